from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.errors import ProfileError
from rollplex_cli.core.resources import shipped_profiles
from rollplex_cli.profile.load import load_profile, parse_profile

MINIMAL = "name: x\ntask: {name: shapes}\nmodel: {config: tiny}\n"


def fault_lines(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ProfileError) as caught:
        parse_profile(text, "job.yaml", overrides)
    return [line.strip() for line in caught.value.message.splitlines()[1:]]


@pytest.mark.parametrize("name", ["tiny", "tiny.yaml", "qwen25vl32b", "qwen25vl32b.yaml"])
def test_shipped_profiles_resolve_from_any_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_profile(name).name == name.removesuffix(".yaml")


def test_every_shipped_profile_loads_under_its_own_name() -> None:
    profiles = shipped_profiles()
    assert len(profiles) >= 4
    for name, path in profiles.items():
        profile = load_profile(path)
        assert profile.name == name
        assert profile.description


def test_a_file_here_wins_over_a_shipped_profile_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    assert load_profile("tiny").name == "x"
    assert load_profile("tiny.yaml").name == "tiny"


def test_no_such_profile_names_the_nearest() -> None:
    with pytest.raises(ProfileError, match="no such profile: `tinny`") as caught:
        load_profile("tinny")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("did you mean `tiny`?")


def test_overrides_come_in_order_and_read_yaml() -> None:
    overrides = ["runtime.seed=1", "runtime.seed=2", "optimizer.lr=1e-4", "task.options.word=seven", "target=null"]
    profile = parse_profile(MINIMAL + "target: {reward_mean: 1}\n", "job.yaml", overrides)
    assert (profile.runtime.seed, profile.optimizer.lr, profile.target) == (2, 1e-4, None)
    assert profile.task.options == {"word": "seven"}


def test_override_opens_a_section_that_is_null() -> None:
    profile = parse_profile(MINIMAL + "target: null\n", "job.yaml", ["target.reward_mean=0.5"])
    assert profile.target is not None
    assert profile.target.reward_mean == 0.5


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), ("1", 1.0), ("1.", 1.0), (".5", 0.5), ("1.0e-4", 1e-4), ("1_0", 10.0)],
)
def test_spellings_of_numbers(text: str, value: float) -> None:
    profile = parse_profile(MINIMAL, "job.yaml", [f"optimizer.lr={text}"])
    assert profile.optimizer.lr == value
    assert type(profile.optimizer.lr) is float


GOLDEN = """\
name: x
task:
  nam: shapes
model: {config: tiny, dtype: float16, trust_remote_code: yes}
rollout:
  group_sise: 4
  max_new_tokens: 0
  temperature: hot
  max_new_tokens: 3
  top_k: 1.5
optimizer: {betas: [0.9], eps: .inf}
data: 5
target: {window: 3}
lr: 3
memory: {budget_gib: true}
runtime: {keep_checkpoints: !!python/name:os.system x}
"""
GOLDEN_FAULTS = [
    "job.yaml:2: task.name: missing, expected text",
    "job.yaml:3: task.nam: unknown key, did you mean `name`?",
    'job.yaml:4: model.trust_remote_code: got `yes`, expected `true` or `false`, or `"yes"` in quotes for text',
    "job.yaml:4: model.dtype: got the text `float16`, expected `float32` or `bfloat16`",
    "job.yaml:6: rollout.group_sise: unknown key, did you mean `group_size`?",
    "job.yaml:7: rollout.max_new_tokens: got 0, expected an integer >= 1",
    "job.yaml:8: rollout.temperature: got the text `hot`, expected a number > 0",
    "job.yaml:9: rollout.max_new_tokens: duplicate key, first given at job.yaml:7",
    "job.yaml:10: rollout.top_k: got 1.5, expected an integer >= -1",
    "job.yaml:11: optimizer.eps: got `.inf`, expected a finite number",
    "job.yaml:11: optimizer.betas: got a list of 1, expected a list of 2 values, each a number >= 0 and <= 1",
    "job.yaml:12: data: got 5, expected a mapping",
    "job.yaml:13: target.reward_mean: missing, expected a number",
    "job.yaml:14: lr: unknown key, did you mean `optimizer.lr`?",
    "job.yaml:15: memory.budget_gib: got `true`, expected a number > 0 or `null`",
    "job.yaml:16: runtime.keep_checkpoints: got the tag `tag:yaml.org,2002:python/name:os.system`, "
    "expected a plain value",
    "--set runtime.seed=-1: runtime.seed: got -1, expected an integer >= 0",
    "--set runtime.sed=1: runtime.sed: unknown key, did you mean `seed`?",
    "--set schedule=3: schedule: got 3, expected a mapping",
    "--set plain: expected the form `key.path=value`",
    "--set task.options.x=[1]: task.options.x: got a list of 1, expected text, an integer, a number or "
    "`true` or `false`",
    "--set memory.budget_gib2={: not valid YAML: expected the node content, but found '<stream end>'",
]


