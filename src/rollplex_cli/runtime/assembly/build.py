"""Putting a rank together: process group, lanes, engines, data. The only place that knows every layer below."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.events import EventWriter
from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.data.decode import ProcessBuilder
from rollplex_cli.data.loader import PromptCache, PromptLoader
from rollplex_cli.data.order import BatchOrder
from rollplex_cli.data.processor import PromptBuilder
from rollplex_cli.data.tasks import load_task
from rollplex_cli.memory import crash
from rollplex_cli.plan.model import load_shape
from rollplex_cli.plan.topology import build_topology, head_faults
from rollplex_cli.profile.load import load_profile
from rollplex_cli.rl.rewards.scorer import Scorer
from rollplex_cli.runtime.assembly.build_memory import build_memory
from rollplex_cli.runtime.assembly.build_rollout import build_absent, build_rollout, media_tokens_of
from rollplex_cli.runtime.assembly.build_trainer import build_trainer, foreign_weights
from rollplex_cli.runtime.assembly.devices import backend_of, build_sharing, device_of, set_up_lane
from rollplex_cli.runtime.assembly.rank import Engines, Rank
from rollplex_cli.runtime.control.control import Control
from rollplex_cli.runtime.control.peers import Peers
from rollplex_cli.runtime.executor.lanes import LaneThread
from rollplex_cli.runtime.executor.phases import PhaseMachine
from rollplex_cli.runtime.launches.build import build_launches, open_order
from rollplex_cli.runtime.launches.watch import CollectiveWatch
from rollplex_cli.runtime.team.groups import build_groups
from rollplex_cli.runtime.team.team import Publisher, Team, build_team

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.data.types import Sample
    from rollplex_cli.memory.manager import ResidencyChange
    from rollplex_cli.profile.schema import Profile

RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=30)
LANE_CLOSE_S = 10.0


@contextlib.contextmanager
def open_control(run: RunFolder, rank: int) -> Iterator[tuple[Control, PhaseMachine]]:
    """Process group, peers, signals: what a rank needs before its engines, to fail well while it builds them."""
    profile = load_profile(run.profile)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    store = _connect(rank, world_size) if world_size > 1 else None
    namespace = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    machine = PhaseMachine()
    peers = Peers(store, rank, world_size, namespace)
    limits = profile.runtime
    control = Control(peers, machine, run.status(rank), limits.stall_timeout_s, limits.start_timeout_s)
    control.install_signals()
    control.write("starting")
    group_store = _group_store(store, namespace)
    backend = backend_of(device_of(profile))
    timeout = _collective_timeout(profile)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=timeout)
    yield control, machine
    # Reached only when nothing failed: after a failure a collective may hang in the peers, and the process just ends.
    dist.barrier()
    dist.destroy_process_group()


@contextlib.contextmanager
def open_rank(run: RunFolder, control: Control, machine: PhaseMachine) -> Iterator[Rank]:
    """The rank with its engines, ready for its first step.

    Raises:
        UsageError: a base checkpoint, task or degree that cannot be used.
    """
    profile, peers = load_profile(run.profile), control.peers
    lanes = [LaneThread(name, partial(set_up_lane, profile, name)) for name in ("rollout", "trainer", "host")]
    rollout_lane, trainer_lane, host_lane = lanes
    events = EventWriter(run.events(peers.rank), peers.rank)
    # One after the other, in the same order on every rank: all three create process groups.
    joined = trainer_lane.submit(lambda: _team(profile, run, control))
    team = control.await_future(joined, "creating process groups")

    def log_change(change: ResidencyChange) -> None:
        events.point("residency", step=control.step, phase=machine.state, lane="memory", **dataclasses.asdict(change))

    made = rollout_lane.submit(
        lambda: build_memory(profile, where=lambda: f"step {control.step}, phase {machine.state}", on_change=log_change)
    )
    memory = control.await_future(made, "opening the device's memory")
    residency = memory.residency
    built = rollout_lane.submit(
        lambda: build_rollout(
            profile, run.base_dir, replicas=team.topology.rollout_tp_groups, weights="from_trainer",
            residency=residency, foreign=foreign_weights(profile, run.base_dir, team), log=team.launches.rollout,
        )
        if team.place.decodes else build_absent(profile, run.base_dir, team, residency)
    )  # fmt: skip
    rollout = control.await_future(built, "building the rollout engine")
    # After the engine's libraries, which install handlers of their own.
    crash.install()
    banned = tuple(getattr(rollout, "banned_token_ids", ()))
    params = control.await_future(rollout_lane.submit(rollout.parameters), "reading the rollout's parameters")
    trainer = control.await_future(
        trainer_lane.submit(lambda: build_trainer(profile, run.base_dir, params, banned, team, residency)),
        "building the trainer",
    )
    publisher = Publisher(team, trainer.plans, params, rollout, trainer.actor, check=profile.guards.check_publish)
    builder, task = PromptBuilder(run.base_dir, profile.data), load_task(profile.task.name)
    scorer = Scorer(profile.reward, task.reward, getattr(task, "REWARD_PARTS", {}))
    samples = task.samples(run.data_dir, "train")
    order = BatchOrder(
        len(samples), seed=derive_seed(profile.runtime.seed, "order"),
        prompts_per_step=profile.algorithm.prompts_per_step,
        rank=team.place.training_group, num_ranks=team.topology.data_parallel,
    )  # fmt: skip
    cache, loader = open_data(profile, run.base_dir, builder, samples, order)
    rank = Rank(
        profile=profile, run=run, peers=peers, control=control, events=events, machine=machine,
        rollout_lane=rollout_lane, trainer_lane=trainer_lane, host_lane=host_lane,
        engines=Engines(
            rollout=rollout, own_actor=trainer.actor, reference=trainer.reference, builder=builder, task=task,
            scorer=scorer, publisher=publisher,
        ),
        team=team, plan=trainer.plans[0],
        loader=loader, media_tokens=media_tokens_of(run.base_dir), first_group=order.first_slot,
        sharing=build_sharing(profile), memory=memory,
    )  # fmt: skip
    control.doing("")
    try:
        yield rank
        control.await_future(rollout_lane.submit(rollout.close), "closing the rollout engine")
        control.await_future(rollout_lane.submit(residency.close), "giving the device's memory back")
        team.launches.close()
    finally:
        loader.close(wait=False)
        cache.close()
        scorer.close()
        events.close()
        for lane in rank.lanes:
            lane.close(LANE_CLOSE_S)


def open_data(
    profile: Profile, processor_dir: Path, builder: PromptBuilder, samples: Sequence[Sample], order: BatchOrder
) -> tuple[PromptCache, PromptLoader]:
    """The prompts of a run: built by threads or by worker processes, kept up to the profile's limit."""
    data = profile.data
    by_process = data.worker_kind == "process" and data.num_workers > 0
    source = ProcessBuilder(processor_dir, data, data.num_workers) if by_process else builder
    cache = PromptCache(source, int(data.cache_gib * (1 << 30)))
    loader = PromptLoader(
        samples, cache, order, num_workers=data.num_workers, on_bad_media=data.on_bad_media,
        on_long_prompt=data.on_long_prompt, max_bad_rows=data.max_bad_rows, prefetch_steps=data.prefetch_steps,
    )  # fmt: skip
    return cache, loader


