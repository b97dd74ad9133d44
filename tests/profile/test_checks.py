from __future__ import annotations

import re

import pytest

from rollplex_cli.core.errors import ProfileError
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.load import load_profile, parse_profile

CASES = [
    (
        ["rollout.group_size=1"],
        "--set rollout.group_size=1: rollout.group_size: got 1, GRPO needs at least two responses per prompt: "
        "an advantage is a reward compared with its group's mean",
    ),
    (
        ["rollout.top_k=0"],
        "--set rollout.top_k=0: rollout.top_k: got 0, expected -1 (keep every token) or an integer >= 1",
    ),
    (
        ["rollout.max_new_tokens=0"],
        "--set rollout.max_new_tokens=0: rollout.max_new_tokens: got 0, expected an integer >= 1",
    ),
    (
        ["topology.ranks_per_node=6", "topology.train_tp=4"],
        "--set topology.train_tp=4: topology.train_tp: got 4, expected a divisor of the number of ranks: "
        "num_nodes 1 x ranks_per_node 6 = 6 ranks, 6 / train_tp 4 = 1.50 training groups",
    ),
    (
        ["topology.ranks_per_node=2", "topology.train_tp=2", "topology.rollout_tp=4"],
        "--set topology.rollout_tp=4: topology.rollout_tp: got 4, expected a divisor of `topology.train_tp` (2): "
        "a rollout shard is cut into whole training shards",
    ),
    (
        ["topology.ranks_per_node=3", "schedule.name=disagg"],
        "--set topology.ranks_per_node=3: topology.ranks_per_node: got 3, expected an even number of ranks with "
        "`schedule.name: disagg`, one half to train and one to decode: num_nodes 1 x ranks_per_node 3 = 3 ranks",
    ),
    (
        ["topology.ranks_per_node=8", "topology.train_tp=8", "schedule.name=disagg"],
        "--set topology.train_tp=8: topology.train_tp: got 8, expected a divisor of the number of ranks that train: "
        "num_nodes 1 x ranks_per_node 8 = 8 ranks, 4 of them train, 4 / train_tp 8 = 0.50 training groups",
    ),
    (
        ["topology.ranks_per_node=3"],
        "tiny.yaml:LINE: algorithm.prompts_per_step: got 32, expected a multiple of the data-parallel degree 3 "
        "(num_nodes 1 x ranks_per_node 3 / train_tp 1)",
    ),
    (
        ["rollout.kv_tokens=519"],
        "--set rollout.kv_tokens=519: rollout.kv_tokens: got 519, expected at least 520 to hold one request: "
        "max_prompt_tokens 512 + max_new_tokens 8",
    ),
    (
        ["data.min_pixels=20000"],
        "--set data.min_pixels=20000: data.min_pixels: got 20000, expected at most `data.max_pixels` (12544)",
    ),
    (
        ["cold_start.test_from_step=251"],
        "--set cold_start.test_from_step=251: cold_start.test_from_step: got 251, expected at most "
        "`cold_start.max_steps` (250): the cold start would end untested",
    ),
    (
        ["optimizer.betas=[0.9, 1]"],
        "--set optimizer.betas=[0.9, 1]: optimizer.betas.1: got 1.0, expected a number below 1",
    ),
    (
        ["optimizer.master=split"],
        "--set optimizer.master=split: optimizer.master: got `split`, expected `full` with `model.dtype: float32`: "
        "weights in float32 are their own masters, no bits are left for the host to keep",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), CASES)
def test_fault_between_keys(overrides: list[str], line: str) -> None:
    with pytest.raises(ProfileError) as caught:
        load_profile("tiny", overrides)
    lines = [re.sub(r"^tiny.yaml:\d+", "tiny.yaml:LINE", part.strip()) for part in caught.value.message.splitlines()]
    assert line in lines


def test_what_is_merely_tight_is_no_fault() -> None:
    profile = load_profile("tiny", ["rollout.kv_tokens=520", "rollout.group_size=2", "algorithm.prompts_per_step=1"])
    assert profile.rollout.kv_tokens == 520


