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
        {
            "workload": "recorded [/x]",
            "schedule": "rollplex",
            "step_s_median": 1.0,
            "ratio": {"colocate": 1.25},
            "ratio_ci95": {"colocate": [1.125, 1.375]},
        },
    ],
    "hardware": "2 cores",
    "commit": "abc\x1b[31m",
}


def shown(result: dict[str, object]) -> str:
    out = io.StringIO()
    print_bench(result, Console(file=out, width=120))
    return out.getvalue()


def test_schedules_stand_side_by_side() -> None:
    text = shown(RESULT)
    lines = {line.split("\u2502")[1].strip(): line for line in text.splitlines() if "\u2502" in line}
    assert "1.250" in lines["step"]
    assert "1.000" in lines["step"]
    assert "1.25" in lines["times colocate's speed"]
    assert "1.200 .. 1.375" in text
    assert "1.125 .. 1.375" in lines["95 % interval"]
    # The second one has no phases.
    assert " - " in lines["GENERATE"]
    assert "workload recorded [/x]" in text
    assert "commit: abc\\x1b[31m" in text


def test_it_fits_a_narrow_terminal() -> None:
    out = io.StringIO()
    print_bench(RESULT, Console(file=out, width=80))
    assert "lowest .. highest" in out.getvalue()
    assert "\u2026" not in out.getvalue()  # nothing was cut


def test_an_empty_result_says_so() -> None:
    assert "no results" in shown({})


def test_the_update_stands_against_the_link() -> None:
    update = {
        "update_s_median": 0.5,
        "to_device_bytes": 12 << 30,
        "to_host_bytes": 12 << 30,
        "link": {"to_device": 55e9, "to_host": 55e9, "both": 57.3e9},
        "link_s": 0.45,
        "ratio": 1.111,
    }
    text = " ".join(shown({**RESULT, "update": update}).split())
    assert "update: 0.500 s for 12.0 GiB to the device and 12.0 GiB back; the link, 57.3 GB/s both ways" in text
    assert "allows 0.450 s: 1.11 times that" in text
    assert "update:" not in shown({**RESULT, "update": {**update, "link": None, "link_s": None, "ratio": None}})


def test_memory_rates_and_sharing_are_shown_where_they_were_measured() -> None:
    assert "peak memory" not in shown(RESULT) and "co-run" not in shown(RESULT)
    first, second = RESULT["results"]
    figures = {"tokens_per_s": 1833.8, "peak_bytes": 3 << 30, "bound_ratio": 1.25, "logprob_diff_mean": 0.0704}
    measured = {"batch": 8, "reserved_sms": 0, "efficiency": 1.221, "watts": 518.0, "sm_mhz": 1815}
    fenced = {**measured, "reserved_sms": 16, "watts": None}
    text = shown({"results": [{**first, **figures}, second], "bound_s": 1.0, "co_run": [measured, fenced]})
    for part in ("1,834", "3.0 GiB", "1.25", "7.0e-02", "no step takes less than 1.000 s"):
        assert part in text
    assert "co-run efficiency at 8 responses: 1.22 by priority at 518 W, 1815 MHz, 1.22 with 16 SMs fenced" in text
