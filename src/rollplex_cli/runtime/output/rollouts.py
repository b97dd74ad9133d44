"""Responses of a step as rows of `rollouts/`."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollplex_cli.runtime.step import StepResult


def rollout_rows(step: int, result: StepResult, *, token_logprobs: bool) -> Iterator[dict[str, Any]]:
    """One row per response of a step, for people to read."""
    for group, prompt in result.tasks.prompts():
        sample, record = prompt.prompt.sample, result.tasks.records[group]
        turns = [
            [t.role, "".join(p if isinstance(p, str) else f"<{p.kind}>" for p in t.content)] for t in sample.turns()
        ]
        ends = list(itertools.accumulate(record.lengths))
        for index, text in enumerate(record.texts):
            span = slice(ends[index] - record.lengths[index], ends[index])
            sampled = record.sampled_logprobs[span]
            row = {
                "step": step,
                "sample_id": sample.sample_id,
                "question": sample.question,
                "answer": sample.answer,
                "prompt": turns,
                "prompt_tokens": prompt.num_tokens,
                "media": [str(m.path) for m in sample.media],
                "response": text,
                "tokens": record.lengths[index],
                "finish": record.finish[index],
                "reward": record.rewards[index],
                "parts": {name: values[index] for name, values in record.parts.items()},
                "logprob_mean": math.fsum(sampled) / max(1, len(sampled)),
            }
            if token_logprobs:
                row["rollout_logprobs"] = sampled
                row["trainer_logprobs"] = record.trainer_logprobs[span]
            yield row
