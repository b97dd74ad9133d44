"""The policy under training: split forward and backward, gradients in the arena, updates through DeepSpeed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.errors import NonFiniteError
from rollplex_cli.engines.trainer.adamw.ranges import data_parallel_of
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.adamw.streaming import StreamingAdamW
from rollplex_cli.engines.trainer.arena import GradientArena
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.sharded import GradientSync
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.engines.weights.names import is_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch.distributed as dist

    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.lora.adapters import LoraSettings
    from rollplex_cli.engines.trainer.adamw.settings import UpdateStats
    from rollplex_cli.engines.trainer.arena import FlatMemory
    from rollplex_cli.engines.trainer.model.parameters import ModelWeights
    from rollplex_cli.engines.trainer.model.vision import Encoded
    from rollplex_cli.engines.trainer.prefix import PrefixMode, PrefixPack, PrefixState
    from rollplex_cli.engines.trainer.sharded import Shard
    from rollplex_cli.engines.weights.shards import Box
    from rollplex_cli.memory.pinned import HostMemory
    from rollplex_cli.rl.losses import LossResult
    from rollplex_cli.rl.packing import PackedSuffix


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixOutcome:
    """What training one group's suffixes yields."""

    logprobs: torch.Tensor
    """[S], detached, in packing order."""
    loss: float
    """Sum over the group, before normalisation."""
    weight: int
    """What the group adds to the step's normaliser."""
    metrics: dict[str, float]
    """The loss function's metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOutcome:
    """What an update did."""

    grad_norm: float
    """Global norm of the averaged gradient before clipping."""
    lr: float
    applied: bool
    stats: UpdateStats
    """What it moved, and how long that took."""


@dataclass(slots=True)
class _HeldTokens:
    """Tokens of prompts whose prefix activations are held. Counted by calls of the trainer thread alone, not by which
    states are alive: all ranks of a training group make the same calls in the same order and so decide alike, without
    which their collectives would not meet. A group that is dropped without a backward counts until the update."""

    tokens: int = 0

    def give_back(self, tokens: int) -> None:
        """A state is released."""
        self.tokens -= tokens


def is_vision(name: str) -> bool:
    """Whether a Hugging Face parameter name belongs to the vision tower or its projector."""
    return "visual." in name


class Actor:
    """One rank's share of the policy. Every method is called from the trainer thread.

    Gradients of all groups of a step accumulate in the arena in the order of the calls; nothing else is carried from
    one group to the next. No method draws random numbers.

    Args:
        hf_model: the module whose parameters are trained where they lie (views of the rollout's tensors).
        optimizer: AdamW settings.
        temperature: of the rollout.
        banned_token_ids: ids the rollout never samples.
        prefix_activations: what prefix backward uses, `keep`, `device`, `host` or `recompute`; results are bit-equal.
        prefix_kept_tokens: tokens of prompts for which that is held at a time; a prompt beyond it is computed again in
            its backward. None is no limit.
        suffix_kept_layers: see `SplitModel`.
        data_parallel_group: ranks that train the same parameters; None takes all ranks.
        freeze_vision: leave the vision tower and its projector alone.
        shard: this rank's share where a training group has several ranks; None for whole parameters.
        host: page-locked memory within a budget, for the optimizer's state; None takes PyTorch's.
        staging: device memory for the duration of an update (`StreamingAdamW`); None takes it from PyTorch.
        gradient_memory: holds the gradient arena; None leaves it to PyTorch.
        lora: train the module's adapters alone; everything else, the vision tower included, is left as it is.

    Raises ValueError where no default torch.distributed group exists, DoesNotFitError where the optimizer's state
    does not fit the host.
    """

    def __init__(
        self,
        hf_model: Any,
        *,
        optimizer: AdamWSettings,
        temperature: float = 1.0,
        banned_token_ids: Sequence[int] = (),
        prefix_activations: PrefixMode = "recompute",
        prefix_kept_tokens: int | None = None,
        suffix_kept_layers: int | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        freeze_vision: bool = False,
        shard: Shard | None = None,
        host: HostMemory | None = None,
        staging: Callable[[int], torch.Tensor] | None = None,
        gradient_memory: FlatMemory | None = None,
        lora: LoraSettings | None = None,
    ) -> None:
        from rollplex_cli.engines.trainer.deepspeed_engine import TrainingEngine

        if freeze_vision or lora is not None:
            for name, parameter in hf_model.named_parameters():
                parameter.requires_grad_(is_adapter(name) if lora is not None else not is_vision(name))
        self._params: dict[str, torch.nn.Parameter] = {
            name: parameter for name, parameter in hf_model.named_parameters() if parameter.requires_grad
        }
        self.trains_adapters = lora is not None
        """Whether adapters are trained, and nothing else."""
        self._mode, self._kept_limit = prefix_activations, prefix_kept_tokens
        self._held = _HeldTokens()
        self._shared: list[PrefixPack] = []
        """Passes of several prompts that are not finished."""
        self._arena = GradientArena(self._params, gradient_memory)
        self.shard = shard
        sync = GradientSync(shard, self._arena) if shard is not None else None
        self._optimizer = StreamingAdamW(
            self._params,
            self._arena,
            optimizer,
            sync,
            data_parallel=data_parallel_of(data_parallel_group),
            host=host,
            staging=staging,
        )
        self._engine = TrainingEngine(
            hf_model,
            self._optimizer,
            reduction_dtype=self._arena.flat.dtype,
            data_parallel_group=data_parallel_group,
        )
        # The engine has broadcast rank 0's parameters by now.
        self._optimizer.read_parameters()
        self.split = SplitModel(
            shard_weights(hf_model, shard, lora),
            temperature=temperature,
            banned_token_ids=banned_token_ids,
            freeze_vision=freeze_vision or lora is not None,
            suffix_kept_layers=suffix_kept_layers,
        )

    @property
    def data_parallel_size(self) -> int:
        """Ranks over which gradients are summed."""
        return self._engine.data_parallel_size

    @property
    def updates(self) -> int:
        """Updates applied so far, over resumes."""
        return self._optimizer.updates

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters under training by Hugging Face name, tied ones once."""
        return dict(self._params)

    def encode(self, prompts: Sequence[PromptInput]) -> Encoded | None:
        """The vision tower's output for prompts: for `prefixes`, and the reference's too where the tower is frozen."""
        return self.split.encode(prompts)

    def prefix(self, prompt: PromptInput, media: Encoded | None = None) -> PrefixState:
        """The attached boundary of a prompt; reads weights, writes no gradient. See `SplitModel.prefix` on `media`."""
        (state,) = self.prefixes([prompt], media)
        return state

    def prefixes(self, prompts: Sequence[PromptInput], media: Encoded | None = None) -> list[PrefixState]:
        """The same for several prompts in one pass (`SplitModel.prefixes`)."""
        held, limit, tokens = self._held, self._kept_limit, sum(prompt.num_tokens for prompt in prompts)
        if limit is not None and held.tokens + tokens > limit:
            states = self.split.prefixes(prompts, "recompute", media)
        else:
            states = self.split.prefixes(prompts, self._mode, media)
            if limit is not None:
                held.tokens += tokens
                states[0].pack.on_release = partial(held.give_back, tokens)
        if len(states) > 1:
            self._shared = [pack for pack in self._shared if pack.owes or pack.is_open] + [states[0].pack]
        return states

    def adopt_prefix(
        self,
        prompt: PromptInput,
        key_values: Sequence[tuple[torch.Tensor, torch.Tensor]],
        media: Encoded | None = None,
    ) -> PrefixState:
        """The boundary of a prompt from keys and values that another engine computed under the same weights."""
        return self.split.adopt_prefix(prompt, key_values, media)

    def suffix(
        self, state: PrefixState, packed: PackedSuffix, loss_fn: Callable[[torch.Tensor], LossResult]
    ) -> SuffixOutcome:
        """Forward, loss and backward to the boundary of one group.

        `loss_fn` maps log-probs [S] to a loss. Raises NonFiniteError, with no gradient written, for a loss that is
        not a finite number.
        """
        with torch.enable_grad():
            logprobs = self.split.suffix(state, packed)
            result = loss_fn(logprobs)
        loss = float(result.loss.detach())
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss of a group is not finite: {loss}")
        self._engine.backward(result.loss)
        return SuffixOutcome(
            logprobs=logprobs.detach(),
            loss=loss,
            weight=result.weight,
            metrics=_read(result.metrics),
        )

    def logprobs(self, state: PrefixState, packed: PackedSuffix) -> torch.Tensor:
        """Log-probs [S] of a group's responses without a backward; its boundary stays as it is."""
        with torch.no_grad():
            return self.split.suffix(state, packed)

    def prefix_backward(self, state: PrefixState) -> None:
        """Send the boundary's gradients through the prefix into the arena; consumes `state`."""
        self.split.prefix_backward(state)

    def release(self, state: PrefixState) -> None:
        """Drop a boundary whose group has no gradients; the others of its pass may have waited for that."""
        self.split.release(state)

    def update(self, scale: float) -> UpdateOutcome:
        """Apply `scale` * sum over data-parallel ranks of the accumulated gradients, then zero them.

        `scale` is 1 / (the normaliser of the whole step over all ranks). Collective over data-parallel ranks.
        Raises NonFiniteError on every rank, with nothing changed, where the gradient norm is not finite.
        """
        rate = self._optimizer.lr
        self._finish_shared()
        self._arena.check()
        # The engine averages over ranks; a sum is wanted.
        self._arena.scale(scale * self._engine.data_parallel_size)
        self._engine.step()
        self._held = _HeldTokens()  # no boundary outlives the weights it was computed with
        stats = self._optimizer.stats
        assert stats is not None
        return UpdateOutcome(grad_norm=self._optimizer.grad_norm, lr=rate, applied=True, stats=stats)

    def _finish_shared(self) -> None:
        """The backward of passes whose last prompts were cancelled; of every rank alike, in the order of the passes."""
        for pack in self._shared:
            if pack.owes:
                self.split.run_backward(pack)
        self._shared = []

    def discard_gradients(self) -> None:
        """Forget what was accumulated (an interrupted step)."""
        self._held, self._shared = _HeldTokens(), []
        self._arena.zero()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything needed to resume bit-equal, as named tensors (`StreamingAdamW.state_dict`). Collective over
        data-parallel ranks, as is `load_state_dict`."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `state_dict`, parameters included; accumulated gradients are dropped."""
        self._arena.zero()
        self._optimizer.load_state_dict(state)

    def optimizer_parts(self) -> Iterator[tuple[str, str, Box, torch.Tensor]]:
        """See `StreamingAdamW.parts`."""
        return self._optimizer.parts()

    def restore(self, updates: int, read: Callable[[str, str, Box], torch.Tensor]) -> None:
        """See `StreamingAdamW.restore`; accumulated gradients are dropped. Collective over data-parallel ranks."""
        self._arena.zero()
        self._optimizer.restore(updates, read)

    def masters_of(self, name: str) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `StreamingAdamW.masters_of`."""
        return self._optimizer.masters_of(name)

    @property
    def staging_bytes(self) -> int:
        """Device memory that `update` holds beside weights and gradients."""
        return self._optimizer.staging_bytes

    def close(self) -> None:
        """Drop the engine and the optimizer's state; the process group stays."""
        self._engine.close()
        self._optimizer.close()


def _read(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Scalars as numbers; those of one type and device in one read, as each waits for the device."""
    alike: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, value in metrics.items():
        alike.setdefault((value.dtype, value.device), []).append(name)
    found: dict[str, float] = {}
    for names in alike.values():
        values = torch.stack([metrics[name].detach() for name in names]).tolist()
        found.update(zip(names, map(float, values), strict=True))
    return {name: found[name] for name in metrics}


def shard_weights(hf_model: Any, shard: Shard | None, lora: LoraSettings | None = None) -> ModelWeights:
    """The forward's weights of a module: whole, or a rank's shard; with its adapters where `lora` is given."""
    if shard is None:
        return model_weights(hf_model, lora=lora)
    return model_weights(hf_model, shard.parallel, shard.plan.vocab_start, lora=lora)