def test_all_faults_at_once_each_with_its_place() -> None:
    overrides = ["runtime.seed=-1", "runtime.sed=1", "schedule=3", "plain", "task.options.x=[1]"]
    assert fault_lines(GOLDEN, *overrides, "memory.budget_gib2={") == GOLDEN_FAULTS


def test_head_of_the_message_counts_faults() -> None:
    with pytest.raises(ProfileError, match=r"^2 faults in profile `job.yaml`:\n"):
        parse_profile("name: x\nmodel: {config: tiny}\ntask: {name: a}\na: 1\nb: 2\n", "job.yaml")


def test_a_key_far_from_every_other_lists_the_valid_ones() -> None:
    [line] = fault_lines(MINIMAL + "algorithm: {zzz: 1}\n")
    assert line.startswith("job.yaml:4: algorithm.zzz: unknown key, expected one of `name`, `prompts_per_step`, ")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "job.yaml: got nothing, expected a mapping of keys to values"),
        ("- 1\n", "job.yaml: got a list, expected a mapping of keys to values"),
        ("a: [\n", "job.yaml:2: not valid YAML: expected the node content, but found '<stream end>'"),
        ("a: 1\n\tb: 2\n", "job.yaml:2: not valid YAML: found character '\\t' that cannot start any token"),
    ],
)
def test_text_that_is_no_profile_is_one_fault(text: str, fault: str) -> None:
    assert fault_lines(text) == [fault]


@pytest.mark.parametrize(
    ("word", "read"), [("off", None), ("No", None), ("y", "y"), ("1:30", "1:30"), ("010", "010"), ("0x10", "0x10")]
)
def test_surprises_of_old_yaml(word: str, read: str | None) -> None:
    text = MINIMAL.replace("{name: shapes}", f"{{name: shapes, options: {{a: {word}}}}}")
    if read is None:
        [line] = fault_lines(text)
        assert line.endswith(
            f'task.options.a: got `{word}`, expected `true` or `false`, or `"{word}"` in quotes for text'
        )
    else:
        assert parse_profile(text, "job.yaml").task.options == {"a": read}


def test_quoted_text_stays_text() -> None:
    text = MINIMAL.replace("{name: shapes}", '{name: shapes, options: {a: "yes", b: "1", c: "null"}}')
    assert parse_profile(text, "job.yaml").task.options == {"a": "yes", "b": "1", "c": "null"}


def test_a_boolean_is_no_integer_and_an_integer_no_boolean() -> None:
    lines = fault_lines(MINIMAL, "runtime.seed=true", "schedule.early_groups=1")
    assert [line.partition("got")[2] for line in lines] == [
        " `true`, expected an integer >= 0",
        " 1, expected `true` or `false`",
    ]


def test_an_alias_that_holds_itself_ends() -> None:
    assert any("nested deeper" in line for line in fault_lines(MINIMAL + "data: &a {fps: *a}\n"))


def test_control_characters_of_a_file_never_reach_the_message() -> None:
    assert not any("\x1b" in line for line in fault_lines(MINIMAL + '"\\e[31mred": 1\n'))


def test_unreadable_files_are_profile_errors(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(ProfileError, match="not UTF-8"):
        load_profile(tmp_path / "latin.yaml")


@settings(deadline=None)
@given(st.text(max_size=80), st.lists(st.text(max_size=20), max_size=3))
def test_no_text_makes_anything_but_a_profile_error(text: str, overrides: list[str]) -> None:
    with pytest.raises(ProfileError):
        parse_profile(text, "job.yaml", overrides)
