"""Where figures of a run go besides the console: one interface, a file per kind of reader.

`metrics.jsonl` and `evaluations.jsonl` are the record: the console's live view, `rollplex report` and resuming read
them. TensorBoard and Weights & Biases are copies, and never fail a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.profile.schema import LoggingProfile, Profile

log = logging.getLogger("rollplex.loggers")


class Logger(Protocol):
    """Takes rows of figures; a row has its `step`."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Figures of a training step."""

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Figures of an evaluation."""

    def close(self) -> None:
        """Write out what is held."""


class JsonlLogger:
    """One JSON object a line; each line is on its way to the disk when the call returns."""

    def __init__(self, metrics: Path, evaluations: Path) -> None:
        self._metrics, self._evaluations = metrics, evaluations

    def step(self, row: Mapping[str, Any]) -> None:
        """Append to metrics.jsonl."""
        _append(self._metrics, row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Append to evaluations.jsonl."""
        _append(self._evaluations, row)

    def close(self) -> None:
        """Nothing is held."""


class TensorBoardLogger:
    """Scalars for TensorBoard; rows of steps after `first_step`, left by a run that was killed, are hidden."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step or None)

    def step(self, row: Mapping[str, Any]) -> None:
        """Scalars `train/NAME`."""
        self._write("train", row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Scalars `evaluation/NAME`."""
        self._write("evaluation", row)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def _write(self, prefix: str, row: Mapping[str, Any]) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(f"{prefix}/{name}", value, int(row["step"]))
        self._writer.flush()


class WandbLogger:
    """A run of Weights & Biases; a resumed run goes on in the same one. `offline` writes files and sends nothing."""

    def __init__(self, settings: LoggingProfile, run: RunFolder, config: Mapping[str, Any]) -> None:
        import wandb

        name = run.root.resolve().name
        identity = hashlib.sha256(str(run.root.resolve()).encode()).hexdigest()[:16]
        # Console capture would take over stdout, which the rank's log already is.
        self._run: Any = wandb.init(
            project=settings.wandb_project, name=name, id=identity, resume="allow", dir=str(run.root),
            mode="offline" if settings.wandb == "offline" else "online", config=dict(config),
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def step(self, row: Mapping[str, Any]) -> None:
        """Figures `train/NAME`."""
        self._write("train", row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Figures `evaluation/NAME`."""
        self._write("evaluation", row)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish(quiet=True)

    def _write(self, prefix: str, row: Mapping[str, Any]) -> None:
        self._run.log({f"{prefix}/{name}": value for name, value in scalars(row)} | {"step": int(row["step"])})


class Loggers:
    """Every logger of a run; the first one is the record, a fault in another is a warning and ends that one."""

    def __init__(self, record: Logger, copies: Sequence[Logger]) -> None:
        self._record, self._copies = record, list(copies)

    def step(self, row: Mapping[str, Any]) -> None:
        """Figures of a training step."""
        self._record.step(row)
        self._each("step", row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """Figures of an evaluation."""
        self._record.evaluation(row)
        self._each("evaluation", row)

    def close(self) -> None:
        """Close all."""
        self._record.close()
        self._each("close")
        self._copies.clear()

    def _each(self, method: str, *arguments: Any) -> None:
        for logger in list(self._copies):
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:
                log.warning("%s stopped, the run goes on: %s: %s", type(logger).__name__, type(error).__name__, error)
                self._copies.remove(logger)


def open_loggers(profile: Profile, run: RunFolder, first_step: int) -> Loggers:
    """The loggers a profile asks for. Call it on rank 0 only; one that cannot be opened is a warning.

    Args:
        first_step: the first step this process will log.
    """
    import dataclasses

    settings = profile.logging
    copies: list[Logger] = []
    try:
        if settings.tensorboard:
            copies.append(TensorBoardLogger(run.root / "tensorboard", first_step))
        if settings.wandb != "off":
            copies.append(WandbLogger(settings, run, dataclasses.asdict(profile)))
    except Exception as error:
        log.warning("a logger cannot be opened, the run goes on: %s: %s", type(error).__name__, error)
    return Loggers(JsonlLogger(run.metrics, run.evaluations), copies)


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a row by name, those of nested mappings as `name/key`; `step` and everything else is left out."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and (prefix or name != "step"):
            yield f"{prefix}{name}", float(value)


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")
