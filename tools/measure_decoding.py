"""How long training steps wait for their prompts: synthetic clips, real decoding, a step that only sleeps.

    .venv/bin/python tools/measure_decoding.py --workers 14 --step-s 20

Prints one JSON object. The clips are 30 s of 640x360 at 24 frames a second, shown at 2 frames a second within 100352
pixels: 60 frames, 3840 prompt tokens each.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from rollplex_cli.core.resources import model_config_folder
from rollplex_cli.data.decode import ProcessBuilder
from rollplex_cli.data.loader import PromptLoader
from rollplex_cli.data.order import BatchOrder
from rollplex_cli.data.tasks import load_task
from rollplex_cli.data.types import MediaRef, Sample
from rollplex_cli.data.video import write_video
from rollplex_cli.profile.schema import DataProfile

NUM_FILES = 8


def render(path: Path) -> None:
    """A moving gradient with noise: what a camera gives costs a decoder more than a drawing."""
    draw = np.random.default_rng(int(path.stem))
    rows, columns = np.mgrid[0:360, 0:640]
    noise = draw.integers(0, 24, (8, 360, 640, 3), dtype=np.uint8)
    frames = [((rows + columns + 3 * i) % 232)[..., None].astype(np.uint8) + noise[i % 8] for i in range(720)]
    write_video(path, frames, 24)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--clips", type=int, default=64, help="per step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=20.0, help="seconds a step takes without its prompts")
    parser.add_argument("--processor", type=Path, help="a checkpoint folder; a tiny one is built without it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = [root / f"{i}.mp4" for i in range(NUM_FILES)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(render, files))
        processor = arguments.processor
        if processor is None:
            config = model_config_folder("tiny")
            assert config is not None
            processor = root / "base"
            load_task("shapes").build_base(processor, root, config / "config.json", 0)
        profile = DataProfile(max_pixels=100352, worker_kind="process", num_workers=arguments.workers, cache_gib=0.0)
        # Every sample once: nothing is found in a cache.
        samples = [
            Sample(sample_id=f"s{i}", question="What happens?", answer="", kind="",
                   media=(MediaRef(kind="video", path=files[i % NUM_FILES]),))
            for i in range(arguments.clips * (arguments.steps + 3))
        ]  # fmt: skip
        order = BatchOrder(len(samples), seed=0, prompts_per_step=arguments.clips)
        builder = ProcessBuilder(processor, profile, arguments.workers)
        waits = []
        with PromptLoader(samples, builder, order, num_workers=arguments.workers, prefetch_steps=1) as loader:
            for step in range(arguments.steps + 1):
                begun = time.monotonic()
                prompts = loader.batch(step)
                waits.append(time.monotonic() - begun)
                tokens = sum(len(p.token_ids) for p in prompts) // len(prompts)
                del prompts
                if step < arguments.steps:
                    time.sleep(arguments.step_s)
        builder.close()
    # The first step has nothing to hide behind: its wait is the time to decode a whole batch from a cold start.
    later = waits[1:]
    share = sum(later) / (sum(later) + arguments.step_s * len(later))
    print(json.dumps({
        "cores": os.cpu_count(), "workers": arguments.workers, "clips_per_step": arguments.clips,
        "prompt_tokens_mean": tokens, "step_s": arguments.step_s, "first_batch_s": round(waits[0], 2),
        "wait_s": [round(w, 3) for w in later], "wait_share": round(share, 4),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
