"""The shared prefix and the packed suffixes of a prompt group, and the exact gradient across their boundary.

The prefix is a chain of stages (patch embedding, vision blocks, projector with embedding, decoder layers). Only
keys and values leave it; the last decoder layer computes nothing else. The suffix reads them as leaves; its backward
leaves gradients there, and `prefix_backward` sends them on through the chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch.utils.checkpoint import checkpoint

from rollplex_cli.engines.trainer.model import language, vision
from rollplex_cli.engines.trainer.model.attention import ATTENTION
from rollplex_cli.engines.trainer.model.language import KeyValue
from rollplex_cli.engines.trainer.model.suffix_attention import suffix_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.trainer.model.attention import Attention
    from rollplex_cli.engines.trainer.model.parameters import ModelWeights
    from rollplex_cli.engines.trainer.model.primitives import Angles
    from rollplex_cli.rl.packing import PackedSuffix

PrefixMode = Literal["keep", "host", "recompute", "none"]
"""What prefix backward uses: the graph, stage inputs kept on the host, a second forward; `none` has no backward."""

Stage = tuple[torch.Tensor | None, KeyValue | None]
"""What a stage of the prefix yields: hidden states for the next one, boundary keys and values."""


@dataclass(slots=True)
class PrefixState:
    """The boundary of one prompt group.

    `boundary[layer]` holds leaves [1, KV heads, P - 1, head_dim] that collect gradients. Consumed by one
    `prefix_backward`; suffixes may read it any number of times before.
    """

    input: PromptInput
    mode: PrefixMode
    boundary: tuple[KeyValue, ...]
    outputs: tuple[KeyValue, ...] = ()
    """The same values attached to the graph (`keep`)."""
    stage_inputs: list[torch.Tensor | None] = field(default_factory=list)
    """Input of each stage on the host (`host`)."""
    consumed: bool = False

    @property
    def num_tokens(self) -> int:
        """Prefix length, P - 1; 0 for a prompt of one token."""
        return self.input.num_tokens - 1

    @property
    def boundary_bytes(self) -> int:
        """Size of the boundary keys and values."""
        return sum(t.numel() * t.element_size() for pair in self.boundary for t in pair)

    def release(self) -> None:
        """Drop every tensor. The state cannot be used afterwards."""
        self.boundary, self.outputs, self.stage_inputs, self.consumed = (), (), [], True


class SplitModel:
    """Prefix, suffix and full forward of one set of weights. Stateless; callers choose grad mode through `mode`.

    Args:
        weights: the parameters.
        temperature: logits are divided by it, as at sampling.
        banned_token_ids: columns that the rollout can never sample (media placeholders).
        attention: a key of `ATTENTION`.
        freeze_vision: the vision tower runs as one stage without a graph; no backward reaches it.
        suffix_kept_layers: layers, from the last, whose suffix activations are kept; None keeps all. The others keep
            their input and run again in the backward. Bit-equal.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        temperature: float = 1.0,
        banned_token_ids: Sequence[int] = (),
        attention: str = "sdpa",
        freeze_vision: bool = False,
        suffix_kept_layers: int | None = None,
    ) -> None:
        self._freeze_vision = freeze_vision
        layers = len(weights.layers)
        # The last ones are kept: they are gone when the first of the others runs again.
        self._redone_layers = 0 if suffix_kept_layers is None else max(0, layers - suffix_kept_layers)
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        self.weights = weights
        self._temperature = temperature
        banned = weights.vocab.of(sorted(set(banned_token_ids)))
        self._banned = torch.tensor(banned, dtype=torch.int64, device=weights.device) if banned else None
        self._attention: Attention = ATTENTION[attention]

    def prefix(self, prompt: PromptInput, mode: PrefixMode) -> PrefixState:
        """Run prompt positions 0..P-2 and keep what `mode` needs for the backward.

        A prompt of one token has an empty boundary. Raises ValueError if the last prompt token is a media placeholder.
        """
        if prompt.num_tokens < 2:
            return PrefixState(prompt, mode, self._empty_boundary(mode != "none"))
        stages = self._stages(prompt)
        if mode == "keep":
            with torch.enable_grad():
                outputs = _run(stages)
            return PrefixState(prompt, mode, _leaves(outputs), outputs)
        saved: list[torch.Tensor | None] | None = [] if mode == "host" else None
        with torch.no_grad():
            outputs = _run(stages, saved)
        if mode == "none":
            return PrefixState(prompt, mode, outputs)
        return PrefixState(prompt, mode, _leaves(outputs), stage_inputs=[_to_host(t) for t in saved or []])

    def adopt_prefix(self, prompt: PromptInput, key_values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> PrefixState:
        """A boundary of keys (rotated) and values computed elsewhere, by layer, each [1, KV heads, P - 1, head_dim].

        Its backward computes the prefix anew, so gradients are those at the prefix of these weights.
        """
        for pair in key_values:
            for tensor in pair:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())
        return PrefixState(prompt, "recompute", _leaves(tuple(KeyValue(*pair) for pair in key_values)))

    def suffix(self, state: PrefixState, packed: PackedSuffix) -> torch.Tensor:
        """Log-probs [S] of the packed responses behind the prefix, in max(float32, dtype); differentiable where grad
        mode is on and the prefix is not of mode `none`."""
        if state.consumed:
            raise ValueError("the prefix of this group was already consumed")
        weights, sizes = self.weights, self.weights.text_sizes
        device = weights.device
        ids = packed.token_ids.to(device)
        angles = language.rope(sizes, packed.position_ids.to(device).unsqueeze(1), weights.dtype)
        queries_per_kv, segments = sizes.num_heads // sizes.num_kv_heads, packed.segments.to(device)
        behind = suffix_attention(packed.lengths, segments, state.num_tokens, queries_per_kv, weights.dtype)
        hidden = language.embed(weights, ids, None, ()).unsqueeze(0)

        def run(entry: torch.Tensor, index: int) -> torch.Tensor:
            layer, prefix = weights.layers[index], state.boundary[index]
            return language.decoder_layer(layer, sizes, entry, angles, self._attention, prefix=prefix, behind=behind)[0]

        for index in range(len(weights.layers)):
            if index < self._redone_layers and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, index, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden, index)
        return self._logprobs(hidden[0], packed.targets.to(device))

    def prefix_backward(self, state: PrefixState) -> None:
        """Send the gradients collected at the boundary through the prefix into the parameters' `.grad`.

        Consumes `state`. Raises ValueError if it has no backward, was consumed, or no suffix backward ran before.
        """
        if state.mode == "none" or state.consumed:
            raise ValueError("this prefix has no backward" if state.mode == "none" else "prefix backward ran twice")
        if state.num_tokens == 0:
            state.release()
            return
        grads = [t.grad for pair in state.boundary for t in pair]
        if any(g is None for g in grads):
            raise ValueError("no suffix backward has reached the boundary of this group")
        if state.mode == "keep":
            torch.autograd.backward([t for pair in state.outputs for t in pair], grads)
        else:
            self._staged_backward(state, [g for g in grads if g is not None])
        state.release()

    def full_logprobs(self, prompt: PromptInput, response: Sequence[int]) -> torch.Tensor:
        """Log-probs [n] of one response by a plain forward over prompt and response: the split's reference."""
        weights, sizes = self.weights, self.weights.text_sizes
        device, first = weights.device, prompt.num_tokens
        ids = torch.tensor([*prompt.prompt.token_ids, *response[:-1]], device=device)
        tail = torch.arange(first, first + len(response) - 1) + prompt.rope_delta
        positions = torch.cat([prompt.position_ids, tail.expand(3, -1)], dim=1).to(device)
        angles = language.rope(sizes, positions.unsqueeze(1), weights.dtype)
        hidden = language.embed(weights, ids, self._encode([prompt]), prompt.media_spans).unsqueeze(0)
        for layer in weights.layers:
            hidden, _ = language.decoder_layer(layer, sizes, hidden, angles, self._attention)
        return self._logprobs(hidden[0, first - 1 :], torch.tensor(list(response), device=device))

    def supervised_loss(self, prompts: Sequence[PromptInput], targets: Sequence[Sequence[int]]) -> torch.Tensor:
        """Mean negative log-likelihood over all target tokens of a batch, a scalar (temperature 1, nothing banned).

        Rows are padded on the right to the longest: under a causal mask padding changes nothing.
        """
        if len(prompts) != len(targets) or not all(targets):
            raise ValueError("every prompt needs a target of at least one token")
        weights, sizes = self.weights, self.weights.text_sizes
        longest = max(p.num_tokens + len(t) - 1 for p, t in zip(prompts, targets, strict=True))
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        reads: list[int] = []
        positions = []
        for index, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
            base, row = index * longest, [*prompt.prompt.token_ids, *target[:-1]]
            tokens += row + [0] * (longest - len(row))
            spans += [(base + first, base + last) for first, last in prompt.media_spans]
            reads += range(base + prompt.num_tokens - 1, base + len(row))
            tail = torch.arange(prompt.num_tokens, longest) + prompt.rope_delta
            positions.append(torch.cat([prompt.position_ids, tail.expand(3, -1)], dim=1))
        angles = language.rope(sizes, torch.stack(positions, dim=1).to(weights.device), weights.dtype)
        flat = language.embed(weights, torch.tensor(tokens, device=weights.device), self._encode(prompts), spans)
        hidden = flat.view(len(prompts), longest, -1)
        for layer in weights.layers:
            hidden, _ = language.decoder_layer(layer, sizes, hidden, angles, self._attention)
        picked = hidden.flatten(0, 1)[torch.tensor(reads, device=weights.device)]
        wanted = torch.tensor([token for target in targets for token in target], device=weights.device)
        return -language.token_logprobs(weights, picked, wanted).mean()

    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return language.token_logprobs(
            self.weights, hidden, targets, temperature=self._temperature, banned=self._banned
        )

    def _encode(self, prompts: Sequence[PromptInput]) -> torch.Tensor | None:
        media = [m for p in prompts for m in p.prompt.media]
        if not media:
            return None
        patches = torch.cat([m.patches for m in media]) if len(media) > 1 else media[0].patches
        return vision.encode(self.weights, patches.to(self.weights.device), tuple(m.grid_thw for m in media))

    def _empty_boundary(self, requires_grad: bool) -> tuple[KeyValue, ...]:
        weights, sizes = self.weights, self.weights.text_sizes
        shape = (1, sizes.num_kv_heads, 0, sizes.head_dim)

        def leaf() -> torch.Tensor:
            return torch.empty(shape, dtype=weights.dtype, device=weights.device, requires_grad=requires_grad)

        return tuple(KeyValue(leaf(), leaf()) for _ in weights.layers)

    def _stages(self, prompt: PromptInput) -> list[Callable[[torch.Tensor | None], Stage]]:
        """The prefix as functions from hidden states to hidden states and boundary; the first one takes None."""
        weights, sizes = self.weights, self.weights.text_sizes
        device, end = weights.device, prompt.num_tokens - 1
        if any(last >= end for _, last in prompt.media_spans):
            raise ValueError("the last prompt token must not be a media placeholder")
        ids = torch.tensor(prompt.prompt.token_ids[:end], device=device)
        angles = language.rope(sizes, prompt.position_ids[:, :end].to(device).unsqueeze(1), weights.dtype)
        frozen = self._freeze_vision and bool(prompt.prompt.media)
        stages = [self._frozen_vision(prompt)] if frozen else _vision_stages(weights, prompt)

        def embed(media: torch.Tensor | None) -> Stage:
            return language.embed(weights, ids, media, prompt.media_spans).unsqueeze(0), None

        def merge_and_embed(hidden: torch.Tensor | None) -> Stage:
            assert hidden is not None
            return embed(vision.merge_patches(weights, hidden, _layout(weights, prompt)))

        stages.append(merge_and_embed if stages and not frozen else embed)
        last = len(weights.layers) - 1
        stages += [self._layer_stage(index, angles, index == last) for index in range(last + 1)]
        return stages

    def _frozen_vision(self, prompt: PromptInput) -> Callable[[torch.Tensor | None], Stage]:
        def run(_: torch.Tensor | None) -> Stage:
            with torch.no_grad():
                return self._encode([prompt]), None

        return run

    def _layer_stage(self, index: int, angles: Angles, last: bool) -> Callable[[torch.Tensor | None], Stage]:
        layer, sizes = self.weights.layers[index], self.weights.text_sizes

        def run(hidden: torch.Tensor | None) -> Stage:
            assert hidden is not None
            if last:
                own, out = language.key_value_only(layer, sizes, hidden, angles), None
            else:
                out, own = language.decoder_layer(layer, sizes, hidden, angles, self._attention)
            return out, KeyValue(own.keys.contiguous(), own.values.contiguous())

        return run

    def _staged_backward(self, state: PrefixState, grads: list[torch.Tensor]) -> None:
        """Backward stage by stage from the last one, so that one stage's activations exist at a time."""
        stages = self._stages(state.input)
        inputs = state.stage_inputs
        if state.mode == "recompute":
            with torch.no_grad():
                _run(stages[:-1], inputs := [])
                hidden_last = stages[-2](inputs[-1])[0] if len(stages) > 1 else None
            inputs.append(hidden_last)
        hidden_grad: torch.Tensor | None = None
        without_backward = 1 if self._freeze_vision and state.input.prompt.media else 0
        while len(stages) > without_backward:
            stage, saved = stages.pop(), inputs.pop()
            entry = None if saved is None else saved.to(self.weights.device).requires_grad_()
            with torch.enable_grad():
                hidden, own = stage(entry)
            roots: list[torch.Tensor] = []
            root_grads: list[torch.Tensor] = []
            if hidden is not None and hidden_grad is not None:
                roots.append(hidden)
                root_grads.append(hidden_grad)
            if own is not None:
                roots += own
                root_grads += grads[-2:]
                del grads[-2:]
            torch.autograd.backward(roots, root_grads)
            hidden_grad = None if entry is None else entry.grad


