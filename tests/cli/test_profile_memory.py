from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollplex_cli.cli import output
from rollplex_cli.cli.main import run
from rollplex_cli.core.errors import DataError

MEASURES = ["no-kv-release", "no-reference-release", "no-snapshot-release", "no-optimizer-chunks", "naive"]
Shown = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`shown(*arguments)`: exit code, stdout and stderr of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLPLEX_PROFILE", raising=False)
    monkeypatch.setattr(output, "_json_mode", False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["profile-memory", *arguments])
        return code, *capsys.readouterr()

    return call


def test_golden_plan_of_the_32b_profile(shown: Shown, golden: Callable[[str, str], None]) -> None:
    ablate = [word for name in MEASURES for word in ("--ablate", name)]
    code, out, err = shown("--profile", "qwen25vl32b", *ablate)
    assert code == 0 and err == ""
    golden("profile_memory_32b.txt", "\n".join(line.rstrip() for line in out.splitlines()) + "\n")


def test_json_has_what_was_asked_for(shown: Shown) -> None:
    code, out, err = shown("--profile", "qwen25vl32b", "--json", "--ablate", "naive", "--ablate", "no-kv-release")
    assert code == 0 and err == ""
    found: dict[str, Any] = json.loads(out)
    assert found["fits"] and found["advice"] is None
    assert [row["name"] for row in found["ablations"]] == ["naive", "no-kv-release"]
    for row in found["ablations"]:
        assert row["peak_bytes"] - found["peak_bytes"] == row["extra_bytes"] > 0
        assert not row["fits"]
        assert row["peak_bytes"] == max(phase["peak_bytes"] for phase in row["phases"])
    assert found["ablations"][0]["peak_bytes"] == found["naive_peak_bytes"]
    assert found["early_groups"]["on_peak_bytes"] > found["early_groups"]["off_peak_bytes"] == found["peak_bytes"]
    for phase in found["phases"]:
        assert phase["peak_bytes"] == sum(item["bytes"] for item in phase["objects"])
        assert phase["peak_bytes"] == max(m["bytes"] for m in found["moments"] if m["phase"] == phase["name"])
    assert "longest_sample" not in found


def test_too_small_a_budget_names_the_peak_and_the_smallest_change(shown: Shown) -> None:
    code, out, err = shown("--profile", "qwen25vl32b", "--set", "memory.budget_gib=60")
    assert code == 3
    assert "does not fit into 60.0 GiB, 10.7 GiB too much" in out
    lines = err.splitlines()
    assert lines[0] == "error: the plan exceeds the profile's memory budget"
    assert lines[1].startswith(
        "  memory per GPU: 70.7 GiB needed at the peak (LEARN, actor suffix: suffix_activations "
    )
    assert lines[2].startswith("hint: the smallest change that fits (")
    change = lines[2].partition("--set ")[2]
    assert change.startswith("schedule.suffix_kept_layers=")
    assert shown("--profile", "qwen25vl32b", "--set", "memory.budget_gib=60", "--set", change)[0] == 0


def test_too_small_a_budget_in_json_is_one_document(shown: Shown) -> None:
    code, out, err = shown("--profile", "qwen25vl32b", "--set", "memory.budget_gib=60", "--json")
    assert code == 3 and err.startswith("error: ")
    found = json.loads(out)
    assert not found["fits"]
    assert found["advice"]["fits"] and found["advice"]["set"][0].startswith("schedule.suffix_kept_layers=")


def test_too_little_host_memory_lists_what_is_held(shown: Shown) -> None:
    code, _, err = shown("--profile", "qwen25vl7b", "--set", "memory.host_budget_gib=100")
    assert code == 3
    assert "host memory per node: 110.1 GiB needed (2 ranks, each optimizer_state 46.3 GiB, reference_copy " in err
    assert "--set optimizer.master=split" in err


def test_a_chunk_larger_than_the_budget_names_its_key(shown: Shown) -> None:
    wish = ["memory.budget_gib=35", "optimizer.chunk_elements=2147483648", "schedule.suffix_kept_layers=0"]
    code, _, err = shown("--profile", "qwen25vl32b", *(word for key in wish for word in ("--set", key)))
    assert code == 3
    assert "`optimizer.chunk_elements`: 3 chunks of 2147483648 parameters in flight take " in err


def test_an_unknown_measure_lists_the_known(shown: Shown) -> None:
    code, out, err = shown("--ablate", "no-gravity")
    assert code == 2 and out == ""
    assert err.splitlines()[0] == "error: no such measure to leave out: `no-gravity`"
    assert all(f"`{name}`" in err.splitlines()[1] for name in MEASURES)


def test_a_picture_is_written_and_one_that_cannot_be_is_an_error(shown: Shown, tmp_path: Path) -> None:
    assert shown("--plot", "memory.png", "--ablate", "naive")[0] == 0
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = shown("--plot", "no/such/folder/memory.png")
    assert code == 2 and err.startswith("error: cannot write the picture `no/such/folder/memory.png`: ")
    assert shown("--plot", "memory.docx")[0] == 2


def test_the_longest_prompt_of_the_data_is_planned_for(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = {"sample_id": "clip-7", "tokens": 4096, "media_tokens": 4000, "num_checked": 20}
    monkeypatch.setattr("rollplex_cli.launch.check.data.longest_prompt", lambda _job, _count: longest)
    code, out, _ = shown("--profile", "qwen25vl32b", "--samples", "20", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["longest_sample"]["tokens"] == 4096
    assert found["longest_sample"]["peak_bytes"] < found["peak_bytes"]
    assert "the longest of 20 prompts has 4,096 tokens (`clip-7`)" in shown("-p", "qwen25vl32b", "--samples", "20")[1]


def test_data_that_cannot_be_read_is_an_error(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_job: object, _count: int) -> dict[str, Any]:
        raise DataError("cannot read the data of task `rows`: no such file: `rows.jsonl`")

    monkeypatch.setattr("rollplex_cli.launch.check.data.longest_prompt", fail)
    code, out, err = shown("--samples", "5")
    assert code == 2 and out == "" and "rows.jsonl" in err


PROGRAM = """
import json, sys, time
started = time.process_time()
from rollplex_cli.cli.main import run
code = run(["profile-memory", "--profile", "qwen25vl32b", "--json", "--ablate", "naive"])
print()
print(json.dumps([code, time.process_time() - started, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_it_runs_without_any_engine() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    code, _, names = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert not set(names) & {"torch", "transformers", "sglang", "deepspeed", "cuda", "numpy", "matplotlib"}


def test_it_answers_at_once() -> None:
    # Of the processor, so that what else runs does not count.
    def seconds() -> float:
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout.splitlines()[-1])[1])

    assert min(seconds() for _ in range(3)) < 1.0
