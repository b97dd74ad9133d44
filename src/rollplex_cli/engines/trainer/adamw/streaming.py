"""AdamW over float32 state on the host that passes through the device in chunks, writing through parameters' views."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollplex_cli.core.errors import NonFiniteError, RunFailedError
from rollplex_cli.engines.trainer.adamw.elements import ParameterViews, boxes
from rollplex_cli.engines.trainer.adamw.pipeline import Buffers, Held, Pipeline
from rollplex_cli.engines.trainer.adamw.ranges import SINGLE_RANK, Chunk, DataParallel, cut, owned_range
from rollplex_cli.engines.trainer.adamw.settings import UpdateStats
from rollplex_cli.engines.trainer.adamw.state import BLOCK_ELEMENTS, STATE_PARTS, HostState
from rollplex_cli.engines.trainer.arena import ALIGNMENT
from rollplex_cli.engines.weights.rounding import join_into, round_into, rounded, take_remainder
from rollplex_cli.engines.weights.staged import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
    from rollplex_cli.engines.trainer.arena import GradientArena, Slot
    from rollplex_cli.engines.trainer.sharded import GradientSync
    from rollplex_cli.engines.weights.shards import Box
    from rollplex_cli.memory.pinned import HostMemory


class StreamingAdamW(torch.optim.Optimizer):
    """Client optimizer of the DeepSpeed engine (Loshchilov and Hutter, 2019, with PyTorch's fused kernel).

    Master weights, first and second moments are flat host arrays in the arena's layout and type (float32). `step`
    reads the arena, clips by the global norm, and takes chunk after chunk through the device; new weights, the masters
    rounded to nearest with ties away from zero, go into the parameters, which may be strided views. Neither
    `chunk_elements` nor `master` nor the number of data-parallel ranks changes a bit of the result. Norms and biases
    have no weight decay.

    Data-parallel ranks hold the state of one share of the elements each. Then `step`, `restore`, `load_state_dict`,
    `state_dict` and `share_weights` are collectives of them, since every rank has all weights.

    Args:
        params: by name; their memory is written in place and never re-pointed.
        arena: their gradients, equal on all data-parallel ranks when `step` is called.
        sync: what tensor-parallel ranks owe one another.
        host: page-locked memory within a budget, for the host arrays; None takes PyTorch's.
        staging: gives at least so many bytes on the device for the duration of one pass over the chunks, as any
            contiguous tensor; None takes them from PyTorch's allocator.
        staged: whether chunks are copied to staging memory: always on CUDA. On a CPU, where they could as well be
            updated where they lie, only if this or `staging` says so.

    Raises:
        ValueError: a chunk that is no multiple of 64 elements, or `master` and types that do not go together.
        DoesNotFitError: the host arrays do not fit the budget of `host`, or cannot be page-locked.
    """

    overflow = False
    """The engine asks for it; a step here is applied or raises."""

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        arena: GradientArena,
        settings: AdamWSettings,
        sync: GradientSync | None = None,
        *,
        data_parallel: DataParallel = SINGLE_RANK,
        host: HostMemory | None = None,
        staging: Callable[[int], torch.Tensor] | None = None,
        staged: bool = False,
    ) -> None:
        if settings.chunk_elements <= 0 or settings.chunk_elements % ALIGNMENT:
            raise ValueError(f"chunk_elements must be a positive multiple of {ALIGNMENT}: {settings.chunk_elements}")
        decaying = [p for p in params.values() if p.dim() >= 2]
        plain = [p for p in params.values() if p.dim() < 2]
        groups = [{"params": decaying, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        super().__init__([g for g in groups if g["params"]], {"lr": settings.learning_rate(0)})
        self.settings = settings
        self.updates = 0
        """Updates applied so far."""
        self.stats: UpdateStats | None = None
        """Of the last update."""
        self._arena, self._sync, self._peers, self._staging = arena, sync, data_parallel, staging
        self._layout, device = arena.layout, arena.flat.device
        self._weights = ParameterViews(self._layout, params)
        self._shares = [owned_range(self._layout.size, data_parallel.size, r) for r in range(data_parallel.size)]
        start, stop = self._shares[data_parallel.rank]
        self._state = HostState(
            start, stop, self._weights, arena.flat.dtype, settings.master, memory=host, pin=device.type == "cuda"
        )
        # A model smaller than a chunk needs no more memory than it has elements.
        self._chunk_elements = min(settings.chunk_elements, max(ALIGNMENT, self._shares[0][1]))
        self._chunks = [cut(self._layout, low, high, self._chunk_elements) for low, high in self._shares]
        self._buffers = Buffers.of(
            self._weights.dtype, arena.flat.dtype, settings.master,
            staged=staged or staging is not None or device.type == "cuda", exchanged=data_parallel.size > 1,
        )  # fmt: skip
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None
        self._global_grad_norm = 0.0
        self.read_parameters()

    def read_parameters(self) -> None:
        """Take the parameters' present values as masters (after weights were loaded from elsewhere)."""
        self._state.take_weights()

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self.settings.learning_rate(self.updates)

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last update, before clipping."""
        return self._global_grad_norm

    @property
    def staging_bytes(self) -> int:
        """Device memory that `step` holds from its first chunk to its last."""
        return self._buffers.num_bytes(self._chunk_elements)

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank's state."""
        return (self._state.stop - self._state.start) * self._state.element_bytes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one update from the gradients in the arena. `closure` is not supported.

        Raises:
            NonFiniteError: the gradient norm is not finite; nothing was changed.
        """
        assert closure is None
        if self._sync is not None:
            self._sync.synchronize()
        norm = self._sync.norm() if self._sync is not None else self._arena.norm()
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm of update {self.updates + 1} is not finite: {norm}")
        self._global_grad_norm = norm
        # As torch.nn.utils.clip_grad_norm_ computes it.
        clip = self.settings.clip_norm / (norm + 1e-6)
        if clip < 1.0:
            self._arena.scale(clip)
        # On the device, and made there: a copy from pageable memory would stop the pipeline.
        number = torch.full((), float(self.updates + 1), dtype=torch.float32, device=self._arena.flat.device)
        self.stats = self._pass(Held._fields, lambda pipeline, chunk, held: self._update(pipeline, chunk, held, number))
        self._count(self.updates + 1)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the arena; gradients stay where they are whatever `set_to_none` says."""
        self._arena.zero()

    def get_grads_for_reduction(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """What the engine all-reduces: the arena itself, in place."""
        return [self._arena.flat], {}

    def parts(self) -> Iterator[tuple[str, str, Box, torch.Tensor]]:
        """(part, parameter, box of the parameter, its values) of the masters and moments that this rank holds, for
        whoever writes them to a file: all boxes of all data-parallel ranks together are every parameter once. Values
        are float32 on the host and in the shape of the box, valid until the next update."""
        for part in STATE_PARTS:
            for slot, low, high in self._layout.overlaps(self._state.start, self._state.stop):
                for box, first, end in self._boxes(slot, low, high):
                    yield part, slot.name, box, self._state.values(part, first, end).view(box.shape)

    @torch.no_grad()
    def restore(self, updates: int, read: Callable[[str, str, Box], torch.Tensor]) -> None:
        """Take masters and moments from `read(part, parameter, box of the parameter)`, which is asked for what this
        rank holds, and make the masters the weights.

        What `read` raises leaves the state half restored: the run cannot go on from it.
        """
        for part in STATE_PARTS:
            for slot, low, high in self._layout.overlaps(self._state.start, self._state.stop):
                for box, first, end in self._boxes(slot, low, high):
                    values = read(part, slot.name, box).to(self._state.dtype).contiguous().view(-1)
                    if part != "master":
                        self._state.values(part, first, end).copy_(values)
                        continue
                    self._state.set_masters(first, values)
                    if self._state.is_split:
                        self._weights.write(first, rounded(values, self._weights.dtype))
        self._count(updates)
        self.share_weights()

    @torch.no_grad()
    def share_weights(self) -> None:
        """Write every rank's masters into the parameters of all."""
        self._pass(() if self._state.is_split else ("stored",), self._present, changed=False)

    def masters_of(self, name: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """(box of the parameter, its masters) of what this rank holds of a parameter; nothing for one that is not
        trained."""
        for slot, low, high in self._layout.overlaps(self._state.start, self._state.stop):
            if slot.name == name:
                for box, first, end in self._boxes(slot, low, high):
                    yield box, self._state.values("master", first, end).view(box.shape)

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything needed to resume, on the host: `master/<parameter>`, `exp_avg/<parameter>`,
        `exp_avg_sq/<parameter>` in the parameter's shape, and `updates` (int64 scalar). Names are those of the
        Hugging Face module, so a checkpoint knows nothing of layout, chunks or ranks."""
        state: dict[str, torch.Tensor] = {"updates": torch.tensor(self.updates, dtype=torch.int64)}
        for part in STATE_PARTS:
            flat = torch.zeros(self._layout.size, dtype=self._state.dtype)
            start, stop = self._state.start, self._state.stop
            flat[start:stop].copy_(self._state.values(part, start, stop))
            for rank, (low, high) in enumerate(self._shares if self._peers.size > 1 else ()):
                if low < high:
                    dist.broadcast(flat[low:high], group_src=rank, group=self._peers.group)
            for slot in self._layout.slots:
                state[f"{part}/{slot.name}"] = self._layout.view(flat, slot).clone()
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a `state_dict` and write its masters into the parameters.

        Raises RunFailedError for missing, unexpected or misshapen entries; then nothing was changed.
        """
        wanted = {f"{part}/{slot.name}": slot.shape for part in STATE_PARTS for slot in self._layout.slots}
        wanted["updates"] = ()
        wrong = sorted(set(wanted) ^ set(state))
        wrong += sorted(name for name in set(wanted) & set(state) if tuple(state[name].shape) != wanted[name])
        if wrong:
            raise RunFailedError(f"the optimizer checkpoint does not fit this model: {', '.join(wrong[:8])}")
        self.restore(int(state["updates"]), lambda part, name, box: state[f"{part}/{name}"][box.slices()])

    def close(self) -> None:
        """Give the host memory back; the optimizer cannot be used afterwards."""
        self._state.close()

    def _count(self, updates: int) -> None:
        self.updates = updates
        for group in self.param_groups:
            group["lr"] = self.lr

    def _boxes(self, slot: Slot, low: int, high: int) -> Iterator[tuple[Box, int, int]]:
        """(box, first, end) of the elements [low, high) of a parameter: as few boxes as there can be, but none that
        is too large to be put together under `split`."""
        step = BLOCK_ELEMENTS if self._state.is_split else high - low
        for start in range(low, high, step):
            cursor = start
            for box in boxes(slot.shape, start - slot.offset, min(start + step, high) - start):
                yield box, cursor, cursor + box.numel
                cursor += box.numel

    def _pass(
        self, parts: tuple[str, ...], work: Callable[[Pipeline, Chunk, Held], torch.Tensor], *, changed: bool = True
    ) -> UpdateStats:
        """Take these parts of every chunk of this rank through `work`, which gives the chunk's weights, and back if
        `changed`; then have all ranks write the weights of that turn."""
        started, exchanged = time.monotonic(), 0
        size = self.staging_bytes
        staging = (
            self._staging(size)
            if self._staging is not None
            else torch.empty(size, dtype=torch.uint8, device=self._arena.flat.device)
        )
        pipeline = Pipeline(self._state, self._buffers, self._chunk_elements, staging, self._streams)
        own = self._chunks[self._peers.rank]
        # Every rank takes part in every turn, also one that has fewer chunks.
        for number in range(max(len(chunks) for chunks in self._chunks)):
            held = weights = None
            if number < len(own):
                held = pipeline.load(number, own[number], parts)
                weights = work(pipeline, own[number], held)
                self._weights.write(own[number].start, weights)
            if self._peers.size > 1:
                exchanged += self._exchange(pipeline, number, weights)
            if held is not None:
                pipeline.offload(number, own[number], held, parts if changed else ())
        pipeline.finish()
        return UpdateStats(
            elements=self._state.stop - self._state.start,
            to_device_bytes=pipeline.to_device_bytes,
            to_host_bytes=pipeline.to_host_bytes,
            exchanged_bytes=exchanged,
            staging_bytes=size,
            seconds=time.monotonic() - started,
        )

    def _update(self, pipeline: Pipeline, chunk: Chunk, held: Held, number: torch.Tensor) -> torch.Tensor:
        """Update a chunk; returns its new weights [n]."""
        master = self._master(pipeline, chunk, held)
        beta1, beta2 = self.settings.betas
        torch._fused_adamw_(
            [master],
            [self._arena.flat[chunk.start : chunk.stop]],
            [held.exp_avg],
            [held.exp_avg_sq],
            [],
            [number],
            lr=self.lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.settings.weight_decay if chunk.decays else 0.0,
            eps=self.settings.eps,
            amsgrad=False,
            maximize=False,
        )
        if self._state.is_split:
            take_remainder(master, held.stored)
        return self._round(pipeline, master)

    def _present(self, pipeline: Pipeline, chunk: Chunk, held: Held) -> torch.Tensor:
        """The weights [n] of a chunk as they are; under `split` those in the parameters."""
        if not self._state.is_split:
            return self._round(pipeline, held.stored)
        weights = pipeline.scratch("weights", chunk.stop - chunk.start)
        self._weights.read(chunk.start, weights)
        return weights

    def _master(self, pipeline: Pipeline, chunk: Chunk, held: Held) -> torch.Tensor:
        if not self._state.is_split:
            return held.stored
        master = pipeline.scratch("master", chunk.stop - chunk.start)
        join_into(self._present(pipeline, chunk, held), held.stored, master)
        return master

    def _round(self, pipeline: Pipeline, master: torch.Tensor) -> torch.Tensor:
        if master.dtype == self._weights.dtype:
            return master
        weights = pipeline.scratch("weights", len(master))
        round_into(master, weights, pipeline.scratch("nan", len(master)))
        return weights

    def _exchange(self, pipeline: Pipeline, number: int, own: torch.Tensor | None) -> int:
        """Every rank's `number`-th chunk of weights to all ranks, one after the other through one buffer: a collective
        sees contiguous staging memory only, never a parameter. Returns the bytes received."""
        received = 0
        for rank, chunks in enumerate(self._chunks):
            if number >= len(chunks):
                continue
            chunk = chunks[number]
            mine = rank == self._peers.rank
            values = own if mine else pipeline.scratch("received", chunk.stop - chunk.start)
            assert values is not None
            # As bytes: not every backend sends every type.
            dist.broadcast(whole(values).view(torch.uint8), group_src=rank, group=self._peers.group)
            if not mine:
                self._weights.write(chunk.start, values)
                received += values.nbytes
        return received
