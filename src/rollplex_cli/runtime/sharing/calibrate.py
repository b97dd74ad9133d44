"""Measuring what overlap gains on this GPU, at this run's sizes, in steady state.

Co-run efficiency of a policy = decode rate / decode rate alone + trainer rate / trainer rate alone, both in the same
seconds. 1 is time slicing. Seconds, not milliseconds: the card is limited by power when both run, and its clock needs
a while to fall.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import statistics
import threading
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rollplex_cli.core.files import write_atomic
from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.plan.vision import vision_source
from rollplex_cli.runtime.groups.packs import packs_of
from rollplex_cli.runtime.sharing.sharing import MIN_EFFICIENCY, Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.trainer.actor import Actor
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.assembly.rank import Rank

log = logging.getLogger("rollplex.sharing")

CANDIDATES = (0, 16, 32)
"""SMs kept from the trainer; 0 is priority alone."""
BATCHES = (8, 32)
"""Decode batches measured besides the run's largest."""
MAX_TOKENS = 4096
STEADY_STEPS = 10
"""Decode steps of the full batch before measuring."""
FENCE_GAIN = 0.05
"""Efficiency that a fence has to add: PyTorch's allocator gives each stream blocks of its own, so a fenced stream asks
the driver for memory that the free one has already (measured: up to 155 times in a step, each stalling the device)."""
IN_FLIGHT = 2
"""Prefixes launched before the first of them is waited for."""

