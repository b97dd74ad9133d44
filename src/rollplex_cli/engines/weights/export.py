"""Writing a Hugging Face checkpoint that `from_pretrained` and any other tool load."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.weights.names import is_padded_vision_mlp
from rollplex_cli.engines.weights.skeleton import build_skeleton, load_config, quiet_transformers, vision_mlp_width

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# Written anew; everything else beside a source checkpoint (tokenizer, processor, template, generation) is copied.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def save_hf(hf_model: Any, directory: Path, source_dir: Path) -> None:
    """Write `hf_model` as a checkpoint folder with published key names and un-padded vision MLPs.

    Weights are gathered tensor by tensor to the host; the module is not changed. Configuration, tokenizer, processor
    and generation files come from `source_dir`. The folder appears under its name only when it is complete.

    Raises:
        UsageError: `directory` exists already.
    """
    with complete_folder(directory) as partial:
        config = load_config(source_dir)
        state = unpadded_state(hf_model, vision_mlp_width(config))
        shell = build_skeleton(config, hf_model.dtype, pad_vision=False)
        with quiet_transformers():
            shell.save_pretrained(partial, state_dict=state)
        _copy_companions(source_dir, partial)


@contextmanager
def complete_folder(directory: Path) -> Iterator[Path]:
    """A folder to write to, which takes the name `directory` once all of it is on the disk.

    Raises:
        UsageError: `directory` exists already.
    """
    if directory.exists():
        raise UsageError(f"the folder exists already: {directory}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.parent / f".{directory.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _sync(partial)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def unpadded_state(hf_model: Any, vision_width: int) -> dict[str, torch.Tensor]:
    """The module's state as contiguous host copies, vision MLPs cut to `vision_width`."""
    state: dict[str, torch.Tensor] = {}
    tied = hf_model.config.tie_word_embeddings
    for name, param in hf_model.named_parameters():
        value = param.detach()
        if is_padded_vision_mlp(name):
            value = value[:, :vision_width] if name.endswith("down_proj.weight") else value[:vision_width]
        state[name] = value.to("cpu", copy=True).contiguous()
    if tied:
        state["lm_head.weight"] = state["model.language_model.embed_tokens.weight"]
    return state


def _copy_companions(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, target / path.name)


def _sync(folder: Path) -> None:
    """Force the files to disk, so that a rename never publishes names without contents."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
