from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollplex_cli.cli import bench, output, train
from rollplex_cli.cli.main import run
from rollplex_cli.core.errors import RollplexError, RunFailedError
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.run_folder import lock_run
from rollplex_cli.plan.build import build_plan
from rollplex_cli.plan.memory import compute_memory
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.load import load_profile


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLPLEX_PROFILE", raising=False)
    monkeypatch.setattr(output, "_json_mode", False)


def lines(capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    out, err = capsys.readouterr()
    return out, err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["train", "--nope"], "No such option: --nope", "`rollplex train --help` lists what it takes"),
        (["nope"], "No such command 'nope'", "`rollplex --help` lists what it takes"),
        (["report"], "Missing argument", "`rollplex report --help` lists what it takes"),
        (["bench", "--baseline", "x"], "Invalid value for '--baseline'", "`rollplex bench --help` lists what it takes"),
    ],
)
def test_usage_errors_look_like_all_others(
    arguments: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = lines(capsys)
    assert out == ""
    assert err[0].startswith(f"error: {message}")
    assert not err[0].endswith(".")
    assert err[1] == f"hint: {hint}"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["profiles"]])
def test_bare_calls_show_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert "Commands:" in capsys.readouterr().out


def test_an_error_nobody_foresaw_leaves_a_traceback_in_a_file_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(*_arguments: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("rollplex_cli.cli.options.load", fail)
    assert run(["train"]) == 1
    _, err = lines(capsys)
    assert err[0] == "error: unexpected ZeroDivisionError: by zero"
    path = Path(err[1].split("`")[1])
    assert "in fail" in path.read_text()
    assert not any("Traceback" in line for line in err)


def test_ctrl_c_outside_a_run_is_75(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rollplex_cli.cli.options.load", interrupt)
    assert run(["train"]) == 75
    assert lines(capsys)[1] == ["error: interrupted"]


def test_messages_never_carry_control_codes_or_lose_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    error = RunFailedError("response: \x1b[31m[/answer][bold]\n  next\x07", hint="\x1b]0;title")
    assert output.report_error(error) == 1
    _, err = lines(capsys)
    assert err == ["error: response: \\x1b[31m[/answer][bold]", "  next\\x07", "hint: \\x1b]0;title"]


def test_profile_faults_exit_2_and_come_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--set", "rollout.group_sise=1", "--set", "rollout.max_new_tokens=0"]) == 2
    _, err = lines(capsys)
    assert err == [
        "error: 2 faults in profile `tiny.yaml`:",
        "  --set rollout.group_sise=1: rollout.group_sise: unknown key, did you mean `group_size`?",
        "  --set rollout.max_new_tokens=0: rollout.max_new_tokens: got 0, expected an integer >= 1",
    ]


def test_a_job_for_a_cluster_says_what_it_needs_and_exits_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(["train", "--profile", "qwen25vl32b.yaml"]) == 3
    out, err = lines(capsys)
    assert out == ""
    text = "\n".join(err)
    assert "error: the job does not fit this machine" in text
    for need in ("nodes: 4 needed, 1 here", "GPUs per node: 8 needed", "GPUs: 32, 8 per node", "memory per GPU: "):
        assert need in text
    assert "host memory per node: " in text
    assert list(tmp_path.iterdir()) == []


def test_json_errors_are_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(["train", "--profile", "qwen25vl7b", "--json"]) == 3
    out, _ = lines(capsys)
    assert json.loads(out)["exit_code"] == 3


def test_the_profile_comes_from_the_environment_where_no_option_names_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLPLEX_PROFILE", "nonesuch")
    assert run(["profile-memory"]) == 2
    assert lines(capsys)[1][0] == "error: no such profile: `nonesuch`"
    assert run(["profile-memory", "--profile", "tiny"]) == 0


def test_profiles_list_show_copy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["profiles", "ls", "--json"]) == 0
    names = {row["name"] for row in json.loads(capsys.readouterr().out)}
    assert {"tiny", "tiny-2rank", "qwen25vl7b", "qwen25vl32b"} <= names
    assert run(["profiles", "ls"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in names)
    assert run(["profiles", "show", "tiny"]) == 0
    assert capsys.readouterr().out.startswith("# The demo")
    assert run(["profiles", "show", "tiny", "--resolved"]) == 0
    assert "stall_timeout_s: 600.0" in capsys.readouterr().out
    assert run(["profiles", "copy", "tiny", "mine.yaml"]) == 0
    assert run(["profiles", "copy", "tiny", "mine.yaml"]) == 2
    assert "the file exists: `mine.yaml`" in capsys.readouterr().err
    assert run(["profile-memory", "--profile", "mine.yaml"]) == 0
    assert run(["profiles", "copy", "tiny", "no/such/folder.yaml"]) == 2


@pytest.mark.parametrize("command", ["report", "export"])
def test_folders_that_are_no_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--to", "out"] if command == "export" else []
    assert run([command, ".", *extra]) == 2
    assert lines(capsys)[1][0].startswith("error: not a run folder")


class Supervised:
    """Stands for the run itself: records what it was asked to do, and writes two steps."""

    def __init__(self, error: RollplexError | None = None) -> None:
        self.error = error
        self.jobs: list[tuple[object, Path]] = []

    def __call__(self, job: object, _plan: object, folder: object, *, plain: bool) -> None:
        self.jobs.append((job, folder.root))  # type: ignore[attr-defined]
        folder.metrics.write_text('{"step": 0}\n{"step": 1, "reward_mean": 0.5}\n')  # type: ignore[attr-defined]
        assert plain
        if self.error is not None:
            raise self.error


def test_train_writes_a_folder_and_ends_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised = Supervised()
    monkeypatch.setattr(train, "run_job", supervised)
    assert run(["train", "--json", "--max-steps", "3", "--schedule", "colocate", "--set", "runtime.seed=5"]) == 0
    out, err = lines(capsys)
    result = json.loads(out)
    assert result["num_steps"] == 2
    assert result["last"]["reward_mean"] == 0.5
    [(job, root)] = supervised.jobs
    assert (job.runtime.max_steps, job.schedule.name, job.runtime.seed) == (3, "colocate", 5)  # type: ignore[attr-defined]
    assert root.parent == Path("runs")
    assert root.name.startswith("tiny-")
    assert (root / "plan.json").is_file()
    assert err == [f"run folder: {root}"]


def test_train_refuses_a_folder_in_use_and_resumes_it_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised = Supervised()
    monkeypatch.setattr(train, "run_job", supervised)
    assert run(["train", "--plain", "--run-dir", "r", "--set", "runtime.seed=5"]) == 0
    assert run(["train", "--plain", "--run-dir", "r"]) == 2
    assert (
        "hint: choose another `--run-dir`; a training run is continued with `rollplex train --resume`"
        in lines(capsys)[1]
    )
    assert run(["train", "--plain", "--run-dir", "r", "--resume", "--max-steps", "7"]) == 0
    job = supervised.jobs[-1][0]
    assert (job.runtime.seed, job.runtime.max_steps) == (5, 7)  # type: ignore[attr-defined]
    assert len(Path("r/command.txt").read_text().splitlines()) == 2


def test_resume_without_a_folder_names_the_newest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "run_job", Supervised())
    assert run(["train", "--resume"]) == 2
    assert lines(capsys)[1] == ["error: `--resume` needs `--run-dir`"]
    assert run(["train", "--plain", "--run-dir", "runs/mine"]) == 0
    assert run(["train", "--resume"]) == 2
    assert "hint: the newest run here is `--run-dir runs/mine`" in lines(capsys)[1]
    assert run(["train", "--resume", "--run-dir", "elsewhere"]) == 2


def test_exit_code_of_the_run_is_the_program_s(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RollplexError("mean reward of 10 steps: 0.61")
    error.exit_code = 5
    monkeypatch.setattr(train, "run_job", Supervised(error))
    assert run(["train", "--json", "--run-dir", "r"]) == 5
    assert json.loads(capsys.readouterr().out)["error"] == "mean reward of 10 steps: 0.61"


def test_bench_asks_for_its_baselines_and_has_no_target_to_miss(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised = Supervised()
    monkeypatch.setattr(bench, "run_job", supervised)
    assert run(["bench", "--plain", "--run-dir", "b", "--steps", "4", "--baseline", "colocate"]) == 1
    assert "error: the benchmark left no result: `b/bench_result.json`" in lines(capsys)[1]
    [(job, root)] = supervised.jobs
    assert (job.target, job.runtime.max_steps) == (None, 2 * (1 + 4))  # type: ignore[attr-defined]
    request = json.loads((root / "bench.json").read_text())
    expected = {"baselines": ["colocate"], "steps": 4, "workloads": [], "policies": [], "ablations": []}
    assert request == expected


def test_bench_of_several_policies_needs_no_baseline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised = Supervised(RollplexError("seen"))
    monkeypatch.setattr(bench, "run_job", supervised)
    asked = ["bench", "--plain", "--policy", "auto"]
    for more in ([], ["--policy", "auto"], ["--policy", "serial"], ["--policy", "serial", "--baseline", "colocate"]):
        assert run([*asked, *more, "--run-dir", f"b{len(supervised.jobs)}"]) == 1
    requests = [json.loads((root / "bench.json").read_text()) for _, root in supervised.jobs]
    assert [request["baselines"] for request in requests] == [["colocate"], ["colocate"], [], ["colocate"]]
    assert [request["policies"] for request in requests] == [["auto"], ["auto"], ["auto", "serial"], ["auto", "serial"]]
    capsys.readouterr()


def test_what_cannot_be_ablated_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def said(ablation: str, *overrides: str) -> tuple[int, str]:
        changes = [part for override in overrides for part in ("--set", override)]
        return run(["bench", "--plain", "--ablate", ablation, *changes]), "\n".join(lines(capsys)[1])

    # Without a reference, gradients are what else there is beside the weights.
    one = ("schedule.early_groups=false", "algorithm.kl_coef=0")
    plan = build_plan(load_profile("tiny", [*one]))
    kept = replace(plan.memory_inputs, without=frozenset({"no-kv-release"}))
    budget = (plan.memory.budgeted_bytes + compute_memory(kept).budgeted_bytes) / 2**31
    code, text = said("kv-release", *one, f"memory.budget_gib={budget}")
    assert code == 3 and "`--ablate kv-release` does not fit" in text and "regions per rank: " in text
    assert "`rollplex profile-memory --ablate no-kv-release`" in text
    for ablation, overrides, why in (
        ("reference-release", ["memory.residency=resident"], "`memory.residency: resident` releases nothing"),
        ("reference-release", ["algorithm.kl_coef=0"], "got `algorithm.kl_coef` 0, so there is no reference"),
        ("snapshot-release", [], "a rank holds no rows that only others train"),
        ("early-groups", ["schedule.early_groups=false"], "got `schedule.early_groups` false"),
        ("actor-overlap", ["schedule.policy=serial"], "policy `serial` overlaps nothing"),
        ("vision-reuse", [], "every role runs its own vision tower"),
        ("matched-tp", [], "got `topology.rollout_tp` 1, which is `topology.train_tp` already"),
    ):
        code, text = said(ablation, *overrides)
        assert code == 2 and f"`--ablate {ablation}` would change nothing: {why}" in text and "hint: " in text
    assert run(["bench", "--set", "schedule.name=colocate"]) == 2
    assert "`schedule.name: colocate` is a baseline here" in "\n".join(lines(capsys)[1])
    assert run(["bench", "--policy", "foo"]) == 2
    assert "error: `--policy`: got `foo`" in "\n".join(lines(capsys)[1])
    assert list(tmp_path.iterdir()) == []


def test_bench_halves_the_ranks_for_disagg_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    supervised = Supervised(RollplexError("seen"))
    monkeypatch.setattr(bench, "run_job", supervised)
    asked = ["bench", "--plain", "--run-dir", "b", "--baseline", "disagg"]
    assert run(asked) == 2
    assert "`--baseline disagg`: got 1 rank(s), expected an even number" in "\n".join(lines(capsys)[1])
    assert list(tmp_path.iterdir()) == []
    assert run([*asked, "--set", "topology.ranks_per_node=2", "--set", "schedule.name=disagg"]) == 2
    assert "set `schedule.name` to `rollplex` and add `--baseline disagg`" in "\n".join(lines(capsys)[1])
    four = ["--set", "topology.ranks_per_node=4", "--set", "topology.train_tp=4", "--set", "topology.rollout_tp=4"]
    job = load_profile("tiny", four[1::2])
    assert bench._halved(job)[2:] == ["reuse.vision=false", "topology.train_tp=2", "topology.rollout_tp=2"]
    assert run([*asked, *four]) == 1
    [(first, root)] = supervised.jobs
    assert not first.disaggregated  # type: ignore[attr-defined]
    assert json.loads((root / "bench.json").read_text())["baselines"] == []


def test_the_second_part_of_a_bench_takes_data_and_base_of_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, dict[str, object]]] = []

    def run_job(job: object, _plan: object, folder: RunFolder, *, plain: bool) -> None:
        assert plain
        request = json.loads(folder.bench.read_text())
        seen.append((job.schedule.name, request))  # type: ignore[attr-defined]
        if len(seen) == 1:
            folder.base_dir.mkdir()
            (folder.data_dir / "clip").write_text("frames")
            folder.prepare_status.write_text("done")
        assert folder.base_dir.is_dir() and folder.prepare_status.read_text() == "done"
        assert (folder.data_dir / "clip").read_text() == "frames"
        folder.bench_result.write_text(json.dumps({"part": len(seen), "results": []}))

    monkeypatch.setattr(bench, "run_job", run_job)
    two = ["--set", "topology.ranks_per_node=2", "--set", "topology.train_tp=2"]
    asked = ["bench", "--json", "--run-dir", "b", "--baseline", "colocate", "--baseline", "disagg", "--policy", "auto"]
    assert run([*asked, *two, "--steps", "3"]) == 0
    assert json.loads(lines(capsys)[0]) == {"part": 2, "results": []}
    assert json.loads(Path("b/bench_result.json").read_text())["part"] == 2
    assert [name for name, _ in seen] == ["rollplex", "disagg"]
    first, second = (request for _, request in seen)
    assert (first["baselines"], first["policies"], "beside" in first) == (["colocate"], ["auto"], False)
    assert (second["baselines"], second["policies"], second["steps"]) == ([], [], 3)
    assert second["beside"] == str(Path("b/bench_result.json").resolve())
    resolved = load_profile("b/disagg/profile.yaml")
    assert (resolved.topology.train_tp, resolved.schedule.policy) == (1, "serial")


def test_what_a_bench_measured_is_shown_when_a_later_part_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(job: object, _plan: object, folder: RunFolder, *, plain: bool) -> None:
        assert plain
        if job.schedule.name == "disagg":  # type: ignore[attr-defined]
            raise RunFailedError("rank 1 died")
        folder.base_dir.mkdir()
        folder.prepare_status.write_text("done")
        row = {"workload": "star", "variant": "rollplex", "step_s_median": 1.25}
        folder.bench_result.write_text(json.dumps({"results": [row]}))

    monkeypatch.setattr(bench, "run_job", run_job)
    asked = ["bench", "--plain", "--run-dir", "b", "--baseline", "disagg", "--set", "topology.ranks_per_node=2"]
    assert run(asked) == 1
    out, err = lines(capsys)
    assert "workload star" in out and "1.25" in out
    assert "measured before that: b/bench_result.json" in err and "error: rank 1 died" in err


def test_a_resume_beside_a_running_supervisor_leaves_its_profile_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.profile.write_text(resolved_yaml(load_profile("tiny")))
    before, lock = folder.profile.read_text(), lock_run(folder)
    try:
        assert run(["train", "--resume", "--run-dir", str(folder.root), "--set", "runtime.seed=77"]) == 2
    finally:
        lock.release()
    assert "another process is running in this folder" in capsys.readouterr().err
    assert folder.profile.read_text() == before
    assert not folder.command.exists()
