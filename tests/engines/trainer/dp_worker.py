"""One data-parallel rank of a small training run; started by test_data_parallel.py.

Arguments: rank, world size, rendezvous file, output file. Rank r trains groups r, r + world, ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import conftest as tiny

from rollplex_cli.engines.trainer.actor import Actor
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.rl.losses import LossSettings, policy_loss
from rollplex_cli.rl.packing import pack_suffix

GROUPS = 4


def main(rank: int, world: int, store: str, output: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    # Other ranks start from other weights: the engine must give them rank 0's.
    model = tiny.tiny_model(seed=rank)
    down = model.model.language_model.layers[0].mlp.down_proj.weight
    home = torch.full((down.shape[0], down.shape[1] + 6), 5.0)
    home[:, 3:-3] = down.detach()
    down.data = home[:, 3:-3]
    actor = Actor(model, optimizer=AdamWSettings(lr=1e-3, clip_norm=1e9), prefix_activations="host")
    norms, first = [], {}
    for step in range(2):
        tokens = 0
        for group in range(GROUPS):
            prompt = tiny.make_prompt(10 * step + group, [(1, 4, 4)])
            responses = tiny.make_responses(group, [3, 1 + group])
            packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
            tokens += packed.num_tokens
            if group % world != rank:
                continue
            state = actor.prefix(prompt)
            advantages = torch.tensor([1.0, -0.5])
            actor.suffix(
                state,
                packed,
                lambda lp, n=packed.lengths, a=advantages: policy_loss(lp, None, a, None, n, LossSettings()),
            )
            actor.prefix_backward(state)
        norms.append(actor.update(1 / tokens).grad_norm)
        first = first or actor.state_dict()
    assert (home[:, :3] == 5).all() and (home[:, -3:] == 5).all()
    params = {name: p.detach().contiguous() for name, p in actor.named_parameters().items()}
    torch.save({"norms": norms, "first": first, "state": actor.state_dict(), "params": params}, output)
    actor.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
