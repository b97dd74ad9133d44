"""Rollout against trainer log-probs of the same sampled tokens, prompts from real mp4 files: prints the differences.

Run by test_parity.py as `python parity.py RUN_DIR FOLDER`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenarios.support import open_test_rank

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.data.processor import PromptBuilder
from rollplex_cli.data.types import MediaRef, Sample
from rollplex_cli.data.video import write_video
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.engines.rollout.base import SamplingSettings
from rollplex_cli.rl.packing import pack_suffix
from rollplex_cli.runtime.evaluate import answer_all

if TYPE_CHECKING:
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.rollout.base import Response
    from rollplex_cli.runtime.assembly.rank import Rank

NUM_RESPONSES = 4
# name -> (number of videos, frames per second taken, seconds of video, height, width)
CASES = {
    "text": (0, 2.0, 0, 0, 0),
    "one video, 2 fps": (1, 2.0, 4, 112, 112),
    "one video, 6 fps": (1, 6.0, 2, 112, 112),
    "two videos, 2 fps": (2, 2.0, 3, 56, 84),
    "two videos, 6 fps": (2, 6.0, 1, 84, 56),
}


def prompt(rank: Rank, folder: Path, name: str) -> PromptInput:
    """A prompt of the case, its clips drawn at random and written at 12 frames per second."""
    count, fps, seconds, height, width = CASES[name]
    rng, media = np.random.default_rng(len(name)), []
    for index in range(count):
        coarse = rng.integers(0, 255, (12 * seconds, height // 28, width // 28, 3), dtype=np.uint8)
        path = folder / f"{name}-{index}.mp4"
        write_video(path, np.repeat(np.repeat(coarse, 28, axis=1), 28, axis=2), 12.0)
        media.append(MediaRef(kind="video", path=path))
    data = dataclasses.replace(rank.profile.data, fps=fps, max_frames=32)
    sample = Sample(
        sample_id=name, question="Which way does the red square move?", answer="left", kind="", media=tuple(media)
    )
    return build_prompt_input(PromptBuilder(rank.run.base_dir, data).build(sample), rank.media_tokens)


def difference(rank: Rank, inputs: PromptInput, responses: tuple[Response, ...]) -> list[float]:
    """Absolute differences per token between the rollout's log-probs and the split forward's."""
    import torch

    split = rank.engines.actor.split
    packed = pack_suffix(inputs.prompt.token_ids[-1], inputs.num_tokens, inputs.rope_delta,
                         [r.token_ids for r in responses])  # fmt: skip
    with torch.no_grad():
        ours = split.suffix(split.prefix(inputs, "none"), packed)
    theirs = torch.tensor([x for r in responses for x in r.logprobs])
    return (ours - theirs).abs().tolist()


def main() -> None:
    """Print one JSON object: case to figures."""
    run, folder = RunFolder(Path(sys.argv[1])), Path(sys.argv[2])
    figures = {}
    with open_test_rank(run) as rank:
        for name in CASES:
            inputs = prompt(rank, folder, name)
            settings = SamplingSettings(max_new_tokens=24, temperature=1.0, ignore_eos=True)
            seeds = [range(NUM_RESPONSES)]

            def answer(
                i: PromptInput = inputs, s: list[range] = seeds, t: SamplingSettings = settings
            ) -> tuple[Response, ...]:
                with rank.memory.residency.hold("rollout_kv", "parity"):
                    answered = answer_all(rank.engines.rollout, [i], t, s)
                    rank.engines.rollout.drop_caches()
                return answered[0]

            responses = rank.rollout_lane.submit(answer).result()
            values = rank.trainer_lane.submit(lambda i=inputs, r=responses: difference(rank, i, r)).result()
            figures[name] = {
                "mean": sum(values) / len(values),
                "max": max(values),
                "tokens": len(values),
                "prompt_tokens": inputs.num_tokens,
                "videos": len(inputs.media_spans),
                "seconds_per_grid": [m.seconds_per_grid for m in inputs.prompt.media],
            }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
