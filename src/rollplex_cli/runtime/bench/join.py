"""Two results of one benchmark, whose schedules need engines built differently, as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.runtime.bench.result import compare

if TYPE_CHECKING:
    from collections.abc import Mapping

SAME_WORK = ("prompt_tokens", "response_tokens_mean")


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
