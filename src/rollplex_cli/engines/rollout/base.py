"""What a rollout engine takes and gives. Pure data: importing this file imports no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rollplex_cli.engines.inputs import PromptInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float
    """0.0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    """Decode exactly `max_new_tokens` (benchmarks replay recorded lengths so)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One prompt, several responses. The first response is prefilled alone, its siblings reuse its prefix."""

    group: int
    """Group id, unique within a step."""
    input: PromptInput
    seeds: tuple[int, ...]
    """One seed per response; the tokens of a response depend on weights, prompt, settings and its seed only."""
    settings: SamplingSettings
    max_new_tokens: tuple[int, ...] | None = None
    """Per-response limit; `None` takes the one of `settings`."""
    keep_prefix: bool = False
    """Copy the prompt's keys and values into the result."""
    keep_vision: bool = False
    """Offer the vision tower's output in `take_vision` as soon as the prefill has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One generated response."""

    token_ids: tuple[int, ...]
    """Generated ids, the end token included where it was sampled; never empty unless aborted."""
    logprobs: tuple[float, ...]
    """log p of each token at the sampling temperature (natural log, temperature-scaled, not renormalised)."""
    weight_versions: tuple[int, ...]
    """Version of the weights each token was sampled under."""
    finish_reason: Literal["stop", "length", "abort"]
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """All responses of a group, complete at decode step `decode_step` of this replica."""

    group: int
    responses: tuple[Response, ...]
    decode_step: int
    """Scheduler steps taken since `begin_step` when the last response ended: the logical time of completion."""
    prefix: tuple[tuple[torch.Tensor, torch.Tensor], ...] | None = None
    """Keys (rotated) and values of prompt positions 0..P-2 by layer, each [1, KV heads, P - 1, head_dim], complete on
    the device; None unless asked for, and where the first response ended before they could be copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOutput:
    """The vision tower's output for the prompt of a group, under the weights of now."""

    group: int
    pieces: tuple[torch.Tensor, ...]
    """Of each medium [merged patches, hidden * (1 + DeepStack features)], in the order of the prompt; not to be
    written."""
    ready: torch.cuda.Event | None
    """Behind their computation on the device; None where they are complete."""


class RolloutEngine(Protocol):
    """A generation engine stepped by hand. Every call is made from one thread, the one that built it."""

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; grows by one with each `publish`."""

    @property
    def num_running(self) -> int:
        """Responses under way now."""

    @property
    def capacity_tokens(self) -> int:
        """Prompt plus response tokens that one response may have."""

    def parameters(self) -> dict[str, torch.Tensor]:
        """The engine's own parameter tensors by SGLang name. Writing through them changes the model."""

    def begin_step(self) -> None:
        """Reset the logical clock; the engine must be idle, or paused with groups that go on in the new step."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Queue groups. Raises UsageError for a request that can never run."""

    def step(self) -> list[GroupResult]:
        """One scheduler step (a prefill or a decode); returns groups completed by it, ordered by group id."""

    def take_vision(self) -> list[VisionOutput]:
        """Vision outputs that the steps since the last call have found, of groups that asked for them; each group's
        once a step of training. A group that goes on without a prefill has none."""

    def has_work(self) -> bool:
        """True while any submitted request is unfinished."""

    def abort(self, groups: Sequence[int] | None = None) -> list[GroupResult]:
        """Stop the groups named (all, if None); returns them with the partial responses so far."""

    def pause(self) -> None:
        """Give back the KV of running requests, keeping their tokens and log-probs; `step` resumes them."""

    def drop_caches(self) -> None:
        """Forget every prompt: nothing in the KV pool is read again, so its memory may go until the next `step`."""

    def publish(self) -> None:
        """The weights were rewritten in place: drop every cache computed under the old ones."""

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
