"""AdamW over float32 state on the host, in chunks, writing through the parameters' views."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.errors import NonFiniteError, RunFailedError
from rollplex_cli.engines.trainer.arena import ALIGNMENT, GradientArena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rollplex_cli.engines.trainer.sharded import GradientSync

_PARTS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """The profile's `optimizer` section; same names, defaults and meanings."""

    lr: float
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    chunk_elements: int = 16_777_216

    def learning_rate(self, step: int) -> float:
        """Rate of update `step` (0-based): linear warm-up, then constant."""
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.lr


class HostAdamW(torch.optim.Optimizer):
    """Client optimizer of the DeepSpeed engine (Loshchilov and Hutter, 2019, with PyTorch's fused kernel).

    Master weights, first and second moments are flat host arrays in the arena's layout and type (float32). `step`
    reads the arena, clips by the global norm, updates chunk by chunk and copies new values into the parameters, which
    may be strided views. The result does not depend on `chunk_elements`. Norms and biases have no weight decay.

    `step` raises NonFiniteError, with nothing changed, where the gradient norm is not finite.
    """

    overflow = False
    """The engine asks for it; a step here is applied or raises."""

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        arena: GradientArena,
        settings: AdamWSettings,
        sync: GradientSync | None = None,
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
        self._arena = arena
        self._sync = sync
        self._layout = arena.layout
        self._offsets = [slot.offset for slot in self._layout.slots]
        self._named = dict(params)
        # Pinned, or a GPU's link runs at a fraction of its rate.
        kind: dict[str, Any] = {"dtype": arena.flat.dtype, "pin_memory": arena.flat.is_cuda}
        self._flat = {part: torch.zeros(self._layout.size, **kind) for part in _PARTS}
        self._global_grad_norm = 0.0
        self.read_parameters()

    def read_parameters(self) -> None:
        """Take the parameters' present values as masters (after weights were loaded from elsewhere)."""
        for slot in self._layout.slots:
            self._layout.view(self._flat["master"], slot).copy_(self._named[slot.name].detach())

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self.settings.learning_rate(self.updates)

    @property
    def grad_norm(self) -> float:
        """Global gradient norm of the last update, before clipping."""
        return self._global_grad_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one update from the gradients in the arena. `closure` is not supported."""
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
        rate = self.lr
        for start, stop, decay in self._chunks():
            self._write(start, stop, self._update(start, stop, decay, rate))
        self._wait()
        self.updates += 1
        for group in self.param_groups:
            group["lr"] = self.lr

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the arena; gradients stay where they are whatever `set_to_none` says."""
        self._arena.zero()

    def get_grads_for_reduction(self) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """What the engine all-reduces: the arena itself, in place."""
        return [self._arena.flat], {}

    def parts(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(part, parameter, its values where they lie) of masters and moments, for whoever writes them to a file."""
        for part, flat in self._flat.items():
            for slot in self._layout.slots:
                yield part, slot.name, self._layout.view(flat, slot)

    @torch.no_grad()
    def restore(self, updates: int, read: Callable[[str, str], torch.Tensor]) -> None:
        """Take masters and moments from `read(part, parameter)` and write the masters into the parameters.

        What `read` raises leaves the state half restored: the run cannot go on from it.
        """
        for part, name, place in self.parts():
            place.copy_(read(part, name))
        self.updates = updates
        for group in self.param_groups:
            group["lr"] = self.lr
        self._write(0, self._layout.size, self._flat["master"])
        self._wait()

    def master_of(self, name: str) -> torch.Tensor | None:
        """The master values of a parameter, in its shape, not a copy; None for one that is not trained."""
        slot = next((slot for slot in self._layout.slots if slot.name == name), None)
        return None if slot is None else self._layout.view(self._flat["master"], slot)

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything needed to resume, as flat tensors: `master/<parameter>`, `exp_avg/<parameter>`,
        `exp_avg_sq/<parameter>` in the parameter's shape, and `updates` (int64 scalar). Names are those of the
        Hugging Face module, so a checkpoint knows nothing of layout, chunks or ranks."""
        state: dict[str, torch.Tensor] = {"updates": torch.tensor(self.updates, dtype=torch.int64)}
        for part, flat in self._flat.items():
            for slot in self._layout.slots:
                state[f"{part}/{slot.name}"] = self._layout.view(flat, slot).clone()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore a `state_dict` and write its masters into the parameters.

        Raises RunFailedError for missing, unexpected or misshapen entries; then nothing was changed.
        """
        wanted = {f"{part}/{slot.name}": slot.shape for part in _PARTS for slot in self._layout.slots}
        wanted["updates"] = ()
        wrong = sorted(set(wanted) ^ set(state))
        wrong += sorted(name for name in set(wanted) & set(state) if tuple(state[name].shape) != wanted[name])
        if wrong:
            raise RunFailedError(f"the optimizer checkpoint does not fit this model: {', '.join(wrong[:8])}")
        for part, flat in self._flat.items():
            for slot in self._layout.slots:
                self._layout.view(flat, slot).copy_(state[f"{part}/{slot.name}"])
        self.updates = int(state["updates"])
        for group in self.param_groups:
            group["lr"] = self.lr
        self._write(0, self._layout.size, self._flat["master"])
        self._wait()

    def _chunks(self) -> Iterator[tuple[int, int, float]]:
        """(start, stop, weight decay) of every chunk; none crosses the border of the two parts."""
        step = self.settings.chunk_elements
        decay_end, size = self._layout.decay_end, self._layout.size
        for low, high, decay in ((0, decay_end, self.settings.weight_decay), (decay_end, size, 0.0)):
            for start in range(low, high, step):
                yield start, min(start + step, high), decay

    def _wait(self) -> None:
        """The host arrays are read next by the CPU, which does not wait for a stream by itself."""
        if self._arena.flat.is_cuda:
            torch.cuda.current_stream().synchronize()

    def _update(self, start: int, stop: int, decay: float, rate: float) -> torch.Tensor:
        """Update one chunk; returns its new masters, on the arena's device."""
        device = self._arena.flat.device
        host = [self._flat[part][start:stop] for part in _PARTS]
        master, first, second = (t.to(device, non_blocking=True) for t in host)
        beta1, beta2 = self.settings.betas
        torch._fused_adamw_(
            [master],
            [self._arena.flat[start:stop]],
            [first],
            [second],
            [],
            [torch.tensor(float(self.updates + 1), device=device)],
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=self.settings.eps,
            amsgrad=False,
            maximize=False,
        )
        for target, value in zip(host, (master, first, second), strict=True):
            if target.data_ptr() != value.data_ptr():
                target.copy_(value, non_blocking=True)
        return master

    def _write(self, start: int, stop: int, masters: torch.Tensor) -> None:
        """Copy `masters`, those of [start, stop), into the parameters they belong to."""
        index = max(bisect_right(self._offsets, start) - 1, 0)
        for slot in self._layout.slots[index:]:
            if slot.offset >= stop:
                break
            low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if low < high:
                values = masters[low - start : high - start]
                write_elements(self._named[slot.name].detach(), low - slot.offset, values)


def write_elements(target: torch.Tensor, first: int, values: torch.Tensor) -> None:
    """`target.flatten()[first : first + n] = values` [n] for a target that may be a strided matrix view, in at most
    three copies (the rest of a row, whole rows, the start of a row)."""
    if target.is_contiguous():
        target.view(-1)[first : first + len(values)].copy_(values)
        return
    if target.dim() != 2:
        raise ValueError(f"only matrices may be strided views, not a tensor of shape {tuple(target.shape)}")
    columns = target.shape[1]
    row, column = divmod(first, columns)
    if column:
        head = min(columns - column, len(values))
        target[row, column : column + head].copy_(values[:head])
        values, row = values[head:], row + 1
    whole = len(values) // columns
    if whole:
        target[row : row + whole].copy_(values[: whole * columns].view(whole, columns))
    if rest := len(values) - whole * columns:
        target[row + whole, :rest].copy_(values[whole * columns :])
