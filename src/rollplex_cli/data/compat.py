"""A torchvision that imports beside a CPU-only PyTorch.

The published Linux wheels of torchvision carry operators built for CUDA. Beside a CPU build of PyTorch their library
does not load, `torchvision::nms` is never defined, and `import torchvision` raises although the Python part
(the transforms that the Qwen video processor uses) would work. Declaring the missing operators is enough.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_lock = threading.Lock()
# A Library takes its operators away when it is collected, so it lives as long as the process.
_declared: list[Any] = []


def ensure_torchvision() -> None:
    """Make `import torchvision` work; call it before importing processors of transformers.

    Does nothing where torchvision imports by itself. Safe to call often and from several threads.

    Raises:
        ImportError: torchvision is not installed.
    """
    with _lock:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::" not in str(error) or _declared:
                raise
            _declare_operators()
            importlib.import_module("torchvision")


def _declare_operators() -> None:
    import torch

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        library.define(operator + _SIGNATURE)
    _declared.append(library)