# The stores are defined in C++ and missing from the stubs.
def _connect(rank: int, world_size: int) -> Any:
    """This rank's connection to the rendezvous store, which torchrun's agent holds if it says so."""
    held_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0 and not held_by_agent,
        timeout=RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
    )


def _group_store(store: Any, namespace: str) -> Any:
    """Where process groups meet; over a connection of its own, since theirs blocks."""
    if store is None:
        return dist.HashStore()  # type: ignore[attr-defined]
    return dist.PrefixStore(f"rollplex/{namespace}/groups", store.clone())  # type: ignore[attr-defined]


def _team(profile: Profile, run: RunFolder, control: Control) -> Team:
    """The rank's training group and its process groups; a collective of all ranks."""
    wanted, shape = profile.topology, load_shape(str(run.base_dir))
    faults = head_faults(shape, wanted.train_tp, wanted.rollout_tp)
    if faults:
        raise UsageError("the model cannot be split this way:" + "".join(f"\n  {fault}" for fault in faults))
    device = device_of(profile)
    ordered = profile.orders_launches(device)
    topology = build_topology(
        wanted.num_nodes, wanted.ranks_per_node, wanted.train_tp, wanted.rollout_tp, disaggregated=profile.disaggregated
    )
    place, peers = topology.places[control.peers.rank], control.peers
    groups = build_groups(topology, place, shape.num_kv_heads, _collective_timeout(profile))
    store = peers.another_connection() if ordered else None
    order = open_order(topology, place, store, peers.namespace) if store is not None else None
    launches = build_launches(order, on_device=device == "cuda")
    control.watch_collectives(CollectiveWatch((launches.rollout, launches.trainer), peers))
    return build_team(topology, place, groups, peers, launches)


def _collective_timeout(profile: Profile) -> datetime.timedelta:
    """Of the process groups: long enough for the stall watchdog, which knows who waits for whom, to speak first."""
    return datetime.timedelta(seconds=2 * max(profile.runtime.stall_timeout_s, profile.runtime.start_timeout_s))
