"""Writing and reading a run's checkpoints with all its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.core.names import Phase
from rollplex_cli.runtime import checkpoint
from rollplex_cli.runtime.checkpoint import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollplex_cli.engines.trainer.actor import Actor
    from rollplex_cli.engines.weights.shards import ShardPlan
    from rollplex_cli.runtime.assembly.rank import Rank
    from rollplex_cli.runtime.checkpoint import Checkpoint


def save(rank: Rank, step: int, state: dict[str, Any], *, is_best: bool = False) -> None:
    """Write the checkpoint of `step` with `state`, which is equal on all ranks; in phase CHECKPOINT, every rank at the
    same point.

    Raises:
        RunFailedError: on every rank, if any of them could not write; then there is no such checkpoint.
    """
    folder, first = rank.run.checkpoints_dir, rank.peers.rank == 0
    with rank.events.span("checkpoint", step=step, phase=Phase.CHECKPOINT, lane="control"):
        _together(rank, step, "begin", (lambda: checkpoint.begin(folder, step)) if first else None)
        writer, writes = rank.peers.rank, rank.team.place.trains

        def write() -> dict[str, int]:
            return checkpoint.write(folder, step, writer, owned_entries(rank.engines.actor, rank.plan))

        written = _together(rank, step, "write", write if writes else None)
        files = {name: size for sizes in written if sizes for name, size in sizes.items()}
        keep = rank.profile.runtime.keep_checkpoints

        def commit() -> str:
            whole = {**state, "phase": str(Phase.PUBLISH), "updates": rank.engines.actor.updates}
            return str(checkpoint.commit(folder, step, files, whole, keep, is_best=is_best))

        _together(rank, step, "commit", commit if first else None)


def load(rank: Rank, found: Checkpoint) -> None:
    """Take masters, moments and weights from a checkpoint of any degrees; call it on the trainer lane of every rank
    that trains. One that only decodes gets its weights at the next publish."""
    placements = rank.plan.placements
    rank.engines.actor.restore(
        int(found.state["updates"]),
        lambda part, name, box: found.read(f"{part}/{placements[name].tensor}", box.moved(placements[name].box.offset)),
    )


def owned_entries(actor: Actor, plan: ShardPlan) -> Iterator[Entry]:
    """What a rank writes: of the optimizer state it holds, which no other training group does, every box of which it
    is the first of its training group's holders."""
    for part, name, box, values in actor.optimizer_parts():
        placement = plan.placements[name]
        if placement.primary:
            where = box.moved(placement.box.offset)
            yield Entry(tensor=f"{part}/{placement.tensor}", full=placement.full, box=where, values=values)


def _together(rank: Rank, step: int, stage: str, work: Callable[[], Any] | None) -> list[Any]:
    """One stage on every rank: all succeed, or all raise the first rank's reason and the draft is gone."""
    told: dict[str, Any] = {}
    if work is not None:
        job = rank.trainer_lane.submit(work)
        try:
            told["value"] = rank.control.await_future(job, f"checkpoint of step {step}: {stage}")
        except RunFailedError as error:
            told = {"error": error.message, "hint": error.hint}
    answers = rank.peers.meet(f"step {step}: checkpoint {stage}", told, rank.control.tick)
    for number, answer in enumerate(answers):
        if "error" in answer:
            if rank.peers.rank == 0:
                checkpoint.discard(rank.run.checkpoints_dir, step)
            where = f"rank {number}: " if len(answers) > 1 else ""
            raise RunFailedError(f"{where}{answer['error']}", hint=answer["hint"])
    return [answer.get("value") for answer in answers]
