"""One copy of the weights: the trainer's parameters become views of the rollout engine's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.engines.weights.names import VOCAB_ROWS
from rollplex_cli.engines.weights.shards import Placement, ShardPlan, plan_shards

if TYPE_CHECKING:
    from collections.abc import Mapping

ViewKind = Literal["identical", "view", "rebuilt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewEntry:
    """One trainer parameter inside a rollout tensor."""

    hf_name: str
    rollout_name: str
    kind: ViewKind
    """`identical`: a run of the rollout tensor's bytes (all of it, or some of its rows); `view`: some of its columns,
    with its row stride; `rebuilt`: a copy of its own."""
    first_element: int
    """Offset in the rollout tensor."""
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


def bind_views(hf_model: Any, rollout_params: Mapping[str, torch.Tensor], plan: ShardPlan | None = None) -> ViewTable:
    """Point every parameter of the trainer's module into the rollout tensors of the same rank.

    No bytes are copied or written. The module may be on the meta device (`skeleton.build_shards`). Its vision MLPs
    must have the padded width. Gradients stay enabled on the parameters as they were.

    Args:
        hf_model: a model of transformers, or its shard of `build_shards`.
        rollout_params: the rollout engine's contiguous parameters by its own names; a tied `lm_head` may be present.
        plan: the rank's plan; None for a whole model in whole tensors.

    Raises:
        RunFailedError: a parameter without a home, a rollout tensor nobody views, or shapes that do not fit; the
            message names all of them.
    """
    params = dict(hf_model.named_parameters())
    faults: list[str] = []
    if plan is None:
        plan = _whole_plan(hf_model, params)
    faults += [f"unexpected trainer parameter `{name}`" for name in params if name not in plan.placements]
    faults += _home_faults(plan, params, rollout_params)
    if faults:
        raise RunFailedError("trainer and rollout weights do not fit: " + "; ".join(faults))
    replacements: dict[int, torch.nn.Parameter] = {}
    entries = []
    for name, param in params.items():
        placement = plan.placements[name]
        home = rollout_params[placement.home].detach()
        view = view_of(home, placement)
        replacements[id(param)] = _point(param, view)
        entries.append(_entry(placement, home, view))
    for module in hf_model.modules():
        for name, own in list(module._parameters.items()):
            if own is not None and replacements[id(own)] is not own:
                module._parameters[name] = replacements[id(own)]
    table = ViewTable(tuple(entries))
    check_views(hf_model, table, rollout_params)
    return table


def view_of(home: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The parameter's part of its rollout tensor; strided where it is some of its columns."""
    return home[placement.home_box.slices()]


def check_views(hf_model: Any, table: ViewTable, rollout_params: Mapping[str, torch.Tensor]) -> None:
    """Assert that every parameter still lies inside its rollout tensor, at its place."""
    params = dict(hf_model.named_parameters())
    for entry in table.entries:
        home, param = rollout_params[entry.rollout_name], params[entry.hf_name]
        assert param.data_ptr() == home.data_ptr() + entry.first_element * home.element_size(), entry.hf_name
        assert tuple(param.shape) == entry.shape and param.dtype == home.dtype, entry.hf_name


def _whole_plan(hf_model: Any, params: Mapping[str, torch.Tensor]) -> ShardPlan:
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    try:
        return plan_shards(hf_model.config, shapes)
    except KeyError as error:
        raise RunFailedError(f"unexpected trainer parameter `{error.args[0]}`") from error


def _point(param: torch.nn.Parameter, view: torch.Tensor) -> torch.nn.Parameter:
    if param.is_meta:
        return torch.nn.Parameter(view, requires_grad=param.requires_grad)
    param.data = view
    return param


def _entry(placement: Placement, home: torch.Tensor, view: torch.Tensor) -> ViewEntry:
    return ViewEntry(
        hf_name=placement.name,
        rollout_name=placement.home,
        kind="identical" if view.is_contiguous() else "view",
        first_element=(view.data_ptr() - home.data_ptr()) // home.element_size(),
        shape=tuple(view.shape),
        bytes=view.numel() * view.element_size(),
    )


def _home_faults(
    plan: ShardPlan, params: Mapping[str, torch.Tensor], rollout_params: Mapping[str, torch.Tensor]
) -> list[str]:
    faults = []
    for name, placement in plan.placements.items():
        if placement.home not in rollout_params:
            faults.append(f"`{name}` needs the rollout tensor `{placement.home}`, which is missing")
        if name not in params:
            faults.append(f"the trainer's module has no parameter `{name}`")
        elif tuple(params[name].shape) != placement.box.shape:
            faults.append(f"`{name}` has shape {tuple(params[name].shape)}, its shard has {placement.box.shape}")
    faults += [f"nobody views the rollout tensor `{name}`" for name in sorted(_orphans(plan, rollout_params))]
    dtypes = {placement.home: params[name].dtype for name, placement in plan.placements.items() if name in params}
    for home_name, parts in plan.homes.items():
        if home_name in rollout_params:
            faults += _shape_faults(home_name, rollout_params[home_name], parts, dtypes.get(home_name))
    return faults


def _orphans(plan: ShardPlan, rollout_params: Mapping[str, torch.Tensor]) -> set[str]:
    """Rollout tensors without a viewer, aliases of viewed ones (a tied head) excepted."""
    viewed = {rollout_params[name].data_ptr() for name in plan.homes if name in rollout_params}
    return {name for name, t in rollout_params.items() if name not in plan.homes and t.data_ptr() not in viewed}


def _shape_faults(home_name: str, home: torch.Tensor, parts: Any, dtype: torch.dtype | None) -> list[str]:
    rows = parts[-1].first_row + parts[-1].rows
    wanted = (rows, *parts[0].box.shape[1:])
    # A hand-made or older engine may pad the vocabulary further: nobody reads those rows here.
    enough = home.shape[0] >= rows if home_name in VOCAB_ROWS else home.shape[0] == rows
    faults = []
    if not (enough and tuple(home.shape[1:]) == wanted[1:]):
        faults.append(f"the rollout tensor `{home_name}` has shape {tuple(home.shape)}, the trainer needs {wanted}")
    if not home.is_contiguous():
        faults.append(f"the rollout tensor `{home_name}` is not contiguous")
    if dtype is not None and home.dtype != dtype:
        faults.append(f"the rollout tensor `{home_name}` has type {home.dtype}, the trainer needs {dtype}")
    return faults
