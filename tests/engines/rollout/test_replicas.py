"""Two replicas of one rank each, on one gloo default group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
import torch, torch.distributed as dist

rank, folder, checkpoint, conftest = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("tiny", conftest)
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.engines.rollout.engine import SglangRollout

engine = SglangRollout(RolloutOptions(model_dir=checkpoint, kv_tokens=2048))

def roll_out(seeds, length):
    settings = SamplingSettings(max_new_tokens=length, temperature=1.0, ignore_eos=True)
    engine.begin_step()
    engine.submit([GroupRequest(group=0, input=tiny.Tiny.video_prompt(0), seeds=seeds, settings=settings)])
    results = []
    while engine.has_work():
        results += engine.step()
    engine.publish()
    return results[0]

for _ in range(1 + 2 * rank):  # the replicas take different numbers of steps
    roll_out((9, 10), 3 + 5 * rank)
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


@pytest.mark.scenario
def test_two_replicas_agree_and_are_independent(tmp_path: Path, tiny_checkpoint: Path) -> None:
    conftest = str(Path(__file__).parents[1] / "conftest.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path), str(tiny_checkpoint), conftest],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=150)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["total"] == second["total"] == 2
    assert first["tokens"] == second["tokens"]
    assert first["logprobs"] == second["logprobs"]
