"""The same tiny model as the trainer's tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_path = Path(__file__).parent.parent / "trainer" / "conftest.py"
_spec = importlib.util.spec_from_file_location("tiny_qwen_fixtures", _path)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

tiny = _module.tiny
_one_thread = _module._one_thread