_NO_POWER: tuple[float | None, int | None] = (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One batch under one policy."""

    batch: int
    reserved_sms: int
    decode_alone: float
    """Decode steps a second."""
    decode: float
    prefix_alone: float
    """Passes of prefixes a second, of the longest prompt given or those that share its pass."""
    prefix: float
    efficiency: float
    watts: float | None
    sm_mhz: int | None


def calibrate(rank: Rank, inputs: Sequence[PromptInput]) -> list[Measurement]:
    """Measure with the run's own engines, between steps, and let `auto` decide by it; nothing on a CPU.

    All ranks measure at once, and decide by the mean of what they found: one choice for all of them. The rollout's
    caches are empty afterwards. Results are in the run folder's `sharing.json`.

    Args:
        rank: this rank; nothing is measured where its rollout replica has several ranks, whose decode steps would have
            to be counted out, too, or where it does not both decode and train.
        inputs: prompts of a step of the training group, at least one.
    """
    seconds, sharing, topology = rank.profile.schedule.calibration_s, rank.sharing, rank.team.topology
    if sharing.streams is None or not seconds or topology.rollout_tp > 1 or topology.disaggregated:
        return []
    decoding = max(1, len(inputs) // topology.replicas_per_group) * rank.profile.rollout.group_size
    largest = min(rank.profile.rollout.max_running_requests, decoding)
    probe = _Probe(rank, longest_pass(rank.profile, inputs), seconds)
    alone = probe.prefix_rate(0)
    found = [m for batch in sorted({*(b for b in BATCHES if b < largest), largest}) for m in probe.batch(batch, alone)]
    found = _agreed(rank, found)
    job = rank.rollout_lane.submit(rank.engines.rollout.publish)
    rank.control.await_future(job, "emptying the rollout's caches")
    sharing.decide([best_choice([m for m in found if m.batch == batch]) for batch in {m.batch for m in found}])
    rows = {"measurements": [asdict(m) for m in found], "choices": [asdict(c) for c in sharing.choices]}
    write_atomic(rank.run.sharing(rank.peers.rank), json.dumps(rows, indent=2) + "\n")
    for choice in sharing.choices:
        log.info("up to %d responses: %s", choice.batch, choice)
    return found


def longest_pass(profile: Profile, inputs: Sequence[PromptInput]) -> list[PromptInput]:
    """Prompts of the pass of prefixes with the most tokens, as a step divides them."""
    # What the rollout's tower yields is of one prompt, which then runs by itself.
    from_rollout = vision_source(profile) == "rollout"
    alone = [i for i, given in enumerate(inputs) if from_rollout and given.prompt.media]
    packs = packs_of(dict(enumerate(inputs)), profile.prefix_pack_tokens, alone)
    return [inputs[i] for i in max(packs, key=lambda pack: sum(inputs[i].num_tokens for i in pack))]


def best_choice(measured: Sequence[Measurement]) -> Choice:
    """The most efficient policy of one batch, and whether it pays at all. A fence has to gain FENCE_GAIN over none."""
    best = max(measured, key=lambda m: m.efficiency - (FENCE_GAIN if m.reserved_sms else 0.0))
    return Choice(
        batch=best.batch,
        overlap=best.efficiency >= MIN_EFFICIENCY,
        reserved_sms=best.reserved_sms,
        efficiency=best.efficiency,
    )


def _agreed(rank: Rank, found: Sequence[Measurement]) -> list[Measurement]:
    """This rank's measurements with the mean efficiency of all ranks."""
    own = {"efficiency": [m.efficiency for m in found]}
    every = rank.peers.meet("what sharing gains", own, rank.control.tick)
    means = [statistics.fmean(values) for values in zip(*(theirs["efficiency"] for theirs in every), strict=True)]
    return [replace(m, efficiency=mean) for m, mean in zip(found, means, strict=True)]


class _Probe:
    """Decode of one prompt and passes of prefixes on the rank's lanes.

    Ranks of a training group meet in every prefix: each takes as many of them as the others, a number agreed on before.
    """

    def __init__(self, rank: Rank, prompts: Sequence[PromptInput], seconds: float) -> None:
        self._rank, self._prompts, self._seconds = rank, prompts, seconds
        self._prompt = max(prompts, key=lambda i: i.num_tokens)
        self._steps = 0
        self._count = 0
        self._full = threading.Event()
        self._stop = threading.Event()

    def batch(self, batch: int, prefix_alone: float) -> list[Measurement]:
        """Every candidate beside a decode of `batch` responses."""
        self._stop.clear()
        self._full.clear()
        job = self._rank.rollout_lane.submit(partial(self._decode, batch))
        try:
            while not self._full.wait(0.1) and not job.done():
                self._rank.control.tick()
            self._meet("decode at its full batch", {})
            decode_alone = self._decode_rate(lambda: time.sleep(self._seconds))
            return [self._measure(batch, sms, decode_alone, prefix_alone) for sms in CANDIDATES]
        finally:
            self._stop.set()
            self._rank.control.await_future(job, "measuring decode")

    def _measure(self, batch: int, reserved_sms: int, decode_alone: float, prefix_alone: float) -> Measurement:
        prefix, power = 0.0, _NO_POWER

        def run() -> None:
            nonlocal prefix, power
            prefix = self.prefix_rate(reserved_sms)
            power = _power()

        decode = self._decode_rate(run)
        return Measurement(
            batch=batch,
            reserved_sms=reserved_sms,
            decode_alone=decode_alone,
            decode=decode,
            prefix_alone=prefix_alone,
            prefix=prefix,
            efficiency=decode / decode_alone + prefix / prefix_alone,
            watts=power[0],
            sm_mhz=power[1],
        )

    def _decode_rate(self, during: Callable[[], None]) -> float:
        first, started = self._steps, time.monotonic()
        during()
        return (self._steps - first) / (time.monotonic() - started)

    def prefix_rate(self, reserved_sms: int) -> float:
        """Passes a second on the trainer lane, while whatever runs beside it runs."""
        if not self._count:
            rates = self._meet("prefixes a second", {"rate": self._run_prefixes(0, IN_FLIGHT)})
            self._count = max(IN_FLIGHT, math.ceil(self._seconds / 2 * max(theirs["rate"] for theirs in rates)))
        return self._run_prefixes(reserved_sms, self._count)

    def _run_prefixes(self, reserved_sms: int, count: int) -> float:
        job = self._rank.trainer_lane.submit(partial(self._prefixes, reserved_sms, count))
        return self._rank.control.await_future(job, "measuring prefixes")

    def _meet(self, name: str, value: dict[str, float]) -> list[dict[str, float]]:
        return self._rank.peers.meet(f"calibration: {name}", value, self._rank.control.tick)

    def _prefixes(self, reserved_sms: int, count: int) -> float:
        actor, streams = self._rank.engines.actor, self._rank.sharing.streams
        assert streams is not None
        streams.enter(reserved_sms)
        self._pass(actor)
        streams.synchronize()
        started = time.monotonic()
        for number in range(1, count + 1):
            self._pass(actor)
            # A few in flight: the device never waits for Python, and Python never runs far ahead.
            if number % IN_FLIGHT == 0 or number == count:
                streams.synchronize()
        rate = count / (time.monotonic() - started)
        streams.enter(0)
        return rate

    def _pass(self, actor: Actor) -> None:
        for state in actor.prefixes(self._prompts):
            actor.release(state)

    def _decode(self, batch: int) -> None:
        with self._rank.memory.residency.hold("rollout_kv", "calibration"):
            self._decode_until_stopped(batch)
            self._rank.engines.rollout.drop_caches()

    def _decode_until_stopped(self, batch: int) -> None:
        engine = self._rank.engines.rollout
        engine.begin_step()
        steady = 0
        while not self._stop.is_set():
            if not engine.has_work():
                engine.submit(self._requests(batch))
            engine.step()
            self._steps += 1
            # Steady only some steps after the last prompt: kernels are built at first use.
            steady = steady + 1 if engine.num_running >= batch else 0
            if steady >= STEADY_STEPS:
                self._full.set()
        engine.abort()

    def _requests(self, batch: int) -> list[GroupRequest]:
        rollout = self._rank.profile.rollout
        room = (rollout.kv_tokens - 2 * self._prompt.num_tokens) // batch - 8
        limit = max(1, min(MAX_TOKENS, room, self._rank.engines.rollout.capacity_tokens - self._prompt.num_tokens))
        settings = SamplingSettings(max_new_tokens=limit, temperature=rollout.temperature, ignore_eos=True)
        seeds = tuple(derive_seed(0, "calibrate", index) for index in range(batch))
        return [GroupRequest(group=0, input=self._prompt, seeds=seeds, settings=settings)]


def _power() -> tuple[float | None, int | None]:
    """(watts, SM clock in MHz) now; None where the library that tells is missing."""
    with contextlib.suppress(Exception):
        return torch.cuda.power_draw() / 1000, int(torch.cuda.clock_rate())
    return None, None
