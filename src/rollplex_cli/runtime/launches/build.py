"""Opening the launch order of a replica on all its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import ClusterError
from rollplex_cli.core.names import Lane
from rollplex_cli.engines.collectives import CollectiveLog
from rollplex_cli.runtime.launches.order import LaunchOrder
from rollplex_cli.runtime.launches.shared import SharedLog, Unit

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollplex_cli.plan.topology import RankPlace, Topology
    from rollplex_cli.runtime.control.peers import Store


@dataclass(frozen=True, slots=True)
class Launches:
    """What the lanes of a rank launch for other ranks."""

    order: LaunchOrder | None
    """None where decode and training never launch at once, or one of them without other ranks."""
    rollout: CollectiveLog
    trainer: CollectiveLog

    def begin(self, lane: Lane, task: str) -> None:
        """Name what a lane does from now on."""
        if lane is Lane.ROLLOUT:
            self.rollout.task = task
        elif lane is Lane.TRAINER:
            self.trainer.task = task

    def check_with(self, check: Callable[[], None]) -> None:
        """Lanes that wait for their turn ask it whether the step was stopped."""
        if self.order is not None:
            self.order.check = check

    def begin_decode(self, listen: Callable[[], object]) -> None:
        """The rollout lane decodes from now on, and calls `listen` while it waits for its turn."""
        self.begin(Lane.ROLLOUT, "decode")
        if self.order is not None:
            self.order.meanwhile = listen

    def end_step(self) -> None:
        """Nothing of the step is asked for any more."""
        self.check_with(_nothing)
        if self.order is not None:
            self.order.meanwhile = _nothing

    def close(self) -> None:
        """Let go of shared memory; no lane launches anything afterwards."""
        if self.order is not None:
            self.order.close()


def _nothing() -> None:
    return None


def build_launches(order: LaunchOrder | None, *, on_device: bool) -> Launches:
    """Logs of both lanes, whose launches take their turns in `order`."""

    def log(lane: Lane, unit: Unit) -> CollectiveLog:
        return CollectiveLog(lane, partial(order.turn, unit) if order else None, on_device=on_device)

    return Launches(order, log(Lane.ROLLOUT, Unit.ROLLOUT), log(Lane.TRAINER, Unit.TRAINER))


def open_order(topology: Topology, place: RankPlace, store: Store, name: str) -> LaunchOrder:
    """This rank's part in the launch order of its replica, whose ranks all call this.

    Args:
        store: a connection that may block until the replica's first rank is here.
        name: prefix of keys, unique in the run.

    Raises:
        ClusterError: the memory that the ranks are to share cannot be opened.
    """
    key, readers = f"{name}/launches/{place.training_group}/{place.replica}", topology.rollout_tp - 1
    if place.rollout_shard == 0:
        log, path = SharedLog.create(readers)
        store.set(key, path)
        return LaunchOrder(log, None)
    path = store.get(key).decode()
    try:
        log = SharedLog.open(path, readers)
    except OSError as error:
        raise ClusterError(
            f"the launch order of a rollout replica cannot be shared: {path}: {error.strerror}",
            hint="the ranks of a replica have to run on one machine, as one user, and see each other's processes",
        ) from error
    return LaunchOrder(log, place.rollout_shard - 1)
