from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollplex_cli.plan.build import build_plan, memory_summary, moments_summary
from rollplex_cli.plan.memory import ABLATIONS, ablation_costs
from rollplex_cli.plan.memory.objects import CLASSES
from rollplex_cli.profile.load import load_profile
from rollplex_cli.report.memory.compare import compare, comparison_json, comparison_table
from rollplex_cli.report.memory.plot import COLORS, Panel, draw_memory
from rollplex_cli.report.memory.tables import plan_table


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return memory_summary(build_plan(load_profile("qwen25vl32b")))


def shown(renderable: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(renderable)
    return out.getvalue()


def measured_as_planned(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        phase["name"]: {"peak_bytes": phase["peak_bytes"], "objects": {o["name"]: o["bytes"] for o in phase["objects"]}}
        for phase in summary["phases"]
    }


def test_a_measurement_that_equals_the_plan(summary: dict[str, Any]) -> None:
    rows = compare(summary, measured_as_planned(summary))
    assert [row.name for row in rows] == ["GENERATE", "LEARN", "UPDATE", "PUBLISH"]
    assert all(row.within_tolerance and row.ratio == 1 for row in rows)
    learn = {item.name: item for item in rows[1].objects}
    assert learn["suffix_activations"].planned_bytes == learn["suffix_activations"].measured_bytes
    # An object that is largest at another moment of the phase is compared all the same.
    assert learn["reference_weights"].planned_bytes and learn["reference_weights"].measured_bytes is None


@pytest.mark.parametrize(("factor", "holds"), [(1.049, True), (0.951, True), (1.051, False), (0.949, False)])
def test_five_percent_either_way(summary: dict[str, Any], factor: float, holds: bool) -> None:
    measured = measured_as_planned(summary)
    measured["LEARN"]["peak_bytes"] = round(factor * measured["LEARN"]["peak_bytes"])
    assert compare(summary, measured)[1].within_tolerance is holds


def test_what_only_one_side_knows_is_shown(summary: dict[str, Any]) -> None:
    measured = {"UPDATE": {"peak_bytes": 30 * 2**30, "objects": {"snapshot": 10 * 2**30, "torch_cache": 2**30}}}
    rows = compare(summary, measured)
    (row,) = comparison_json(rows)
    objects = {item["name"]: item for item in row["objects"]}
    assert objects["torch_cache"] == {"name": "torch_cache", "planned_bytes": None, "measured_bytes": 2**30}
    assert objects["gradients"]["measured_bytes"] is None
    assert row["ratio"] == pytest.approx(30 * 2**30 / row["planned_bytes"])
    text = shown(comparison_table(rows))
    assert "torch_cache" in text and "UPDATE" in text
    assert any(line.split() == ["torch_cache", "-", "1.0", "GiB"] for line in text.splitlines())


def test_what_a_run_measures_as_one_is_planned_as_one(summary: dict[str, Any]) -> None:
    learn = {"snapshot": 10 * 2**30, "actor_boundary": 2**31, "activations_and_caches": 40 * 2**30}
    (row,) = compare(summary, {"LEARN": {"peak_bytes": 70 * 2**30, "objects": learn}})
    objects = {item.name: item for item in row.objects}
    suffix = next(m["objects"] for m in summary["moments"] if m["name"] == "actor suffix")
    sizes = {item["name"]: item["bytes"] for item in suffix}
    # Never beside the backward of a prefix.
    together = sizes["suffix_activations"] + sizes["boundary_gradients"]
    assert objects["activations_and_caches"].planned_bytes == together
    assert "suffix_activations" not in objects and objects["gradients"].measured_bytes is None


def test_the_table_fits_a_terminal_with_all_moments() -> None:
    text = shown(plan_table(memory_summary(build_plan(load_profile("tiny"))), "tiny: memory of one rank"))
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[-1].startswith("total")


def test_every_object_has_a_colour() -> None:
    assert set(COLORS) == set(CLASSES)


@pytest.mark.parametrize("with_others", [False, True])
def test_the_picture(tmp_path: Path, summary: dict[str, Any], with_others: bool) -> None:
    costs = ablation_costs(build_plan(load_profile("qwen25vl32b")).memory_inputs, ABLATIONS if with_others else ())
    others = [Panel(title=cost.name, moments=moments_summary(cost.ledger)) for cost in costs]
    path = tmp_path / "memory.png"
    draw_memory(Panel(title="plan", moments=summary["moments"]), others, summary["budget_bytes"], path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_a_picture_without_a_budget(tmp_path: Path) -> None:
    plan = build_plan(load_profile("tiny"))
    draw_memory(Panel(title="tiny", moments=moments_summary(plan.memory)), [], None, tmp_path / "memory.svg")
    assert "prefix activations" not in (tmp_path / "memory.svg").read_text()[:200]
