"""Faults that lie between keys. Only what can never work is a fault; what is merely slow or odd is not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollplex_cli.core.units import parse_time_limit
from rollplex_cli.profile.sharing import parse_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.profile.site import Site

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(^|_)KEY($|_)|APIKEY", re.IGNORECASE)
"""Names of environment variables whose values do not belong into a file."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
OWN_FLAGS = (
    "array",
    "chdir",
    "error",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "requeue",
    "signal",
)
"""Options of `sbatch` that follow from the launch itself; overriding one would break it."""


def faults(profile: Profile) -> Iterator[tuple[str, str]]:
    """Key path and text of every fault across keys of a profile whose single values are valid."""
    yield from _algorithm(profile)
    yield from _refills(profile)
    yield from _lora(profile)
    yield from _topology(profile)
    yield from _lengths(profile)
    yield from _schedule(profile)
    if profile.optimizer.master == "split" and profile.model.dtype == "float32":
        text = (
            "got `split`, expected `full` with `model.dtype: float32`: weights in float32 are their own masters, no "
            "bits are left for the host to keep"
        )
        yield "optimizer.master", text


def _algorithm(profile: Profile) -> Iterator[tuple[str, str]]:
    algorithm, name = profile.algorithm, profile.algorithm.name
    if profile.rollout.group_size < 2:
        text = (
            f"got {profile.rollout.group_size}, {name.upper()} needs at least two responses per prompt: "
            "an advantage is a reward compared with its group's mean"
        )
        yield "rollout.group_size", text
    if profile.rollout.top_k == 0:
        yield "rollout.top_k", "got 0, expected -1 (keep every token) or an integer >= 1"
    if algorithm.advantage == "batch_std":
        if profile.schedule.name == "rollplex" and profile.schedule.early_groups:
            text = (
                "got `true`, expected `false` with `algorithm.advantage: batch_std`: the advantage of a group waits "
                "for the rewards of the whole batch"
            )
            yield "schedule.early_groups", text
        if algorithm.kl_in == "reward" and algorithm.kl_coef:
            text = (
                "got `reward`, expected `loss` with `algorithm.advantage: batch_std`: the deviation of the batch is "
                "taken before the reference has scored it"
            )
            yield "algorithm.kl_in", text
    if algorithm.importance_cap is not None and algorithm.old_logprobs == "rollout":
        text = (
            f"got {algorithm.importance_cap:g}, expected `null` with `algorithm.old_logprobs: rollout`: the ratio "
            "itself then corrects for the rollout"
        )
        yield "algorithm.importance_cap", text
    if profile.rollout.extra_groups and algorithm.num_minibatches > 1:
        text = f"got {algorithm.num_minibatches}, expected 1 with `rollout.extra_groups`: the groups of a step vary"
        yield "algorithm.num_minibatches", text
    if profile.rollout.extra_groups and profile.topology.train_tp > 1:
        text = (
            f"got {profile.rollout.extra_groups}, expected 0 with `topology.train_tp` above 1: the ranks of a training "
            "group must leave the same groups"
        )
        yield "rollout.extra_groups", text
    if algorithm.overlong_buffer_tokens > profile.rollout.max_new_tokens:
        text = (
            f"got {algorithm.overlong_buffer_tokens}, expected at most `rollout.max_new_tokens` "
            f"({profile.rollout.max_new_tokens})"
        )
        yield "algorithm.overlong_buffer_tokens", text


def _refills(profile: Profile) -> Iterator[tuple[str, str]]:
    algorithm = profile.algorithm
    if not algorithm.max_refills:
        return
    got = f"got {algorithm.max_refills}, expected 0"
    if not algorithm.skip_zero_variance:
        yield (
            "algorithm.max_refills",
            f"{got} without `algorithm.skip_zero_variance`: what is replaced must not be trained",
        )
    if algorithm.kl_in == "reward" and algorithm.kl_coef:
        text = f"{got} with `algorithm.kl_in: reward`: the penalty gives groups of equal rewards a signal of their own"
        yield "algorithm.max_refills", text
    if profile.disaggregated:
        text = f"{got} with `schedule.name: disagg`: the ranks that decode do not hear of rewards"
        yield "algorithm.max_refills", text
    elif profile.topology.train_tp > 1:
        text = (
            f"{got} with `topology.train_tp` above 1: the ranks of a training group must start the same groups at the "
            "same decode step"
        )
        yield "algorithm.max_refills", text


