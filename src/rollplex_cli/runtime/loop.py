"""The run: steps, evaluation, checkpoints, target, and the stop at a step boundary."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import InterruptedRunError, RunFailedError, TargetNotReachedError, UsageError
from rollplex_cli.core.files import read_jsonl, write_atomic
from rollplex_cli.core.names import Phase
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.memory.meter import trim_heap
from rollplex_cli.runtime import checkpoint
from rollplex_cli.runtime.evaluate import evaluate
from rollplex_cli.runtime.executor.schedules import schedule_of
from rollplex_cli.runtime.groups.intake import Intake
from rollplex_cli.runtime.output.loggers import open_loggers
from rollplex_cli.runtime.output.rollouts import rollout_rows
from rollplex_cli.runtime.sharing.calibrate import calibrate
from rollplex_cli.runtime.step import run_step
from rollplex_cli.runtime.team import saving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rollplex_cli.core.names import TaskKey
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.runtime.assembly.rank import Rank
    from rollplex_cli.runtime.groups.intake import Started
    from rollplex_cli.runtime.output.loggers import Loggers
    from rollplex_cli.runtime.step import StepResult

log = logging.getLogger("rollplex.loop")

TRIM_EVERY_STEPS = 10
"""Pages given back are faulted in again by the next step, a few milliseconds for every 10 MiB."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a run must remember between steps besides the optimizer; equal on all ranks."""

    step: int = 0
    """Steps done."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step so far."""
    zero_steps: int = 0
    """Steps in a row in which every reward was zero."""
    constant_steps: int = 0
    """Steps in a row in which every reward was the same number, zero or not."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Held-out results with their step."""

    def to_json(self) -> dict[str, Any]:
        """As plain data for a checkpoint."""
        return {name: getattr(self, name) for name in self.__slots__}


