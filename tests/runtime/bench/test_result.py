"""Ratios of a benchmark and how well they are known."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.runtime.bench.join import merge, of_workload
from rollplex_cli.runtime.bench.result import ratio_interval


def test_interval_by_hand() -> None:
    """Logarithms 0 and 0.2: mean 0.1, standard error 0.1, t of one degree of freedom 12.71."""
    found = ratio_interval([1.0, math.exp(0.2)])
    assert found == pytest.approx([math.exp(0.1 - 1.271), math.exp(0.1 + 1.271)])


def test_one_pair_has_no_interval() -> None:
    assert ratio_interval([1.2]) is None


def test_the_inverse_ratio_has_the_inverse_interval() -> None:
    ratios = [1.1, 0.9, 1.3, 1.05]
    low, high = ratio_interval(ratios) or []
    assert ratio_interval([1 / r for r in ratios]) == pytest.approx([1 / high, 1 / low])


@pytest.mark.parametrize("pairs", [2, 4, 8, 16])
def test_it_holds_the_truth_nineteen_times_in_twenty(pairs: int) -> None:
    """Pairs with 3 % of noise around a ratio of 1.1, 4,000 times: 95 % within three standard deviations of 0.34 %."""
    rng, inside, trials = random.Random(pairs), 0, 4000
    for _ in range(trials):
        low, high = ratio_interval([1.1 * math.exp(rng.gauss(0, 0.03)) for _ in range(pairs)]) or (0.0, 0.0)
        inside += low < 1.1 < high
    assert 0.94 < inside / trials < 0.972


def test_results_of_workloads_are_merged_and_found_again() -> None:
    def result(workload: str) -> dict[str, Any]:
        row = {"workload": workload, "variant": "rollplex"}
        return {"results": [row], "hardware": "h", "commit": "c", "raw": {"rollplex": [workload]}}

    one, two = result("star"), result("math")
    assert merge([one]) == one
    merged = merge([one, two])
    assert merged["results"] == one["results"] + two["results"]
    assert (merged["hardware"], "raw" in merged) == ("h", False)
    assert of_workload(merged, "math") == two
    assert of_workload(one, "star") == one
    with pytest.raises(RunFailedError, match="no workload `clevrer`, only star, math"):
        of_workload(merged, "clevrer")
