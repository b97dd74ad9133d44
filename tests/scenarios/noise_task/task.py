"""The demo's clips with a reward that random weights already earn unevenly, so that tests need no cold start."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from rollplex_cli.data.tasks import load_task

if TYPE_CHECKING:
    from rollplex_cli.data.types import Sample

_shapes = load_task("shapes")
prepare, samples, answer_text, build_base = (_shapes.prepare, _shapes.samples, _shapes.answer_text, _shapes.build_base)


def reward(sample: Sample, text: str, finished: bool) -> dict[str, float]:
    """A number from 0 to 1 that depends on the text alone. ROLLPLEX_TEST_REWARD makes it misbehave."""
    mode = os.environ.get("ROLLPLEX_TEST_REWARD", "")
    if mode == "raise":
        raise KeyError("the reward function's own fault")
    if mode == "zero":
        return {"noise": 0.0}
    if mode.startswith("pace:"):
        import time

        # Seconds per response, which the test may change meanwhile.
        with open(mode.removeprefix("pace:")) as stream:
            time.sleep(float(stream.read() or 0))
    if mode == "hang":
        import time

        time.sleep(3600)
    if mode == "some equal" and hashlib.blake2b(sample.sample_id.encode(), digest_size=1).digest()[0] % 2:
        return {"noise": 0.25}
    digest = hashlib.blake2b(text.encode(), digest_size=2).digest()
    return {"noise": int.from_bytes(digest, "little") / 65535}
