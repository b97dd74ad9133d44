from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from rollplex_cli.core.errors import ClusterError
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.torchrun import UNASKED_PORTS, Rendezvous, choose_port, prepare_argv, worker_argv, worker_env
from rollplex_cli.plan.build import build_plan
from rollplex_cli.profile.load import load_profile


def test_command_line_on_one_node(tmp_path: Path) -> None:
    argv = worker_argv(build_plan(load_profile("tiny-2rank")), RunFolder(tmp_path), Rendezvous(port=4711))
    assert argv == [
        sys.executable, "-m", "rollplex_cli.launch.elastic",
        "--master-addr=127.0.0.1", "--master-port=4711", "--max-restarts=0", "--nnodes=1", "--node-rank=0",
        "--nproc-per-node=2", "--signals-to-handle=SIGQUIT", "-m", "rollplex_cli.runtime.worker", str(tmp_path),
    ]  # fmt: skip


def test_command_line_of_a_node_among_several(tmp_path: Path) -> None:
    meeting = Rendezvous(port=4711, address="n1", num_nodes=4, job_id="77")
    argv = worker_argv(build_plan(load_profile("qwen25vl32b")), RunFolder(tmp_path), meeting)
    flags = [part for part in argv if part.startswith("--")]
    assert flags == [
        "--max-restarts=0", "--nnodes=4", "--nproc-per-node=8", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:4711",
        "--rdzv-id=77", "--signals-to-handle=SIGQUIT",
    ]  # fmt: skip


def test_nodes_on_one_machine_need_no_name(tmp_path: Path) -> None:
    meeting = Rendezvous(port=4711, num_nodes=2, job_id="77")
    argv = worker_argv(build_plan(load_profile("tiny", ["topology.num_nodes=2"])), RunFolder(tmp_path), meeting)
    assert "--local-addr=127.0.0.1" in argv
    assert "--rdzv-endpoint=127.0.0.1:4711" in argv


def test_processes_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert prepare_argv(RunFolder(Path("run")))[-1] == str(tmp_path / "run")


def test_environment_of_a_cpu_run_keeps_what_the_user_set() -> None:
    env = worker_env(load_profile("tiny"), {"HOME": "/h", "GLOO_SOCKET_IFNAME": "eth1", "OMP_NUM_THREADS": "64"})
    assert env["HOME"] == "/h"
    assert env["GLOO_SOCKET_IFNAME"] == "eth1"
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert (env["HF_HUB_OFFLINE"], env["TOKENIZERS_PARALLELISM"], env["PYTHONUNBUFFERED"]) == ("1", "false", "1")


def test_environment_of_a_gpu_run_leaves_gpus_and_threads_alone() -> None:
    env = worker_env(load_profile("qwen25vl7b"), {})
    assert not {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"} & set(env)


def test_collectives_of_two_lanes_leave_each_other_room() -> None:
    beside = load_profile("qwen25vl32b")
    assert worker_env(beside, {})["NCCL_MAX_CTAS"] == "32"
    assert worker_env(beside, {"NCCL_MAX_CTAS": "16"})["NCCL_MAX_CTAS"] == "16"
    for alone in (["topology.rollout_tp=1"], ["schedule.name=colocate"], ["topology.device=cpu"]):
        assert "NCCL_MAX_CTAS" not in worker_env(load_profile("qwen25vl32b", alone), {})


def test_collectives_are_not_recorded_twice() -> None:
    profile = load_profile("qwen25vl7b")
    assert worker_env(profile, {})["TORCH_FR_BUFFER_SIZE"] == "0"
    assert worker_env(profile, {"TORCH_FR_BUFFER_SIZE": "9"})["TORCH_FR_BUFFER_SIZE"] == "9"
    older_name = "TORCH_NCCL_TRACE_BUFFER_SIZE"
    assert "TORCH_FR_BUFFER_SIZE" not in worker_env(profile, {older_name: "9"})
    assert "TORCH_FR_BUFFER_SIZE" not in worker_env(load_profile("tiny"), {})


def test_port_in_use_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ClusterError, match=f"the rendezvous port is in use: {port}$") as caught:
            choose_port(port)
    assert caught.value.exit_code == 4
    assert choose_port(port) == port


def test_free_port_is_found() -> None:
    assert 1024 < choose_port(0) < 65536


def test_a_port_of_no_choice_is_none_that_connections_are_given() -> None:
    assert {choose_port(0) in UNASKED_PORTS for _ in range(20)} == {True}
