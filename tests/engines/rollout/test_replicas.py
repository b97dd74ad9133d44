"""Two ranks of one gloo default group, as two replicas and as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engines.spawn import run_ranks

SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
import torch, torch.distributed as dist

rank, folder, checkpoint, conftest = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
replicas = json.loads(sys.argv[5])
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("tiny", conftest)
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.engines.rollout.engine import SglangRollout

engine = SglangRollout(RolloutOptions(
    model_dir=checkpoint, kv_tokens=2048, replicas=tuple(map(tuple, replicas))))

from rollplex_cli.engines.weights.load import CheckpointReader, fill_homes
from rollplex_cli.engines.weights.skeleton import build_shards, build_skeleton, load_config, parameter_shapes

# What the engine has loaded by itself is what the plan of the shard would put there.
config = load_config(checkpoint)
reader = CheckpointReader(checkpoint, config, parameter_shapes(build_skeleton(config, torch.float32)))
_, plan = build_shards(config, torch.float32, train_tp=2, training_shard=rank, rollout_tp=len(replicas[0]))
theirs = engine.parameters()
ours = {name: torch.full_like(theirs[name], 5.0) for name in plan.homes}
fill_homes(plan, ours, reader.read)
for name, tensor in ours.items():
    assert torch.equal(tensor, theirs[name]), name

def roll_out(seeds, length):
    settings = SamplingSettings(max_new_tokens=length, temperature=1.0, ignore_eos=True)
    engine.begin_step()
    engine.submit([GroupRequest(group=0, input=tiny.Tiny.video_prompt(0), seeds=seeds, settings=settings)])
    results = []
    while engine.has_work():
        results += engine.step()
    engine.publish()
    return results[0]

own = rank if len(replicas) == 2 else 0
for _ in range(1 + 2 * own):  # replicas take different numbers of steps
    roll_out((9, 10), 3 + 5 * own)
common = roll_out((1, 2, 3), 6)
total = torch.ones(1)
dist.all_reduce(total)  # the default group is still the whole world
engine.close()
dist.barrier()
(folder / f"{rank}.json").write_text(json.dumps(
    {"total": float(total), "tokens": [r.token_ids for r in common.responses],
     "logprobs": [r.logprobs for r in common.responses]}))
dist.destroy_process_group()
"""


def run(folder: Path, checkpoint: Path, replicas: str) -> list[dict[str, Any]]:
    """The script on two ranks; what each wrote."""
    conftest = str(Path(__file__).parents[1] / "conftest.py")
    folder.mkdir()
    run_ranks(
        2, lambda rank: ["-c", SCRIPT, str(rank), str(folder), str(checkpoint), conftest, replicas], timeout_s=150
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.scenario
def test_replicas_agree_and_are_independent(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Two replicas of one rank, then one of two ranks: the same tokens, and weights where the plan says."""
    apart = run(tmp_path / "apart", tiny_checkpoint, "[[0], [1]]")
    assert apart[0] == apart[1]
    assert apart[0]["total"] == 2
    sharded = run(tmp_path / "sharded", tiny_checkpoint, "[[0, 1]]")
    assert sharded[0] == sharded[1]
    assert sharded[0]["tokens"] == apart[0]["tokens"]
    for one, two in zip(sharded[0]["logprobs"], apart[0]["logprobs"], strict=True):
        assert one == pytest.approx(two, abs=1e-5)
