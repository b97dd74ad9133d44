"""A run's newest weights as a Hugging Face checkpoint: `python -m rollplex_cli.runtime.export RUN_DIR --to DIR`.

Masters in the checkpoint are exact, so the export needs neither the engines nor the ranks of the run.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from rollplex_cli.core.errors import RollplexError, RunFailedError, UsageError
from rollplex_cli.core.log import redirect_output, setup_logging
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import failed_prepare, write_status
from rollplex_cli.profile.load import load_profile

log = logging.getLogger("rollplex.export")

MASTER = "master/"
"""Prefix of the master weights in a checkpoint's tensors."""


def main(argv: list[str] | None = None) -> int:
    """Export; returns the exit code the status file carries."""
    parser = argparse.ArgumentParser(prog="rollplex_cli.runtime.export")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--best", action="store_true")
    arguments = parser.parse_args(argv)
    run = RunFolder(arguments.run_dir)
    redirect_output(run.logs_dir / "export.log")
    setup_logging()
    try:
        export(run, arguments.to, best=arguments.best)
    except BaseException as error:
        log.exception("export failed")
        write_status(run.status_dir / "export.json", failed_prepare(error))
        return error.exit_code if isinstance(error, RollplexError) else 1
    return 0


def export(run: RunFolder, target: Path, *, best: bool = False) -> None:
    """Write the weights of the newest checkpoint of `run` (or of its best one) to the new folder `target`.

    Raises:
        UsageError: the run has no such checkpoint, or `target` holds something.
        RunFailedError: the checkpoint does not fit the run's model.
    """
    import torch

    from rollplex_cli.engines.trainer.actor import is_vision
    from rollplex_cli.engines.weights.export import save_hf
    from rollplex_cli.engines.weights.rounding import rounded
    from rollplex_cli.engines.weights.skeleton import build_skeleton, load_config, load_model
    from rollplex_cli.runtime import checkpoint

    found = checkpoint.best(run.checkpoints_dir) if best else checkpoint.newest(run.checkpoints_dir)
    if found is None and best:
        raise UsageError(
            f"the run has no best checkpoint: {run.root}", hint="`evaluation.best_metric` says what makes it the best"
        )
    if found is None:
        raise UsageError(f"the run has no checkpoint yet: {run.root}", hint="`runtime.checkpoint_every` sets how often")
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    masters = {name.removeprefix(MASTER) for name in found.shapes() if name.startswith(MASTER)}
    profile = load_profile(run.profile)
    dtype = getattr(torch, profile.model.dtype)
    if profile.model.freeze_vision:
        model = load_model(run.base_dir, dtype)
        params = {name: p for name, p in model.named_parameters() if not is_vision(name)}
    else:
        model = build_skeleton(load_config(run.base_dir), dtype)
        model.to_empty(device="cpu")
        model.tie_weights()
        params = dict(model.named_parameters())
    if set(params) != masters:
        raise RunFailedError(f"checkpoint and model differ in: {', '.join(sorted(set(params) ^ masters)[:5])}")
    with torch.no_grad():
        for name, parameter in params.items():
            parameter.copy_(rounded(found.read(MASTER + name), dtype))
    save_hf(model, target, run.base_dir)
    log.info("step %d exported to %s", found.step, target)


if __name__ == "__main__":
    sys.exit(main())
