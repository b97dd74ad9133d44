"""Several results of one benchmark as one: of workloads, and of schedules that need engines built differently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.runtime.bench.result import compare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAME_WORK = ("prompt_tokens", "response_tokens_mean")
SHARED = ("hardware", "ranks", "model", "pairs", "commit", "command")
"""What the results of all workloads of a benchmark have in common."""


def merge(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result as it is; several with all their rows, and each whole under `workloads`, by the workload's name."""
    if len(results) == 1:
        return dict(results[0])
    shared = {key: results[0][key] for key in SHARED if key in results[0]}
    rows = [row for result in results for row in result["results"]]
    return {**shared, "results": rows, "workloads": {result["results"][0]["workload"]: result for result in results}}


def of_workload(merged: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The result of one workload among those that `merge` put together; a single one as it is.

    Raises:
        RunFailedError: there are several, and none of this workload.
    """
    if "workloads" not in merged:
        return merged
    if name not in merged["workloads"]:
        raise RunFailedError(f"the result to join has no workload `{name}`, only {', '.join(merged['workloads'])}")
    return dict(merged["workloads"][name])


def join(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The first result with the variants of the second, and the ratios of all of them to one another.

    A pair of the second had the prompts and response lengths of the same pair of the first, some minutes later.

    Raises:
        RunFailedError: a pair in which it had not.
    """
    rows = {**first["raw"], **second["raw"]}
    reference = next(iter(first["raw"]))
    for name in second["raw"]:
        for pair, (mine, theirs) in enumerate(zip(rows[reference], rows[name], strict=True), start=1):
            if any(mine[key] != theirs[key] for key in SAME_WORK):
                raise RunFailedError(
                    f"pair {pair} of `{name}` was not the work of `{reference}`: its times say nothing"
                )
    results = []
    for row in (*first["results"], *second["results"]):
        bound = first["bound_s"]
        bound_ratio = row["step_s_median"] / bound if bound else None
        results.append({**row, **compare(row["variant"], rows), "bound_ratio": bound_ratio})
    return {**first, "results": results, "raw": rows}
