"""Check and time one copy of the weights under two engines: train TP n over rollout TP 1, one process per GPU.

    python tools/gpu/weights_check.py                             7B shape, random weights, 2 GPUs with 40 GiB each
    python tools/gpu/weights_check.py --model tiny --device cpu   the same path over gloo, to try the script

Measures: seconds of the exchange after an update that touches every parameter, and of the whole publish; device
memory that the trainer's view adds; mean and largest difference between the rollout's log-probs and the trainer's, for
the same tokens, before and after. Compares the weights of all ranks byte by byte. A table on stdout, one line of JSON
last; exit code 0 when the figures meet their targets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

PUBLISH_LIMIT_S = 0.3
DIFFERENCE_LIMIT = 0.02
REPEATS = 5
GROUP_SIZE = 4
UPDATE_SCALE = 1e-3


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen25vl7b", help="a bundled configuration")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, and the trainer's degree")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--fp32-head", action="store_true", help="the rollout multiplies with its head in float32")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(arguments: argparse.Namespace, script: str) -> int:
    """Start one process of `script` a rank and wait for all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as work:
        ranks = []
        for rank in range(arguments.ranks):
            command = [sys.executable, script, *sys.argv[1:], "--rank", str(rank), "--work", work]
            env = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "8",
            }  # fmt: skip
            ranks.append(subprocess.Popen(command, env=env))
        try:
            codes = [process.wait() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    return max(codes, key=abs)


class Check:
    """One rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        from rollplex_cli.core.resources import model_config_folder
        from rollplex_cli.engines.inputs import MediaTokens
        from rollplex_cli.engines.trainer.model.parallel import TensorParallel
        from rollplex_cli.engines.trainer.sharded import Shard
        from rollplex_cli.engines.weights.skeleton import build_shards, build_skeleton, load_config, parameter_shapes
        from rollplex_cli.plan.model import load_shape
        from rollplex_cli.plan.topology import build_topology
        from rollplex_cli.runtime.team.groups import build_groups

        self.torch, self.dist, self.arguments = torch, dist, arguments
        self.cuda = arguments.device == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        if self.cuda:
            torch.cuda.set_device(arguments.rank)
        else:
            torch.set_num_threads(1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")
        source = model_config_folder(arguments.model)
        assert source is not None, arguments.model
        self.folder = arguments.work / f"model-{arguments.rank}"
        self.folder.mkdir()
        values = json.loads((source / "config.json").read_text())
        vocab = (values.get("text_config") or values)["vocab_size"]
        if vocab < MediaTokens.from_config(values).video_token_id:  # the tiny one gets its tokens from its task
            names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
            values |= {name: vocab - 4 + i for i, name in enumerate(names)}
        (self.folder / "config.json").write_text(json.dumps(values))
        self.media = MediaTokens.from_config(values)
        self.topology = build_topology(1, arguments.ranks, arguments.ranks, 1)
        self.place = self.topology.places[arguments.rank]
        heads = load_shape(arguments.model).num_kv_heads
        self.groups = build_groups(self.topology, self.place, heads, None)
        self.config = load_config(self.folder)
        self.shapes = parameter_shapes(build_skeleton(self.config, self.dtype))
        self.engine = self._engine()
        self.params = self.engine.parameters()
        self.module, self.plan = build_shards(
            self.config, self.dtype, train_tp=arguments.ranks, training_shard=self.place.training_shard, rollout_tp=1
        )
        self.shard = Shard(
            plan=self.plan,
            parallel=TensorParallel(arguments.ranks, arguments.rank, self.groups.train),
            kv_group=self.groups.key_values,
        )

    def _engine(self) -> Any:
        from rollplex_cli.engines.rollout.args import RolloutOptions
        from rollplex_cli.engines.rollout.engine import SglangRollout

        stream = self.torch.cuda.Stream(priority=-1) if self.cuda else None
        return SglangRollout(
            RolloutOptions(
                model_dir=self.folder,
                load_weights=False,
                device=self.arguments.device,
                gpu_index=self.arguments.rank,
                dtype="bfloat16" if self.cuda else "float32",
                kv_tokens=16384,
                max_running_requests=16,
                fp32_lm_head=self.arguments.fp32_head,
                stream=stream,
                replicas=self.topology.rollout_tp_groups,
                memory_fraction=0.6,
            )
        )

    def synchronize(self) -> None:
        """Wait for this device and for the other ranks."""
        if self.cuda:
            self.torch.cuda.synchronize()
        self.dist.barrier()

    def allocated(self) -> int:
        """Bytes that PyTorch holds on the device."""
        return int(self.torch.cuda.memory_allocated()) if self.cuda else 0

    def run(self) -> dict[str, Any]:
        """All figures of this rank."""
        from rollplex_cli.engines.weights.draw import RandomReader
        from rollplex_cli.engines.weights.exchange import Exchange
        from rollplex_cli.engines.weights.load import fill_homes
        from rollplex_cli.engines.weights.skeleton import vision_mlp_width
        from rollplex_cli.engines.weights.views import bind_views

        before = self.allocated()
        kinds = bind_views(self.module, self.params, self.plan).bytes_by_kind()
        duplicated = self.allocated() - before
        device = self.torch.device(self.arguments.device)
        width = vision_mlp_width(self.config)
        fill_homes(self.plan, self.params, RandomReader(7, self.shapes, width, device).read)
        self.synchronize()
        self.engine.publish()
        first = self.differences(0)
        exchange = Exchange(self.plan, self.params, self.groups.exchange)
        exchanges, publishes = [], []
        for number in range(REPEATS):
            self.update(number)
            written = self.own_values() if number == 0 else {}
            self.synchronize()
            started = time.perf_counter()
            exchange.run()
            if self.cuda:
                self.torch.cuda.synchronize()
            exchanges.append(time.perf_counter() - started)
            self.engine.publish()
            publishes.append(time.perf_counter() - started)
            if number == 0:
                self.check(written)
        second = self.differences(1)
        return {
            "exchange_s": sorted(exchanges)[REPEATS // 2],
            "exchange_s_first": exchanges[0],
            "publish_s": sorted(publishes)[REPEATS // 2],
            "received_bytes": exchange.received_bytes,
            "transfers": len(exchange.transfers),
            "views_bytes": kinds,
            "duplicated_bytes": duplicated + kinds["rebuilt"],
            "logprob_difference": {"start": first, "after_updates": second},
            "peak_bytes": int(self.torch.cuda.max_memory_allocated()) if self.cuda else None,
        }

    def update(self, number: int) -> None:
        """A change of every parameter trained here; equal on ranks that hold the same part of a tensor."""
        from rollplex_cli.core.seeds import derive_seed

        torch = self.torch
        with torch.no_grad():
            for name, param in self.module.named_parameters():
                placement = self.plan.placements[name]
                generator = torch.Generator(device=param.device)
                generator.manual_seed(derive_seed(number, f"{placement.tensor}{placement.box.offset}"))
                noise = torch.randn(param.shape, generator=generator, device=param.device, dtype=torch.float32)
                # In proportion, so that padded widths stay zero.
                param.mul_((1.0 + UPDATE_SCALE * noise).to(param.dtype))
                del noise

    def own_values(self) -> dict[str, Any]:
        """Copies on the host of what this rank trains."""
        return {name: param.detach().cpu().clone() for name, param in self.module.named_parameters()}

    def check(self, written: dict[str, Any]) -> None:
        """Every byte on every rank."""
        from rollplex_cli.engines.weights.check import check_published

        check_published([self.plan], self.params, written.get, None)

    # ---- log-probs ---------------------------------------------------------------------------------------

    def differences(self, turn: int) -> dict[str, Any]:
        """Rollout against trainer, by prompt: tokens, mean and largest absolute difference."""
        from rollplex_cli.engines.trainer.actor import shard_weights
        from rollplex_cli.engines.trainer.split import SplitModel

        split = SplitModel(shard_weights(self.module, self.shard), banned_token_ids=tuple(self.engine.banned_token_ids))
        found = {}
        for name, prompt, packed, sampled in self.decoded(turn):
            with self.torch.no_grad():
                trained = split.suffix(split.prefix(prompt, "none"), packed).float().cpu()
            difference = (trained - sampled).abs()
            found[name] = {
                "prompt_tokens": prompt.num_tokens, "tokens": len(difference),
                "mean": float(difference.mean()), "max": float(difference.max()),
            }  # fmt: skip
        self.synchronize()
        return found

    def decoded(self, turn: int) -> Iterator[tuple[str, Any, Any, Any]]:
        """(name, prompt, its packed responses, log-probs [S] the rollout gave) of each prompt, on every rank."""
        from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
        from rollplex_cli.rl.packing import pack_suffix
        from rollplex_cli.runtime.team.responses import ResponseExchange

        prompts = self.prompts(turn)
        settings = SamplingSettings(max_new_tokens=self.arguments.new_tokens, temperature=1.0, ignore_eos=True)
        names = list(prompts)
        mine = [i for i in range(len(names)) if i % self.arguments.ranks == self.place.replica]
        self.engine.begin_step()
        self.engine.submit(
            [
                GroupRequest(group=i, input=prompts[names[i]], seeds=tuple(range(GROUP_SIZE)), settings=settings)
                for i in mine
            ]
        )
        results = {}
        while self.engine.has_work():
            results |= {result.group: result for result in self.engine.step()}
        assert self.groups.responses is not None
        exchange = ResponseExchange(self.groups.responses, range(self.arguments.ranks))
        for i, name in enumerate(names):
            result = exchange.run(i, i % self.arguments.ranks, GROUP_SIZE, results.get(i))
            prompt = prompts[name]
            responses = [response.token_ids for response in result.responses]
            packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
            yield name, prompt, packed, self.torch.tensor([x for r in result.responses for x in r.logprobs])

    def prompts(self, turn: int) -> dict[str, Any]:
        """A text and three clips, random."""
        small = self.arguments.model == "tiny"
        grids = {"8 frames 112x112": (4, 8, 8), "16 frames 224x280": (8, 16, 20), "32 frames 336x448": (16, 24, 32)}
        if small:
            grids = {"clip": (2, 4, 4), "longer clip": (4, 4, 8)}
        built = {"text": self.prompt(turn, None, 24 if small else 300)}
        return built | {name: self.prompt(turn, grid, 24) for name, grid in grids.items()}

    def prompt(self, turn: int, grid: tuple[int, int, int] | None, words: int) -> Any:
        """Random words, with a random clip between them where there is a grid."""
        from rollplex_cli.data.types import Media, Prompt, Sample
        from rollplex_cli.engines.inputs import build_prompt_input

        rng = random.Random(f"{turn}/{grid}/{words}")
        limit = min(self.config.text_config.vocab_size, self.media.vision_start_token_id) - 10
        ids = [rng.randrange(limit) for _ in range(words // 2)]
        media = ()
        if grid is not None:
            generator = self.torch.Generator().manual_seed(rng.randrange(1 << 30))
            patches = self.torch.randn(grid[0] * grid[1] * grid[2], self.patch_elements(), generator=generator)
            media = (
                Media(
                    kind="video", patches=patches, grid_thw=grid, seconds_per_grid=1.0, content_hash=rng.getrandbits(60)
                ),
            )
            tokens = grid[0] * grid[1] * grid[2] // self.media.merge_size**2
            ids += [self.media.vision_start_token_id, *[self.media.video_token_id] * tokens]
        ids += [rng.randrange(limit) for _ in range(words - words // 2)]
        sample = Sample(sample_id=str(grid), question="", answer="", kind="")
        return build_prompt_input(Prompt(sample=sample, token_ids=tuple(ids), media=media), self.media)

    def patch_elements(self) -> int:
        """Numbers of one patch."""
        vision = self.config.vision_config
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def report(found: dict[str, Any], arguments: argparse.Namespace) -> bool:
    """Print the figures; whether they meet the targets."""
    gigabytes = found["received_bytes"] / 1e9
    rate = gigabytes / max(found["exchange_s"], 1e-9)
    print(f"exchange   {found['exchange_s']:.3f} s for {gigabytes:.2f} GB a rank, {rate:.0f} GB/s")
    print(
        f"publish    {found['publish_s']:.3f} s with caches dropped; first exchange {found['exchange_s_first']:.3f} s"
    )
    print(f"duplicated {found['duplicated_bytes']} B; views: {found['views_bytes']}")
    worst = 0.0
    for when, prompts in found["logprob_difference"].items():
        for name, row in prompts.items():
            worst = max(worst, row["mean"])
            shown = f"mean {row['mean']:.4f}   max {row['max']:.4f}"
            print(f"{when:<14} {name:<20} {row['prompt_tokens']:>5} tokens   {shown}")
    print(json.dumps({"model": arguments.model, "ranks": arguments.ranks, **found}), flush=True)
    met = found["duplicated_bytes"] == 0 and worst < DIFFERENCE_LIMIT
    return met and (arguments.device == "cpu" or found["publish_s"] < PUBLISH_LIMIT_S)


def main(kind: type[Check] = Check, script: str = __file__) -> int:
    """Launch `script`, or be a rank of it."""
    arguments = parse()
    if arguments.rank is None:
        return launch(arguments, script)
    check = kind(arguments)
    found = check.run()
    good = True
    if arguments.rank == 0:
        good = report(found, arguments)
    check.synchronize()
    check.engine.close()
    check.dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
