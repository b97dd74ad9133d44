"""Bytes of activations: what autograd keeps of a forward, and what lies beside it at the worst moment.

Every figure is a product of rows and values per row. Values of one row in one decoder layer, `e` bytes each, on a rank
of a training group (h hidden, A query width, K key width, I gate width of the rank):

    kept by autograd     4 h        inputs and outputs of both norms
                       + 2 A + 2 K  rotated queries, keys and values; attention's output
                       + 4 I        gate and up, silu(gate), their product
    gradients in flight    h + 3 I  of the layer's output; of the product, and of gate and up with one temporary

Blocks of the vision tower are alike, with the MLP of their family (`VISION_MLPS`).
They follow `engines/trainer/model`: whoever changes what a layer saves changes them here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.plan.memory.inputs import FLOAT32_BYTES

if TYPE_CHECKING:
    from rollplex_cli.plan.families import VisionMlp
    from rollplex_cli.plan.memory.inputs import MemoryInputs, PrefixActivations


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer or vision block: bytes of a row."""

    entry: int
    """Its input."""
    kept: int
    """What autograd keeps of it, the input included."""
    backward: int
    """Gradients that exist at once in its backward."""
    forward: int
    """What a forward without autograd holds at once."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """An MLP's arrays of its inner width."""

    kept: int
    """By autograd."""
    backward: int
    """Gradients that exist at once."""
    forward: int
    """Without autograd."""
    rollout: int
    """In the rollout engine, which fuses silu with the product."""
    statistics: int
    """Float32 values that the norm before it keeps of a row."""


VISION_MLPS: dict[VisionMlp, Mlp] = {
    # As the decoder layers: gate and up, silu(gate), their product.
    "gated": Mlp(kept=4, backward=3, forward=4, rollout=3, statistics=1),
    # x, sigmoid(1.702 x), their product; LayerNorm keeps mean and deviation.
    "quick_gelu": Mlp(kept=3, backward=3, forward=3, rollout=3, statistics=2),
    # x and GELU(x).
    "gelu": Mlp(kept=2, backward=2, forward=2, rollout=2, statistics=2),
}


