"""What a rank says about the collectives its lanes are in, with how far the other members have come."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.collectives import CollectiveLog, Launch
    from rollplex_cli.runtime.control.peers import Peers

QUIET_S = 1.0
"""Age from which a launch is worth a word: normally there is a next one by then."""
_TOPIC = "launched"
_STATES = {"turn": "waits for its turn in the launch order", "launching": "not returned", "launched": "not finished"}


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a rank has come in a group: its last launch there."""

    number: int
    task: str
    state: str


class CollectiveWatch:
    """Reads the logs of a rank's lanes. Used by the control thread only.

    Args:
        logs: of the lanes.
        peers: carries what the ranks say about themselves.
    """

    def __init__(self, logs: Sequence[CollectiveLog], peers: Peers) -> None:
        self._logs, self._peers = tuple(logs), peers
        self._told = ""

    def tell(self) -> None:
        """Let the other ranks know where this one stands, if nothing has been launched for a while."""
        now = time.monotonic()
        quiet = [log for log in self._logs if log.last is not None and now - log.last.since > QUIET_S]
        marks = {
            label: [launch.number, launch.task, _state(launch) if launch is log.last else "finished"]
            for log in quiet
            for label, launch in list(log.latest.items())
        }
        text = json.dumps(marks)
        if marks and text != self._told:
            self._told = text
            self._peers.say(_TOPIC, text)

    def lines(self) -> list[str]:
        """One line per lane that is in a launch for longer than `QUIET_S`."""
        now, found = time.monotonic(), []
        for log in self._logs:
            launch = log.last
            if launch is not None and now - launch.since > QUIET_S and not launch.finished:
                found.append(f"{log.lane} lane: {_sentence(launch, now)}{self._others(launch)}")
        return found

    def _others(self, launch: Launch) -> str:
        marks = {rank: self._mark(rank, launch) for rank in launch.group.ranks if rank != self._peers.rank}
        behind = [
            f"rank {rank} is at #{mark.number} in {mark.task or 'no task'}, {mark.state}"
            for rank, mark in marks.items()
            if mark is not None and (mark.number < launch.number or _before(mark, launch))
        ]
        return "".join(f"; {text}" for text in behind)

    def _mark(self, rank: int, launch: Launch) -> Mark | None:
        text = self._peers.heard(_TOPIC, rank)
        values = None if text is None else json.loads(text).get(launch.group.label)
        return None if values is None else Mark(*values)


def _sentence(launch: Launch, now: float) -> str:
    size = f", {format_bytes(launch.num_bytes)}" if launch.num_bytes else ""
    where = f" in {launch.task}" if launch.task else ""
    return (
        f"{launch.operation} #{launch.number} of the {launch.group.label}{where}{size}, "
        f"begun {now - launch.since:.0f} s ago, {_STATES[launch.state]}"
    )


def _state(launch: Launch) -> str:
    return "finished" if launch.finished else _STATES[launch.state]


def _before(mark: Mark, launch: Launch) -> bool:
    """Whether a rank at the same launch has not begun it, which this one has."""
    return mark.number == launch.number and mark.state == _STATES["turn"] and launch.state != "turn"
