"""The shared prefix and the packed suffixes of a prompt group, and the exact gradient across their boundary.

The prefix is a chain of stages (patch embedding, vision blocks, projector with embedding, decoder layers). Beside the
hidden states a stage hands on the features that vision blocks have set aside for decoder layers (DeepStack). Only keys
and values leave the chain; the last decoder layer computes nothing else. The suffix, which has no media, reads them as
leaves; its backward leaves gradients there, and `prefix_backward` sends them on through the chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from rollplex_cli.engines.trainer.model import language, vision
from rollplex_cli.engines.trainer.model.attention import causal, causal_runs
from rollplex_cli.engines.trainer.model.language import KeyValue
from rollplex_cli.engines.trainer.model.suffix_attention import suffix_attention
from rollplex_cli.engines.trainer.prefix import PrefixInput, PrefixPack
from rollplex_cli.engines.trainer.stages import (
    backward,
    layout_of,
    run_stages,
    stage_inputs,
    to_host,
    vision_stages,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.data.types import Media
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.trainer.model.attention import Attention
    from rollplex_cli.engines.trainer.model.parameters import ModelWeights
    from rollplex_cli.engines.trainer.model.primitives import Angles
    from rollplex_cli.engines.trainer.model.vision import Encoded
    from rollplex_cli.engines.trainer.prefix import PrefixMode, PrefixState
    from rollplex_cli.engines.trainer.stages import Carry, Stage, Yield
    from rollplex_cli.rl.packing import PackedSuffix


class SplitModel:
    """Prefix, suffix and full forward of one set of weights. Stateless; callers choose grad mode through `mode`.

    Args:
        weights: the parameters.
        temperature: logits are divided by it, as at sampling.
        banned_token_ids: columns that the rollout can never sample (media placeholders).
        freeze_vision: the tower runs as one stage without a graph; no backward reaches it (nor a frozen embedding).
        suffix_kept_layers: layers, from the last, whose suffix activations are kept; None keeps all. The others keep
            their input and run again in the backward. Bit-equal.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        temperature: float = 1.0,
        banned_token_ids: Sequence[int] = (),
        freeze_vision: bool = False,
        suffix_kept_layers: int | None = None,
    ) -> None:
        self._freeze_vision = freeze_vision
        layers = len(weights.layers)
        # The last ones are kept: they are gone when the first of the others runs again.
        self._redone_layers = 0 if suffix_kept_layers is None else max(0, layers - suffix_kept_layers)
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, not {temperature}")
        if weights.device.type == "cuda":
            # It builds a plan for each length that it has not seen, and every prompt has one of its own.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.weights = weights
        self._temperature = temperature
        banned = weights.vocab.of(sorted(set(banned_token_ids)))
        self._banned = torch.tensor(banned, dtype=torch.int64, device=weights.device) if banned else None

    def encode(self, prompts: Sequence[PromptInput]) -> Encoded | None:
        """What the vision tower makes of the media of prompts, end to end, in one pass and without a graph; None where
        there are none."""
        with torch.no_grad():
            return self._encode([medium for prompt in prompts for medium in prompt.prompt.media])

    def prefix(self, prompt: PromptInput, mode: PrefixMode, media: Encoded | None = None) -> PrefixState:
        """Run prompt positions 0..P-2 and keep what `mode` needs for the backward.

        With `media` the tower does not run here: it has this output already. A frozen one does not run in the backward
        either; one that is trained does, which only `recompute` can.

        A prompt of one token has an empty boundary. Raises ValueError if the last prompt token is a media placeholder,
        or `media` does not fit the prompt or the mode.
        """
        (state,) = self.prefixes([prompt], mode, media)
        return state

    def prefixes(
        self, prompts: Sequence[PromptInput], mode: PrefixMode, media: Encoded | None = None
    ) -> list[PrefixState]:
        """The same for several prompts of two tokens or more in one pass, whose backward is one pass too: when the last
        of them is consumed or dropped. `media` is of all prompts, end to end.

        On a GPU the prefix of a short prompt waits for the host, which launches as much for one prompt as for many.
        """
        given = PrefixInput.of(prompts)
        if min(given.lengths) < 1:
            if len(prompts) > 1:
                raise ValueError("a prompt of one token has no prefix: it runs alone")
            return PrefixPack(given, mode).states(self._empty_boundary())
        if media is not None:
            self._check_media(given, mode, media)
        stages = self._stages(given, media)
        if mode == "keep":
            with torch.enable_grad():
                outputs = run_stages(stages)
            stream = torch.cuda.current_stream() if self.weights.device.type == "cuda" else None
            return PrefixPack(given, mode, outputs, stream=stream).states(outputs)
        saved: list[Carry] | None = [] if mode in ("device", "host") else None
        with torch.no_grad():
            outputs = run_stages(stages, saved)
        kept = to_host(saved or []) if mode == "host" else saved or []
        again = media if self._freeze_vision and mode == "recompute" else None
        return PrefixPack(given, mode, stage_inputs=kept, media=again).states(outputs)

    def adopt_prefix(
        self,
        prompt: PromptInput,
        key_values: Sequence[tuple[torch.Tensor, torch.Tensor]],
        media: Encoded | None = None,
    ) -> PrefixState:
        """A boundary of keys (rotated) and values computed elsewhere, by layer, each [1, KV heads, P - 1, head_dim].

        Its backward computes the prefix anew, so gradients are those at the prefix of these weights; from `media` on
        where the tower is frozen.
        """
        for pair in key_values:
            for tensor in pair:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())
        pack = PrefixPack(PrefixInput.of([prompt]), "recompute", media=media if self._freeze_vision else None)
        (state,) = pack.states(tuple(KeyValue(*pair) for pair in key_values))
        return state

    def suffix(self, state: PrefixState, packed: PackedSuffix) -> torch.Tensor:
        """Log-probs [S] of the packed responses behind the prefix, in max(float32, dtype); differentiable where grad
        mode is on and the prefix is not of mode `none`."""
        if state.consumed:
            raise ValueError("the prefix of this group was already consumed")
        weights, sizes = self.weights, self.weights.text_sizes
        device = weights.device
        # Copies to a device wait for what is launched there: all of them before the layers.
        ids, targets = packed.token_ids.to(device), packed.targets.to(device)
        angles = language.rope(sizes, packed.position_ids.to(device).unsqueeze(1), weights.dtype)
        queries_per_kv, segments = sizes.num_heads // sizes.num_kv_heads, packed.segments.to(device)
        behind = suffix_attention(packed.lengths, segments, state.num_tokens, queries_per_kv, weights.dtype)
        hidden = language.embed(weights, ids, None, ()).unsqueeze(0)

        def run(entry: torch.Tensor, index: int) -> torch.Tensor:
            layer, prefix = weights.layers[index], state.boundary[index]
            return language.decoder_layer(layer, sizes, entry, angles, causal, prefix=prefix, behind=behind)[0]

        for index in range(len(weights.layers)):
            if index < self._redone_layers and torch.is_grad_enabled():
                hidden = checkpoint(run, hidden, index, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = run(hidden, index)
        return self._logprobs(hidden[0], targets)

    def prefix_backward(self, state: PrefixState) -> None:
        """Send the gradients collected at the boundary through the prefix into the parameters' `.grad`: at once, or
        with those of the last prompt that shares the pass.

        Consumes `state`. Raises ValueError if it has no backward, was consumed, or no suffix backward ran before.
        """
        gradients = state.take_gradients()
        if state.pack.end(state.place, gradients or None):
            self.run_backward(state.pack)

    def release(self, state: PrefixState) -> None:
        """A boundary goes without a backward; that of the others that share its pass may be due then."""
        if state.release():
            self.run_backward(state.pack)

    def run_backward(self, pack: PrefixPack) -> None:
        """The backward of a pack whose prompts have handed in what they have."""
        if pack.mode == "keep":
            outputs = [t for pair in pack.outputs for t in pair]
            backward(list(zip(outputs, pack.take_gradients(), strict=True)))
            if pack.stream is not None:
                # Autograd runs a backward where the forward ran, and orders what comes after behind the gradients that
                # it was given; those that products add themselves it does not know of.
                torch.cuda.current_stream().wait_stream(pack.stream)
        else:
            self._staged_backward(pack)
        pack.release()

    def full_logprobs(self, prompt: PromptInput, response: Sequence[int]) -> torch.Tensor:
        """Log-probs [n] of one response by a plain forward over prompt and response: the split's reference."""
        weights, sizes = self.weights, self.weights.text_sizes
        device, first = weights.device, prompt.num_tokens
        ids = torch.tensor([*prompt.prompt.token_ids, *response[:-1]], device=device)
        tail = torch.arange(first, first + len(response) - 1) + prompt.rope_delta
        positions = torch.cat([prompt.position_ids, tail.expand(3, -1)], dim=1).to(device)
        angles = language.rope(sizes, positions.unsqueeze(1), weights.dtype)
        hidden = self._decode(ids, (1, len(ids)), angles, self._encode(prompt.prompt.media), prompt.media_spans)
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
        ids = torch.tensor(tokens, device=weights.device)
        media = [medium for prompt in prompts for medium in prompt.prompt.media]
        hidden = self._decode(ids, (len(prompts), longest), angles, self._encode(media), spans)
        picked = hidden.flatten(0, 1)[torch.tensor(reads, device=weights.device)]
        wanted = torch.tensor([token for target in targets for token in target], device=weights.device)
        return -language.token_logprobs(weights, picked, wanted).mean()

    def _decode(
        self,
        ids: torch.Tensor,
        shape: tuple[int, int],
        angles: Angles,
        media: Encoded | None,
        spans: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        """The whole decoder over flat `ids`: [*shape, hidden]."""
        weights, features = self.weights, media.deepstack if media else ()
        hidden = language.embed(weights, ids, media.rows if media else None, spans).view(*shape, -1)
        rows = language.span_rows(spans, ids.device) if features else None
        for index, layer in enumerate(weights.layers):
            hidden, _ = language.decoder_layer(layer, weights.text_sizes, hidden, angles, causal)
            if rows is not None and index < len(features):
                hidden = language.add_rows(hidden, rows, features[index])
        return hidden

    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return language.token_logprobs(
            self.weights, hidden, targets, temperature=self._temperature, banned=self._banned
        )

    def _encode(self, media: Sequence[Media]) -> Encoded | None:
        if not media:
            return None
        patches = torch.cat([m.patches for m in media]) if len(media) > 1 else media[0].patches
        return vision.encode(self.weights, patches.to(self.weights.device), tuple(m.grid_thw for m in media))

    def _empty_boundary(self) -> tuple[KeyValue, ...]:
        weights, sizes = self.weights, self.weights.text_sizes
        nothing = torch.empty((1, sizes.num_kv_heads, 0, sizes.head_dim), dtype=weights.dtype, device=weights.device)
        return tuple(KeyValue(nothing, nothing) for _ in weights.layers)

    def _check_media(self, given: PrefixInput, mode: PrefixMode, media: Encoded) -> None:
        if mode in ("keep", "device", "host") and not self._freeze_vision:
            raise ValueError(f"the backward of mode `{mode}` needs the tower's own forward, which is trained")
        wanted = sum(last - first + 1 for first, last in given.media_spans)
        if any(len(rows) != wanted for rows in (media.rows, *media.deepstack)):
            raise ValueError(f"the prompt has {wanted} placeholders, not: {len(media.rows)}")

    def _stages(self, given: PrefixInput, features: Encoded | None = None) -> list[Stage]:
        """The prefix as functions from carry to carry and boundary; `features` is the tower's output, if it ran
        before."""
        weights, sizes = self.weights, self.weights.text_sizes
        device = weights.device
        ids = torch.tensor(given.token_ids, device=device)
        angles = language.rope(sizes, given.position_ids.to(device).unsqueeze(1), weights.dtype)
        whole = bool(given.media) and (self._freeze_vision or features is not None)
        stages = [self._whole_vision(given, features)] if whole else vision_stages(weights, given.media)

        def embed(carry: Carry) -> Yield:
            media, *features = carry or (None,)
            return (language.embed(weights, ids, media, given.media_spans).unsqueeze(0), *features), None

        def merge_and_embed(carry: Carry) -> Yield:
            hidden, *features = carry
            return embed((vision.merge_patches(weights, hidden, layout_of(weights, given.media)), *features))

        stages.append(merge_and_embed if stages and not whole else embed)
        last = len(weights.layers) - 1
        rows = language.span_rows(given.media_spans, device) if given.media_spans else None
        attention = causal_runs(given.lengths, device, weights.dtype)
        stages += [self._layer_stage(index, angles, rows, attention, index == last) for index in range(last + 1)]
        return stages

    def _stages_without_backward(self, given: PrefixInput) -> int:
        """Stages at the start that no gradient needs to reach: the frozen tower, and the embedding behind it."""
        words = not self.weights.embed.requires_grad
        return bool(given.media) + words if self._freeze_vision else 0

    def _whole_vision(self, given: PrefixInput, features: Encoded | None) -> Stage:
        """The tower as one stage without a graph."""

        def run(_: Carry) -> Yield:
            media = features
            if media is None:
                with torch.no_grad():
                    media = self._encode(given.media)
            assert media is not None
            if media.rows.is_cuda and features is not None:
                # Another stream's memory perhaps, and tasks of one prompt run on several.
                for tensor in (media.rows, *media.deepstack):
                    tensor.record_stream(torch.cuda.current_stream())
            return (media.rows, *media.deepstack), None

        return run

    def _layer_stage(
        self, index: int, angles: Angles, rows: torch.Tensor | None, attention: Attention, last: bool
    ) -> Stage:
        layer, sizes = self.weights.layers[index], self.weights.text_sizes

        def run(carry: Carry) -> Yield:
            hidden, *features = carry
            if last:
                own, carry = language.key_value_only(layer, sizes, hidden, angles), ()
            else:
                out, own = language.decoder_layer(layer, sizes, hidden, angles, attention)
                if features:
                    assert rows is not None
                    out = language.add_rows(out, rows, features[0])
                carry = (out, *features[1:])
            return carry, KeyValue(own.keys.contiguous(), own.values.contiguous())

        return run

    def _staged_backward(self, pack: PrefixPack) -> None:
        """Backward stage by stage from the last one, so that one stage's activations exist at a time."""
        stages, grads = self._stages(pack.input, pack.media), pack.take_gradients()
        inputs = stage_inputs(stages) if pack.mode == "recompute" else pack.stage_inputs
        carry_grads: tuple[torch.Tensor | None, ...] = ()
        without_backward = self._stages_without_backward(pack.input)
        while len(stages) > without_backward:
            stage, saved = stages.pop(), inputs.pop()
            # Detached, because what a stage only hands on is one tensor in the inputs of several.
            entry = tuple(tensor.to(self.weights.device).detach() for tensor in saved)
            if len(stages) > without_backward:
                for tensor in entry:
                    tensor.requires_grad_()
            with torch.enable_grad():
                carry, own = stage(entry)
            pairs = list(zip(carry, carry_grads, strict=True)) if carry_grads else []
            if own is not None:
                pairs += zip(own, grads[-2:], strict=True)
                del grads[-2:]
            backward([(root, grad) for root, grad in pairs if grad is not None])
            carry_grads = tuple(tensor.grad for tensor in entry)
