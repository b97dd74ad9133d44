"""The benchmark through the real command line, on a workload's shapes scaled down to a small model."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scenarios.support import rollplex, sets, small

from rollplex_cli.core.files import read_jsonl
from rollplex_cli.core.paths import RunFolder

pytestmark = pytest.mark.scenario


def test_variants_of_a_workload_run_the_same_work(tmp_path: Path) -> None:
    overrides = small(
        "rollout.max_new_tokens=16", "reuse.rollout_prefix=true", "schedule.prefix_activations=recompute",
        "model.freeze_vision=true", "reuse.vision=true",
    )  # fmt: skip
    done = rollplex(
        "bench", "--profile", "tiny", *sets(overrides), "--workload", "clevrer", "--steps", "2",
        "--policy", "auto", "--policy", "serial", "--baseline", "colocate", "--baseline", "colocate_same_work",
        "--ablate", "early-groups", "--ablate", "vision-reuse",
        "--ablate", "kv-release", "--ablate", "reference-release", "--run-dir", str(tmp_path / "run"), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    rows = {row["variant"]: row for row in result["results"]}
    ablated = [f"without {name}" for name in ("early-groups", "vision-reuse", "kv-release", "reference-release")]
    assert list(rows) == ["rollplex", "rollplex serial", "colocate", "colocate_same_work", *ablated]
    own = rows["rollplex"]
    assert own["workload"] == "clevrer" and own["policy"] == "auto" and rows["colocate"]["policy"] == "serial"
    assert set(own["ratio"]) == set(rows) - {"rollplex"}
    low, high = own["ratio_ci95"]["colocate"]
    assert low < own["ratio"]["colocate"] < high
    assert own["tokens_per_s"] > 0 and own["peak_bytes"] is None and own["bound_ratio"] is None
    # Prompts and lengths of a pair are the same under every variant.
    for name, steps in result["raw"].items():
        for mine, theirs in zip(result["raw"]["rollplex"], steps, strict=True):
            assert mine["prompt_tokens"] == theirs["prompt_tokens"], name
            assert mine["response_tokens_mean"] == theirs["response_tokens_mean"], name
    assert {"hardware", "commit", "command"} <= set(result) and result["launch_us"] > 0
    assert moved(RunFolder(tmp_path / "run")) == {
        **{name: {"rollout_kv", "reference_weights"} for name in [*list(rows)[:4], *ablated[:2]]},
        ablated[2]: {"reference_weights"},
        ablated[3]: {"rollout_kv"},
    }


def moved(run: RunFolder) -> dict[str, set[str]]:
    """Variant to what was given or lost memory during its steps."""
    variants = {row["step"]: row["variant"] for row in read_jsonl(run.metrics)}
    events = list(read_jsonl(run.events_dir / "rank0.jsonl"))
    found: dict[str, set[str]] = {name: set() for name in variants.values()}
    for step, name in variants.items():
        own = [event for event in events if event["step"] == step]
        phases = [event for event in own if event["lane"] == "control"]
        begun, ended = min(event["t0"] for event in phases), max(event["t1"] for event in phases)
        for event in own:
            if event["name"] == "residency" and begun <= event["t0"] <= ended:
                found[name] |= {*event["regions"]} & {"rollout_kv", "reference_weights"}
    return found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policy", "mps"], "MPS divides a GPU between processes"),
        (["--policy", "serial", "--policy", "partition:70/30"], "cannot alternate with others"),
    ],
)
def test_policies_that_cannot_be_measured_are_refused(tmp_path: Path, arguments: list[str], text: str) -> None:
    done = rollplex("bench", "--profile", "tiny", *arguments, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert text in done.stderr


def test_one_signal_ends_it_and_it_is_not_continued(tmp_path: Path) -> None:
    run, more = RunFolder(tmp_path / "run"), ("rollout.max_new_tokens=16",)
    command = [sys.executable, "-m", "rollplex_cli.cli.main", "bench", "--profile", "tiny", *sets(small(*more))]
    command += ["--workload", "star", "--steps", "500", "--run-dir", str(run.root), "--plain"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.startswith("step 2 "):
                process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
    err = "".join(said)
    assert process.returncode == 75, err
    assert "stopped by a signal after step" in err and "a benchmark or measurement is not continued" in err
    assert "Traceback" not in err
    resumed = rollplex("train", "--resume", "--run-dir", str(run.root))
    assert resumed.returncode == 2 and "which is not continued" in resumed.stderr


@pytest.mark.timeout(600)
def test_disagg_does_the_same_work_on_ranks_with_one_role(tmp_path: Path) -> None:
    overrides = small("rollout.max_new_tokens=16", "topology.ranks_per_node=2", "topology.train_tp=2")
    done = rollplex(
        "bench", "--profile", "tiny", *sets(overrides), "--workload", "clevrer", "--workload", "math", "--steps", "2",
        "--baseline", "disagg", "--baseline", "colocate", "--ablate", "matched-tp", "--run-dir", str(tmp_path / "run"),
        "--json", timeout_s=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "run" / "bench_result.json").read_text())
    names = ["rollplex", "colocate", "disagg", "matched-tp"]
    assert [(row["workload"], row["variant"]) for row in result["results"]] == [
        (workload, name) for workload in ("clevrer", "math") for name in names
    ]
    assert list(result["workloads"]) == ["clevrer", "math"]
    for workload, part in result["workloads"].items():
        assert part["results"] == [row for row in result["results"] if row["workload"] == workload]
        check_apart(part)


def check_apart(result: dict[str, Any]) -> None:
    rows = {row["variant"]: row for row in result["results"]}
    own, apart = rows["rollplex"], rows["disagg"]
    assert set(own["ratio"]) == {"colocate", "disagg", "matched-tp"}
    pairs = zip(result["raw"]["disagg"], result["raw"]["rollplex"], strict=True)
    assert own["ratio"]["disagg"] == statistics.median(theirs["step_s"] / mine["step_s"] for theirs, mine in pairs)
    assert set(apart["ratio"]) == {"rollplex", "colocate", "matched-tp"}
    assert own["layout"] == {"training_ranks": 2, "rollout_ranks": 2, "train_tp": 2, "rollout_tp": 1}
    assert apart["layout"] == {"training_ranks": 1, "rollout_ranks": 1, "train_tp": 1, "rollout_tp": 1}
    assert rows["matched-tp"]["layout"] == {**own["layout"], "rollout_tp": 2}
    assert (rows["matched-tp"]["schedule"], rows["matched-tp"]["policy"]) == ("rollplex", own["policy"])
    assert apart["policy"] == "serial" and apart["phase_s"]["PUBLISH"] > 0
    for mine, theirs in zip(result["raw"]["rollplex"], result["raw"]["disagg"], strict=True):
        assert mine["prompt_tokens"] == theirs["prompt_tokens"] and len(mine["prompt_tokens"]) == 4
        assert mine["response_tokens_mean"] == theirs["response_tokens_mean"]
        assert theirs["logprob_diff_mean"] < 1e-4  # the rollout decodes with the weights that were sent
