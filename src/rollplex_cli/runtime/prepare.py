"""Before the first step: `python -m rollplex_cli.runtime.prepare RUN_DIR`, one process, started by `rollplex train`.

It writes the task's data and the base checkpoint that RL starts from, and leaves alone what is there already, so an
interrupted preparation goes on where it stopped and a resumed run does not repeat it.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import RollplexError, UsageError
from rollplex_cli.core.log import redirect_output, setup_logging
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.resources import model_config_folder, model_config_names
from rollplex_cli.core.status import PrepareStatus, failed_prepare, write_status
from rollplex_cli.profile.load import load_profile

if TYPE_CHECKING:
    from rollplex_cli.data.tasks import Task
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.cold_start import ColdStartStep

log = logging.getLogger("rollplex.prepare")

LARGE_PARAMETERS = 200_000_000
"""Random weights of more parameters than this are drawn by each rank where they lie instead of written to a disk."""


def main(argv: list[str] | None = None) -> int:
    """Prepare a run; returns the exit code its status file carries."""
    run = RunFolder(Path((argv or sys.argv[1:])[0]))
    redirect_output(run.prepare_log)
    setup_logging()
    try:
        prepare(run)
    except BaseException as error:
        log.exception("preparation failed")
        write_status(run.prepare_status, failed_prepare(error))
        return error.exit_code if isinstance(error, RollplexError) else 1
    return 0


def prepare(run: RunFolder) -> None:
    """Data and base checkpoint of a run folder.

    Raises:
        UsageError: a task or checkpoint folder that cannot be used.
    """
    from rollplex_cli.data.tasks import load_task

    profile = load_profile(run.profile)
    task = load_task(profile.task.name)
    write_status(run.prepare_status, PrepareStatus(stage="render"))
    task.prepare(run.data_dir, profile.task.options, profile.runtime.seed)
    last = None
    if not (run.base_dir / "config.json").exists():
        last = _build_base(run, profile, task)
    done = PrepareStatus(stage="done")
    if last is not None:
        done = PrepareStatus(stage="done", step=last.step, loss=last.loss, accuracy=last.accuracy)
    write_status(run.prepare_status, done)


def _build_base(run: RunFolder, profile: Profile, task: Task) -> ColdStartStep | None:
    from rollplex_cli.plan.model import load_shape

    write_status(run.prepare_status, PrepareStatus(stage="base"))
    if profile.model.init == "checkpoint":
        source = Path(profile.model.config).expanduser().resolve()
        if profile.model.config in model_config_names() or not (source / "config.json").is_file():
            raise UsageError(
                f"`model.init: checkpoint` needs a folder with weights in `model.config`: {profile.model.config}",
                hint="give a Hugging Face checkpoint folder, or set `model.init` to `random` or `cold_start`",
            )
        run.base_dir.unlink(missing_ok=True)  # a link to a folder that has gone since
        run.base_dir.symlink_to(source, target_is_directory=True)
        return None
    folder = model_config_folder(profile.model.config)
    if folder is None:
        raise UsageError(f"no model configuration in `model.config`: {profile.model.config}")
    raw = run.root / ".base-random"
    shutil.rmtree(raw, ignore_errors=True)
    build_shell = getattr(task, "build_shell", None)
    if profile.model.init == "random" and build_shell and load_shape(str(folder)).num_parameters > LARGE_PARAMETERS:
        from rollplex_cli.engines.weights.draw import mark_random

        build_shell(raw, run.data_dir, folder / "config.json")
        mark_random(raw, profile.runtime.seed)
    else:
        task.build_base(raw, run.data_dir, folder / "config.json", profile.runtime.seed)
    if profile.model.init == "random":
        raw.rename(run.base_dir)
        return None
    last = _cold_start(run, profile, task, raw)
    shutil.rmtree(raw, ignore_errors=True)
    return last


def _cold_start(run: RunFolder, profile: Profile, task: Task, raw: Path) -> ColdStartStep:
    """Train the random base on the task's answers and write it as the run's base; returns its last step."""
    import torch

    from rollplex_cli.core.events import EventWriter
    from rollplex_cli.engines.weights.export import save_hf
    from rollplex_cli.runtime.assembly.build_rollout import build_rollout, media_tokens_of, open_single_rank
    from rollplex_cli.runtime.assembly.devices import device_of, set_up_lane
    from rollplex_cli.runtime.cold_start import ColdStart

    # One process does alone here what two lanes share later.
    if profile.runtime.torch_threads:
        torch.set_num_threads(2 * profile.runtime.torch_threads)
    if device_of(profile) == "cuda":
        # One thread does both, so one stream: nothing else orders the update before the sampling.
        set_up_lane(profile, "rollout")
    with open_single_rank(device_of(profile)):
        from rollplex_cli.data.processor import PromptBuilder

        engine = build_rollout(profile, raw)
        builder = PromptBuilder(raw, profile.data)
        events = EventWriter(run.events_dir / "prepare.jsonl", rank=0)
        started = time.monotonic()
        cold = ColdStart(
            profile, engine, raw, builder, task, media_tokens_of(raw),
            task.samples(run.data_dir, "train"), task.samples(run.data_dir, "validation"),
        )  # fmt: skip

        def report(step: ColdStartStep) -> None:
            log.info("cold start step %d: loss %.3f, sampled accuracy %s", step.step, step.loss, step.accuracy)
            events.point("cold_start", step=step.step, phase="cold_start", lane="control", loss=step.loss,
                         accuracy=step.accuracy)  # fmt: skip
            write_status(
                run.prepare_status,
                PrepareStatus(stage="cold_start", step=step.step, total=profile.cold_start.max_steps, loss=step.loss,
                              accuracy=step.accuracy),
            )  # fmt: skip

        last = cold.run(report)
        log.info("cold start: %d steps in %.0f s, accuracy %s", last.step, time.monotonic() - started, last.accuracy)
        save_hf(cold.model, run.base_dir, raw)
        events.close()
        engine.close()
        return last


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
