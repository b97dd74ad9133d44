"""torchvision imports, often and from a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollplex_cli.data.compat import ensure_torchvision


def test_transforms_work_after_it() -> None:
    ensure_torchvision()
    ensure_torchvision()
    import torch
    from torchvision.transforms.v2 import functional

    assert functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)


@pytest.mark.scenario
def test_importing_the_module_loads_neither() -> None:
    code = "import sys, rollplex_cli.data.compat; print({'torch', 'torchvision'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "set()"