def test_all_faults_between_keys_at_once() -> None:
    with pytest.raises(ProfileError, match=r"^3 faults"):
        load_profile("tiny", ["rollout.group_size=1", "rollout.kv_tokens=1", "topology.ranks_per_node=5"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.name=reinforce_pp", "schedule.early_groups=true"], "schedule.early_groups: got `true`"),
        (
            ["algorithm.name=reinforce_pp", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"],
            "algorithm.kl_in: got `reward`",
        ),
        (["algorithm.importance_cap=2", "algorithm.old_logprobs=rollout"], "algorithm.importance_cap: got 2"),
        (["algorithm.num_minibatches=5"], "algorithm.num_minibatches: got 5, expected a divisor of the 32"),
        (["rollout.extra_groups=2", "algorithm.num_minibatches=2"], "algorithm.num_minibatches: got 2, expected 1"),
        (
            ["algorithm.max_refills=1"],
            "algorithm.max_refills: got 1, expected 0 without `algorithm.skip_zero_variance`",
        ),
        (
            ["algorithm.name=dapo", "algorithm.max_refills=2", "algorithm.kl_in=reward", "algorithm.kl_coef=0.1"],
            "algorithm.max_refills: got 2, expected 0 with `algorithm.kl_in: reward`",
        ),
        (
            ["algorithm.name=dapo", "algorithm.max_refills=2", "topology.ranks_per_node=2", "topology.train_tp=2"],
            "algorithm.max_refills: got 2, expected 0 with `topology.train_tp` above 1",
        ),
        (
            ["algorithm.name=dapo", "algorithm.max_refills=2", "topology.ranks_per_node=2", "schedule.name=disagg"],
            "algorithm.max_refills: got 2, expected 0 with `schedule.name: disagg`",
        ),
        (["algorithm.overlong_buffer_tokens=9"], "expected at most `rollout.max_new_tokens` (8)"),
        (["rollout.group_size=1", "algorithm.name=rloo"], "RLOO needs at least two responses"),
        (["algorithm.name=grpoo"], "algorithm.name: got the text `grpoo`, expected `grpo`"),
    ],
)
def test_faults_of_algorithms(overrides: list[str], expected: str) -> None:
    with pytest.raises(ProfileError) as caught:
        load_profile("tiny", overrides)
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["lora.rank=8", "lora.dropout=0.1"],
            "lora.dropout: got 0.1, expected 0: with dropout the trainer's",
        ),
        (["lora.targets=[]"], "lora.targets: got an empty list"),
        (["lora.targets=[q_proj, v_proj, q_proj]"], "lora.targets: got `q_proj` twice"),
        (["lora.targets=[qkv]"], "lora.targets.0: got the text `qkv`, expected `q_proj`, `k_proj`"),
        (["lora.rank=0"], "lora.rank: got 0, expected an integer >= 1"),
        (["lora.alpa=1"], "lora.alpa: unknown key, did you mean `alpha`?"),
    ],
)
def test_faults_of_adapters(overrides: list[str], expected: str) -> None:
    with pytest.raises(ProfileError) as caught:
        load_profile("tiny", overrides)
    assert expected in caught.value.message


def test_adapters_are_off_unless_asked_for() -> None:
    plain, own = load_profile("tiny"), load_profile("tiny", ["lora.rank=4", "lora.targets=[v_proj]"])
    assert plain.lora is None
    assert own.lora is not None
    assert (own.lora.rank, own.lora.alpha, own.lora.targets) == (4, 32.0, ("v_proj",))
    assert parse_profile(resolved_yaml(own), "again") == own


def test_a_named_algorithm_sets_what_the_profile_does_not() -> None:
    plain, own = load_profile("tiny"), load_profile("tiny", ["algorithm.name=dapo", "algorithm.clip_high=0.5"])
    assert (plain.algorithm.clip_high, plain.algorithm.skip_zero_variance) == (0.2, False)
    assert (own.algorithm.clip_high, own.algorithm.skip_zero_variance) == (0.5, True)
    assert (plain.algorithm.max_refills, own.algorithm.max_refills) == (0, 3)
    for stands_against in (
        ["topology.ranks_per_node=2", "topology.train_tp=2"],
        ["topology.ranks_per_node=2", "schedule.name=disagg"],
        ["algorithm.kl_in=reward"],
        ["algorithm.skip_zero_variance=false"],
    ):
        assert load_profile("tiny", ["algorithm.name=dapo", *stands_against]).algorithm.max_refills == 0
    batch = load_profile("tiny", ["algorithm.name=reinforce_pp"])
    assert (batch.algorithm.advantage, batch.schedule.early_groups) == ("batch_std", False)
    # What was resolved once stays as it is.
    assert parse_profile(resolved_yaml(own), "again") == own


def test_reward_function_alone_is_a_part() -> None:
    assert load_profile("tiny", ["reward=mine.py:score"]).reward.parts == {"mine.py:score": 1.0}
    assert load_profile("tiny", ["reward.parts={exact: 1, format: 0.5}"]).reward.parts == {"exact": 1.0, "format": 0.5}
