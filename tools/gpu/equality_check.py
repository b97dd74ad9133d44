"""What steps give under each schedule, sharing policy and reuse, from the same weights, against run-to-run noise.

    python tools/gpu/equality_check.py --out equality.json                     20 steps of the tiny model, one GPU
    python tools/gpu/equality_check.py --device cpu --steps 2                  the same on the CPU, bit-equal

`serial` runs twice: what differs between the two is noise of the device (kernels that add in no fixed order, and the
tokens that are then sampled otherwise). A case is equal within noise if its losses, gradient norms and updated weights
are no further from the first run than NOISE_FACTOR times the second is. Reuse of what another set of kernels computed
is not exact: how far it is away is printed, and not judged. Each case also prints the difference of rollout and trainer
log-probs, mean over the steps of its first and second half.

A table on stdout, one line of JSON last. Exit code 0 when all exact cases are equal within noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "memory"))

from memory_growth import overrides  # noqa: E402

from rollplex_cli.core.paths import RunFolder  # noqa: E402
from rollplex_cli.profile.sharing import parse_policy  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollplex_cli.runtime.assembly.rank import Rank

EXACT: dict[str, tuple[str, str, bool]] = {
    "serial": ("rollplex", "serial", True),
    "serial again": ("rollplex", "serial", True),
    "colocate": ("colocate", "serial", True),
    "auto": ("rollplex", "auto", True),
    "streams": ("rollplex", "streams", True),
    "priority": ("rollplex", "priority", True),
    "fence:16": ("rollplex", "fence:16", True),
    "no early groups": ("rollplex", "priority", False),
}
"""Case to (schedule, policy, early groups)."""
REUSED = {"rollout_prefix": {"rollout_prefix": True}, "vision": {"vision": True}}
"""Case to what is reused; schedule and policy are those of `auto`."""
FIRST, NOISE = "serial", "serial again"
NOISE_FACTOR = 3.0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--case", action="append", help="repeatable, beside the two of `serial` [default: all]")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    known = [*EXACT, *REUSED]
    unknown = [name for name in arguments.case or [] if name not in known]
    if unknown or arguments.steps < 2:
        parser.error(f"cases are: {', '.join(known)}; `--steps` is 2 or more")
    return arguments


def run_case(rank: Rank, name: str, steps: int, initial: Mapping[str, Any]) -> dict[str, Any]:
    """`steps` steps from the initial state: a list of each figure, and the updated weights on the host in float32."""
    from rollplex_cli.engines.inputs import build_prompt_input
    from rollplex_cli.runtime.bench.run import NOTHING_REUSED
    from rollplex_cli.runtime.executor.schedules import schedule_from
    from rollplex_cli.runtime.step import run_step

    rank.trainer_lane.submit(lambda: rank.engines.actor.load_state_dict(dict(initial))).result()
    rank.rollout_lane.submit(rank.engines.rollout.publish).result()
    schedule_name, policy, early = EXACT.get(name, ("rollplex", "auto", True))
    reuse = dataclasses.replace(NOTHING_REUSED, **REUSED.get(name, {}))
    rank.sharing.follow(parse_policy(policy))
    schedule = schedule_from(schedule_name, early_groups=early, prefixes_in_flight=0)
    rows = []
    for step in range(1, steps + 1):
        rank.control.step = step
        inputs = [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(step - 1)]
        profile = dataclasses.replace(rank.profile, reuse=reuse)
        rows.append(run_step(rank, step, inputs, schedule, profile=profile).row)
    return {
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
        "logprob_diff": [row["logprob_diff_mean"] for row in rows],
        "response_tokens": [row["response_tokens_mean"] for row in rows],
        "weights": weights(rank),
    }


def weights(rank: Rank) -> dict[str, Any]:
    """The published weights on the host, in their own dtype."""
    found = rank.rollout_lane.submit(rank.engines.rollout.parameters).result()
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """L2 norm of the difference of all weights."""
    return float(sum((a[name].double() - b[name].double()).square().sum().item() for name in a) ** 0.5)


def compare(case: Mapping[str, Any], first: Mapping[str, Any], moved: float) -> dict[str, float]:
    """Largest differences of a case to the first run; weights over how far the first run moved them."""
    half = len(case["logprob_diff"]) // 2
    pairs = zip(case["grad_norms"], first["grad_norms"], strict=True)
    return {
        "loss": max(abs(a - b) for a, b in zip(case["losses"], first["losses"], strict=True)),
        "grad_norm_relative": max(abs(a - b) / max(b, 1e-12) for a, b in pairs),
        "first_step_grad_norm_relative": abs(case["grad_norms"][0] / max(first["grad_norms"][0], 1e-12) - 1),
        "weights_relative": distance(case["weights"], first["weights"]) / max(moved, 1e-12),
        "logprob_diff_first_half": statistics.fmean(case["logprob_diff"][:half]),
        "logprob_diff_second_half": statistics.fmean(case["logprob_diff"][half:]),
    }


JUDGED = ("loss", "grad_norm_relative", "weights_relative")


def main() -> int:
    """Run the cases, print, judge."""
    from rollplex_cli.profile.dump import resolved_yaml
    from rollplex_cli.profile.load import load_profile
    from rollplex_cli.runtime.assembly.build import open_control, open_rank
    from rollplex_cli.runtime.prepare import prepare

    arguments = parse()
    names = list(dict.fromkeys([FIRST, NOISE, *(arguments.case or [*EXACT, *REUSED])]))
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        run.make()
        more = ("schedule.prefix_activations=recompute", "optimizer.warmup_steps=0", "algorithm.kl_coef=0.05")
        profile = load_profile("tiny", overrides(arguments, Path(folder), 1, *more))
        run.profile.write_text(resolved_yaml(profile), encoding="utf-8")
        prepare(run)
        with open_control(run, 0) as (control, machine), open_rank(run, control, machine) as rank:
            state = rank.trainer_lane.submit(rank.engines.actor.state_dict).result()
            initial = {name: tensor.clone() for name, tensor in state.items()}
            before = weights(rank)
            found = {}
            for name in names:
                found[name] = run_case(rank, name, arguments.steps, initial)
                print(f"{name}: done", file=sys.stderr, flush=True)
    moved = distance(found[FIRST]["weights"], before)
    rows = {name: compare(case, found[FIRST], moved) for name, case in found.items()}
    noise = rows[NOISE]
    apart = [
        name for name in EXACT if name in rows and any(rows[name][k] > NOISE_FACTOR * noise[k] for k in JUDGED)
    ]  # fmt: skip
    show(rows, names)
    print(f"weights moved by {moved:.4g}; further from the first run than {NOISE_FACTOR:g} x noise: {apart or 'none'}")
    series = {n: {k: v for k, v in case.items() if k != "weights"} for n, case in found.items()}
    result = {
        "device": arguments.device, "steps": arguments.steps, "moved": moved, "compared": rows, "apart": apart,
        "series": series, "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "series"}))
    return int(bool(apart))


def show(rows: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> None:
    """A line per case."""
    heads = ("loss", "|g| rel", "|g| step 1", "weights", "parity", "later")
    print(f"{'against `serial`':<18}" + "".join(f"{head:>11}" for head in heads))
    for name in names:
        print(f"{name:<18}" + "".join(f"{value:>11.3g}" for value in rows[name].values()))


if __name__ == "__main__":
    sys.exit(main())
