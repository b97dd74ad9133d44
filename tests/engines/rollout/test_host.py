"""What is refused before SGLang is imported, and that reading the contract costs nothing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from rollplex_cli.core.errors import ClusterError
from rollplex_cli.engines.rollout import host
from rollplex_cli.plan.families import FAMILIES


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.5.17")
    with pytest.raises(ClusterError, match=r"0\.5\.17") as caught:
        host.check_version()
    assert caught.value.exit_code == 4
    assert "0.5.16" in str(caught.value.hint)


def test_a_missing_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ClusterError, match="not installed"):
        host.check_version()


def test_the_other_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_imported_for", "cuda")
    with pytest.raises(ClusterError, match="another device"):
        host.import_sglang("cpu")


def test_every_family_has_its_file_and_no_other_file_is_imported() -> None:
    files = host._model_files()
    assert len(files) > 100
    assert {family.rollout_file for family in FAMILIES.values()} <= set(files)


def test_the_contract_imports_no_engine() -> None:
    code = (
        "import sys, rollplex_cli.engines.rollout.base, rollplex_cli.engines.rollout.args;"
        "print(sorted(m for m in ('torch', 'sglang', 'transformers', 'numpy') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.scenario
def test_hosting_is_silent_and_patches_find_their_names() -> None:
    """In a fresh interpreter: nothing on stdout or stderr, no thread, no handler; every patch applies."""
    code = """
import importlib, logging, signal, sys, threading
before = [signal.getsignal(s) for s in range(1, 32)]
from rollplex_cli.engines.rollout import host
host.import_sglang("cpu")
from rollplex_cli.engines.rollout import patches
patches.apply("cpu", "qwen2_5_vl")
patches.apply("cpu", "qwen2_5_vl")
wanted = [p for p in patches.PATCHES if "cpu" in p.devices]
assert patches._applied == {p.target for p in wanted if p.model_type in (None, "qwen2_5_vl")}
for patch in patches.PATCHES:  # those of the other device name things that exist, too
    module, _, path = patch.target.partition(":")
    owner = importlib.import_module(module)
    for name in path.split("."):
        owner = getattr(owner, name)
    assert patch.reason
assert threading.active_count() == 1
assert not logging.getLogger().handlers
assert before == [signal.getsignal(s) for s in range(1, 32)]
import torch
positions = importlib.import_module("sglang.srt.models.utils").RotaryPosMixin.rot_pos_ids
assert positions(torch.tensor(4), torch.tensor(8), 2) is positions(torch.tensor(4), torch.tensor(8), 2)
assert positions(4, 8, 2).shape == (32, 2)
assert not torch._dynamo.config.disable
from rollplex_cli.plan.families import FAMILIES
registry = importlib.import_module("sglang.srt.models.registry").ModelRegistry
for family in FAMILIES.values():
    host.load_model_class(family)
    assert registry.models[family.model_class].__name__ == family.model_class
assert set(registry.models) == {family.model_class for family in FAMILIES.values()}, registry.models
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
