"""Decode tokens a second of the hosted rollout engine beside SGLang's own engine process.

    python tools/gpu/decode_check.py --out decode.json             7B shape, random weights, batches of 1, 16 and 64
    python tools/gpu/decode_check.py --model tiny --device cpu     the same path with the hosted engines alone

Each side is a process of its own on the same GPU; while one works the others wait. Sides:

    hosted          the product's: a scheduler in this process, running ahead of the GPU, log-probs kept
    in_step         the same, not running ahead
    engine          `sglang.Engine` with its overlap schedule and log-probs returned
    engine_tokens   the same engine without log-probs

All use Triton attention (no FlashAttention-3), the same graph sizes, the same prompts and the same fixed lengths. The
hosted sides sample with the product's seeded sampler, the others with SGLang's `pytorch` backend. A rate is batch x
(L2 - L1) / (seconds for L2 tokens - seconds for L1), so prefill and start-up cancel. Sides take turns, forwards and
backwards. A table on stdout, one line of JSON last. Exit code 1 where `hosted` is slower than 0.95 of `engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

MARK = "@@decode "
GOAL = 0.95
SIDES = {"hosted": "hosted", "in_step": "in_step", "engine": "engine", "engine_tokens": "engine"}
"""Side: the process that runs it."""

if importlib.util.find_spec("uvloop") is None:
    # SGLang's engine asks for it by name; its subprocesses import this file again and find the same stand-in.
    _uvloop = types.ModuleType("uvloop")
    _uvloop.EventLoopPolicy = asyncio.DefaultEventLoopPolicy  # type: ignore[attr-defined]
    _uvloop.__spec__ = importlib.util.spec_from_loader("uvloop", loader=None)
    sys.modules["uvloop"] = _uvloop


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen25vl7b", help="a bundled configuration")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, action="append", help="repeatable [default: 1, 16, 64]")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens between the two lengths")
    parser.add_argument("--repeats", type=int, default=4, help="turns of every side, an even number")
    parser.add_argument("--side", action="append", choices=list(SIDES), help="repeatable [default: all]")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--process", choices=sorted(set(SIDES.values())), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.batch = arguments.batch or [1, 16, 64]
    if arguments.side is None:
        arguments.side = ["hosted", "in_step"] if arguments.device == "cpu" else list(SIDES)
    return arguments


def prompts(arguments: argparse.Namespace, batch: int, seed: int) -> list[list[int]]:
    """Random text tokens [batch][prompt tokens]; every prompt starts otherwise, so none finds another's prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(16, 200) for _ in range(arguments.prompt_tokens)] for _ in range(batch)]


def kv_tokens(arguments: argparse.Namespace) -> int:
    """Room for the largest batch, and some."""
    return int(max(arguments.batch) * (arguments.prompt_tokens + 2 * arguments.new_tokens + 64) + 4096)


# -- the processes that are measured ---------------------------------------------------------------------------------


