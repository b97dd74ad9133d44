"""Greedy answers on the held-out split. They decide nothing: no target, no checkpoint choice, no stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.core.names import Phase
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollplex_cli.data.types import Sample
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.rollout.base import Response, RolloutEngine
    from rollplex_cli.runtime.assembly.rank import Rank


def answer_all(
    engine: RolloutEngine,
    inputs: Sequence[PromptInput],
    settings: SamplingSettings,
    seeds: Sequence[Sequence[int]],
    on_step: Callable[[], None] = lambda: None,
) -> list[tuple[Response, ...]]:
    """Responses to every prompt, in the prompts' order; `seeds` holds those of each prompt's responses."""
    engine.begin_step()
    engine.submit(
        [
            GroupRequest(group=i, input=prompt, seeds=tuple(s), settings=settings)
            for i, (prompt, s) in enumerate(zip(inputs, seeds, strict=True))
        ]
    )
    answers: dict[int, tuple[Response, ...]] = {}
    while engine.has_work():
        answers |= {result.group: result.responses for result in engine.step()}
        on_step()
    return [answers[i] for i in range(len(inputs))]


def evaluate(rank: Rank) -> dict[str, Any]:
    """Answer the held-out samples greedily, shared out among the ranks; in phase EVALUATE.

    Returns `heldout_reward`, `heldout_<part>` for each reward part as a share of its weightless count, and
    `num_samples`.
    """
    rank.control.go(rank.machine, Phase.EVALUATE)
    profile = rank.profile
    samples = rank.engines.task.samples(rank.run.data_dir, "heldout")[: profile.evaluation.num_samples]
    own = samples[rank.peers.rank :: rank.peers.world_size]
    job = rank.rollout_lane.submit(lambda: _answer(rank, own))
    sums = rank.control.await_future(job, "evaluation")
    total: dict[str, float] = {}
    for values in rank.peers.meet(f"step {rank.control.step}: evaluation", sums, rank.control.tick):
        for name, value in values.items():
            total[name] = total.get(name, 0.0) + value
    count = max(1.0, total.pop("num_samples", 0.0))
    result: dict[str, Any] = {f"heldout_{name}": value / count for name, value in sorted(total.items())}
    return {**result, "num_samples": int(count)}


def _answer(rank: Rank, samples: Sequence[Sample]) -> dict[str, float]:
    rollout, sums = rank.profile.rollout, {"num_samples": float(len(samples)), "reward": 0.0, "accuracy": 0.0}
    settings = SamplingSettings(max_new_tokens=rollout.max_new_tokens, temperature=0.0)
    with rank.events.span("evaluate", step=rank.control.step, phase=Phase.EVALUATE, lane="rollout"):
        inputs = [build_prompt_input(rank.prompts.build(s), rank.media_tokens) for s in samples]
        answers = answer_all(rank.engines.rollout, inputs, settings, [(0,)] * len(inputs)) if inputs else []
    for sample, (response,) in zip(samples, answers, strict=True):
        text = rank.engines.builder.decode_response(response.token_ids)
        [reward] = rank.engines.scorer.score(sample, [text], [response.finish_reason == "stop"])
        sums["reward"] += reward.total
        # An answer counts as right when it earns every part but the form.
        sums["accuracy"] += reward.parts.get("exact", reward.total) > 0
        for name, value in reward.parts.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
