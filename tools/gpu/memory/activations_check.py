"""Compare the memory plan's activations with what the trainer allocates: one GPU, random weights, no rollout.

    python tools/gpu/memory/activations_check.py                                7B shape, 4 x 1024 response tokens
    python tools/gpu/memory/activations_check.py --model qwen25vl3b --out a.json

Each row is one task: planned bytes, the peak that PyTorch allocated above weights, gradients and boundary, and what
its allocator reserved for that. Exit code 0 when every peak is within 5 % of the plan.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "src"))

from rollplex_cli.core.resources import model_config_folder  # noqa: E402
from rollplex_cli.core.units import GIB  # noqa: E402
from rollplex_cli.plan.memory import MemoryInputs, activations  # noqa: E402
from rollplex_cli.plan.model import load_shape  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 0.05


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen25vl7b", help="a bundled configuration")
    parser.add_argument("--grid", type=int, nargs=3, default=(16, 44, 44), help="the prompt's video, in patches")
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of each response")
    parser.add_argument("--out", type=Path, help="write the rows there as JSON")
    return parser.parse_args()


def inputs_of(arguments: argparse.Namespace, prompt_tokens: int) -> MemoryInputs:
    """The job as the plan sees it."""
    return MemoryInputs(
        shape=load_shape(arguments.model), train_tp=1, rollout_tp=1, data_parallel=1, groups=1, prefixes_in_flight=0,
        group_size=arguments.responses, max_prompt_tokens=prompt_tokens, max_new_tokens=arguments.tokens,
        kv_tokens=1, max_running_requests=1, chunked_prefill_tokens=1, bytes_per_value=2, has_reference=False,
        overlap=True, early_groups=False, prefix_activations="recompute", suffix_kept_layers=None,
        freeze_vision=False, chunk_elements=64, master="full", prompt_cache_bytes=0, on_gpu=True,
    )  # fmt: skip


class Check:
    """The trainer's split model over random weights, with its gradient arena."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from rollplex_cli.engines.trainer.arena import GradientArena
        from rollplex_cli.engines.trainer.model.families.gather import model_weights
        from rollplex_cli.engines.weights.skeleton import build_skeleton, load_config

        self.torch, self.arguments = torch, arguments
        folder = model_config_folder(arguments.model)
        assert folder is not None, arguments.model
        self.config = load_config(folder)
        self.module = build_skeleton(self.config, torch.bfloat16)
        generator = torch.Generator("cuda").manual_seed(0)
        self.module.to_empty(device="cuda")
        self.module.tie_weights()
        for parameter in self.module.parameters():
            parameter.data.normal_(0, 0.02, generator=generator)
        self.arena = GradientArena(dict(self.module.named_parameters()))
        self.weights = model_weights(self.module)
        self.prompt, self.packed = self._group()
        self.inputs = inputs_of(arguments, self.prompt.num_tokens)
        self.rows: list[dict[str, Any]] = []

    def _group(self) -> tuple[Any, Any]:
        from rollplex_cli.data.types import Media, Prompt, Sample
        from rollplex_cli.engines.inputs import MediaTokens, build_prompt_input
        from rollplex_cli.rl.packing import pack_suffix

        torch, arguments = self.torch, self.arguments
        media_tokens = MediaTokens.from_config(self.config.to_dict())
        t, h, w = arguments.grid
        patches = torch.randn(t * h * w, load_shape(arguments.model).patch_elements)
        media = Media(kind="video", patches=patches, grid_thw=(t, h, w), seconds_per_grid=1.0, content_hash=1)
        count = t * h * w // media_tokens.merge_size**2
        start = media_tokens.vision_start_token_id
        ids = (11, start, *[media_tokens.video_token_id] * count, start + 1, 12, 13, 14)
        sample = Sample(sample_id="a", question="", answer="", kind="")
        prompt = build_prompt_input(Prompt(sample=sample, token_ids=ids, media=(media,)), media_tokens)
        length = arguments.tokens
        responses = [[100 + (7 * i + 3 * j) % 1000 for j in range(length)] for i in range(arguments.responses)]
        return prompt, pack_suffix(ids[-1], prompt.num_tokens, prompt.rope_delta, responses)

    def split(self, kept: int | None) -> Any:
        """The model with so many kept layers."""
        from rollplex_cli.engines.trainer.split import SplitModel

        return SplitModel(self.weights, suffix_kept_layers=kept)

    def measure(self, name: str, planned: int, body: Callable[[], Any]) -> Any:
        """Run a task and enter its row."""
        torch = self.torch
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        result = body()
        torch.cuda.synchronize()
        row = {
            "task": name,
            "planned_bytes": planned,
            "allocated_bytes": torch.cuda.max_memory_allocated() - before,
            "reserved_bytes": torch.cuda.max_memory_reserved() - reserved,
        }
        row["ratio"] = row["allocated_bytes"] / planned
        self.rows.append(row)
        sizes = "  ".join(f"{row[key] / GIB:8.3f}" for key in ("planned_bytes", "allocated_bytes", "reserved_bytes"))
        print(f"{name:36} {sizes}  {row['ratio']:.3f}", flush=True)
        return result

    def run(self) -> None:
        """All tasks."""
        torch, inputs = self.torch, self.inputs
        boundary = inputs.max_prompt_tokens * inputs.shape.kv_bytes_per_token(1, 2)
        layers = inputs.shape.num_layers
        print(f"{'task, GiB':36} {'planned':>8}  {'peak':>8}  {'reserved':>8}  peak / planned")
        split = self.split(None)
        self._warm_up(split)
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
        print(f"context: {context / GIB:.3f} GiB, prompt of {inputs.max_prompt_tokens} tokens")
        state = self.measure(
            "prefix forward", boundary + activations.prefix_forward(inputs), lambda: split.prefix(self.prompt, "none")
        )
        planned = activations.scored_suffix(inputs)
        with torch.no_grad():
            self.measure("suffix forward", planned, lambda: split.suffix(state, self.packed))
        del state
        for kept in (None, layers // 2, 1, 0):
            split, changed = self.split(kept), replace(inputs, suffix_kept_layers=kept)
            state = split.prefix(self.prompt, "recompute")
            planned = activations.suffix_activations(changed) + boundary
            name = f"suffix, {changed.kept_layers} of {layers} layers kept"
            self.measure(name, planned, lambda s=split, st=state: s.suffix(st, self.packed).sum().backward())
            if kept is None:
                planned = activations.prefix_backward(inputs)
                self.measure("prefix backward, recompute", planned, lambda s=split, st=state: s.prefix_backward(st))
            del state
        state = split.prefix(self.prompt, "host")
        split.suffix(state, self.packed).sum().backward()
        planned = activations.prefix_backward(replace(inputs, prefix_activations="host"))
        self.measure("prefix backward, host", planned, lambda: split.prefix_backward(state))

    def _warm_up(self, split: Any) -> None:
        """Libraries take their workspaces at their first use."""
        state = split.prefix(self.prompt, "recompute")
        split.suffix(state, self.packed).sum().backward()
        split.prefix_backward(state)


def main() -> int:
    """Run and report."""
    arguments = parse()
    check = Check(arguments)
    check.run()
    if arguments.out:
        arguments.out.write_text(json.dumps({"model": arguments.model, "rows": check.rows}, indent=1) + "\n")
    return int(any(abs(row["ratio"] - 1) > LIMIT for row in check.rows))


if __name__ == "__main__":
    sys.exit(main())
