"""A run's newest weights as a Hugging Face checkpoint: `python -m rollplex_cli.runtime.export RUN_DIR --to DIR`.

Masters in the checkpoint are exact, so the export needs neither the engines nor the ranks of the run. A run that
trained adapters gives a PEFT adapter folder, or with `--merge` the whole model.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import RollplexError, RunFailedError, UsageError
from rollplex_cli.core.log import redirect_output, setup_logging
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import failed_prepare, write_status
from rollplex_cli.profile.load import load_profile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.checkpoint import Checkpoint

log = logging.getLogger("rollplex.export")

MASTER = "master/"
"""Prefix of the master weights in a checkpoint's tensors."""


def main(argv: list[str] | None = None) -> int:
    """Export; returns the exit code the status file carries."""
    parser = argparse.ArgumentParser(prog="rollplex_cli.runtime.export")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--merge", action="store_true")
    arguments = parser.parse_args(argv)
    run = RunFolder(arguments.run_dir)
    redirect_output(run.logs_dir / "export.log")
    setup_logging()
    try:
        export(run, arguments.to, best=arguments.best, merge=arguments.merge)
    except BaseException as error:
        log.exception("export failed")
        write_status(run.status_dir / "export.json", failed_prepare(error))
        return error.exit_code if isinstance(error, RollplexError) else 1
    return 0


def export(run: RunFolder, target: Path, *, best: bool = False, merge: bool = False) -> None:
    """Write the weights of the newest checkpoint of `run` (or of its best one) to the new folder `target`.

    Args:
        merge: of a run with adapters, write the base with them merged into it.

    Raises:
        UsageError: the run has no such checkpoint, or `target` holds something.
        RunFailedError: the checkpoint does not fit the run's model.
    """
    from rollplex_cli.engines.weights.export import save_hf
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
    profile = load_profile(run.profile)
    if profile.lora is not None:
        _export_adapters(run, found, profile, target, merge=merge)
    else:
        save_hf(_trained_model(run, found, profile), target, run.base_dir)
    log.info("step %d exported to %s", found.step, target)


def _trained_model(run: RunFolder, found: Checkpoint, profile: Profile) -> Any:
    """The model with the checkpoint's masters; what is frozen comes from the base."""
    import torch

    from rollplex_cli.engines.trainer.actor import is_vision
    from rollplex_cli.engines.weights.rounding import rounded
    from rollplex_cli.engines.weights.skeleton import build_skeleton, load_config, load_model

    dtype = getattr(torch, profile.model.dtype)
    if profile.model.freeze_vision:
        model = load_model(run.base_dir, dtype)
        params = {name: p for name, p in model.named_parameters() if not is_vision(name)}
    else:
        model = build_skeleton(load_config(run.base_dir), dtype)
        model.to_empty(device="cpu")
        model.tie_weights()
        params = dict(model.named_parameters())
    _check_names(found, params)
    with torch.no_grad():
        for name, parameter in params.items():
            parameter.copy_(rounded(found.read(MASTER + name), dtype))
    return model


def _export_adapters(run: RunFolder, found: Checkpoint, profile: Profile, target: Path, *, merge: bool) -> None:
    import torch

    from rollplex_cli.engines.lora import peft
    from rollplex_cli.engines.lora.adapters import adapted_modules
    from rollplex_cli.engines.weights.draw import random_seed_of
    from rollplex_cli.engines.weights.export import save_hf
    from rollplex_cli.engines.weights.rounding import rounded
    from rollplex_cli.engines.weights.skeleton import build_skeleton, load_config, load_model
    from rollplex_cli.runtime.assembly.build_rollout import lora_settings

    lora, dtype = lora_settings(profile), getattr(torch, profile.model.dtype)
    assert lora is not None
    modules = adapted_modules(build_skeleton(load_config(run.base_dir), dtype), lora)
    names = [f"{module}.lora_{factor}.weight" for module in modules for factor in "AB"]
    _check_names(found, names)
    factors = {name: rounded(found.read(MASTER + name), dtype) for name in names}
    if not merge:
        peft.save_adapter(factors, lora, str(run.base_dir.resolve()), target)
        return
    if random_seed_of(run.base_dir) is not None:
        raise UsageError(
            f"the run's base was drawn at random where it lay and is in no file: {run.base_dir}",
            hint="export without `--merge`: the adapters alone",
        )
    model = load_model(run.base_dir, dtype)
    peft.merge(model, lora, factors)
    save_hf(model, target, run.base_dir)


def _check_names(found: Checkpoint, names: Iterable[str]) -> None:
    masters = {name.removeprefix(MASTER) for name in found.shapes() if name.startswith(MASTER)}
    if differing := sorted(set(names) ^ masters):
        raise RunFailedError(f"checkpoint and model differ in: {', '.join(differing[:5])}")


if __name__ == "__main__":
    sys.exit(main())
