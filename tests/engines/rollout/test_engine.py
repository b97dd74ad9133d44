"""What the hosted scheduler generates, judged by transformers' own forward."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.core.errors import UsageError

if TYPE_CHECKING:
    from rollplex_cli.engines.rollout.base import GroupResult
    from rollplex_cli.engines.rollout.engine import SglangRollout

pytestmark = pytest.mark.scenario

TOLERANCE = 1e-5


def assert_parity(kit: Any, model: Any, prompt: Any, result: GroupResult, temperature: float = 1.0) -> None:
    for response in result.responses:
        expected = kit.reference_logprobs(model, prompt, response.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=TOLERANCE, rtol=0)


def test_text_logprobs_match_transformers(engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any) -> None:
    prompts = [tiny.text_prompt(i, length) for i, length in enumerate((1, 7, 40))]
    results = kit.roll_out(engine, [kit.request(i, p) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert_parity(kit, hf_model, prompt, results[i])


def test_video_logprobs_match_transformers(engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any) -> None:
    """At 2 and 6 sampled frames a second, odd grids, two videos in one prompt, longer than a prefill chunk."""
    prompts = [
        tiny.video_prompt(0),
        tiny.video_prompt(1, fps=6.0),
        tiny.video_prompt(2, grid_thw=(3, 6, 10), fps=6.0),
        tiny.prompt([5, 6], [tiny.video(3, (2, 4, 4), 2.0), tiny.video(4, (6, 4, 8), 6.0)], [7, 8, 9]),
        tiny.video_prompt(5, grid_thw=(20, 8, 8)),
    ]
    assert prompts[-1].num_tokens > 256
    results = kit.roll_out(engine, [kit.request(i, p) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert_parity(kit, hf_model, prompt, results[i])


def test_image_logprobs_match_transformers(engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any) -> None:
    prompt = tiny.prompt([3], [tiny.image(6, (1, 8, 12)), tiny.video(7, (2, 4, 4), 2.0)], [4, 5])
    results = kit.roll_out(engine, [kit.request(0, prompt)])
    assert_parity(kit, hf_model, prompt, results[0])


def test_temperature_scales_and_nucleus_does_not_renormalise(
    engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any
) -> None:
    prompt = tiny.video_prompt(0)
    requests = [
        kit.request(0, prompt, temperature=0.7),
        kit.request(1, prompt, temperature=0.7, top_p=0.5),
        kit.request(2, prompt, temperature=1.3, top_k=5),
    ]
    results = kit.roll_out(engine, requests)
    for group, temperature in ((0, 0.7), (1, 0.7), (2, 1.3)):
        assert_parity(kit, hf_model, prompt, results[group], temperature)


def test_greedy_takes_the_most_probable_token(engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any) -> None:
    prompt = tiny.video_prompt(0)
    results = kit.roll_out(engine, [kit.request(0, prompt, temperature=0.0), kit.request(1, prompt)])
    assert len(set(kit.tokens(results[0]))) == 1
    assert_parity(kit, hf_model, prompt, results[0])
    response = results[0].responses[0]
    best = kit.reference_distribution(hf_model, prompt, response.token_ids).max(dim=-1).values
    torch.testing.assert_close(torch.tensor(response.logprobs), best, atol=TOLERANCE, rtol=0)


def test_siblings_reuse_the_whole_prefix(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    prompts = [tiny.video_prompt(i) for i in range(3)]
    results = kit.roll_out(engine, [kit.request(i, p, seeds=range(5)) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert [r.cached_tokens for r in results[i].responses] == [0] + [prompt.num_tokens - 1] * 4


def test_equal_prompts_in_several_groups(engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any) -> None:
    prompt = tiny.video_prompt(0)
    results = kit.roll_out(engine, [kit.request(i, prompt, seeds=(4, 5)) for i in range(4)])
    assert all(kit.tokens(results[i]) == kit.tokens(results[0]) for i in range(4))
    assert_parity(kit, hf_model, prompt, results[3])


def test_one_video_at_two_frame_rates_shares_no_keys(engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any) -> None:
    """Same tokens and pixels, other positions: the prefix cache must not take one for the other."""
    slow, fast = tiny.video_prompt(0, fps=1.0), tiny.video_prompt(0, fps=6.0)
    assert slow.prompt.token_ids == fast.prompt.token_ids
    engine.publish()
    for prompt in (slow, fast):
        engine.begin_step()
        engine.submit([kit.request(0, prompt)])
        (result,) = kit.drain(engine)
        assert result.responses[0].cached_tokens == 0
        assert_parity(kit, hf_model, prompt, result)


def test_two_questions_about_one_video_share_it(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    first, second = tiny.video_prompt(0), tiny.video_prompt(0)
    ids = (*second.prompt.token_ids[:-2], 1, 2)
    second = tiny.prompt(ids[:16], [tiny.video(0, (4, 8, 8), 2.0)], ids[-16:])
    engine.publish()
    engine.begin_step()
    engine.submit([kit.request(0, first)])
    kit.drain(engine)
    engine.submit([kit.request(1, second)])
    (result,) = kit.drain(engine)
    assert result.responses[0].cached_tokens == second.num_tokens - 2


def test_responses_do_not_depend_on_their_company(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    """Alone, in any order, beside requests with top-p, greedy ones or text: the same tokens."""
    prompts = {i: tiny.video_prompt(i, grid_thw=(1 + i % 3, 4, 8)) for i in range(6)}
    plain = {i: kit.request(i, p, seeds=(10 * i, 10 * i + 1)) for i, p in prompts.items()}
    alone = {i: kit.tokens(kit.roll_out(engine, [r])[i]) for i, r in plain.items()}
    noise = [
        kit.request(20, tiny.text_prompt(0, 33), top_p=0.4),
        kit.request(21, tiny.video_prompt(9), temperature=0.0, max_new_tokens=3),
        kit.request(22, tiny.text_prompt(1, 5), top_k=3, temperature=0.5),
    ]
    for seed in range(3):
        mixed = [*plain.values(), *noise[seed:]]
        random.Random(seed).shuffle(mixed)
        results = kit.roll_out(engine, mixed)
        assert {i: kit.tokens(results[i]) for i in plain} == alone


def test_same_seed_same_tokens_other_seed_other_tokens(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    results = kit.roll_out(engine, [kit.request(0, tiny.video_prompt(0), seeds=(7, 7, 8, 2**62 + 7))])
    rows = kit.tokens(results[0])
    assert rows[0] == rows[1]
    assert len(set(rows)) == 3


def test_repeating_a_step_is_bit_equal(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    requests = [kit.request(i, tiny.video_prompt(i, grid_thw=(1 + i, 4, 8)), seeds=range(4)) for i in range(5)]
    first, second = kit.roll_out(engine, requests), kit.roll_out(engine, requests)
    for i in range(5):
        assert first[i].decode_step == second[i].decode_step
        for a, b in zip(first[i].responses, second[i].responses, strict=True):
            assert (a.token_ids, a.logprobs, a.cached_tokens) == (b.token_ids, b.logprobs, b.cached_tokens)
            assert [v + 1 for v in a.weight_versions] == list(b.weight_versions)


def test_sampling_leaves_the_global_generators_alone(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    before, python = torch.get_rng_state(), random.getstate()
    kit.roll_out(engine, [kit.request(0, tiny.video_prompt(0))])
    assert torch.equal(before, torch.get_rng_state())
    assert random.getstate() == python


def test_limits_are_per_response_and_exact(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    limits = (1, 5, 2, 17)
    results = kit.roll_out(engine, [kit.request(0, tiny.video_prompt(0), seeds=range(4), limits=limits)])
    assert tuple(len(t) for t in kit.tokens(results[0])) == limits
    assert {r.finish_reason for r in results[0].responses} == {"length"}


def test_end_token_ends_a_response(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    results = kit.roll_out(
        engine, [kit.request(0, tiny.text_prompt(0, 9), seeds=range(40), ignore_eos=False, max_new_tokens=200)]
    )
    stopped = [r for r in results[0].responses if r.finish_reason == "stop"]
    assert stopped
    for response in stopped:
        assert response.token_ids[-1] == tiny.eos_token
        assert tiny.eos_token not in response.token_ids[:-1]
        assert len(response.logprobs) == len(response.token_ids) == len(response.weight_versions)


def test_placeholders_are_never_sampled(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    """Even where the model wants nothing else."""
    head = engine.parameters()["model.embed_tokens.weight"]
    saved = head.clone()
    try:
        # Tied embeddings: rows far longer than all others win or lose every step.
        head[list(kit.banned)] *= 50
        engine.publish()
        results = kit.roll_out(engine, [kit.request(0, tiny.text_prompt(0, 9), seeds=range(16), max_new_tokens=16)])
        drawn = {t for row in kit.tokens(results[0]) for t in row}
        assert drawn.isdisjoint(kit.banned)
        assert engine.banned_token_ids == kit.banned
    finally:
        head.copy_(saved)


def test_results_come_in_group_order_with_their_step(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    engine.publish()
    engine.begin_step()
    lengths = {5: 3, 1: 3, 3: 6}
    engine.submit([kit.request(g, tiny.text_prompt(g, 9), max_new_tokens=n) for g, n in lengths.items()])
    results = kit.drain(engine)
    assert [r.group for r in results] == [1, 5, 3]
    # A step for the leaders, in which they draw their first token, one for the siblings, then one per token.
    assert [r.decode_step for r in results] == [4, 4, 7]
    assert not engine.has_work()


def test_a_group_too_long_for_the_pool_is_refused(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    engine.publish()
    engine.begin_step()
    prompt = tiny.text_prompt(0, 20)
    room = engine.capacity_tokens - 20
    with pytest.raises(UsageError, match="can never run"):
        engine.submit([kit.request(0, prompt), kit.request(1, prompt, limits=(1, 1, room + 1))])
    assert not engine.has_work()
    engine.submit([kit.request(0, prompt, limits=(1, 1, room))])
    for _ in range(3):
        engine.step()
    engine.abort()


def test_misuse_is_a_value_error(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    prompt = tiny.text_prompt(0, 9)
    engine.publish()
    engine.begin_step()
    for wrong in (
        [kit.request(0, prompt), kit.request(0, prompt)],
        [kit.request(0, prompt, seeds=())],
        [kit.request(0, prompt, limits=(1,))],
        [kit.request(0, prompt, max_new_tokens=0)],
    ):
        with pytest.raises(ValueError, match="group"):
            engine.submit(wrong)
    engine.submit([kit.request(0, prompt)])
    engine.step()
    with pytest.raises(ValueError, match="idle"):
        engine.begin_step()
    with pytest.raises(ValueError, match="paused"):
        engine.publish()
    with pytest.raises(ValueError, match="no such group"):
        engine.abort([4])
    caught: list[Exception] = []

    def call() -> None:
        try:
            engine.step()
        except ValueError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "thread" in str(caught[0])
    engine.abort()


def test_parameters_are_the_weights_in_use(engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any) -> None:
    parameters = engine.parameters()
    assert all(p.is_contiguous() and not p.requires_grad for p in parameters.values())
    qkv = parameters["model.layers.1.self_attn.qkv_proj.weight"]
    attention = hf_model.model.language_model.layers[1].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(qkv, torch.cat(parts))
    gate_up = parameters["visual.blocks.0.mlp.gate_up_proj.weight"]
    mlp = hf_model.model.visual.blocks[0].mlp
    assert torch.equal(gate_up, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    assert sum(p.numel() for p in parameters.values()) == sum(p.numel() for p in hf_model.parameters())
