"""The profile's keys are what users have in their files: a change here is a change of the product."""

from __future__ import annotations

import dataclasses

from rollplex_cli.profile import schema
from rollplex_cli.profile.fields import key_paths

KEYS = {
    "algorithm.advantage_epsilon",
    "algorithm.clip_high",
    "algorithm.clip_low",
    "algorithm.kl_coef",
    "algorithm.kl_estimator",
    "algorithm.loss_normalizer",
    "algorithm.name",
    "algorithm.old_logprobs",
    "algorithm.prompts_per_step",
    "cold_start.batch_size",
    "cold_start.lr",
    "cold_start.max_steps",
    "cold_start.stop_accuracy",
    "cold_start.stop_accuracy_each_kind",
    "cold_start.test_clips",
    "cold_start.test_every",
    "cold_start.test_from_step",
    "cold_start.test_samples",
    "cold_start.warmup_steps",
    "data.fps",
    "data.max_frames",
    "data.max_pixels",
    "data.max_prompt_tokens",
    "data.min_pixels",
    "data.num_workers",
    "data.on_bad_media",
    "description",
    "evaluation.every_steps",
    "evaluation.num_samples",
    "guards.parity_limit",
    "guards.zero_reward_steps",
    "memory.budget_gib",
    "memory.host_budget_gib",
    "model.config",
    "model.dtype",
    "model.init",
    "model.trust_remote_code",
    "name",
    "optimizer.betas",
    "optimizer.chunk_elements",
    "optimizer.clip_norm",
    "optimizer.eps",
    "optimizer.lr",
    "optimizer.warmup_steps",
    "optimizer.weight_decay",
    "rollout.chunked_prefill_tokens",
    "rollout.group_size",
    "rollout.kv_tokens",
    "rollout.max_new_tokens",
    "rollout.max_running_requests",
    "rollout.temperature",
    "rollout.top_k",
    "rollout.top_p",
    "runtime.checkpoint_every",
    "runtime.keep_checkpoints",
    "runtime.master_port",
    "runtime.max_steps",
    "runtime.seed",
    "runtime.stall_timeout_s",
    "runtime.torch_threads",
    "schedule.early_groups",
    "schedule.name",
    "schedule.prefix_activations",
    "schedule.prefixes_in_flight",
    "target.reward_mean",
    "target.stop",
    "target.window",
    "task.name",
    "task.options",
    "topology.device",
    "topology.num_nodes",
    "topology.ranks_per_node",
    "topology.rollout_tp",
    "topology.train_tp",
}


def test_keys() -> None:
    assert set(key_paths(schema.Profile)) == KEYS


def test_every_section_is_frozen_and_refuses_unknown_keys() -> None:
    sections = [kind for kind in vars(schema).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    assert len(sections) == 15
    for section in sections:
        assert section.__dataclass_params__.frozen  # type: ignore[attr-defined]
