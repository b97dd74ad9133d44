"""Prompts built in worker processes: a decoder that crashes, hangs or holds the interpreter costs one row."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import DataError
from rollplex_cli.core.workers import WorkerCallError, WorkerDiedError, WorkerPool, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollplex_cli.data.types import Media, Prompt, Sample
    from rollplex_cli.profile.schema import DataProfile

SHARED_MEMORY = Path("/dev/shm")


class ProcessBuilder:
    """Builds prompts as `PromptBuilder` does, in `num_workers` processes. `build` may be called from as many threads.

    Pixels come back in files in shared memory, which are mapped and removed at once: sending them through a pipe
    would copy them three times under the interpreter's lock.

    Args:
        processor_dir, profile: as of `PromptBuilder`.
        num_workers: processes; each loads the processor when first used.
    """

    def __init__(self, processor_dir: Path, profile: DataProfile, num_workers: int) -> None:
        base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="rollplex-prompts-", dir=base)
        self._timeout_s = profile.decode_timeout_s
        self._pool = WorkerPool(
            _set_up, (processor_dir, profile, self._folder.name), num_workers=num_workers, name="rollplex-prompts"
        )

    def build(self, sample: Sample) -> Prompt:
        """The prompt of a sample.

        Raises:
            DataError: as `PromptBuilder.build`; or its process died or did not answer in time.
        """
        try:
            prompt, files = self._pool.call(sample, self._timeout_s)
        except WorkerTimeoutError:
            raise DataError(
                f"sample `{sample.sample_id}`: not decoded within `data.decode_timeout_s`: {self._timeout_s:g} s"
            ) from None
        except (WorkerDiedError, WorkerCallError) as error:
            raise DataError(f"sample `{sample.sample_id}`: decoding failed: {error}") from None
        media = tuple(_mapped(medium, *file) for medium, file in zip(prompt.media, files, strict=True))
        built: Prompt = dataclasses.replace(prompt, media=media)
        return built

    def close(self) -> None:
        """End the processes and remove what they left."""
        self._pool.close()
        with contextlib.suppress(OSError):
            self._folder.cleanup()


def _set_up(processor_dir: Path, profile: DataProfile, folder: str) -> Callable[[Sample], Any]:
    import torch

    from rollplex_cli.data.processor import PromptBuilder

    nothing = torch.empty(0)
    torch.set_num_threads(1)
    builder = PromptBuilder(processor_dir, profile)
    counter = iter(range(1 << 62))

    def handle(sample: Sample) -> tuple[Prompt, list[tuple[str, tuple[int, ...]]]]:
        prompt = builder.build(sample)
        files = []
        for medium in prompt.media:
            path = os.path.join(folder, f"{os.getpid()}-{next(counter)}")
            medium.patches.numpy().tofile(path)
            files.append((path, tuple(medium.patches.shape)))
        light = tuple(dataclasses.replace(medium, patches=nothing) for medium in prompt.media)
        return dataclasses.replace(prompt, media=light), files

    return handle


def _mapped(medium: Media, path: str, shape: tuple[int, ...]) -> Media:
    import torch

    size = shape[0] * shape[1]
    # The mapping outlives the name; a private one, as nobody else reads it.
    patches = torch.from_file(path, shared=False, size=size, dtype=torch.float32).view(shape)
    os.unlink(path)
    return dataclasses.replace(medium, patches=patches)
