"""The process around SGLang: versions, environment and stand-ins that must exist before its first import.

Nothing in this file imports sglang at module level, so it can be read without paying for it. Every other file
of this package that names sglang is imported only after `import_sglang` has run.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
import types
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollplex_cli.core.errors import ClusterError
from rollplex_cli.core.imports import without_collector
from rollplex_cli.data.compat import ensure_torchvision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollplex_cli.plan.families import Family

Device = Literal["cpu", "cuda"]

SUPPORTED_VERSION = "0.5.16"
"""The patches in `patches.py` name internals of exactly this version."""

_lock = threading.Lock()
_imported_for: Device | None = None


def import_sglang(device: Device) -> None:
    """Import SGLang once per process, prepared for `device`.

    Raises ClusterError when SGLang is missing, of another version, cannot be loaded, or was already imported
    for the other device: which kernels its modules bind is decided while they are imported.
    """
    global _imported_for
    with _lock:
        if _imported_for == device:
            return
        if _imported_for is not None:
            raise ClusterError(f"this process already hosts SGLang for another device: `{_imported_for}`")
        check_version()
        with without_collector():
            _import(device)
        _imported_for = device


def check_version() -> None:
    """Raise ClusterError unless the installed SGLang is the one the patches were written for."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ClusterError("SGLang is not installed: `sglang`", hint=f"install `sglang=={SUPPORTED_VERSION}`") from None
    if found != SUPPORTED_VERSION:
        raise ClusterError(
            f"SGLang must be version `{SUPPORTED_VERSION}`, found: `{found}`",
            hint=f"install `sglang=={SUPPORTED_VERSION}`",
        )


def _import(device: Device) -> None:
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(_model_files()))
    ensure_torchvision()
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        _stub_sgl_kernel()
        _stub_triton()
    else:
        # No FlashInfer kernel is used; with this off SGLang asks for its names only.
        os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
    with _logging_untouched(), _no_compile(enabled=device == "cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that this device does not have
        importlib.import_module("sglang.srt.managers.scheduler")
        if device == "cpu":
            # The scheduler imports it when it loads a model, which would be outside of `_no_compile`.
            importlib.import_module("sglang.srt.model_executor.model_runner")
        importlib.import_module("sglang.srt.models.registry")
    logging.getLogger("sglang").setLevel(logging.WARNING)


def load_model_class(family: Family) -> None:
    """Import SGLang's model of `family` and register it; a second call does nothing. After `import_sglang`.

    The registry itself would import every model file and swallow what goes wrong.

    Raises:
        ClusterError: the file does not load here.
    """
    models = importlib.import_module("sglang.srt.models.registry").ModelRegistry.models
    if family.model_class in models:
        return
    with _logging_untouched(), _no_compile(enabled=_imported_for == "cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            file = importlib.import_module(f"sglang.srt.models.{family.rollout_file}")
            models[family.model_class] = getattr(file, family.model_class)
        except (ImportError, AttributeError) as error:
            raise ClusterError(f"SGLang could not load its model `{family.model_class}`: {error}") from error


def _model_files() -> list[str]:
    """Model files of SGLang, none of which the registry need import (a second and more at start-up)."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent / "srt" / "models"
    return sorted(p.stem for p in folder.glob("*.py") if p.stem not in {"__init__", "registry"})


@contextmanager
def _logging_untouched() -> Iterator[None]:
    """Importing a library must not add handlers to the root logger or change its level."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def _no_compile(*, enabled: bool) -> Iterator[None]:
    """`torch.compile` as a decorator gives back what it decorates inside: no C++ compiler at run time, and no import of
    the inductor, two of the twelve CPU seconds in which a rank of the tiny model was built."""
    if not enabled:
        yield
        return
    import torch

    def plain(model: Any = None, **_settings: Any) -> Any:
        return (lambda function: function) if model is None else model

    compile_ = torch.compile
    torch.compile = plain
    try:
        yield
    finally:
        torch.compile = compile_


class _AnyName(types.ModuleType):
    """A module that has every public name; calling one is an error, importing it is not."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: object, **_kwargs: object) -> None:
            raise RuntimeError(f"there is no CPU kernel `{name}` in this process")

        return missing


def _stub_sgl_kernel() -> None:
    """SGLang's kernel package exists for CUDA only; on the CPU its names are imported and never called.

    It replaces an installed one as well: the CPU path must be the same PyTorch code on every machine.
    """
    sys.modules["sgl_kernel"] = _AnyName("sgl_kernel")


def _stub_triton() -> None:
    """Where Triton is absent, SGLang's own stand-in for it lets kernel definitions be imported."""
    if importlib.util.find_spec("triton") is not None:
        return
    # PyTorch must have decided that there is no Triton before a module of that name appears.
    for name in ("torch.utils._triton", "torch._inductor.runtime.triton_compat"):
        module = importlib.import_module(name)
        for probe in ("has_triton_package", "has_triton"):
            if hasattr(module, probe):
                getattr(module, probe)()
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "_triton_stub.py"
    stub_spec = importlib.util.spec_from_file_location("_sglang_triton_stub", path)
    assert stub_spec is not None
    assert stub_spec.loader is not None
    stub = importlib.util.module_from_spec(stub_spec)
    stub_spec.loader.exec_module(stub)
    stub.install()
