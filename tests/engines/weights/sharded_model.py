"""Sharded models against the whole one on four gloo ranks; run by test_sharded.py as
`python sharded_model.py RANK WORLD STORE`. Prints nothing; an assertion ends the rank.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
import conftest as tiny

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.engines.lora.adapters import LoraSettings, attach_adapters
from rollplex_cli.engines.trainer.actor import Actor, shard_weights
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.adamw.streaming import StreamingAdamW
from rollplex_cli.engines.trainer.arena import GradientArena
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.model.parallel import TensorParallel
from rollplex_cli.engines.trainer.sharded import GradientSync, Shard
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.engines.weights.check import check_published
from rollplex_cli.engines.weights.exchange import Exchange
from rollplex_cli.engines.weights.load import fill_homes
from rollplex_cli.engines.weights.names import ADAPTED_MODULES, is_adapter
from rollplex_cli.engines.weights.shards import Box, ShardPlan
from rollplex_cli.engines.weights.skeleton import build_shards
from rollplex_cli.engines.weights.views import bind_views
from rollplex_cli.plan.topology import Topology, build_topology
from rollplex_cli.rl.losses import LossSettings, policy_loss
from rollplex_cli.rl.packing import pack_suffix

if TYPE_CHECKING:
    from collections.abc import Callable

ADAMW = AdamWSettings(lr=1e-3, weight_decay=0.01)
MODES = ("keep", "device", "host", "recompute")


class Groups:
    """All groups of a topology on this rank, created in its order."""

    def __init__(self, topology: Topology, kv_heads: int) -> None:
        self.train = self._mine(topology.train_tp_groups)
        self.data = self._mine(topology.data_parallel_groups)
        self.exchange = self._mine(topology.exchange_groups)
        self.kv = self._mine(topology.kv_groups(kv_heads))

    @staticmethod
    def _mine(lists: Any) -> Any:
        made = [(ranks, dist.new_group(list(ranks))) for ranks in lists]
        return next((group for ranks, group in made if dist.get_rank() in ranks), None)


class Sharded:
    """This rank's shard of a whole model, in hand-made rollout tensors."""

    def __init__(self, whole: Any, topology: Topology, groups: Groups, lora: LoraSettings | None = None) -> None:
        self.topology, self.groups = topology, groups
        place = topology.places[dist.get_rank()]
        self.module, self.plan = build_shards(
            whole.config, whole.dtype, train_tp=topology.train_tp, training_shard=place.training_shard,
            rollout_tp=topology.rollout_tp, lora=lora,
        )  # fmt: skip
        self.homes = empty_homes(self.plan, whole.dtype)
        values = {name: param.detach() for name, param in whole.named_parameters()}
        fill_homes(self.plan, self.homes, lambda name, box: boxed(values[name], box))
        self.table = bind_views(self.module, self.homes, self.plan)
        self.shard = Shard(
            plan=self.plan,
            parallel=TensorParallel(topology.train_tp, place.training_shard, groups.train),
            kv_group=groups.kv,
        )


