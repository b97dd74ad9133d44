"""Adapters in the form that PEFT and what follows it load, and merged into the weights they were trained beside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.engines.lora.adapters import adapted_modules
from rollplex_cli.engines.weights.export import complete_folder
from rollplex_cli.engines.weights.rounding import rounded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rollplex_cli.engines.lora.adapters import LoraSettings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of every name in the file: PEFT's wrapper around the model."""


def save_adapter(factors: Mapping[str, torch.Tensor], lora: LoraSettings, base: str, directory: Path) -> None:
    """Write a PEFT adapter folder; `factors` by Hugging Face name, `base` is the model they belong to.

    Modules are listed in full: the short names alone would match the vision tower's MLPs as well.

    Raises:
        UsageError: `directory` exists already.
    """
    from safetensors.torch import save_file

    modules = sorted({name.rsplit(".lora_", 1)[0] for name in factors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with complete_folder(directory) as partial:
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {PREFIX + name: value.detach().cpu().contiguous() for name, value in factors.items()}
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def merge(hf_model: Any, lora: LoraSettings, factors: Mapping[str, torch.Tensor]) -> None:
    """W += scale B A for every targeted module, in place, rounded once; `factors` by Hugging Face name."""
    for stem in adapted_modules(hf_model, lora):
        update = factors[f"{stem}.lora_B.weight"].double() @ factors[f"{stem}.lora_A.weight"].double()
        weight = hf_model.get_submodule(stem).weight
        weight.copy_(rounded((weight.double() + lora.scale * update).float(), weight.dtype))