def _lora(profile: Profile) -> Iterator[tuple[str, str]]:
    lora = profile.lora
    if lora is None:
        return
    if lora.dropout:
        text = (
            f"got {lora.dropout:g}, expected 0: with dropout the trainer's log-probs would be those of another policy "
            "than the one that sampled"
        )
        yield "lora.dropout", text
    if not lora.targets:
        yield "lora.targets", "got an empty list, expected at least one projection"
    for target in sorted({t for t in lora.targets if lora.targets.count(t) > 1}):
        yield "lora.targets", f"got `{target}` twice"


def _minibatches(profile: Profile) -> Iterator[tuple[str, str]]:
    """Asked once the prompts are known to divide."""
    groups, wanted = profile.algorithm.prompts_per_step // profile.data_parallel, profile.algorithm.num_minibatches
    if groups % wanted:
        text = (
            f"got {wanted}, expected a divisor of the {groups} prompt groups of a rank (prompts_per_step "
            f"{profile.algorithm.prompts_per_step} / data-parallel degree {profile.data_parallel})"
        )
        yield "algorithm.num_minibatches", text


def _topology(profile: Profile) -> Iterator[tuple[str, str]]:
    topology = profile.topology
    nodes, per_node, ranks = topology.num_nodes, topology.ranks_per_node, profile.num_ranks
    if topology.train_tp % topology.rollout_tp:
        text = (
            f"got {topology.rollout_tp}, expected a divisor of `topology.train_tp` ({topology.train_tp}): "
            "a rollout shard is cut into whole training shards"
        )
        yield "topology.rollout_tp", text
    product = f"num_nodes {nodes} x ranks_per_node {per_node} = {ranks} ranks"
    if profile.disaggregated:
        if ranks % 2:
            text = (
                f"got {per_node}, expected an even number of ranks with `schedule.name: disagg`, one half to train and "
                f"one to decode: {product}"
            )
            yield "topology.ranks_per_node", text
            return
        ranks //= 2
        product += f", {ranks} of them train"
        if profile.rollout.extra_groups:
            text = (
                f"got {profile.rollout.extra_groups}, expected 0 with `schedule.name: disagg`: where a step ends is "
                "known to the ranks that decode, not to those that train"
            )
            yield "rollout.extra_groups", text
        if profile.lora is not None:
            yield "lora", "got adapters, expected none with `schedule.name: disagg`: they are not sent between ranks"
    if ranks % topology.train_tp:
        which = "ranks that train" if profile.disaggregated else "ranks"
        text = (
            f"got {topology.train_tp}, expected a divisor of the number of {which}: {product}, "
            f"{ranks} / train_tp {topology.train_tp} = {ranks / topology.train_tp:.2f} training groups"
        )
        yield "topology.train_tp", text
        return
    if profile.rollout.extra_groups and topology.train_tp > topology.rollout_tp:
        text = (
            f"got {profile.rollout.extra_groups}, expected 0 where several rollout replicas decode for one training "
            f"group: train_tp {topology.train_tp} / rollout_tp {topology.rollout_tp} = "
            f"{topology.train_tp // max(1, topology.rollout_tp)} replicas"
        )
        yield "rollout.extra_groups", text
    degree, prompts = profile.data_parallel, profile.algorithm.prompts_per_step
    roles = "2 roles / " if profile.disaggregated else ""
    if prompts % degree:
        text = (
            f"got {prompts}, expected a multiple of the data-parallel degree {degree} "
            f"(num_nodes {nodes} x ranks_per_node {per_node} / {roles}train_tp {topology.train_tp})"
        )
        yield "algorithm.prompts_per_step", text
        return
    yield from _minibatches(profile)


def _lengths(profile: Profile) -> Iterator[tuple[str, str]]:
    rollout, data = profile.rollout, profile.data
    needed = data.max_prompt_tokens + rollout.max_new_tokens
    if rollout.kv_tokens < needed:
        text = (
            f"got {rollout.kv_tokens}, expected at least {needed} to hold one request: "
            f"max_prompt_tokens {data.max_prompt_tokens} + max_new_tokens {rollout.max_new_tokens}"
        )
        yield "rollout.kv_tokens", text
    if data.min_pixels > data.max_pixels:
        yield "data.min_pixels", f"got {data.min_pixels}, expected at most `data.max_pixels` ({data.max_pixels})"


