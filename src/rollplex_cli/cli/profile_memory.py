"""`rollplex profile-memory`: what lies in memory when, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.output import print_json, set_json_mode, stdout_console
from rollplex_cli.core.errors import DoesNotFitError, UsageError
from rollplex_cli.core.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from rollplex_cli.plan.build import Plan
    from rollplex_cli.plan.memory import Ablation
    from rollplex_cli.plan.weights import WeightSharing
    from rollplex_cli.profile.schema import Profile

AblateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ablate",
        metavar="NAME",
        help="What leaving a measure out would cost: `no-kv-release`, `no-reference-release`, `no-snapshot-release`, "
        "`no-optimizer-chunks`, or `naive` for all of them. Repeatable.",
    ),
]


def profile_memory(
    profile: options.ProfileOption = options.DEFAULT_PROFILE,
    set_: options.SetOption = None,
    as_json: options.JsonOption = False,
    ablate: AblateOption = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the plan, and what `--ablate` names beside it.")
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", min=0, metavar="N", help="Open N prompts of the data; plan for the longest too."),
    ] = 0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run a step at the profile's limits here; show it beside the plan.")
    ] = False,
    run_dir: options.RunDirOption = None,
    weights: Annotated[bool, typer.Option("--weights", help="Show how both engines share the weights.")] = False,
) -> None:
    """Print the memory plan of one rank: every object at every moment of a step.

    Upper bounds from the profile's limits. Exits 3 if the plan exceeds `memory.budget_gib` or
    `memory.host_budget_gib`, and says what the smallest change would be.
    """
    from rollplex_cli.plan.build import VALUE_BYTES, memory_summary
    from rollplex_cli.plan.fit import Machine, advice_for, advice_text, memory_reasons

    set_json_mode(as_json)
    measures = _ablations(ablate or [])
    job, plan, machine = options.load(profile, set_)
    if weights:
        _print_weights(plan, VALUE_BYTES[job.model.dtype], as_json=as_json)
        return
    summary = memory_summary(plan)
    summary["early_groups"] = _with_and_without_early_groups(plan)
    summary["ablations"] = _costs(plan, measures)
    if samples:
        summary["longest_sample"] = _longest_sample(job, samples)
    # Against the budgets alone: this may be another machine than the one that runs the job.
    reasons, advice = memory_reasons(plan, Machine()), advice_for(plan, Machine())
    summary["fits"] = not reasons
    summary["advice"] = None if advice is None else advice.to_dict()
    if plot is not None:
        _draw(plan, measures, plot)
    if measure:
        options.require_fit(plan, machine)
        summary["measured"] = _measured(job, plan, summary, run_dir, as_json=as_json)
    if as_json:
        print_json(summary)
    else:
        _print(plan, summary)
    if reasons:
        # The document on stdout already says so; a second one would not be JSON any more.
        set_json_mode(False)
        raise DoesNotFitError(
            "the plan exceeds the profile's memory budget" + "".join(f"\n  {reason}" for reason in reasons),
            hint=None if advice is None else advice_text(advice),
        )


def _ablations(names: list[str]) -> tuple[Ablation, ...]:
    from rollplex_cli.plan.memory import ABLATIONS

    known = {str(name): name for name in ABLATIONS}
    for name in names:
        if name not in known:
            raise UsageError(
                f"no such measure to leave out: `{name}`", hint=f"measures are {', '.join(f'`{n}`' for n in known)}"
            )
    return tuple(dict.fromkeys(known[name] for name in names))


def _measured(
    job: Profile, plan: Plan, summary: dict[str, Any], run_dir: Path | None, *, as_json: bool
) -> list[dict[str, Any]]:
    """What a step held on this machine beside the plan, by phase. Without `as_json` also as a table.

    Raises:
        RollplexError: what the step ended with.
    """
    from rollplex_cli.cli.measure import measure
    from rollplex_cli.report.memory.compare import compare, comparison_json, comparison_table

    rows = compare(summary, measure(job, plan, run_dir, plain=as_json))
    if not as_json:
        console = stdout_console()
        console.print(comparison_table(rows))
        if plan.device == "cpu":
            console.print("On a CPU only regions and boundaries are measured: PyTorch's memory is the process's.")
        console.print()
    return comparison_json(rows)


def _with_and_without_early_groups(plan: Plan) -> dict[str, int]:
    from dataclasses import replace

    from rollplex_cli.plan.memory import compute_memory

    inputs = plan.memory_inputs
    on = replace(inputs, early_groups=inputs.overlap)
    off = replace(inputs, early_groups=False)
    return {"on_peak_bytes": compute_memory(on).peak_bytes, "off_peak_bytes": compute_memory(off).peak_bytes}


def _costs(plan: Plan, measures: tuple[Ablation, ...]) -> list[dict[str, Any]]:
    from rollplex_cli.plan.memory import PHASES, ablation_costs

    budget = plan.budget_bytes
    return [
        {
            "name": cost.name,
            "peak_bytes": cost.ledger.peak_bytes,
            "extra_bytes": cost.extra_bytes,
            "fits": budget is None or cost.ledger.budgeted_bytes <= budget,
            "phases": [{"name": phase, "peak_bytes": cost.ledger.phase_bytes(phase)} for phase in PHASES],
        }
        for cost in ablation_costs(plan.memory_inputs, measures)
    ]


def _longest_sample(job: Profile, samples: int) -> dict[str, Any]:
    """Length of the longest of some prompts of the task's data, and the plan's peak with it.

    Raises:
        DataError: the data cannot be read, or holds no prompt.
    """
    from dataclasses import replace

    from rollplex_cli.launch.check.data import longest_prompt
    from rollplex_cli.plan.build import build_plan

    found = longest_prompt(job, samples)
    longest = replace(job, data=replace(job.data, max_prompt_tokens=found["tokens"]))
    ledger = build_plan(longest).memory
    return {**found, "peak_bytes": ledger.peak_bytes, "kv_sequences": ledger.kv.sequences}


def _draw(plan: Plan, measures: tuple[Ablation, ...], path: Path) -> None:
    from rollplex_cli.plan.build import moments_summary
    from rollplex_cli.plan.memory import ablation_costs
    from rollplex_cli.report.memory.plot import Panel, draw_memory

    peak = format_bytes(plan.memory.peak_bytes)
    planned = Panel(title=f"{plan.profile_name}: {peak} at the peak", moments=moments_summary(plan.memory))
    others = [
        Panel(title=cost.name, moments=moments_summary(cost.ledger))
        for cost in ablation_costs(plan.memory_inputs, measures)
    ]
    try:
        # On a CPU the budget counts what lies in regions, which is not what is drawn.
        draw_memory(planned, others, plan.budget_bytes if plan.memory_inputs.on_gpu else None, path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the picture `{path}`: {error}") from error


def _print(plan: Plan, summary: dict[str, Any]) -> None:
    from rich.text import Text

    from rollplex_cli.report.memory.tables import ablation_table, plan_lines, plan_table

    console = stdout_console()
    console.print(plan_table(summary, f"{plan.profile_name}: memory of one rank"))
    for line in plan_lines(summary, node_host_bytes=plan.node_host_bytes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if summary["ablations"]:
        console.print()
        console.print(ablation_table(summary))
    console.print()
    console.print("Assumed", style="bold")
    for sentence in summary["assumptions"]:
        console.print(Text(f"- {sentence}", style="dim"), soft_wrap=True)


def _print_weights(plan: Plan, bytes_per_value: int, *, as_json: bool) -> None:
    from rollplex_cli.plan.weights import weight_sharing

    place = plan.topology
    sharing = weight_sharing(plan.model, place.train_tp, place.rollout_tp, bytes_per_value)
    if as_json:
        print_json(sharing.to_dict(plan.model))
        return
    console = stdout_console()
    console.print(_weights_table(plan, sharing))
    for line in _weights_lines(plan, sharing):
        console.print(line, markup=False, highlight=False)


def _weights_table(plan: Plan, sharing: WeightSharing) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = Text(f"{plan.profile_name}: weights at train TP {sharing.train_tp}, rollout TP {sharing.rollout_tp}")
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in ("parameters", "cut by", "training view"):
        table.add_column(column)
    for column in ("share", "on a rank", "received"):
        table.add_column(column, justify="right")
    total = sum(row.parameters for row in sharing.classes)
    for row in sharing.classes:
        received = format_bytes(row.received_bytes) if row.received_bytes else "-"
        share = f"{100 * row.parameters / total:.1f} %"
        table.add_row(row.name, row.split, row.kind, share, format_bytes(row.shard_bytes), received)
    return table


def _weights_lines(plan: Plan, sharing: WeightSharing) -> list[str]:
    from rollplex_cli.plan.weights import KINDS, PAPER, is_of_the_paper

    shares = " / ".join(f"{sharing.percent_of(kind):.1f}" for kind in KINDS)
    lines = [
        f"{' / '.join(KINDS)}: {shares} % of all parameters",
        f"extra     {format_bytes(sharing.extra_bytes)} a rank for the second view; a second copy would take "
        f"{format_bytes(sharing.second_copy_bytes)}",
        f"publish   {format_bytes(sharing.received_bytes)} received a rank, "
        f"{format_bytes(sharing.staging_bytes)} staged meanwhile",
    ]
    if is_of_the_paper(plan.model, sharing):
        percents = " / ".join(str(PAPER[f"{kind}_percent"]) for kind in KINDS)
        lines.append(
            f"paper     {percents} %, {PAPER['extra_gib']} GiB extra instead of {PAPER['second_copy_gib']} GiB"
        )
    return lines