def serve(arguments: argparse.Namespace) -> None:
    """Answer requests {batch, tokens, seed, logprobs} on stdin with {seconds} on stdout, until stdin ends."""
    build: Callable[[argparse.Namespace], Any] = engine_process if arguments.process == "engine" else hosted_process
    with build(arguments) as generate:
        print(MARK + json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            ids = prompts(arguments, order["batch"], order["seed"])
            seconds, tokens = generate(ids, order["tokens"], order["logprobs"])
            if tokens != order["batch"] * order["tokens"]:
                raise RuntimeError(f"wanted {order['tokens']} tokens each, got {tokens} of {order['batch']} prompts")
            print(MARK + json.dumps({"seconds": seconds}), flush=True)


class hosted_process:  # noqa: N801 - used as a function
    """The product's engine on this thread."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    def __enter__(self) -> Callable[..., tuple[float, int]]:
        import torch

        from rollplex_cli.engines.rollout.args import RolloutOptions
        from rollplex_cli.engines.rollout.engine import SglangRollout
        from rollplex_cli.runtime.assembly.build_rollout import open_single_rank
        from rollplex_cli.runtime.assembly.devices import rollout_stream

        arguments, cuda = self.arguments, self.arguments.device == "cuda"
        if cuda:
            torch.cuda.set_device(0)
        else:
            torch.set_num_threads(1)
        self.group = open_single_rank(arguments.device)
        self.group.__enter__()
        self.engine = SglangRollout(
            RolloutOptions(
                model_dir=arguments.folder,
                load_weights=False,
                device=arguments.device,
                dtype="bfloat16" if cuda else "float32",
                kv_tokens=kv_tokens(arguments),
                max_running_requests=max(arguments.batch),
                stream=rollout_stream() if cuda else None,
                run_ahead=arguments.process == "hosted",
            )
        )
        return self.generate

    def generate(self, ids: list[list[int]], tokens: int, logprobs: bool) -> tuple[float, int]:
        """(seconds, tokens generated); log-probs are always kept."""
        from rollplex_cli.data.types import Prompt, Sample
        from rollplex_cli.engines.inputs import MediaTokens, build_prompt_input
        from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings

        del logprobs
        media = MediaTokens.from_config(json.loads((self.arguments.folder / "config.json").read_text()))
        settings = SamplingSettings(max_new_tokens=tokens, temperature=1.0, ignore_eos=True)
        requests = []
        for group, prompt in enumerate(ids):
            sample = Sample(sample_id=str(group), question="", answer="", kind="")
            inputs = build_prompt_input(Prompt(sample=sample, token_ids=tuple(prompt), media=()), media)
            requests.append(GroupRequest(group=group, input=inputs, seeds=(group,), settings=settings))
        self.engine.publish()
        self.engine.begin_step()
        started, count = time.perf_counter(), 0
        self.engine.submit(requests)
        while self.engine.has_work():
            for result in self.engine.step():
                count += sum(len(response.token_ids) for response in result.responses)
        return time.perf_counter() - started, count

    def __exit__(self, *_error: object) -> None:
        self.engine.close()
        self.group.__exit__(None, None, None)


class engine_process:  # noqa: N801 - used as a function
    """SGLang's engine: scheduler and detokenizer in processes of their own, its tokenizer manager in this one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    def __enter__(self) -> Callable[..., tuple[float, int]]:
        from rollplex_cli.engines.rollout import host
        from rollplex_cli.engines.rollout.args import GRAPH_BATCH_SIZES

        os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
        os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(host._unused_model_files()))
        from sglang.srt.entrypoints.engine import Engine

        arguments, largest = self.arguments, max(self.arguments.batch)
        self.engine = Engine(
            model_path=str(arguments.folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_multimodal=False,  # its processor would want a tokenizer; the prompts are text
            dtype="bfloat16",
            max_running_requests=largest,
            max_total_tokens=kv_tokens(arguments),
            context_length=min(kv_tokens(arguments), 32768),
            chunked_prefill_size=8192,
            max_prefill_tokens=8192,
            page_size=1,
            schedule_policy="fcfs",
            disable_overlap_schedule=False,
            attention_backend="triton",
            mm_attention_backend="triton_attn",
            sampling_backend="pytorch",
            grammar_backend="none",
            cuda_graph_bs_decode=[b for b in GRAPH_BATCH_SIZES if b < largest] + [largest],
            cuda_graph_backend_prefill="disabled",
            mem_fraction_static=0.8,
            random_seed=0,
            log_level="error",
        )
        return self.generate

    def generate(self, ids: list[list[int]], tokens: int, logprobs: bool) -> tuple[float, int]:
        """(seconds, tokens generated)."""
        self.engine.flush_cache()
        settings = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        started = time.perf_counter()
        answers: Any = self.engine.generate(input_ids=ids, sampling_params=settings, return_logprob=logprobs)
        seconds = time.perf_counter() - started
        return seconds, sum(int(answer["meta_info"]["completion_tokens"]) for answer in answers)

    def __exit__(self, *_error: object) -> None:
        self.engine.shutdown()


# -- the one that measures -------------------------------------------------------------------------------------------


class Side:
    """A process being measured."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, started = name, time.monotonic()
        command = [sys.executable, __file__, *sys.argv[1:], "--process", name, "--folder", str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()
        print(f"{name} ready after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    def answer(self) -> dict[str, Any]:
        """The process's next answer; what else it prints goes to stderr."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
            print(line, end="", file=sys.stderr)
        raise SystemExit(f"the process of `{self.name}` ended with code {self.process.wait()}")

    def seconds(self, batch: int, tokens: int, seed: int, logprobs: bool) -> float:
        """Seconds to generate `tokens` tokens for each of `batch` prompts."""
        assert self.process.stdin is not None
        order = {"batch": batch, "tokens": tokens, "seed": seed, "logprobs": logprobs}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return float(self.answer()["seconds"])

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def model_folder(arguments: argparse.Namespace, folder: Path) -> Path:
    """A folder with the configuration of the model, media token ids within its vocabulary."""
    from rollplex_cli.core.resources import model_config_folder
    from rollplex_cli.engines.inputs import MediaTokens

    source = model_config_folder(arguments.model)
    if source is None:
        raise SystemExit(f"no such configuration: `{arguments.model}`")
    values = json.loads((source / "config.json").read_text())
    vocab = (values.get("text_config") or values)["vocab_size"]
    if vocab < MediaTokens.from_config(values).video_token_id:  # the tiny one gets its tokens from its task
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        values |= {name: vocab - 4 + i for i, name in enumerate(names)}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def measure(arguments: argparse.Namespace, sides: dict[str, Side]) -> dict[str, dict[int, list[float]]]:
    """Tokens a second by side and batch, one for each turn."""
    short = 16
    rates: dict[str, dict[int, list[float]]] = {side: {batch: [] for batch in arguments.batch} for side in sides}
    for batch in arguments.batch:
        for turn in range(-1, arguments.repeats):  # the first one warms up: kernels are built when first used
            for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
                taken = [
                    sides[name].seconds(batch, tokens, 100 * turn + batch, name != "engine_tokens")
                    for tokens in (short, short + arguments.new_tokens)
                ]
                rate = batch * arguments.new_tokens / (taken[1] - taken[0])
                if turn >= 0:
                    rates[name][batch].append(rate)
                print(f"batch {batch} turn {turn} {name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
    return rates


def summary(arguments: argparse.Namespace, rates: dict[str, dict[int, list[float]]]) -> list[dict[str, Any]]:
    """One row per batch: medians, and the ratios of `hosted` with their confidence intervals."""
    from rollplex_cli.runtime.bench.result import ratio_interval

    rows = []
    for batch in arguments.batch:
        row: dict[str, Any] = {
            "batch": batch,
            "tokens_per_s": {side: statistics.median(own[batch]) for side, own in rates.items()},
            "raw": {side: own[batch] for side, own in rates.items()},
            "hosted_over": {},
        }
        for side, own in rates.items():
            if side != "hosted" and "hosted" in rates:
                ratios = [a / b for a, b in zip(rates["hosted"][batch], own[batch], strict=True)]
                row["hosted_over"][side] = {"median": statistics.median(ratios), "ci95": ratio_interval(ratios)}
        rows.append(row)
    return rows


def main() -> int:
    """Run all sides in turn."""
    arguments = parse()
    if arguments.process:
        serve(arguments)
        return 0
    processes: dict[str, Side] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = model_folder(arguments, Path(work))
        try:
            for side in arguments.side:
                if SIDES[side] not in processes:
                    processes[SIDES[side]] = Side(SIDES[side], folder)
            rates = measure(arguments, {side: processes[SIDES[side]] for side in arguments.side})
        finally:
            for process in processes.values():
                process.close()
    rows = summary(arguments, rates)
    result = {
        "model": arguments.model, "device": arguments.device, "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens, "attention": "triton", "results": rows, "commit": revision(),
        "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip
    for row in rows:
        print(f"batch {row['batch']}: " + ", ".join(f"{s} {v:.1f} tokens/s" for s, v in row["tokens_per_s"].items()))
        for side, ratio in row["hosted_over"].items():
            interval = ratio["ci95"] and " .. ".join(f"{end:.3f}" for end in ratio["ci95"])
            print(f"  hosted / {side}: {ratio['median']:.3f}, 95 % interval {interval}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    against = [row["hosted_over"]["engine"]["median"] for row in rows if "engine" in row["hosted_over"]]
    return int(bool(against) and min(against) < GOAL)


def revision() -> str:
    """The commit that was measured."""
    from rollplex_cli.launch.run_folder import git_revision

    return git_revision().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