def empty_homes(plan: ShardPlan, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rollout tensors of a rank, filled with what no test expects."""
    homes = {}
    for name, parts in plan.homes.items():
        rows = parts[-1].first_row + parts[-1].rows
        homes[name] = torch.full((rows, *parts[0].box.shape[1:]), 7.0, dtype=dtype)
    return homes


def boxed(value: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a tensor that may lack the vision padding."""
    out = torch.zeros(box.shape, dtype=value.dtype)
    common = box.intersection(Box.whole(tuple(value.shape)))
    if common is not None:
        out[common.slices(box.offset)] = value[common.slices()]
    return out


def backward_of_group(split: SplitModel, seed: int, mode: Any) -> torch.Tensor:
    """Prefix, suffix, weighted loss and both backwards of one group; returns its log-probs."""
    prompt = tiny.make_prompt(seed, [(1, 4, 4), (2, 4, 8)])
    responses = tiny.make_responses(seed, [3, 1, 4])
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    state = split.prefix(prompt, mode)
    with torch.enable_grad():
        logprobs = split.suffix(state, packed)
        weights = torch.linspace(-1.0, 2.0, len(logprobs), dtype=logprobs.dtype)
        loss = (logprobs * weights).mean()
    loss.backward()
    split.prefix_backward(state)
    return logprobs.detach()


def check_gradients(
    whole: Any, sharded: Sharded, tolerance: float, mode: Any, kept: int | None, lora: LoraSettings | None = None
) -> None:
    """Log-probs and every gradient (of adapters alone, where there are any) equal those of the whole model, with `kept`
    layers' suffix activations kept."""
    whole.zero_grad()
    for name, param in [*whole.named_parameters(), *sharded.module.named_parameters()]:
        param.requires_grad_(lora is None or is_adapter(name))
    options: dict[str, Any] = {"temperature": 0.7, "banned_token_ids": (tiny.VIDEO, tiny.IMAGE)}
    options["freeze_vision"] = lora is not None
    reference = SplitModel(model_weights(whole, lora=lora), **options)
    params = {name: param for name, param in sharded.module.named_parameters() if param.requires_grad}
    arena = GradientArena(params)
    split = SplitModel(shard_weights(sharded.module, sharded.shard, lora), suffix_kept_layers=kept, **options)
    expected, got = backward_of_group(reference, 3, "keep"), backward_of_group(split, 3, mode)
    assert (expected - got).abs().max() < tolerance, (expected - got).abs().max()
    prompt, (response,) = tiny.make_prompt(5, [(2, 8, 4)]), tiny.make_responses(5, [6])
    with torch.no_grad():
        full = split.full_logprobs(prompt, response) - reference.full_logprobs(prompt, response)
    assert full.abs().max() < tolerance
    sync = GradientSync(sharded.shard, arena)
    sync.synchronize()
    grads = {name: param.grad for name, param in whole.named_parameters() if param.requires_grad}
    for name, placement in sharded.plan.placements.items():
        if name not in params:
            continue
        wanted = boxed(grads[placement.tensor], placement.box)
        assert wanted.abs().max() > 10 * tolerance, name
        error = (wanted - params[name].grad).abs().max()
        assert error < tolerance, (name, float(error))
    norm = torch.sqrt(sum(g.double().square().sum() for g in grads.values())).item()  # type: ignore[arg-type]
    assert abs(sync.norm() - norm) < 100 * tolerance
    for param in params.values():
        param.grad = None


def gradients(rank: int) -> None:
    """TP 2 x DP 2 (here: two equal groups) and TP 4, KV heads 1 and 2, q = 1, 2 and 4, float32 and float64."""
    cases = [(2, 1, 2), (2, 2, 1), (4, 1, 1), (4, 2, 2), (4, 4, 1)]
    modes, kept = itertools.cycle(MODES), itertools.cycle((None, 0, 1, 2))
    for train_tp, rollout_tp, kv_heads in cases:
        topology = build_topology(1, 4, train_tp, rollout_tp)
        groups = Groups(topology, kv_heads)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
            whole = tiny.tiny_model(dtype, tied=train_tp == 2, intermediate=190, kv_heads=kv_heads)
            check_gradients(whole, Sharded(whole, topology, groups), tolerance, next(modes), next(kept))


def adapted_model(dtype: torch.dtype, kv_heads: int, lora: LoraSettings) -> Any:
    """A whole model with adapters far from zero."""
    whole = tiny.tiny_model(dtype, kv_heads=kv_heads)
    attach_adapters(whole, lora)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, param in whole.named_parameters():
            if is_adapter(name):
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    return whole


def adapters(rank: int) -> None:
    """The same with adapters beside frozen weights; then updates, exchange and check, only adapters being sent. Without
    the sum of their partial gradients the copies drift apart."""
    lora = LoraSettings(rank=3, alpha=6.0, targets=tuple(ADAPTED_MODULES))
    modes = itertools.cycle(MODES)
    for train_tp, rollout_tp, kv_heads in [(2, 1, 1), (4, 2, 2), (4, 1, 2)]:
        topology = build_topology(1, 4, train_tp, rollout_tp)
        groups = Groups(topology, kv_heads)
        whole = adapted_model(torch.float64, kv_heads, lora)
        check_gradients(whole, Sharded(whole, topology, groups, lora), 1e-12, next(modes), 1, lora)
    sharded = Sharded(adapted_model(torch.float32, 2, lora), topology, groups, lora)
    actor = make_actor(sharded, lora)
    exchange = Exchange(sharded.plan, sharded.homes, groups.exchange, trained=actor.named_parameters())
    assert exchange.transfers and all("lora_" in transfer.home for transfer in exchange.transfers)
    sync = actor._optimizer._sync
    assert sync is not None and sync._partial
    for step in range(2):
        train_step(actor, step, lambda _: True)
        exchange.run()
        if step == 0:
            check_published([sharded.plan], sharded.homes, actor.masters_of, None)
            sync._partial = []
    with pytest.raises(RunFailedError, match="published weights are wrong"):
        check_published([sharded.plan], sharded.homes, actor.masters_of, None)
    actor.close()


class Alone:
    """One rank's training without an engine: the engine keeps its groups in module globals, one set a process."""

    def __init__(self, model: Any) -> None:
        self._params = dict(model.named_parameters())
        self._arena = GradientArena(self._params)
        self._optimizer = StreamingAdamW(self._params, self._arena, ADAMW)
        self._split = SplitModel(model_weights(model), banned_token_ids=(tiny.VIDEO, tiny.IMAGE))

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._params

    def prefix(self, prompt: Any) -> Any:
        return self._split.prefix(prompt, "keep")

    def suffix(self, state: Any, packed: Any, loss_fn: Any) -> Any:
        with torch.enable_grad():
            logprobs = self._split.suffix(state, packed)
            loss_fn(logprobs).loss.backward()
        return SimpleNamespace(logprobs=logprobs.detach())

    def prefix_backward(self, state: Any) -> None:
        self._split.prefix_backward(state)

    def update(self, scale: float) -> Any:
        self._arena.scale(scale)
        self._optimizer.step()
        self._arena.zero()
        return SimpleNamespace(grad_norm=self._optimizer.grad_norm)


def make_actor(sharded: Sharded, lora: LoraSettings | None = None) -> Actor:
    """An actor over the shard, the ranks of its data-parallel group being its peers."""
    return Actor(
        sharded.module,
        optimizer=ADAMW,
        banned_token_ids=(tiny.VIDEO, tiny.IMAGE),
        prefix_activations="host",
        data_parallel_group=sharded.groups.data,
        shard=sharded.shard,
        lora=lora,
    )


def train_step(actor: Any, step: int, mine: Callable[[int], bool]) -> tuple[float, float]:
    """A step over four groups, of which this rank's training group does some; returns its loss and the norm."""
    loss, tokens = 0.0, 0
    for group in range(4):
        prompt = tiny.make_prompt(10 * step + group, [(1, 4, 4)] if group % 2 else [])
        responses = tiny.make_responses(group, [3, 1 + group])
        packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
        tokens += packed.num_tokens
        if mine(group):
            advantages = torch.tensor([1.0, -0.5])
            state = actor.prefix(prompt)
            outcome = actor.suffix(
                state,
                packed,
                lambda lp, n=packed.lengths, a=advantages: policy_loss(lp, None, a, None, n, LossSettings()),  # type: ignore[misc]
            )
            loss += float((outcome.logprobs * outcome.logprobs).sum())
            actor.prefix_backward(state)
    return loss, actor.update(1 / tokens).grad_norm


def publishes(rank: int) -> None:
    """Twenty updates on TP 2 x DP 2 over rollout TP 1, from rank-different initial values, each followed by the
    exchange and the check; the same losses and weights as one rank alone."""
    topology = build_topology(1, 4, 2, 1)
    groups = Groups(topology, 1)
    place = topology.places[rank]
    sharded = Sharded(tiny.tiny_model(seed=place.training_group, kv_heads=1, tied=False), topology, groups)
    # Foreign columns carry sentinels until the first exchange: no collective before it may touch them.
    foreign = {h: home.clone() for h, home in sharded.homes.items()}
    actor = make_actor(sharded)
    for placement in sharded.plan.placements.values():
        foreign[placement.home][placement.home_box.slices()] = sharded.homes[placement.home][
            placement.home_box.slices()
        ]
    assert all(torch.equal(foreign[h], home) for h, home in sharded.homes.items())
    exchange = Exchange(sharded.plan, sharded.homes, groups.exchange)
    exchange.run()
    check_published([sharded.plan], sharded.homes, actor.masters_of, None)
    alone = Alone(tiny.tiny_model(kv_heads=1, tied=False))
    start = {name: home.clone() for name, home in sharded.homes.items()}
    for step in range(20):
        loss, norm = train_step(actor, step, lambda g: g % 2 == place.training_group)
        both = torch.tensor([loss], dtype=torch.float64)
        dist.all_reduce(both, group=groups.data)
        exchange.run()
        check_published([sharded.plan], sharded.homes, actor.masters_of, None)
        told = torch.tensor(train_step(alone, step, lambda _: True) if rank == 0 else (0.0, 0.0), dtype=torch.float64)
        dist.broadcast(told, src=0)
        expected, expected_norm = told.tolist()
        assert abs(float(both) - expected) < 1e-4 * max(1.0, abs(expected)), (step, float(both), expected)
        assert abs(norm - expected_norm) < 1e-4 * max(1.0, expected_norm), (step, norm, expected_norm)
    assert all(not torch.equal(start[name], home) for name, home in sharded.homes.items())
    values = {name: param.detach() for name, param in alone.named_parameters().items()}
    for value in values.values():
        dist.broadcast(value, src=0)
    for name, parts in sharded.plan.homes.items():
        for part in parts:
            error = sharded.homes[name][part.first_row : part.first_row + part.box.shape[0]] - boxed(
                values[part.tensor], part.box
            )
            assert error.abs().max() < 1e-3, name
    mutations(sharded, actor, exchange)
    actor.close()


def mutations(sharded: Sharded, actor: Actor, exchange: Exchange) -> None:
    """What is left out on purpose must not pass the check."""

    def fails() -> None:
        with pytest.raises(RunFailedError, match="published weights are wrong"):
            check_published([sharded.plan], sharded.homes, actor.masters_of, None)

    def restore() -> None:
        exchange.run()
        check_published([sharded.plan], sharded.homes, actor.masters_of, None)

    hows = {transfer.how for transfer in exchange.transfers}
    assert hows == {"rows", "columns"}, hows
    for how in sorted(hows):
        partial = Exchange(sharded.plan, sharded.homes, sharded.groups.exchange, skip=lambda t, how=how: t.how == how)  # type: ignore[misc]
        train_step(actor, 50, lambda _: True)
        partial.run()
        fails()
        restore()
    sync = actor._optimizer._sync
    assert sync is not None
    kept = sync._shared
    assert kept
    sync._shared = []
    train_step(actor, 60, lambda _: True)
    exchange.run()
    fails()
    sync._shared = kept


def drift(rank: int) -> None:
    """Replicated gradients that differ between the ranks of a training group, and two heads shared by four ranks
    inside one rollout shard: with both synchronisations the copies stay equal, without either the check fails."""
    topology = build_topology(1, 4, 4, 1)
    groups = Groups(topology, 2)
    for left_out in ("_replicated", "_shared"):
        sharded = Sharded(tiny.tiny_model(kv_heads=2), topology, groups)
        actor = make_actor(sharded)
        exchange = Exchange(sharded.plan, sharded.homes, groups.exchange)
        assert {transfer.how for transfer in exchange.transfers} == {"rows", "columns", "shared_rows"}
        norm = sharded.module.model.language_model.norm.weight
        for step in range(2):
            norm.grad.add_(1e-2 * (rank + 1) * torch.linspace(-1, 1, len(norm)))
            train_step(actor, step, lambda _: True)
            exchange.run()
            if step == 0:
                check_published([sharded.plan], sharded.homes, actor.masters_of, None)
                setattr(actor._optimizer._sync, left_out, [])
        with pytest.raises(RunFailedError, match="published weights are wrong"):
            check_published([sharded.plan], sharded.homes, actor.masters_of, None)
        actor.close()


def main(rank: int, world: int, store: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from sharded_delivery import deliveries  # it builds on this module

    for check in (gradients, publishes, drift, adapters, deliveries):
        check(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
