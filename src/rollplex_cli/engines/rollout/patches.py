"""Every change made to SGLang 0.5.16 from outside, in one table.

All patches are applied once per process, after the import and before the first scheduler. They replace names inside
SGLang's modules only; no class of transformers or PyTorch is touched.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from tqdm import tqdm

from rollplex_cli.engines.rollout import attention, host
from rollplex_cli.engines.rollout.absent import group_lists

if TYPE_CHECKING:
    from rollplex_cli.engines.rollout.absent import Groups
    from rollplex_cli.engines.rollout.args import KvBuffers
    from rollplex_cli.engines.rollout.host import Device


@dataclass(slots=True)
class Hooks:
    """What the patched functions read: set by the engine under construction, from its own thread."""

    replicas: tuple[tuple[int, ...], ...] = ()
    """Global ranks of each rollout replica; each rank at most once."""
    kv_buffers: KvBuffers | None = None
    capture_stream: torch.cuda.Stream | None = None


hooks = Hooks()


def _init_parallel_groups(*, backend: str, server_args: Any, model_config: Any, gpu_id: int, **_unused: Any) -> None:
    """Build SGLang's groups for replicas that are subsets of an existing default group."""
    from sglang.srt.distributed import parallel_state as state
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    world, tensor, pipeline = group_lists(hooks.replicas)

    def group(lists: Groups, name: str) -> Any:
        return state.init_model_parallel_group(
            [list(ranks) for ranks in lists],
            gpu_id,
            backend,
            use_custom_allreduce=False,
            group_name=name,
            use_message_queue_broadcaster=False,
        )

    # Creating a group is a collective of the default group: same lists, same order on every rank, those that have no
    # engine included (`absent.join_groups`).
    state._WORLD = group(world, "world")
    state._TP = group(tensor, "tp")
    state._PP = group(pipeline, "pp")
    state._ATTN_TP = state._MOE_TP = state._TP
    state._ATTN_CP = state._MOE_DP = state._MOE_EP = state._PP
    initialize_dp_attention(server_args=server_args, model_config=model_config)


def _broadcast_seed(data: list[Any], *_args: Any, **_kwargs: Any) -> list[Any]:
    """Every rank of a replica is given the same seed already."""
    return data


class _NoWatchdog:
    """Stands where SGLang keeps its watchdog."""

    def feed(self) -> None:
        """Nothing to feed."""


def _create_scheduler_watchdog(*_args: Any, **_kwargs: Any) -> _NoWatchdog:
    return _NoWatchdog()


def _no_threads_binding(*_args: Any, **_kwargs: Any) -> None:
    """Threads stay where the process put them."""


