"""Sharded models of every family against the whole one on four gloo ranks; run by test_weights.py as
`python sharded.py RANK WORLD STORE`. Prints nothing; an assertion ends the rank.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
from sharded_model import Groups, Sharded, boxed

from rollplex_cli.engines.trainer.actor import shard_weights
from rollplex_cli.engines.trainer.arena import GradientArena
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.sharded import GradientSync
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.plan.families import FAMILIES
from rollplex_cli.plan.topology import build_topology
from rollplex_cli.rl.packing import pack_suffix

TOLERANCE = 1e-12


def families_kit() -> Any:
    spec = importlib.util.spec_from_file_location("families_kit", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(split: SplitModel, prompt: Any, responses: list[list[int]], mode: Any) -> torch.Tensor:
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    state = split.prefix(prompt, mode)
    with torch.enable_grad():
        logprobs = split.suffix(state, packed)
        (logprobs * torch.linspace(-1.0, 2.0, len(logprobs), dtype=logprobs.dtype)).mean().backward()
    split.prefix_backward(state)
    return logprobs.detach()


def check(kit: Any, family: str, train_tp: int, rollout_tp: int, kv_heads: int, mode: str) -> None:
    """Log-probs and every gradient equal those of the whole model."""
    whole = kit.model_of(family, torch.float64, kv_heads=kv_heads, tied=train_tp == 2)
    topology = build_topology(1, 4, train_tp, rollout_tp)
    sharded = Sharded(whole, topology, Groups(topology, kv_heads))
    prompt = kit.prompt_of(family, 3, images=[(4, 6)], videos=[(2, 8, 4)])
    responses = kit.responses_of(4, [3, 1, 4])
    params = dict(sharded.module.named_parameters())
    arena = GradientArena(params)
    expected = gradients(SplitModel(model_weights(whole)), prompt, responses, "keep")
    found = gradients(SplitModel(shard_weights(sharded.module, sharded.shard)), prompt, responses, mode)
    assert (expected - found).abs().max() < TOLERANCE
    GradientSync(sharded.shard, arena).synchronize()
    wanted = {name: param.grad for name, param in whole.named_parameters()}
    for name, placement in sharded.plan.placements.items():
        part = boxed(wanted[placement.tensor], placement.box)
        assert (part - params[name].grad).abs().max() < TOLERANCE, (family, name)
    assert all(float(gradient.abs().max()) > 10 * TOLERANCE for gradient in wanted.values())


def main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    kit = families_kit()
    for family in FAMILIES:
        check(kit, family, 2, 1, 2, "recompute")
        check(kit, family, 4, 2, 2, "host")
        check(kit, family, 4, 4, 4, "keep")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
