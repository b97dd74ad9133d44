"""The engine's options and the SGLang server arguments they become. The only file, besides `host.py`, that differs by
device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from rollplex_cli.engines.collectives import CollectiveLog
    from rollplex_cli.engines.lora.adapters import LoraSettings
    from rollplex_cli.engines.rollout.host import Device

    Rebind = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
    """All parameters as loaded, by SGLang name -> contiguous tensors of equal shapes, types and values instead."""
    Shape = tuple[int, ...]
    KvBuffers = Callable[[Shape, Shape, torch.dtype, int], tuple[list[torch.Tensor], list[torch.Tensor]]]
    """(K shape, V shape of one layer, dtype, number of layers) -> zeroed K and V buffers, one per layer."""

SAMPLING_BACKEND = "rollplex"
"""Name under which `sampling/backend.py` registers its sampler."""
WATCHDOG_NEVER_S = 10.0**9
GRAPH_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What an engine is built from."""

    model_dir: Path
    """A Hugging Face checkpoint folder: config and safetensors. No tokenizer is read."""
    load_weights: bool = True
    """Without it the parameters hold arbitrary numbers, for the caller to fill; the folder needs no safetensors."""
    device: Device = "cpu"
    gpu_index: int = 0
    """CUDA device of this rank; ignored on the CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_tokens: int = 65536
    """Capacity of the KV pool, in tokens."""
    max_running_requests: int = 256
    chunked_prefill_tokens: int = 8192
    """Prompt tokens prefilled in one step at most."""
    seed: int = 0
    replicas: tuple[tuple[int, ...], ...] | None = None
    """Global ranks of every rollout replica, no rank twice; `None`: every rank is its own replica (TP 1). Ranks in none
    of them call `absent.join_groups` meanwhile."""
    vision_cache_mib: int = 512
    """Vision embeddings kept between the first and the last sibling of a group."""
    fp32_lm_head: bool = False
    """Multiply the last hidden state with the head in float32."""
    run_ahead: bool = False
    """Launch a step's batch before the tokens of the one before are read: the device never waits for Python, a response
    that ends takes part in one batch more, and its end is seen one step later. Costs time on the CPU."""
    lora: LoraSettings | None = None
    """Adapters beside the weights, zero until they are written."""
    rebind: Rebind | None = None
    """Places the parameters elsewhere, before the KV pool and the decode graphs exist."""
    kv_buffers: KvBuffers | None = None
    """Places the KV pool."""
    stream: torch.cuda.Stream | None = None
    """CUDA: everything runs on it. Decode graphs are captured on it, which gives their kernels its priority."""
    log: CollectiveLog | None = None
    """Hears of every batch of a replica of several ranks, whose forward holds collectives, and says when it may be
    launched; None where nobody asks."""
    memory_fraction: float = 0.9
    """CUDA: share of the device that SGLang may count on; `kv_tokens` above what fits in it is an error."""


def server_args(options: RolloutOptions, tp_size: int) -> Any:
    """SGLang's `ServerArgs` for these options and ranks per replica. Call `import_sglang` first."""
    from sglang.srt.server_args import ServerArgs

    common: dict[str, Any] = {
        "model_path": str(options.model_dir),
        "skip_tokenizer_init": True,
        "load_format": "auto" if options.load_weights else "dummy",
        "dtype": options.dtype,
        "device": options.device,
        "tp_size": tp_size,
        "random_seed": options.seed,
        "context_length": _context_length(options),
        "max_running_requests": options.max_running_requests,
        "max_total_tokens": options.kv_tokens,
        "chunked_prefill_size": options.chunked_prefill_tokens,
        "max_prefill_tokens": options.chunked_prefill_tokens,
        "page_size": 1,
        "schedule_policy": "fcfs",
        "disable_overlap_schedule": not options.run_ahead,
        "enable_mixed_chunk": False,
        "grammar_backend": "none",
        "enable_multimodal": True,
        "enable_memory_saver": False,
        "enable_fp32_lm_head": options.fp32_lm_head,
        "disable_custom_all_reduce": True,
        "watchdog_timeout": WATCHDOG_NEVER_S,
        "soft_watchdog_timeout": None,
        "enable_metrics": False,
        "log_level": "warning",
        "mem_fraction_static": options.memory_fraction,
    }
    args = ServerArgs(**common, **(_cpu_args() if options.device == "cpu" else _cuda_args(options)))
    # The constructor would force PyTorch's sampler on the CPU.
    args.override("rollplex", sampling_backend=SAMPLING_BACKEND)
    return args


def _context_length(options: RolloutOptions) -> int | None:
    """No sequence is longer than the pool, and SGLang keeps a table of [max_running_requests, this]."""
    config = json.loads((options.model_dir / "config.json").read_text())
    limit = config.get("text_config", config).get("max_position_embeddings", config.get("max_position_embeddings"))
    return None if limit is None else min(int(limit), options.kv_tokens)


def _cpu_args() -> dict[str, Any]:
    return {
        "attention_backend": "torch_native",
        "mm_attention_backend": "sdpa",
        "disable_cuda_graph": True,
    }


def _cuda_args(options: RolloutOptions) -> dict[str, Any]:
    sizes = [b for b in GRAPH_BATCH_SIZES if b < options.max_running_requests] + [options.max_running_requests]
    return {
        "base_gpu_id": options.gpu_index,
        "attention_backend": "triton",
        "mm_attention_backend": "triton_attn",
        "cuda_graph_bs_decode": sizes,
        "cuda_graph_backend_prefill": "disabled",
    }
