from __future__ import annotations

import io

from rich.console import Console

from rollplex_cli.report.bench import print_bench

RESULT = {
    "results": [
        {
            "workload": "recorded [/x]",
            "schedule": "colocate",
            "policy": "none",
            "step_s_median": 1.25,
            "step_s_spread": [1.2, 1.375],
            "phase_s": {"GENERATE": 0.5, "LEARN": 0.75},
            "ratio": {"colocate": 1.0},
        },
        {"workload": "recorded [/x]", "schedule": "rollplex", "step_s_median": 1.0, "ratio": {"colocate": 1.25}},
    ],
    "hardware": "2 cores",
    "commit": "abc\x1b[31m",
}


def shown(result: dict[str, object]) -> str:
    out = io.StringIO()
    print_bench(result, Console(file=out, width=120))
    return out.getvalue()


def test_rows_phases_and_ratios_are_shown() -> None:
    text = shown(RESULT)
    rollplex = next(line for line in text.splitlines() if "rollplex" in line)
    assert "1.000" in rollplex
    assert "1.25" in rollplex
    # This row has no phases and no policy.
    assert rollplex.count(" - ") >= 3
    assert "1.200 .. 1.375" in text
    assert "recorded [/x]" in text
    assert "x colocate" in text
    assert "commit: abc\\x1b[31m" in text


def test_an_empty_result_is_an_empty_table() -> None:
    assert "workload" in shown({})
