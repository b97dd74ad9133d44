from __future__ import annotations

import dataclasses

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.resources import shipped_profiles
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.fields import key_paths
from rollplex_cli.profile.load import load_profile, parse_profile
from rollplex_cli.profile.schema import (
    AlgorithmProfile,
    MemoryProfile,
    ModelProfile,
    OptimizerProfile,
    Profile,
    RuntimeProfile,
    TargetProfile,
    TaskProfile,
)

TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=30) | st.sampled_from(
    ["yes", "off", "null", "~", "1e-4", "1.5", "010", "a: b", "- x", "#", "", " ", "'", '"', "\n", "!!int 3", "*a", "."]
)
POSITIVE = st.floats(min_value=1e-300, max_value=1e300)
OPTIONS = st.dictionaries(
    TEXT,
    TEXT | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    max_size=4,
)
PROFILES = st.builds(
    Profile,
    name=TEXT,
    description=TEXT,
    task=st.builds(TaskProfile, name=TEXT, options=OPTIONS),
    model=st.builds(ModelProfile, config=TEXT, dtype=st.sampled_from(["float32", "bfloat16"])),
    optimizer=st.builds(OptimizerProfile, lr=POSITIVE, eps=POSITIVE, betas=st.tuples(st.floats(0, 0.99), st.just(0.5))),
    target=st.none() | st.builds(TargetProfile, reward_mean=st.floats(-1e9, 1e9)),
    memory=st.builds(MemoryProfile, budget_gib=st.none() | POSITIVE),
    algorithm=st.builds(AlgorithmProfile, kl_coef=st.floats(0, 1)),
    runtime=st.builds(RuntimeProfile, seed=st.integers(0, 2**63 - 1)),
)


@settings(deadline=None)
@given(PROFILES)
def test_what_is_written_reads_back_equal(profile: Profile) -> None:
    text = resolved_yaml(profile)
    back = parse_profile(text, "profile.yaml")
    assert back == profile
    assert resolved_yaml(back) == text
    # Equal is not enough for options: True == 1 == 1.0.
    assert [type(v) for v in back.task.options.values()] == [type(v) for v in profile.task.options.values()]


@settings(deadline=None)
@given(PROFILES)
def test_other_yaml_readers_agree_about_text(profile: Profile) -> None:
    read = yaml.safe_load(resolved_yaml(profile))
    assert (read["name"], read["task"]["name"], list(read["task"]["options"])) == (
        profile.name, profile.task.name, list(profile.task.options),
    )  # fmt: skip


@pytest.mark.parametrize("name", list(shipped_profiles()))
def test_shipped_profiles_survive_and_name_every_key(name: str) -> None:
    profile = load_profile(name)
    text = resolved_yaml(profile)
    assert parse_profile(text, "profile.yaml") == profile
    written = yaml.safe_load(text)
    for path in key_paths(Profile):
        value = written
        for part in path.split("."):
            value = None if value is None else value[part]
    assert set(written) == {field.name for field in dataclasses.fields(Profile)}
