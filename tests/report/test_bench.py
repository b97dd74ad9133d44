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
