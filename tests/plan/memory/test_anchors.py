"""Qwen2.5-VL-32B, train TP 8, rollout TP 4, 32 prompts x 8 responses, 8192 + 2048 tokens, product by product."""

from __future__ import annotations

import pytest

from rollplex_cli.core.units import GIB
from rollplex_cli.plan.build import build_plan
from rollplex_cli.plan.memory import Ablation, MemoryLedger, ablation_costs
from rollplex_cli.profile.load import load_profile

CARD_BYTES = 80e9
PAPER_NAIVE_BYTES = 165 * GIB

# Of 64 layers, hidden size 5120, 40 query and 8 key/value heads of 128, gate width 27648, vocabulary 152064:
LANGUAGE_ROWS = (
    2 * 152064 * 5120  # embedding and head
    + 64 * (5120 * 5120 + 5120)  # queries
    + 64 * 2 * (5120 * 1024 + 1024)  # keys and values
    + 64 * 2 * 5120 * 27648  # gate and up
)
LANGUAGE_COLUMNS = 64 * (5120 * 5120 + 5120 * 27648)  # output, down
LANGUAGE_WHOLE = 64 * 2 * 5120 + 5120  # norms
# Of 32 blocks of width 1280 with MLPs of 3456, and a projector 5120 -> 5120 -> 5120:
VISION_ROWS = 32 * 3 * (1280 * 1280 + 1280) + 32 * 2 * (1280 * 3456 + 3456) + 5120 * 5120 + 5120
VISION_COLUMNS = 32 * (1280 * 1280 + 1280 * 3456) + 5120 * 5120
VISION_WHOLE = 3 * 2 * 14 * 14 * 1280 + 32 * 4 * 1280 + 1280 + 5120
ROWS, COLUMNS = LANGUAGE_ROWS + VISION_ROWS, LANGUAGE_COLUMNS + VISION_COLUMNS
WHOLE = LANGUAGE_WHOLE + VISION_WHOLE

