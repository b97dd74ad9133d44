"""Results of a benchmark's two parts become one."""

from __future__ import annotations

from typing import Any

import pytest

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.runtime.bench.join import join


def part(bound_s: float | None, **seconds: list[float]) -> dict[str, Any]:
    """A result of these variants; pair n has prompts of n + 10 tokens."""
    rows = [
        {"variant": name, "schedule": name, "step_s_median": times[0], "ratio": {}, "bound_ratio": None}
        for name, times in seconds.items()
    ]
    raw = {
        name: [{"step_s": s, "prompt_tokens": [n + 10], "response_tokens_mean": 4.5} for n, s in enumerate(times)]
        for name, times in seconds.items()
    }
    return {"results": rows, "raw": raw, "bound_s": bound_s, "commit": "abc"}


def test_ratios_are_over_the_pairs_of_both_parts() -> None:
    first = part(1.0, rollplex=[2.0, 4.0], colocate=[3.0, 6.0])
    result = join(first, part(None, disagg=[5.0, 8.0]))
    rows = {row["variant"]: row for row in result["results"]}
    assert list(rows) == list(result["raw"]) == ["rollplex", "colocate", "disagg"]
    assert rows["rollplex"]["ratio"] == {"colocate": 1.5, "disagg": (2.5 + 2.0) / 2}
    assert rows["rollplex"]["ratio_spread"]["disagg"] == [2.0, 2.5]
    assert rows["disagg"]["ratio"] == pytest.approx({"rollplex": (0.4 + 0.5) / 2, "colocate": (0.6 + 0.75) / 2})
    assert rows["disagg"]["bound_ratio"] == 5.0
    assert result["commit"] == "abc"


def test_other_work_is_no_baseline() -> None:
    second = part(None, disagg=[5.0, 8.0])
    second["raw"]["disagg"][1]["prompt_tokens"] = [12]
    with pytest.raises(RunFailedError, match="pair 2 of `disagg` was not the work of `rollplex`"):
        join(part(1.0, rollplex=[2.0, 4.0]), second)
