"""Answers on the held-out split. They decide nothing but, where asked for, which checkpoint is kept as the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.core.names import Lane, Phase
from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollplex_cli.data.types import Sample
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.rollout.base import Response, RolloutEngine
    from rollplex_cli.runtime.assembly.rank import Rank

FORM_PARTS = frozenset({"format", "think_format"})
OWN_FIGURES = frozenset({"reward", "accuracy", "tokens", "num_samples", "num_responses"})
"""What an evaluation counts itself; a part of that name (a bare number is the part `reward`) is not added to it."""


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
    """Answer the held-out samples with the evaluation's own sampling, shared out among the replicas; in phase EVALUATE.

    Returns `heldout_reward`, `heldout_accuracy`, `heldout_<part>` for each reward part (means over all responses),
    `heldout_tokens` and `num_samples`, of the samples that could be used (`data.on_bad_media`, `data.on_long_prompt`).
    """
    rank.control.go(rank.machine, Phase.EVALUATE)
    profile = rank.profile
    samples = rank.engines.task.samples(rank.run.data_dir, "heldout")[: profile.evaluation.num_samples]
    own = samples[rank.team.replica_number :: rank.team.num_replicas] if rank.team.place.decodes else []
    job = rank.rollout_lane.submit(lambda: _answer(rank, own))
    sums = rank.control.await_future(job, "evaluation")
    if not rank.team.speaks_for_replica:
        sums = {}
    total: dict[str, float] = {}
    for values in rank.peers.meet(f"step {rank.control.step}: evaluation", sums, rank.control.tick):
        for name, value in values.items():
            total[name] = total.get(name, 0.0) + value
    num_samples, count = int(total.pop("num_samples", 0.0)), max(1.0, total.pop("num_responses", 0.0))
    result: dict[str, Any] = {f"heldout_{name}": value / count for name, value in sorted(total.items())}
    return {**result, "num_samples": num_samples}


def _answer(rank: Rank, samples: Sequence[Sample]) -> dict[str, float]:
    settings, limit = rank.profile.evaluation, rank.profile.rollout.max_new_tokens
    sums = {"num_samples": 0.0, "num_responses": 0.0, "reward": 0.0, "accuracy": 0.0, "tokens": 0.0}
    sampling = SamplingSettings(
        max_new_tokens=settings.max_new_tokens or limit, temperature=settings.temperature, top_p=settings.top_p
    )
    seed, numbers = rank.profile.runtime.seed, range(settings.num_responses)
    rank.team.launches.begin(Lane.ROLLOUT, "evaluation")
    with rank.events.span("evaluate", step=rank.control.step, phase=Phase.EVALUATE, lane="rollout"):
        inputs = []
        for sample in samples:
            if (prompt := rank.loader.build(sample)) is not None:
                inputs.append(build_prompt_input(prompt, rank.media_tokens))
            rank.control.touch()
        usable = [prompt.prompt.sample for prompt in inputs]
        # By sample, not by rank or step: every evaluation draws alike, so that their differences are the weights'.
        seeds = [[derive_seed(seed, f"evaluation/{s.sample_id}", i) for i in numbers] for s in usable]
        with rank.memory.residency.hold("rollout_kv", "evaluation"):
            answers = answer_all(rank.engines.rollout, inputs, sampling, seeds, rank.control.touch) if inputs else []
            # Its prompts' keys and values do not outlive the pool's memory.
            rank.engines.rollout.drop_caches()
    sums["num_samples"] = float(len(usable))
    for sample, responses in zip(usable, answers, strict=True):
        texts = [rank.engines.builder.decode_response(r.token_ids) for r in responses]
        finished = [r.finish_reason == "stop" for r in responses]
        for response, reward in zip(responses, rank.engines.scorer.score(sample, texts, finished), strict=True):
            sums["num_responses"] += 1
            sums["reward"] += reward.total
            sums["tokens"] += len(response.token_ids)
            # An answer counts as right when it earns anything besides the form.
            judged = [value for name, value in reward.parts.items() if name not in FORM_PARTS]
            sums["accuracy"] += sum(judged) > 0
            for name, value in reward.parts.items():
                if name in OWN_FIGURES:
                    continue
                sums[name] = sums.get(name, 0.0) + value
    return sums
