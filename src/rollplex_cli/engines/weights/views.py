"""One copy of the weights: the trainer's parameters become views of the rollout engine's tensors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.engines.weights.names import VOCAB_ROWS, rollout_location

if TYPE_CHECKING:
    from collections.abc import Mapping

ViewKind = Literal["identical", "view", "rebuilt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewEntry:
    """One trainer parameter inside a rollout tensor."""

    hf_name: str
    rollout_name: str
    kind: ViewKind
    """`identical`: the whole tensor; `view`: some of its rows; `rebuilt`: a copy of its own."""
    first_row: int
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class ViewTable:
    """Every trainer parameter, in the module's order. Tied parameters appear once."""

    entries: tuple[ViewEntry, ...]

    def bytes_by_kind(self) -> dict[ViewKind, int]:
        """Bytes of parameters per kind; `rebuilt` is what the second view of the weights costs."""
        totals: dict[ViewKind, int] = {"identical": 0, "view": 0, "rebuilt": 0}
        for entry in self.entries:
            totals[entry.kind] += entry.bytes
        return totals


def bind_views(hf_model: Any, rollout_params: Mapping[str, torch.Tensor]) -> ViewTable:
    """Point every parameter of the Hugging Face module into the rollout tensors (equal TP degrees, q = 1).

    No bytes are copied or written. The module may be on the meta device (`skeleton.build_skeleton`). Its vision MLPs
    must have the padded width. Gradients stay enabled on the parameters as they were.

    Args:
        hf_model: a `Qwen2_5_VLForConditionalGeneration`.
        rollout_params: the rollout engine's contiguous parameters by its own names; a tied `lm_head` may be present.

    Raises:
        RunFailedError: a parameter without a home, a rollout tensor nobody views, or shapes that do not fit; the
            message names all of them.
    """
    plan, faults = _plan(hf_model, rollout_params)
    if faults:
        raise RunFailedError("trainer and rollout weights do not fit: " + "; ".join(faults))
    replacements: dict[int, torch.nn.Parameter] = {}
    for param, view, _ in plan:
        replacements[id(param)] = _point(param, view)
    for module in hf_model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and replacements[id(param)] is not param:
                module._parameters[name] = replacements[id(param)]
    table = ViewTable(tuple(entry for _, _, entry in plan))
    check_views(hf_model, table, rollout_params)
    return table


def check_views(hf_model: Any, table: ViewTable, rollout_params: Mapping[str, torch.Tensor]) -> None:
    """Assert that every parameter still lies inside its rollout tensor, at its row."""
    params = dict(hf_model.named_parameters())
    for entry in table.entries:
        home, param = rollout_params[entry.rollout_name], params[entry.hf_name]
        row_bytes = home.stride(0) * home.element_size()
        assert param.data_ptr() == home.data_ptr() + entry.first_row * row_bytes, entry.hf_name
        assert tuple(param.shape) == entry.shape and param.dtype == home.dtype, entry.hf_name


def _point(param: torch.nn.Parameter, view: torch.Tensor) -> torch.nn.Parameter:
    if param.is_meta:
        return torch.nn.Parameter(view, requires_grad=param.requires_grad)
    param.data = view
    return param


def _plan(
    hf_model: Any, rollout_params: Mapping[str, torch.Tensor]
) -> tuple[list[tuple[torch.nn.Parameter, torch.Tensor, ViewEntry]], list[str]]:
    """(parameter, its view, entry) per parameter in module order, and every fault found."""
    faults: list[str] = []
    stacks: dict[str, dict[int, str]] = defaultdict(dict)
    params = dict(hf_model.named_parameters())
    for name in params:
        try:
            location = rollout_location(name)
        except KeyError:
            faults.append(f"unexpected trainer parameter `{name}`")
            continue
        if location.name not in rollout_params:
            faults.append(f"`{name}` needs the rollout tensor `{location.name}`, which is missing")
            continue
        stacks[location.name][location.part or 0] = name
    faults += [f"nobody views the rollout tensor `{name}`" for name in sorted(_orphans(rollout_params, stacks))]
    planned: dict[str, tuple[torch.nn.Parameter, torch.Tensor, ViewEntry]] = {}
    for home_name, parts in stacks.items():
        row = 0
        home = rollout_params[home_name].detach()
        for part in sorted(parts):
            param = params[parts[part]]
            entry = _entry(parts[part], home_name, param, home, row)
            row += param.shape[0]
            planned[parts[part]] = (param, home[entry.first_row : entry.first_row + param.shape[0]], entry)
        faults += _shape_faults(home_name, home, [params[parts[part]] for part in sorted(parts)])
    return [planned[name] for name in params if name in planned], faults


def _orphans(rollout_params: Mapping[str, torch.Tensor], stacks: Mapping[str, object]) -> set[str]:
    """Rollout tensors without a viewer, aliases of viewed ones (a tied head) excepted."""
    viewed = {rollout_params[name].data_ptr() for name in stacks}
    return {name for name, tensor in rollout_params.items() if name not in stacks and tensor.data_ptr() not in viewed}


def _entry(hf_name: str, home_name: str, param: torch.nn.Parameter, home: torch.Tensor, row: int) -> ViewEntry:
    whole = tuple(param.shape) == tuple(home.shape)
    return ViewEntry(
        hf_name=hf_name,
        rollout_name=home_name,
        kind="identical" if whole else "view",
        first_row=row,
        shape=tuple(param.shape),
        bytes=param.numel() * home.element_size(),
    )


def _shape_faults(home_name: str, home: torch.Tensor, params: list[torch.nn.Parameter]) -> list[str]:
    rows = sum(p.shape[0] for p in params)
    same_rest = all(p.shape[1:] == home.shape[1:] for p in params)
    enough = rows <= home.shape[0] if home_name in VOCAB_ROWS else rows == home.shape[0]
    faults = []
    if not (same_rest and enough):
        wanted = (rows, *params[0].shape[1:])
        faults.append(f"the rollout tensor `{home_name}` has shape {tuple(home.shape)}, the trainer needs {wanted}")
    if not home.is_contiguous():
        faults.append(f"the rollout tensor `{home_name}` is not contiguous")
    if any(p.dtype != home.dtype for p in params):
        faults.append(f"the rollout tensor `{home_name}` has type {home.dtype}, the trainer needs {params[0].dtype}")
    return faults