def decoder_layer(inputs: MemoryInputs) -> Layer:
    """A layer of the language model on a training rank."""
    shape, tp, size = inputs.shape, inputs.train_tp, inputs.bytes_per_value
    h, queries = shape.hidden_size, shape.num_heads * shape.head_dim // tp
    keys = max(1, shape.num_kv_heads // tp) * shape.head_dim
    gate = -(-shape.intermediate_size // tp)
    # Float32: the statistics of both norms, and one log-sum-exp for each query head.
    scalars = FLOAT32_BYTES * (2 + max(1, shape.num_heads // tp))
    # What the norms of heads read: queries, keys and values as they were projected.
    projected = queries + 2 * keys if shape.family.head_norms else 0
    return Layer(
        entry=h * size,
        kept=(4 * h + 2 * queries + 2 * keys + 4 * gate + projected) * size + scalars,
        backward=(h + 3 * gate) * size,
        forward=(3 * h + 4 * gate) * size,
    )


def vision_block(inputs: MemoryInputs) -> Layer:
    """A block of the vision tower; a row is a patch."""
    shape, tp, size = inputs.shape, inputs.train_tp, inputs.bytes_per_value
    v, inner, mlp = shape.vision_hidden_size, -(-shape.vision_width // tp), VISION_MLPS[shape.family.vision_mlp]
    scalars = FLOAT32_BYTES * (2 * mlp.statistics + max(1, shape.vision_num_heads // tp))
    return Layer(
        entry=v * size,
        # As a decoder layer, with as many key heads as query heads.
        kept=(4 * v + 4 * (v // tp) + mlp.kept * inner) * size + scalars,
        backward=(v + mlp.backward * inner) * size,
        forward=(3 * v + mlp.forward * inner) * size,
    )


def patches(inputs: MemoryInputs) -> int:
    """Patches of a prompt that is all media: merged patches are tokens."""
    return inputs.max_prompt_tokens * inputs.shape.merge_size**2


def vision_features(inputs: MemoryInputs) -> int:
    """What the tower makes of a prompt that is all media: a row of hidden values for each token, and one more for every
    decoder layer that takes features of its own. Whole on every rank."""
    return inputs.max_prompt_tokens * (1 + inputs.shape.num_deepstack) * decoder_layer(inputs).entry


def weight_gradient(inputs: MemoryInputs, elements: int) -> int:
    """Gradient of embedding or head before it is added to the arena: as computed, and cast to float32. Those of linear
    maps are added by their product. Beside adapters there is none, and theirs are too small to count."""
    if inputs.adapter_parameters:
        return 0
    size = inputs.bytes_per_value
    return elements * (size + (FLOAT32_BYTES if size < FLOAT32_BYTES else 0))


def suffix_activations(inputs: MemoryInputs) -> int:
    """Training the packed responses of one group, at the worst moment of its backward."""
    rows, layers, kept, layer = inputs.suffix_rows, inputs.shape.num_layers, inputs.kept_layers, decoder_layer(inputs)
    redone = layers - kept
    # Rotary angles, shared by all layers; input and output of the last norm.
    saved = rows * (2 * FLOAT32_BYTES * inputs.shape.head_dim + 2 * layer.entry) + _masks(inputs)
    saved += rows * (redone * layer.entry + kept * (layer.kept + joined_keys(inputs)))
    at_head = _head(inputs)
    in_kept = rows * layer.backward if kept else 0
    # The kept layers are the last ones: when the first of the others is run again, they are gone.
    in_redone = rows * (layer.kept + joined_keys(inputs) - layer.entry + layer.backward) if redone else 0
    return saved + max(at_head, in_kept, in_redone - rows * kept * (layer.kept + joined_keys(inputs)))


def _head(inputs: MemoryInputs) -> int:
    """Logits of all rows and their gradients, float32: the log-probs' backward holds both, and where the vocabulary is
    whole PyTorch's cross entropy a third array. Then the head's weight gradient beside gradients of the logits in the
    weights' type."""
    rows = inputs.suffix_rows
    columns = -(-inputs.shape.vocab_size // inputs.train_tp)
    arrays = 2 if inputs.train_tp > 1 else 3
    gradient = weight_gradient(inputs, columns * inputs.shape.hidden_size)
    return max(arrays * FLOAT32_BYTES * rows * columns, inputs.bytes_per_value * rows * columns + gradient)


def scored_suffix(inputs: MemoryInputs) -> int:
    """Scoring the packed responses of one group without autograd: a layer, or the head with two float32 arrays."""
    layer, columns = decoder_layer(inputs), -(-inputs.shape.vocab_size // inputs.train_tp)
    head = 2 * layer.entry + 2 * FLOAT32_BYTES * columns
    return inputs.suffix_rows * max(layer.forward + joined_keys(inputs), head) + _masks(inputs)


def stage_inputs(inputs: MemoryInputs) -> int:
    """The input of every stage of one prefix: patches into vision blocks and projector, tokens into layers, and the
    features that stages hand on to the first layers."""
    features = inputs.shape.num_deepstack * inputs.max_prompt_tokens * decoder_layer(inputs).entry
    return _language_inputs(inputs) + _vision_inputs(inputs) + features


def _language_inputs(inputs: MemoryInputs) -> int:
    return inputs.max_prompt_tokens * inputs.shape.num_layers * decoder_layer(inputs).entry


def _vision_inputs(inputs: MemoryInputs) -> int:
    if inputs.freeze_vision:
        return inputs.max_prompt_tokens * decoder_layer(inputs).entry  # the projector's output
    return patches(inputs) * (inputs.shape.vision_depth + 1) * vision_block(inputs).entry


def prefix_forward(inputs: MemoryInputs) -> int:
    """One prefix without autograd: its widest stage, and with `host` the inputs of all stages until they leave."""
    tokens, shape = inputs.max_prompt_tokens, inputs.shape
    first = patches(inputs) * shape.patch_elements * (FLOAT32_BYTES + inputs.bytes_per_value)
    widest = max(
        tokens * decoder_layer(inputs).forward,
        patches(inputs) * vision_block(inputs).forward,
        first + patches(inputs) * vision_block(inputs).entry,
    )
    return widest + (stage_inputs(inputs) if inputs.prefix_activations == "host" else 0)


def kept_prefix(inputs: MemoryInputs) -> int:
    """The whole graph of one prefix (`keep`); the last layer is keys and values only."""
    tokens, shape, layer = inputs.max_prompt_tokens, inputs.shape, decoder_layer(inputs)
    language = tokens * ((shape.num_layers - 1) * layer.kept + 2 * layer.entry)
    vision = 0 if inputs.freeze_vision else patches(inputs) * shape.vision_depth * vision_block(inputs).kept
    return language + vision


def kept_prefixes(inputs: MemoryInputs) -> int:
    """What is held of all prefixes on the device (`keep`, `device`), if every token counts as of a prompt of media."""
    return 0 if inputs.prefix_activations == "host" else held_prefixes(inputs)


def held_prefixes(inputs: MemoryInputs) -> int:
    """The same wherever it lies."""
    one = kept_prefix(inputs) if inputs.prefix_activations == "keep" else stage_inputs(inputs)
    return -(-one * inputs.kept_prefix_tokens // inputs.max_prompt_tokens)


def prefix_backward(inputs: MemoryInputs) -> int:
    """One prefix going backward, beyond what is kept from its forward: stage by stage, the stages' inputs on the device
    where they were not kept."""
    kept = _backward(inputs, inputs.prefix_activations)
    all_kept = inputs.kept_prefix_tokens == inputs.held_prompt_tokens
    return kept if all_kept else max(kept, _backward(inputs, "recompute"))


def _backward(inputs: MemoryInputs, mode: PrefixActivations) -> int:
    shape, tokens, layer, block = inputs.shape, inputs.max_prompt_tokens, decoder_layer(inputs), vision_block(inputs)
    words = weight_gradient(inputs, -(-shape.vocab_size // inputs.train_tp) * shape.hidden_size)
    if mode == "keep":
        return max(tokens * layer.backward, tokens * layer.entry + words)
    redone = mode == "recompute"
    language = _language_inputs(inputs) if redone else 0
    vision = _vision_inputs(inputs) if redone else 0
    # Its boundary, which is counted as held, goes as the backward begins.
    boundary = tokens * shape.kv_bytes_per_token(inputs.train_tp, inputs.bytes_per_value)
    in_layer = language + vision + tokens * (layer.kept - layer.entry * redone + layer.backward) - boundary
    in_embedding = vision + 2 * tokens * layer.entry + words
    if inputs.freeze_vision:
        return max(in_layer, in_embedding)
    in_block = vision + patches(inputs) * (block.kept - block.entry * redone + block.backward)
    return max(in_layer, in_embedding, in_block)


def joined_keys(inputs: MemoryInputs) -> int:
    """Bytes of a row in a layer for prefix and own keys and values laid end to end: `masked` attention only."""
    if inputs.on_gpu and inputs.bytes_per_value == 2:
        return 0
    keys = max(1, inputs.shape.num_kv_heads // inputs.train_tp) * inputs.shape.head_dim
    joined = 2 * keys * (inputs.max_prompt_tokens + inputs.suffix_rows) * inputs.bytes_per_value
    return -(-joined // inputs.suffix_rows)


def _masks(inputs: MemoryInputs) -> int:
    """The additive mask of `masked` attention: query heads of a key head x rows x (prefix and rows)."""
    if inputs.on_gpu and inputs.bytes_per_value == 2:
        return 0
    per_key = inputs.shape.num_heads // inputs.shape.num_kv_heads
    columns = inputs.max_prompt_tokens + inputs.suffix_rows
    return per_key * inputs.suffix_rows * columns * inputs.bytes_per_value


def rollout_workspace(inputs: MemoryInputs) -> int:
    """What the rollout computes in: a chunk of prefill, a prompt's vision tower, or the sampler's logits."""
    shape, tp, size = inputs.shape, inputs.rollout_tp, inputs.bytes_per_value
    gate, inner = -(-shape.intermediate_size // tp), -(-shape.vision_width // tp)
    prefill = inputs.chunked_prefill_tokens * (3 * shape.hidden_size + 3 * gate) * size
    in_mlp = VISION_MLPS[shape.family.vision_mlp].rollout * inner
    vision = patches(inputs) * (4 * shape.vision_hidden_size + in_mlp) * size
    # Logits of every running request, divided by the temperature, and their probabilities, float32.
    sampler = 3 * FLOAT32_BYTES * inputs.max_running_requests * shape.vocab_size
    return max(prefill, vision, sampler)
