"""Where a training task's time goes, host or device: split model of random weights, one process per GPU, no rollout.

    python tools/gpu/learn_profile.py                                       7B shape, 2 GPUs, train TP 2
    python tools/gpu/learn_profile.py --model tiny --device cpu --ranks 1   to try the script

For each task of a group: seconds until the host has launched it, seconds until the device is done, and the sum of its
kernels' own seconds by PyTorch's profiler. A task whose first two figures are close, and far above the third, waits for
the host. Before them the cost of single calls, in microseconds. `--top N` adds the operators with the most time of host
and device. One line of JSON last, of the first rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from weights_check import launch  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS, REPEATS = 200, 5


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen25vl7b", help="a bundled configuration")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, and the trainer's degree")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[75, 1500])
    parser.add_argument("--pack", type=int, default=1, metavar="N", help="groups whose prefixes run in one pass")
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=489)
    parser.add_argument("--kept-layers", type=int, default=17, help="`schedule.suffix_kept_layers`")
    parser.add_argument("--top", type=int, default=0, metavar="N")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Profile:
    """One rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        from rollplex_cli.core.resources import model_config_folder
        from rollplex_cli.engines.trainer.arena import GradientArena
        from rollplex_cli.engines.trainer.model.families.gather import model_weights
        from rollplex_cli.engines.trainer.model.parallel import TensorParallel
        from rollplex_cli.engines.trainer.split import SplitModel
        from rollplex_cli.engines.weights.skeleton import build_shards, load_config
        from rollplex_cli.engines.weights.views import bind_views

        self.torch, self.arguments = torch, arguments
        self.cuda = arguments.device == "cuda"
        self.device = torch.device("cuda", arguments.rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")
        folder = model_config_folder(arguments.model)
        assert folder is not None, arguments.model
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.config = load_config(folder)
        module, plan = build_shards(self.config, dtype, train_tp=arguments.ranks, training_shard=arguments.rank)
        homes = {}
        for name, parts in plan.homes.items():
            shape = (parts[-1].first_row + parts[-1].rows, *parts[0].box.shape[1:])
            homes[name] = torch.empty(shape, dtype=dtype, device=self.device).normal_(0, 0.02)
        bind_views(module, homes, plan)
        self.arena = GradientArena(dict(module.named_parameters()))
        self.parallel = TensorParallel(arguments.ranks, arguments.rank, dist.group.WORLD)
        weights = model_weights(module, self.parallel, plan.vocab_start)
        self.split = SplitModel(weights, suffix_kept_layers=arguments.kept_layers)
        self.hidden = weights.text_sizes.num_heads * weights.text_sizes.head_dim
        self.weight = homes[next(name for name in homes if name.endswith("qkv_proj.weight"))]
        self.dtype = dtype

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            self.torch.cuda.synchronize()

    def calls(self) -> dict[str, float]:
        """Microseconds of the host for one call of each kind."""
        torch = self.torch
        x = torch.zeros(75, self.weight.shape[1], device=self.device, dtype=self.dtype)
        event = torch.cuda.Event() if self.cuda else None
        group = self.parallel.group
        assert group is not None
        kinds: dict[str, Callable[[], object]] = {
            "add_": lambda: x.add_(0.0),
            "linear": lambda: torch.nn.functional.linear(x, self.weight),
            "empty": lambda: torch.empty_like(x),
            "record": event.record if event is not None else lambda: None,
            "allreduce": lambda: group.allreduce([x]).wait(),
            "sum_": lambda: self.parallel.sum_(x),
        }
        return {name: self._call_us(call) for name, call in kinds.items()}

    def _call_us(self, call: Callable[[], object]) -> float:
        found = []
        for _ in range(REPEATS):
            self.synchronize()
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            found.append((time.perf_counter() - begun) / CALLS * 1e6)
        return statistics.median(found)

    def group(self, num_tokens: int) -> tuple[Any, Any]:
        """A text prompt of so many tokens and packed responses."""
        from rollplex_cli.data.types import Prompt, Sample
        from rollplex_cli.engines.inputs import MediaTokens, build_prompt_input
        from rollplex_cli.rl.packing import pack_suffix

        arguments = self.arguments
        ids = tuple(11 + i % 50 for i in range(num_tokens))
        sample = Sample(sample_id="a", question="", answer="", kind="")
        values = self.config.to_dict()
        prompt = build_prompt_input(Prompt(sample=sample, token_ids=ids, media=()), MediaTokens.from_config(values))
        length = arguments.response_tokens
        responses = [[11 + (7 * i + 3 * j) % 50 for j in range(length)] for i in range(arguments.responses)]
        return prompt, pack_suffix(ids[-1], prompt.num_tokens, prompt.rope_delta, responses)

    def tasks(self, num_tokens: int) -> dict[str, dict[str, float]]:
        """Figures of every task of a group, medians of REPEATS; the profiler watches one more run."""
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(1 + REPEATS):
            self.run_group(num_tokens, lambda name, body: found.setdefault(name, []).append(self._timed(body)))
        rows = {
            name: dict(zip(("launched_s", "done_s"), map(statistics.median, zip(*times[1:], strict=True)), strict=True))
            for name, times in found.items()
        }
        self.run_group(num_tokens, lambda name, body: rows[name].update(self._watched(name, body)))
        return rows

    def run_group(self, num_tokens: int, take: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Every task of `--pack` groups through `take`: their prefixes in one pass, the suffixes of one."""
        torch, count = self.torch, self.arguments.pack
        prompt, packed = self.group(num_tokens)
        kept: dict[str, Any] = {}

        def prefix(name: str, mode: Any) -> Callable[[], None]:
            return lambda: kept.update({name: self.split.prefixes([prompt] * count, mode)})

        def reference() -> None:
            with torch.no_grad():
                self.split.suffix(kept["reference"][0], packed)

        def suffix() -> None:
            with torch.enable_grad():
                self.split.suffix(kept["actor"][0], packed).sum().backward()

        def backward() -> None:
            first, *others = kept["actor"]
            for state in others:
                self.split.release(state)
            self.split.prefix_backward(first)

        take("reference prefix", prefix("reference", "none"))
        take("reference suffix", reference)
        take("actor prefix", prefix("actor", "device"))
        take("actor suffix", suffix)
        take("prefix backward", backward)

    def _timed(self, body: Callable[[], Any]) -> tuple[float, float]:
        self.synchronize()
        begun = time.perf_counter()
        body()
        launched = time.perf_counter() - begun
        self.synchronize()
        return launched, time.perf_counter() - begun

    def _watched(self, name: str, body: Callable[[], Any]) -> dict[str, float]:
        """Kernels and their seconds."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.cuda else [])
        self.synchronize()
        with profile(activities=kinds) as watch:
            body()
            self.synchronize()
        averages = watch.key_averages()
        if self.arguments.top and self.arguments.rank == 0:
            for key in ("self_cpu_time_total", "self_cuda_time_total") if self.cuda else ("self_cpu_time_total",):
                table = averages.table(sort_by=key, row_limit=self.arguments.top, max_name_column_width=60)
                print(f"== {name}\n{table}", flush=True)
        on_device = [e for e in watch.events() or () if e.device_type == DeviceType.CUDA]
        # Beside its kernel a collective has an annotation, of the same time.
        on_device = [e for e in on_device if not e.name.startswith("nccl:")]
        sums = [e for e in on_device if "nccl" in e.name.lower()]
        return {
            "kernels": len(on_device),
            "kernels_s": sum(e.device_time_total for e in on_device) / 1e6,
            "nccl_s": sum(e.device_time_total for e in sums) / 1e6,
        }

    def run(self) -> None:
        """Measure and, on the first rank, print."""
        result: dict[str, Any] = {
            "model": self.arguments.model,
            "train_tp": self.arguments.ranks,
            "pack": self.arguments.pack,
        }
        result["host_us"] = self.calls()
        self.say(f"host microseconds a call: { {k: round(v, 1) for k, v in result['host_us'].items()} }")
        result["tasks"] = {}
        for num_tokens in self.arguments.prompt_tokens:
            result["tasks"][num_tokens] = self.tasks(num_tokens)
            count = f"{self.arguments.pack} x " if self.arguments.pack > 1 else ""
            self.say(f"{f'prompt of {count}{num_tokens} tokens, ms':32} launched     done  kernels     nccl    count")
            for name, row in result["tasks"][num_tokens].items():
                values = (row["launched_s"], row["done_s"], row["kernels_s"], row["nccl_s"])
                self.say(f"{name:32} " + " ".join(f"{1000 * v:8.1f}" for v in values) + f" {row['kernels']:8}")
        self.say(json.dumps(result))

    def say(self, text: str) -> None:
        """Print on the first rank."""
        if self.arguments.rank == 0:
            print(text, flush=True)


def main() -> int:
    """Start the ranks, or be one."""
    arguments = parse()
    if arguments.rank is None:
        return launch(arguments, __file__)
    Profile(arguments).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