OWN = ROWS // 8 + COLUMNS // 8 + WHOLE
"""Parameters of a training shard."""
ROLLOUT = ROWS // 4 + COLUMNS // 4 + WHOLE
"""Of a rollout shard."""
RESPONSE_ROWS = 8 * 2048
LAYER = 2 * (4 * 5120 + 2 * 5120 // 8 + 2 * 128 + 4 * 27648 // 8) + 4 * (2 + 40 // 8)
"""Bytes of a row in a layer that autograd keeps: norms, queries and output, one key and one value head, gated MLP; and
float32 statistics."""
KEPT, REDONE = 28, 64 - 28


@pytest.fixture(scope="module")
def ledger() -> MemoryLedger:
    plan = build_plan(load_profile("qwen25vl32b"))
    place, inputs = plan.topology, plan.memory_inputs
    assert (place.train_tp, place.rollout_tp, place.data_parallel) == (8, 4, 4)
    assert (plan.tasks.prompts_per_step, inputs.group_size) == (32, 8)
    assert (inputs.max_prompt_tokens, inputs.max_new_tokens) == (8192, 2048)
    return plan.memory


def at(ledger: MemoryLedger, name: str) -> dict[str, int]:
    return next(moment.objects for moment in ledger.moments if moment.name == name)


def test_parameters_by_hand() -> None:
    assert ROWS + COLUMNS + WHOLE == 33_452_718_336


def test_weights(ledger: MemoryLedger) -> None:
    decode, suffix = at(ledger, "decode, prefixes"), at(ledger, "actor suffix")
    assert decode["snapshot"] == 2 * ROLLOUT
    # Row ranges of the other rank of the exchange group are unmapped, less a page of 2 MiB each. Columns stay, and so
    # do ranges below a page: key and value heads, rows of the vision blocks.
    page = 2 * 2**20
    words = 2 * (2 * 5120 * 152064 // 8 - page)
    layers = 64 * (2 * (5120 * 5120 + 5120) // 8 - page + 2 * (2 * 5120 * 27648 // 8 - page))
    projector = 2 * (5120 * 5120 + 5120) // 8 - page
    assert suffix["snapshot"] == 2 * ROLLOUT - words - layers - projector
    assert decode["reference_weights"] == 2 * OWN
    assert "reference_weights" not in suffix and "rollout_kv" not in suffix
    assert suffix["gradients"] == 4 * OWN


def test_keys_and_values(ledger: MemoryLedger) -> None:
    decode = at(ledger, "decode, prefixes")
    # 64 layers x (key, value) x 2 of 8 heads x 128 x 2 bytes x 262144 tokens
    assert decode["rollout_kv"] == 64 * 2 * 2 * 128 * 2 * 262144
    # 8 groups x 8192 tokens x 64 layers x (key, value) x 1 head x 128 x 2 bytes
    assert decode["actor_boundary"] == decode["reference_boundary"] == 8 * 8192 * 64 * 2 * 128 * 2
    assert at(ledger, "prefix backward")["boundary_gradients"] == 8192 * 64 * 2 * 128 * 2


def test_suffix_activations(ledger: MemoryLedger) -> None:
    saved = REDONE * 2 * 5120 + KEPT * LAYER + 2 * 2 * 5120 + 2 * 4 * 128
    # Two float32 arrays of a vocabulary shard are more than the gradients in flight of a layer.
    logits = 2 * 4 * 152064 // 8
    assert at(ledger, "actor suffix")["suffix_activations"] == RESPONSE_ROWS * (saved + logits)


def test_prefix_backward(ledger: MemoryLedger) -> None:
    # Inputs of 64 layers by tokens, of 32 blocks and the projector by patches, four to a token.
    inputs = 8192 * 64 * 2 * 5120 + 4 * 8192 * 33 * 2 * 1280
    # One layer whose input is among them, and its gradients in flight.
    layer = 8192 * (LAYER - 2 * 5120 + 2 * (5120 + 3 * 27648 // 8))
    # Its boundary is counted as held, and gone by then: keys and values of one head.
    boundary = 8192 * 64 * 2 * 128 * 2
    assert at(ledger, "prefix backward")["prefix_activations"] == inputs + layer - boundary


def test_update(ledger: MemoryLedger) -> None:
    update = at(ledger, "update")
    # 3 chunks in flight x 12 bytes; of one chunk the new weights, a flag, and another rank's new weights
    assert update["optimizer_chunks"] == 16_777_216 * (3 * 12 + 2 + 1 + 2)
    assert set(update) == {"snapshot", "gradients", "optimizer_chunks", "context_and_graphs"}
    # Shared out over 4 data-parallel ranks
    state = next(item for item in ledger.host_objects if item.name == "optimizer_state")
    assert state.bytes == 12 * -(-OWN // 4) and state.pinned
    assert ledger.update_s == pytest.approx(state.bytes / 46e9)


def test_naive_is_what_the_paper_reports(ledger: MemoryLedger) -> None:
    decode, suffix = at(ledger, "decode, prefixes"), at(ledger, "actor suffix")
    by_hand = (
        2 * ROLLOUT
        + 2 * OWN  # a second copy for the trainer
        + 2 * OWN  # the reference
        + 4 * OWN  # gradients
        + 12 * OWN  # masters and moments
        + decode["rollout_kv"]
        + decode["vision_cache"]
        + decode["rollout_workspace"]
        + 2 * decode["actor_boundary"]
        + suffix["boundary_gradients"]
        + suffix["suffix_activations"]
        + at(ledger, "prefix backward")["prefix_activations"]
        + decode["context_and_graphs"]
    )
    assert ledger.naive_peak_bytes == by_hand
    assert ledger.naive_peak_bytes == pytest.approx(PAPER_NAIVE_BYTES, rel=0.1)


def test_the_plan_fits_an_80_gb_card(ledger: MemoryLedger) -> None:
    assert ledger.peak_bytes < CARD_BYTES
    assert ledger.peak_moment().name == "actor suffix"
    assert ledger.peak_bytes / ledger.naive_peak_bytes < 0.45


@pytest.mark.parametrize(
    "name", ["no-kv-release", "no-reference-release", "no-snapshot-release", "no-optimizer-chunks", "naive"]
)
def test_without_any_one_measure_it_does_not(name: Ablation) -> None:
    (cost,) = ablation_costs(build_plan(load_profile("qwen25vl32b")).memory_inputs, (name,))
    assert cost.ledger.peak_bytes > CARD_BYTES
    assert cost.extra_bytes > 0
