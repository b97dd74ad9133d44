"""Named algorithms as defaults of single options, and short forms of keys. Both are written out when resolved."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath (arXiv 2402.03300), with DAPO's token mean.
    "grpo": {},
    # arXiv 2503.20783: no division by the standard deviation, none by a response's own length.
    "dr_grpo": {"advantage": "group_mean", "loss_normalizer": "constant"},
    # arXiv 2402.14740: whole responses as actions, KL in the reward.
    "rloo": {"advantage": "leave_one_out", "loss_normalizer": "sequences", "kl_in": "reward", "kl_estimator": "k1"},
    # arXiv 2501.03262, with baseline: group mean off, scaled over the batch, k2 in the loss.
    "reinforce_pp": {"advantage": "batch_std", "kl_estimator": "k2"},
    # arXiv 2503.14476: clip-higher, token mean, groups without signal left out, and replaced (`DAPO_REFILLS`).
    "dapo": {"clip_high": 0.28, "skip_zero_variance": True},
    # arXiv 2507.18071: one ratio per response, with limits of its own order.
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "loss_normalizer": "responses"},
    # arXiv 2506.13585: no lower limit, the weight's upper one as in later large runs (arXiv 2510.13786).
    "cispo": {"ratio": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    # arXiv 1707.06347, without a critic: several updates per rollout.
    "ppo": {"num_minibatches": 4},
}
"""Options each `algorithm.name` sets unless the profile does."""
DAPO_REFILLS = 3
"""How often `dapo` replaces a group without a signal, where groups can be replaced."""


def fill_in(values: dict[str, Any]) -> None:
    """Write the options an algorithm's name stands for, and `reward: file.py:function`, into a profile's values."""
    reward = values.get("reward")
    if isinstance(reward, str):
        values["reward"] = {"parts": {reward: 1.0}}
    algorithm = values.get("algorithm")
    if isinstance(algorithm, dict):
        for option, value in PRESETS.get(str(algorithm.get("name", "grpo")), {}).items():
            algorithm.setdefault(option, value)
        if algorithm.get("name") == "dapo" and _can_refill(values):
            algorithm.setdefault("max_refills", DAPO_REFILLS)
        # What the name alone asks for must not end in a fault; asked for by hand, both together are one.
        if algorithm.get("name") == "reinforce_pp" and isinstance(values.setdefault("schedule", {}), dict):
            values["schedule"].setdefault("early_groups", False)


def _can_refill(values: dict[str, Any]) -> bool:
    """Whether nothing in the profile stands against `algorithm.max_refills` (see `checks`)."""
    algorithm, topology, schedule = (values.get(name) for name in ("algorithm", "topology", "schedule"))
    return (
        isinstance(algorithm, dict)
        and algorithm.get("skip_zero_variance") is True
        and algorithm.get("kl_in") != "reward"
        and not (isinstance(topology, dict) and topology.get("train_tp", 1) != 1)
        and not (isinstance(schedule, dict) and schedule.get("name") == "disagg")
    )