class Run:
    """A rank's run from its first step (or its newest checkpoint) to its end.

    Args:
        boundary: see `Executor`; tests inject delays and faults there.
    """

    def __init__(self, rank: Rank, *, boundary: Callable[[TaskKey, str], None] | None = None) -> None:
        self.rank = rank
        self.progress = Progress()
        self._boundary = boundary
        self._saved: int | None = None
        self._intake = Intake(rank.profile, rank.loader, rank.media_tokens)
        self._refills = rank.profile.algorithm.max_refills > 0
        self._takes_from_line = self._refills or rank.profile.rollout.extra_groups > 0
        """Whether a step's prompts do not follow from its number alone."""
        self._loggers: Loggers | None = None
        """On rank 0, from `run` on."""
        self._schedule = schedule_of(rank.profile)

    def resume(self) -> None:
        """Continue from the newest checkpoint, or from the start where there is none.

        Rows and responses of later steps, left by a run that was killed, are dropped from the run's files.
        """
        rank, found = self.rank, checkpoint.newest(self.rank.run.checkpoints_dir)
        if found is not None:
            if rank.team.place.trains:
                load = rank.trainer_lane.submit(lambda: saving.load(rank, found))
                rank.control.await_future(load, "loading the checkpoint")
            publish = rank.rollout_lane.submit(rank.engines.publisher.publish)
            rank.control.await_future(publish, "publishing the checkpoint's weights")
            self.progress = Progress(**found.state["progress"])
            if self._takes_from_line:
                self._intake.load(found.state.get("intake", []), rank.peers.rank, rank.peers.world_size)
            self._saved = rank.control.step = self.progress.step
        # Every rank must have read the same one before any of them writes.
        values = rank.peers.meet("resume", {"step": self.progress.step}, rank.control.tick)
        if len({v["step"] for v in values}) > 1:
            raise RunFailedError(f"ranks found different checkpoints, steps by rank: {[v['step'] for v in values]}")
        if rank.peers.rank == 0:
            _drop_rows_after(rank.run.metrics, self.progress.step)
            rows = [json.dumps(row) + "\n" for row in self.progress.evaluations]
            write_atomic(rank.run.evaluations, "".join(rows))
        _drop_rows_after(self._rollouts, self.progress.step)

    def run(self) -> None:
        """All steps.

        Raises:
            InterruptedRunError: a signal asked for a stop; a checkpoint was written.
            TargetNotReachedError: the run ended below its profile's target.
            RollplexError: whatever stopped a step.
        """
        if self.rank.peers.rank == 0:
            self._loggers = open_loggers(self.rank.profile, self.rank.run, self.progress.step + 1)
        try:
            self._all_steps()
        finally:
            if self._loggers is not None:
                self._loggers.close()

    def _all_steps(self) -> None:
        runtime, evaluation = self.rank.profile.runtime, self.rank.profile.evaluation
        self._calibrate()
        if self.progress.step == 0:
            self._evaluate()
        while self.progress.step < runtime.max_steps and not self._reached():
            self._stop_if_asked()
            self._step(self.progress.step + 1)
            if _due(self.progress.step, evaluation.every_steps):
                self._evaluate()
            if _due(self.progress.step, runtime.checkpoint_every):
                self._save()
        self._evaluate()
        self._save()
        self._check_target()

    def _calibrate(self) -> None:
        rank = self.rank
        if rank.sharing.policy.measured and self._schedule.overlap and rank.sharing.streams is not None:
            rank.control.doing("measuring how decode and training share the GPU")
            prompts = rank.loader.batch(self.progress.step)
            calibrate(rank, [build_prompt_input(p, rank.media_tokens) for p in prompts])
            rank.control.doing("")

    # ---- steps -------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        rank = self.rank
        rank.control.step = step
        started = time.monotonic()
        # On a lane: a file system that hangs must show as a stall, so the control thread cannot sit in it.
        job = rank.host_lane.submit(lambda: self._prompts(step))
        inputs, groups = rank.control.await_future(job, "the prompts of the step (decoding media)")
        data_wait_s = time.monotonic() - started
        result = run_step(
            rank, step, inputs, self._schedule, boundary=self._boundary, started=groups,
            further=self._intake.further if self._refills else None,
        )  # fmt: skip
        self._intake.leave(result.tasks.left)
        waits = data_wait_s + result.tasks.refill_wait_s
        row = {
            **result.row,
            "data_wait_s": waits,
            "data_wait_share": waits / (data_wait_s + result.row["step_s"]),
            "skipped_samples": len(rank.loader.skipped),
            "reward_errors": rank.engines.scorer.num_errors,
        }
        self._remember(row)
        row["constant_reward_steps"] = self.progress.constant_steps
        log.info("step %d: reward %.4f, loss %.3g, %.2f s", step, row["reward_mean"], row["loss"], row["step_s"])
        self._report_refills(row)
        self._write(step, row, result)
        if step % TRIM_EVERY_STEPS == 0:
            trim_heap()

    def _prompts(self, step: int) -> tuple[list[PromptInput], list[Started]]:
        """This rank's prompts of a step, and where they come from its line, the groups in flight."""
        rank = self.rank
        if self._takes_from_line:
            groups = self._intake.start()
            return [group.input for group in groups], groups
        return [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(step - 1)], []

    def _drop_partial(self) -> None:
        """Kept tokens stand in the way of an evaluation's requests, and a checkpoint cannot hold them."""
        ids, rank = self._intake.drop_partial(), self.rank
        if ids:
            job = rank.rollout_lane.submit(lambda: rank.engines.rollout.abort(ids))
            rank.control.await_future(job, "dropping unfinished responses")

    def _remember(self, row: dict[str, Any]) -> None:
        progress = self.progress
        progress.step = row["step"]
        progress.rewards.append(row["reward_mean"])
        all_zero = row["reward_mean"] == 0.0 and row["reward_std"] == 0.0
        progress.zero_steps = progress.zero_steps + 1 if all_zero else 0
        # A deviation from sums of squares is exact only to rounding.
        constant = row["reward_std"] <= 1e-6
        progress.constant_steps = progress.constant_steps + 1 if constant else 0

    def _write(self, step: int, row: dict[str, Any], result: StepResult) -> None:
        rank = self.rank
        if self._loggers is not None:
            self._loggers.step(row)
        every = rank.profile.logging.rollouts_every
        if every and step % every == 0 and rank.team.leads:  # its ranks have the same responses
            self._dump(step, result)
        self._check_rewards(step, row["reward_mean"])

    def _check_rewards(self, step: int, mean: float) -> None:
        """The alarms on rewards that teach nothing. A constant other than zero may be a task that is solved."""
        limit = self.rank.profile.guards.zero_reward_steps
        if self.progress.zero_steps >= limit:
            raise RunFailedError(
                f"every reward was zero for {limit} steps in a row, up to step {step}",
                hint=f"look at the responses in {self._rollouts}: a wrong answer format or reward function is likely",
            )
        if self.progress.constant_steps and self.progress.constant_steps % limit == 0:
            log.warning(
                "every reward was %.4g for %d steps in a row, up to step %d: nothing is learned from equal rewards",
                mean, self.progress.constant_steps, step,
            )  # fmt: skip

    def _report_refills(self, row: dict[str, Any]) -> None:
        """Say how the batch was filled, and where it could not be."""
        algorithm = self.rank.profile.algorithm
        if not self._refills:
            return
        log.info(
            "step %d: %d groups sampled, %d of them in place of groups without a signal; %d kept",
            row["step"], row["num_groups"], row["refilled_groups"], row["kept_groups"],
        )  # fmt: skip
        if row["kept_groups"] < algorithm.prompts_per_step:
            log.warning(
                "step %d trained on %d groups instead of %d: the others have equal rewards, as did the %d before each "
                "of them (`algorithm.max_refills`)",
                row["step"], row["kept_groups"], algorithm.prompts_per_step, algorithm.max_refills,
            )  # fmt: skip

    def _dump(self, step: int, result: StepResult) -> None:
        with self._rollouts.open("a", encoding="utf-8") as stream:
            for line in rollout_rows(step, result, token_logprobs=self.rank.profile.logging.token_logprobs):
                stream.write(json.dumps(line) + "\n")

    @property
    def _rollouts(self) -> Path:
        return self.rank.run.rollouts_dir / f"rank{self.rank.peers.rank}.jsonl"

    # ---- between steps -----------------------------------------------------------------------------------

    def _stop_if_asked(self) -> None:
        if self.rank.stop_agreed(f"before step {self.progress.step + 1}"):
            self._save()
            raise InterruptedRunError(
                f"stopped by a signal after step {self.progress.step}, checkpoint written",
                hint="start it again with `--resume`",
            )

    def _evaluate(self) -> None:
        """Evaluate unless this step was; always before the step's checkpoint, which then knows of it."""
        done = any(e["step"] == self.progress.step for e in self.progress.evaluations)
        if done or not self.rank.profile.evaluation.num_samples:
            return
        self._drop_partial()
        row = {"step": self.progress.step, **evaluate(self.rank)}
        is_best = self._beats_all(row)
        self.progress.evaluations.append(row)
        self._saved = None
        if self._loggers is not None:
            self._loggers.evaluation(row)
        if is_best and self.progress.step:  # the base needs no checkpoint
            self._save(is_best=True)

    def _beats_all(self, row: dict[str, Any]) -> bool:
        """Whether the held-out figure that decides is higher than in every evaluation before."""
        metric = self.rank.profile.evaluation.best_metric
        if metric is None:
            return False
        key = f"heldout_{metric}"
        if key not in row:
            known = ", ".join(k.removeprefix("heldout_") for k in row if k.startswith("heldout_"))
            raise UsageError(f"no held-out figure for `evaluation.best_metric`, known are {known}: {metric}")
        return all(float(row[key]) > float(e.get(key, float("-inf"))) for e in self.progress.evaluations)

    def _save(self, *, is_best: bool = False) -> None:
        rank, step = self.rank, self.progress.step
        if self._saved == step:
            return
        rank.control.go(rank.machine, Phase.CHECKPOINT)
        intake: list[dict[str, Any]] = []
        if self._takes_from_line:
            self._drop_partial()
            intake = rank.peers.meet(f"step {step}: in flight", self._intake.to_json(), rank.control.tick)
        saving.save(rank, step, {"progress": self.progress.to_json(), "intake": intake}, is_best=is_best)
        self._saved = step

    # ---- target ------------------------------------------------------------------------------------------

    def _window_mean(self) -> float | None:
        target = self.rank.profile.target
        if target is None or len(self.progress.rewards) < target.window:
            return None
        return sum(self.progress.rewards[-target.window :]) / target.window

    def _reached(self) -> bool:
        target, mean = self.rank.profile.target, self._window_mean()
        return target is not None and target.stop and mean is not None and mean >= target.reward_mean

    def _check_target(self) -> None:
        target, mean = self.rank.profile.target, self._window_mean()
        if target is None or (mean is not None and mean >= target.reward_mean):
            return
        shown = "no mean yet" if mean is None else f"{mean:.3f}"
        raise TargetNotReachedError(
            f"mean reward of the last {target.window} steps is below the target of {target.reward_mean:g}: {shown}",
            hint="look at `zero_variance_share`, `kl` and `entropy` in the report: the first to tell a stall",
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _drop_rows_after(path: Path, step: int) -> None:
    if path.exists():
        kept = [row for row in read_jsonl(path) if row.get("step", 0) <= step]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
