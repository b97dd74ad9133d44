"""One data-parallel rank whose optimizer state is shared out; started by test_shares.py.

Arguments: rank, world size, rendezvous file. Every rank also trains alone and compares, bit for bit.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from small import fill_gradients, make_params, run

from rollplex_cli.engines.trainer.adamw.ranges import DataParallel
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.adamw.streaming import StreamingAdamW
from rollplex_cli.engines.trainer.arena import GradientArena

OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "clip_norm": 3.0, "warmup_steps": 3}


def equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def trains_as_alone(share: DataParallel, dtype: torch.dtype, master: str, chunk: int, staged: bool) -> None:
    """Four updates, and four more after a resume from what one rank alone has, on one rank and on all."""
    alone, shared, resumed = (make_params(dtype, seed, strided=True) for seed in (0, 0, 9))
    settings = AdamWSettings(**OPTIONS, chunk_elements=chunk, master=master)  # type: ignore[arg-type]
    whole = run(alone, AdamWSettings(**OPTIONS))
    parts = run(shared, settings, data_parallel=share, staged=staged)
    assert equal(dict(alone), dict(shared)), (dtype, master, chunk, staged)
    state = parts.state_dict()
    assert equal(whole.state_dict(), state)
    assert parts.host_bytes < whole.host_bytes
    stats = parts.stats
    assert stats is not None
    assert stats.elements * (12 if master == "full" else 10) == parts.host_bytes
    assert stats.exchanged_bytes == (parts._layout.size - stats.elements) * dtype.itemsize
    other = StreamingAdamW(resumed, GradientArena(resumed), settings, data_parallel=share, staged=staged)
    other.load_state_dict(state)
    assert equal(dict(alone), dict(resumed))
    for step in range(4, 8):
        for params, optimizer in ((alone, whole), (resumed, other)):
            fill_gradients(params, step)
            optimizer.step()
    assert equal(dict(alone), dict(resumed))


def main(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    share = DataParallel(world, rank, dist.group.WORLD)
    kinds = ((torch.float32, "full"), (torch.bfloat16, "full"), (torch.bfloat16, "split"))
    for (dtype, master), chunk, staged in itertools.product(kinds, (64, 192, 1 << 20), (False, True)):
        trains_as_alone(share, dtype, master, chunk, staged)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