def _config_as_it_is(model_config: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Widths stay those of the checkpoint; a degree that does not divide them is refused before."""
    return model_config


def _create_buffers_normal(self: Any) -> None:
    """KV buffers from `hooks.kv_buffers`, or SGLang's own where there is none."""
    if hooks.kv_buffers is None:
        _originals["kv_buffers"](self)
        return
    k_shape, v_shape = self._kv_buffer_shapes()
    self.k_buffer, self.v_buffer = hooks.kv_buffers(tuple(k_shape), tuple(v_shape), self.store_dtype, self.layer_num)


def _prompt_is_cached(req: Any) -> bool:
    """True where the prefix cache holds all of a prompt that its siblings will look up."""
    return bool(req.cache_protected_len >= len(req.origin_input_ids) - 1)


def _maybe_cache_unfinished_req(req: Any, tree_cache: Any, **kwargs: Any) -> None:
    if not _prompt_is_cached(req):
        _originals["cache_unfinished"](req, tree_cache, **kwargs)


def _release_kv_cache(req: Any, tree_cache: Any, is_insert: bool = True) -> None:
    _originals["release_kv_cache"](req, tree_cache, is_insert=is_insert and not _prompt_is_cached(req))


def _graph_capture(stream: Any = None) -> Any:
    """Capture on the engine's stream: a graph's kernels run at the priority of the stream it was captured on."""
    return _originals["graph_capture"](stream=stream if stream is not None else hooks.capture_stream)


def _qwen2_vl_tower(self: Any, vision_config: Any, *args: Any, **kwargs: Any) -> None:
    if not hasattr(vision_config, "in_chans"):
        vision_config.in_chans = vision_config.in_channels
    _originals["qwen2_vl_tower"](self, vision_config, *args, **kwargs)


def _rot_pos_ids(h: Any, w: Any, spatial_merge_size: Any) -> torch.Tensor:
    found: torch.Tensor = _originals["rot_pos_ids"](int(h), int(w), int(spatial_merge_size))
    return found


class _QuietTqdm(tqdm):
    """A progress bar that shows nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced name: `target` is `module:attribute` or `module:Class.attribute`."""

    target: str
    replacement: Any
    reason: str
    devices: tuple[Device, ...] = ("cpu", "cuda")
    model_type: str | None = None
    """The only family it is for; None for all."""
    keep_as: str | None = None
    """Under which key the original stays callable."""


PATCHES: tuple[Patch, ...] = (
    Patch(
        "sglang.srt.distributed.bootstrap:_init_parallel_groups",
        _init_parallel_groups,
        "upstream wants the default group to be exactly one replica; here it holds several",
    ),
    Patch(
        "sglang.srt.managers.tp_worker:broadcast_pyobj",
        _broadcast_seed,
        "upstream passes a local rank with a global source: IndexError on replicas that do not start at rank 0",
    ),
    Patch(
        "sglang.srt.managers.scheduler:create_scheduler_watchdog",
        _create_scheduler_watchdog,
        "upstream's watchdog sends SIGQUIT to the parent when stepping pauses, as it does while training",
    ),
    Patch(
        "sglang.srt.managers.scheduler_components.batch_result_processor:maybe_cache_unfinished_req",
        _maybe_cache_unfinished_req,
        "prompts are looked up again, responses never: inserting each costs Python time and holds their KV",
        keep_as="cache_unfinished",
    ),
    Patch(
        "sglang.srt.managers.scheduler_components.batch_result_processor:release_kv_cache",
        _release_kv_cache,
        "the same for finished responses",
        keep_as="release_kv_cache",
    ),
    Patch(
        "sglang.srt.model_loader.weight_utils:tqdm",
        _QuietTqdm,
        "progress bars of a library do not belong on the user's terminal",
    ),
    Patch(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:tqdm",
        SimpleNamespace(tqdm=_QuietTqdm),
        "the same while graphs are captured",
        devices=("cuda",),
    ),
    Patch(
        "sglang.srt.utils.numa_utils:init_threads_binding",
        _no_threads_binding,
        "upstream refuses more ranks than the machine has NUMA nodes",
        devices=("cpu",),
    ),
    Patch(
        "sglang.srt.model_executor.model_runner:adjust_config_with_unaligned_cpu_tp",
        _config_as_it_is,
        "upstream rounds widths of MLPs up on the CPU only, for kernels that are not used",
        devices=("cpu",),
    ),
    Patch(
        "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._create_buffers_normal",
        _create_buffers_normal,
        "the KV pool lives in memory that its owner can unmap",
        keep_as="kv_buffers",
    ),
    Patch(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:graph_capture",
        _graph_capture,
        "decode must be captured on the rollout's high-priority stream",
        devices=("cuda",),
        keep_as="graph_capture",
    ),
    Patch(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend._run_sdpa_forward_decode",
        attention.decode,
        "upstream loops over requests in Python; one padded batch is many times faster",
        devices=("cpu",),
    ),
    Patch(
        "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend._run_sdpa_forward_extend",
        attention.extend,
        "upstream computes attention for cached prompt tokens again, with undefined queries",
        devices=("cpu",),
    ),
    Patch(
        "sglang.srt.layers.attention.vision:VisionSdpaAttention.forward",
        attention.vision,
        "upstream builds a mask of all patches by all patches, quadratic in the prompts of a batch",
        devices=("cpu",),
    ),
    Patch(
        "sglang.srt.models.utils:RotaryPosMixin.rot_pos_ids",
        staticmethod(_rot_pos_ids),
        "upstream keys its cache of positions by tensors, each equal to itself alone: a thousand copies are kept",
        keep_as="rot_pos_ids",
    ),
    Patch(
        "sglang.srt.models.qwen2_vl:Qwen2VisionTransformer.__init__",
        _qwen2_vl_tower,
        "upstream knows the number of channels only by the name that the first checkpoints had for it",
        model_type="qwen2_vl",
        keep_as="qwen2_vl_tower",
    ),
)

TOWER_EPS = 1e-6

_originals: dict[str, Any] = {}
_applied: set[str] = set()


def apply(device: Device, model_type: str) -> None:
    """Apply the patches of `device` and a family; a second call does nothing.

    Raises ClusterError for another version of SGLang, AssertionError when a name to replace is gone.
    """
    host.check_version()
    for patch in PATCHES:
        if device not in patch.devices or patch.target in _applied or patch.model_type not in (None, model_type):
            continue
        module_name, _, path = patch.target.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, name), f"SGLang has no `{patch.target}`"
        if patch.keep_as is not None:
            _originals[patch.keep_as] = getattr(owner, name)
        setattr(owner, name, patch.replacement)
        _applied.add(patch.target)


def linear_patch_embed(patch_embed: Any) -> None:
    """Make one vision patch embedding compute its non-overlapping convolution as a matrix product.

    The kernel covers a whole patch, so each output is a dot product of the flattened patch with the flattened
    kernel; PyTorch's general 3-D convolution takes about seven times as long on a CPU. Set on the object: the
    class belongs to transformers and is the trainer's too.
    """
    projection = patch_embed.proj
    assert tuple(projection.stride) == tuple(projection.kernel_size)

    def forward(patches: torch.Tensor) -> torch.Tensor:
        weight = projection.weight
        return functional.linear(patches.to(weight.dtype), weight.reshape(weight.shape[0], -1), projection.bias)

    patch_embed.forward = forward


def tower_norms(visual: Any) -> None:
    """Give the LayerNorms of a vision tower the epsilon that the model has there, 1e-6.

    SGLang takes that of the language model's norms instead, which is another in some checkpoints.
    """
    for module in visual.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = TOWER_EPS
