"""Constructing a hosted scheduler without leaving marks on the process.

Import only after `host.import_sglang`.
"""

from __future__ import annotations

import json
import logging
import random
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.distributed import parallel_state
from tqdm import tqdm

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.collectives import GroupName
from rollplex_cli.engines.inputs import MediaTokens
from rollplex_cli.engines.rollout import host, patches
from rollplex_cli.engines.rollout.args import server_args
from rollplex_cli.engines.rollout.sampling import backend
from rollplex_cli.engines.rollout.scheduler import HostedScheduler
from rollplex_cli.plan.families import family_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rollplex_cli.engines.rollout.args import RolloutOptions
    from rollplex_cli.plan.families import Family

_FIRST_NAMES = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "visual.")
WEIGHT_PREFIXES = {
    "qwen2_vl": _FIRST_NAMES,
    "qwen2_5_vl": _FIRST_NAMES,
    "qwen3_vl": ("model.language_model.", "model.visual.", "lm_head."),
}
"""Weight names that SGLang's loader of a family takes; it skips others without a word."""

_GROUPS = ("_WORLD", "_TP", "_ATTN_TP", "_ATTN_CP", "_DCP", "_MOE_DP", "_MOE_EP", "_MOE_TP", "_PP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A scheduler and what the engine must know of its model."""

    scheduler: HostedScheduler
    image_token_id: int
    video_token_id: int
    vocab_size: int
    capacity: int
    """Largest prompt plus response, in tokens."""


def scheduler(options: RolloutOptions, replicas: tuple[tuple[int, ...], ...], tp_rank: int) -> Built:
    """Build the scheduler of this rank. With several replicas this is a collective of the default group."""
    path = options.model_dir / "config.json"
    if not path.is_file():
        raise UsageError(f"not a checkpoint with `config.json` and safetensors: {options.model_dir}")
    config = json.loads(path.read_text(encoding="utf-8"))
    family, media = family_of(config, str(path)), MediaTokens.from_config(config)
    if options.load_weights:
        check_weight_names(options.model_dir, family)
    image, video = media.image_token_id, media.video_token_id
    host.load_model_class(family)
    patches.apply(options.device, family.model_type)
    backend.register((image, video))
    patches.hooks.replicas = replicas
    patches.hooks.kv_buffers = options.kv_buffers
    patches.hooks.capture_stream = options.stream
    try:
        with _untouched(), torch.no_grad(), on_stream(options):
            args = server_args(options, len(replicas[0]))
            built = HostedScheduler(
                args, gpu_id=options.gpu_index, tp_rank=tp_rank, rebind=options.rebind, lora=options.lora,
                vision_cache_bytes=options.vision_cache_mib * 2**20,
            )  # fmt: skip
            replica = next(ranks for ranks in replicas if torch.distributed.get_rank() in ranks)
            if options.log is not None and len(replica) > 1:
                options.log.stream = options.stream
                built.launch = partial(options.log.launch, "forward batch", GroupName("rollout group", replica))
    except BaseException:
        release()
        raise
    finally:
        patches.hooks = patches.Hooks()
    if options.stream is not None:
        options.stream.synchronize()  # whoever reads the weights next does so on another stream
    return Built(
        scheduler=built,
        image_token_id=image,
        video_token_id=video,
        vocab_size=built.model_config.vocab_size,
        # SGLang keeps 5 tokens of the pool or context free of prompt and admits strictly less than the pool.
        capacity=built.max_req_len - 6,
    )


def on_stream(options: RolloutOptions) -> AbstractContextManager[Any]:
    """Makes the device and stream of `options` current in this thread, where there are any."""
    if options.device == "cpu":
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.cuda.device(options.gpu_index))
    if options.stream is not None:
        stack.enter_context(torch.cuda.stream(options.stream))
    return stack


def release() -> None:
    """Destroy SGLang's groups, so that another scheduler can be built in this process."""
    destroyed: set[int] = set()
    for name in _GROUPS:
        group = getattr(parallel_state, name)
        if group is not None and id(group) not in destroyed and torch.distributed.is_initialized():
            destroyed.add(id(group))
            group.destroy()
        setattr(parallel_state, name, None)


def check_weight_names(model_dir: Path, family: Family) -> None:
    """Raise UsageError for a checkpoint without weights, or with weights under names that SGLang would skip."""
    from safetensors import safe_open

    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise UsageError(f"not a checkpoint with `config.json` and safetensors: {model_dir}")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if not name.startswith(WEIGHT_PREFIXES[family.model_type]):
                    raise UsageError(
                        f"a weight name in {file.name} is not one that the rollout loads: `{name}`",
                        hint="save the model with `save_pretrained` of the pinned transformers",
                    )


@contextmanager
def _untouched() -> Iterator[None]:
    """Put back what the constructor changes for the whole process: RNGs, default dtype, threads, logging."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    interval, logger = tqdm.monitor_interval, logging.getLogger("sglang")
    tqdm.monitor_interval = 0  # its monitor is a thread that never ends
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(logging.WARNING)
        tqdm.monitor_interval = interval
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