def _schedule(profile: Profile) -> Iterator[tuple[str, str]]:
    try:
        parse_policy(profile.schedule.policy)
    except ValueError as error:
        yield "schedule.policy", f"got `{profile.schedule.policy}`, {error}"
    if profile.reuse.rollout_prefix and profile.schedule.prefix_activations != "recompute":
        text = (
            f"got `{profile.schedule.prefix_activations}`, expected `recompute` with `reuse.rollout_prefix`: "
            "the rollout leaves keys and values, no activations"
        )
        yield "schedule.prefix_activations", text
    if profile.prefix_pack_tokens and profile.schedule.prefixes_in_flight:
        text = (
            f"got {profile.schedule.prefixes_in_flight}, expected 0 with `schedule.prefix_pack_tokens`: a pass holds "
            "the boundaries of all its prompts"
        )
        yield "schedule.prefixes_in_flight", text
    yield from _vision(profile)
    for index, beta in enumerate(profile.optimizer.betas):
        if beta >= 1:
            yield f"optimizer.betas.{index}", f"got {beta}, expected a number below 1"
    start = profile.cold_start
    if profile.model.init == "cold_start" and start.test_from_step > start.max_steps:
        text = (
            f"got {start.test_from_step}, expected at most `cold_start.max_steps` ({start.max_steps}): "
            "the cold start would end untested"
        )
        yield "cold_start.test_from_step", text


def _vision(profile: Profile) -> Iterator[tuple[str, str]]:
    if not profile.reuse.vision:
        return
    if profile.disaggregated:
        text = (
            "got `true`, expected `false` with `schedule.name: disagg`: the tower that has run is on a rank that does "
            "not train"
        )
        yield "reuse.vision", text
    kept = profile.schedule.prefix_activations
    if not profile.frozen_vision and kept != "recompute" and not profile.reuse.rollout_prefix:
        text = (
            f"got `{kept}`, expected `recompute` with `reuse.vision` and a vision tower that is trained: the rollout "
            "leaves the tower's output, no activations (`model.freeze_vision: true` needs none)"
        )
        yield "schedule.prefix_activations", text


def site_faults(site: Site) -> Iterator[tuple[str, str]]:
    """Key path and text of every fault across keys of a site whose single values are valid."""
    for name in site.environment:
        if not VARIABLE.match(name):
            yield f"environment.{name}", f"got `{name}`, expected the name of an environment variable"
        elif SECRET.search(name):
            yield f"environment.{name}", "looks like a secret: list its name in `pass_environment` instead"
    for index, name in enumerate(site.pass_environment):
        if not VARIABLE.match(name):
            yield f"pass_environment.{index}", f"got `{name}`, expected the name of an environment variable"
    yield from _time_faults(site)
    yield from _sbatch_faults(site)


def _time_faults(site: Site) -> Iterator[tuple[str, str]]:
    if site.slurm.time is None:
        return
    limit_s = parse_time_limit(site.slurm.time)
    if not limit_s:
        yield "slurm.time", f"got the text `{site.slurm.time}`, expected a time limit such as `2-00:00:00`"
    elif site.slurm.stop_lead_s >= limit_s:
        text = f"got {site.slurm.stop_lead_s}, expected less than the {limit_s} s of `slurm.time`: {site.slurm.time}"
        yield "slurm.stop_lead_s", text


def _sbatch_faults(site: Site) -> Iterator[tuple[str, str]]:
    for key, value in site.slurm.sbatch.items():
        name = key.replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            yield f"slurm.sbatch.{key}", f"got `{key}`, expected the long name of an option of `sbatch`"
        elif name in OWN_FLAGS:
            yield f"slurm.sbatch.{key}", f"`--{name}` is set by the launch itself"
        elif "\n" in str(value):
            yield f"slurm.sbatch.{key}", "got text with a line break, expected one line"
    for key in ("account", "partition", "qos", "constraint", "exclude", "reservation", "gres", "dependency", "mem"):
        if "\n" in (getattr(site.slurm, key) or ""):
            yield f"slurm.{key}", "got text with a line break, expected one line"
