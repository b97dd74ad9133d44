"""What a rank says about the collectives its lanes are in, with how far the other members have come."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollplex_cli.engines.collectives import CollectiveLog, Launch
    from rollplex_cli.runtime.control.peers import Peers

QUIET_S = 1.0
"""Age from which a launch is worth a word: normally there is a next one by then."""
TELL_EVERY_S = 1.0
"""How often a rank that launches nothing says where it stands; one that says nothing for much longer has stopped."""
SILENT_S = 5.0
_TOPIC = "launched"
_STATES = {"turn": "waits for its turn in the launch order", "launching": "not returned", "launched": "not finished"}


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a rank has come in a group: its last launch there."""

    number: int
    task: str
    state: str
    age_s: float
    """Seconds since it said so."""


class CollectiveWatch:
    """Reads the logs of a rank's lanes. Used by the control thread only.

    Args:
        logs: of the lanes.
        peers: carries what the ranks say about themselves.
    """

    def __init__(self, logs: Sequence[CollectiveLog], peers: Peers) -> None:
        self._logs, self._peers = tuple(logs), peers
        self._told_at = float("-inf")

    def tell(self) -> None:
        """Let the other ranks know where this one stands, if nothing has been launched for a while."""
        now = time.monotonic()
        if now - self._told_at < TELL_EVERY_S:
            return
        quiet = [log for log in self._logs if log.last is not None and now - log.last.since > QUIET_S]
        marks = {
            label: [launch.number, launch.task, _state(launch) if launch is log.last else "finished"]
            for log in quiet
            for label, launch in list(log.latest.items())
        }
        if marks:
            self._told_at = now
            self._peers.say(_TOPIC, json.dumps({"time": time.time(), "marks": marks}))

    def lines(self) -> list[str]:
        """One line per lane that is in a launch for longer than `QUIET_S`."""
        now, found = time.monotonic(), []
        for log in self._logs:
            launch = log.last
            if launch is not None and now - launch.since > QUIET_S and not launch.finished:
                others = "".join(f"; {text}" for text in self._others(launch, now - launch.since))
                found.append(f"{log.lane} lane: {_sentence(launch, now)}{others}")
        return found

    def _others(self, launch: Launch, age_s: float) -> Iterator[str]:
        """What is known of members that have not come to a launch."""
        for rank in launch.group.ranks:
            mark = self._mark(rank, launch)
            if rank == self._peers.rank:
                continue
            if mark is None or mark.age_s > SILENT_S:
                if age_s > SILENT_S:  # else it may just have come to it
                    yield f"rank {rank} has said nothing" + (f" for {mark.age_s:.0f} s" if mark is not None else "")
            elif mark.number < launch.number or _before(mark, launch):
                yield f"rank {rank} is at #{mark.number} in {mark.task or 'no task'}, {mark.state}"

    def _mark(self, rank: int, launch: Launch) -> Mark | None:
        text = self._peers.heard(_TOPIC, rank)
        said = json.loads(text) if text is not None else {"marks": {}}
        if launch.group.label not in said["marks"]:
            return None
        number, task, state = said["marks"][launch.group.label]
        return Mark(number, task, state, time.time() - said["time"])


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