def _layout(weights: ModelWeights, prompt: PromptInput) -> vision.VisionLayout:
    grids = tuple(m.grid_thw for m in prompt.prompt.media)
    return vision.vision_layout(grids, weights.vision_sizes, weights.dtype, weights.device)


def _vision_stages(weights: ModelWeights, prompt: PromptInput) -> list[Callable[[torch.Tensor | None], Stage]]:
    media = prompt.prompt.media
    if not media:
        return []
    layout = _layout(weights, prompt)

    def patch(_: torch.Tensor | None) -> Stage:
        patches = torch.cat([m.patches for m in media]) if len(media) > 1 else media[0].patches
        return vision.patch_embed(weights, patches.to(weights.device), layout), None

    def block(index: int) -> Callable[[torch.Tensor | None], Stage]:
        def run(hidden: torch.Tensor | None) -> Stage:
            assert hidden is not None
            return vision.vision_block(weights, index, hidden, layout), None

        return run

    return [patch, *(block(i) for i in range(len(weights.vision.blocks)))]


def _run(
    stages: Sequence[Callable[[torch.Tensor | None], Stage]], saved: list[torch.Tensor | None] | None = None
) -> tuple[KeyValue, ...]:
    """Chain the stages; `saved` receives the input of each."""
    hidden: torch.Tensor | None = None
    boundary = []
    for stage in stages:
        if saved is not None:
            saved.append(hidden)
        hidden, own = stage(hidden)
        if own is not None:
            boundary.append(own)
    return tuple(boundary)


def _leaves(outputs: tuple[KeyValue, ...]) -> tuple[KeyValue, ...]:
    return tuple(KeyValue(*(t.detach().requires_grad_() for t in pair)) for pair in outputs)


def _to_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to("cpu")
