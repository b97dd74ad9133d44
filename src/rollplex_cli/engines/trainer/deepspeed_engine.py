"""The DeepSpeed engine in the one configuration used here; no other file imports deepspeed.

Stage 0 and unmanaged: backward only accumulates, `step` all-reduces the arena in place over the data-parallel ranks
and calls our optimizer. Nothing is compiled at run time.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from rollplex_cli.engines.trainer.adamw.streaming import StreamingAdamW

_COMMUNICATION_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class TrainingEngine:
    """What the actor needs of DeepSpeed.

    Args:
        hf_model: the module; its parameters keep their memory.
        optimizer: becomes the engine's optimizer as it is.
        reduction_dtype: type of the gradient arena, which must also be the type on the wire.
        data_parallel_group: ranks that hold the same shard; None takes all ranks.

    Raises ValueError where no default process group exists; whoever makes the group also destroys it.
    """

    def __init__(
        self,
        hf_model: Any,
        optimizer: StreamingAdamW,
        *,
        reduction_dtype: torch.dtype,
        data_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("the training engine needs a torch.distributed process group")
        group = data_parallel_group or dist.group.WORLD
        assert group is not None
        self.data_parallel_size = dist.get_world_size(group)
        self._engine = _initialize(hf_model, optimizer, reduction_dtype, _Groups(group))
        assert self._engine.optimizer is optimizer
        # The engine's own version drops every gradient, and with it the arena.
        self._engine.zero_grad = optimizer.zero_grad

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of a scalar loss."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Average the arena over the data-parallel ranks, update, zero the arena."""
        self._engine.step()

    def close(self) -> None:
        """Drop the engine."""
        self._engine.destroy()


class _Groups:
    """The engine's view of the ranks. Given explicitly because the engine's own default is a process-wide cache that
    outlives the process group."""

    def __init__(self, data_parallel: dist.ProcessGroup) -> None:
        self._data_parallel = data_parallel

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data_parallel

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data_parallel)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data_parallel)

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


def _initialize(hf_model: Any, optimizer: StreamingAdamW, reduction_dtype: torch.dtype, groups: _Groups) -> Any:
    device = next(hf_model.parameters()).device.type
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if dist.get_world_size() == 1:
        # torchrun sets it; the engine refuses to start without it.
        os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    if device == "cpu":
        # A C++ extension for inference that would be compiled at start and needs a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "communication_data_type": _COMMUNICATION_TYPES.get(reduction_dtype),
        "steps_per_print": 10**9,
    }
    original = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda engine: _broadcast_parameters(
        engine.module, groups.get_data_parallel_group()
    )
    try:
        engine, _, _, _ = deepspeed.initialize(model=hf_model, optimizer=optimizer, mpu=groups, config=config)
    finally:
        DeepSpeedEngine._broadcast_model = original
    return engine


@torch.no_grad()
def _broadcast_parameters(module: Any, group: dist.ProcessGroup) -> None:
    """The first rank's parameters to every rank of `group`.

    Strided views go through a contiguous copy: a collective on the view itself would write over its neighbours.
    """
    for param in module.parameters():
        staged = param.detach().contiguous()
        dist.broadcast(staged, group_src=0, group=group)
        if staged.data_ptr() != param.data_ptr():
            param.copy_(staged)
