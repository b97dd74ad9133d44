"""Where the engine lives: in how little memory, in whose memory, in which thread."""

from __future__ import annotations

import gc
import logging
import math
import random
import signal
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.units import MIB
from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.engine import SglangRollout
from rollplex_cli.memory.manager import MemoryManager
from rollplex_cli.memory.residency import Residency
from rollplex_cli.memory.vmm.host import HostDriver
from rollplex_cli.runtime.assembly.build_memory import place_key_values, place_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = [pytest.mark.scenario, pytest.mark.usefixtures("default_group", "one_thread")]

ALIGNMENT = 64


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit-equality needs equal thread counts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def options(folder: Path, **changes: Any) -> RolloutOptions:
    return RolloutOptions(**{"model_dir": folder, "kv_tokens": 2048, "chunked_prefill_tokens": 256, **changes})


class Arena:
    """One flat tensor of NaN, handed out in aligned pieces."""

    def __init__(self, size: int) -> None:
        self.flat = torch.full((size,), math.nan)
        self.used = 0

    def take(self, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        piece = self.flat[self.used : self.used + count].view(shape)
        self.used += -(-count // ALIGNMENT) * ALIGNMENT
        return piece

    def holds(self, tensor: torch.Tensor) -> bool:
        start = self.flat.data_ptr()
        return start <= tensor.data_ptr() < start + self.flat.numel() * self.flat.element_size()


def test_memory_pressure_changes_no_token(
    tiny_checkpoint: Path, kit: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool far too small for all at once: requests wait, are taken out and come back."""
    requests = [
        kit.request(i, tiny.video_prompt(i, grid_thw=(2, 4, 8)), seeds=range(12), max_new_tokens=60) for i in range(4)
    ]
    large = SglangRollout(options(tiny_checkpoint, kv_tokens=8192))
    expected = kit.roll_out(large, requests)
    large.close()
    small = SglangRollout(options(tiny_checkpoint, kv_tokens=500, chunked_prefill_tokens=64))
    try:
        retracted = 0
        scheduler = small._scheduler
        add = scheduler._add_request_to_queue

        def counting(req: Any, is_retracted: bool = False) -> None:
            nonlocal retracted
            retracted += is_retracted
            add(req, is_retracted=is_retracted)

        monkeypatch.setattr(scheduler, "_add_request_to_queue", counting)
        results = kit.roll_out(small, requests)
        assert retracted > 0
        for i in range(4):
            assert kit.tokens(results[i]) == kit.tokens(expected[i])
        again = kit.roll_out(small, requests)
        assert {i: r.responses for i, r in results.items()}.keys() == again.keys()
        assert [r.logprobs for r in results[3].responses] == [r.logprobs for r in again[3].responses]
        assert results[3].decode_step == again[3].decode_step
        small.begin_step()
    finally:
        small.close()


def test_weights_and_pool_in_foreign_memory(tiny_checkpoint: Path, kit: Any, tiny: Any) -> None:
    """Bit-equal results from tensors that somebody else owns, and whoever writes there writes the model."""
    requests = [kit.request(i, tiny.video_prompt(i)) for i in range(3)]
    plain = SglangRollout(options(tiny_checkpoint))
    expected = kit.roll_out(plain, requests)
    plain.close()
    weights, pool = Arena(2**20), Arena(2**20)

    def rebind(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: weights.take(tuple(tensor.shape)).copy_(tensor) for name, tensor in tensors.items()}

    def kv_buffers(
        k_shape: tuple[int, ...], v_shape: tuple[int, ...], dtype: torch.dtype, layers: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        assert dtype == torch.float32
        return [pool.take(k_shape) for _ in range(layers)], [pool.take(v_shape) for _ in range(layers)]

    engine = SglangRollout(options(tiny_checkpoint, rebind=rebind, kv_buffers=kv_buffers))
    try:
        assert all(weights.holds(p) for p in engine.parameters().values())
        model = engine._scheduler.model
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        got = kit.roll_out(engine, requests)
        assert pool.flat.isfinite().any()
        for i in range(3):
            assert [r.logprobs for r in got[i].responses] == [r.logprobs for r in expected[i].responses]
        backup = weights.flat.clone()
        weights.flat.mul_(1.05)
        assert kit.roll_out(engine, requests)[0].responses[0].logprobs != expected[0].responses[0].logprobs
        weights.flat.copy_(backup)
        assert kit.roll_out(engine, requests)[0].responses[0].logprobs == expected[0].responses[0].logprobs
    finally:
        engine.close()


def test_a_pool_without_memory_between_decodes_changes_nothing(tiny_checkpoint: Path, kit: Any, tiny: Any) -> None:
    requests = [kit.request(i, tiny.video_prompt(i)) for i in range(3)]
    plain = SglangRollout(options(tiny_checkpoint))
    expected = kit.roll_out(plain, requests)
    plain.close()
    residency = Residency(MemoryManager(HostDriver(64 * MIB), budget_bytes=64 * MIB, host_budget_bytes=0))
    engine = SglangRollout(
        options(
            tiny_checkpoint,
            rebind=partial(place_weights, residency, {}),
            kv_buffers=partial(place_key_values, residency),
        )
    )
    residency.rest("rollout_kv")
    for _ in range(2):
        assert set(residency.manager.usage().regions) == {"snapshot"}
        with residency.hold("rollout_kv", "a test"):
            got = kit.roll_out(engine, requests)
            engine.submit([kit.request(9, tiny.video_prompt(0))])
            engine.step()
            with pytest.raises(ValueError, match="`drop_caches` needs an idle"):
                engine.drop_caches()
            engine.abort()
            engine.drop_caches()
        for i in range(3):
            assert [r.logprobs for r in got[i].responses] == [r.logprobs for r in expected[i].responses]
            assert [r.cached_tokens for r in got[i].responses] == [r.cached_tokens for r in expected[i].responses]
    engine.close()
    residency.close()


def test_close_frees_weights_and_pool(tiny_checkpoint: Path, kit: Any, tiny: Any) -> None:
    engine = SglangRollout(options(tiny_checkpoint))
    kit.roll_out(engine, [kit.request(0, tiny.video_prompt(0))])
    runner = engine._scheduler.tp_worker.model_runner
    held = [weakref.ref(o) for o in (engine._scheduler, runner, runner.model, runner.token_to_kv_pool)]
    del runner
    engine.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * 4


def test_a_wrong_rebind_is_refused_and_leaves_no_engine(tiny_checkpoint: Path) -> None:
    def cut(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.flatten()[:-1] for name, tensor in tensors.items()}

    with pytest.raises(ValueError, match="`rebind`"):
        SglangRollout(options(tiny_checkpoint, rebind=cut))
    SglangRollout(options(tiny_checkpoint)).close()


def test_two_engines_at_once_are_refused(tiny_checkpoint: Path) -> None:
    engine = SglangRollout(options(tiny_checkpoint))
    with pytest.raises(ValueError, match="already"):
        SglangRollout(options(tiny_checkpoint))
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.begin_step()


def test_a_checkpoint_with_other_names_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((tiny_checkpoint / "config.json").read_text())
    with pytest.raises(UsageError, match="not a checkpoint"):
        SglangRollout(options(tmp_path))
    weights = load_file(tiny_checkpoint / "model.safetensors")
    save_file(
        {f"model.language_{n}" if n.startswith("model.") else n: w for n, w in weights.items()},
        tmp_path / "x.safetensors",
    )
    with pytest.raises(UsageError, match=r"model\.language_model"):
        SglangRollout(options(tmp_path))


def test_another_thread_gets_equal_results_and_nothing_else_changes(tiny_checkpoint: Path, kit: Any, tiny: Any) -> None:
    """Built, stepped and closed in a worker thread while this one trains."""
    requests = [kit.request(i, tiny.video_prompt(i)) for i in range(3)]
    here = SglangRollout(options(tiny_checkpoint))
    expected = kit.roll_out(here, requests)
    here.close()
    expected_loss = train()
    state = process_state()
    threads = set(threading.enumerate())
    results: list[Any] = []

    def roll_out() -> None:
        engine = SglangRollout(options(tiny_checkpoint))
        results.append(kit.roll_out(engine, requests))
        engine.close()

    worker = threading.Thread(target=roll_out)
    worker.start()
    losses = []
    while worker.is_alive():
        losses.append(train())
    worker.join()
    assert set(losses) == {expected_loss}
    assert set(threading.enumerate()) == threads
    assert process_state() == state
    for i in range(3):
        assert [r.logprobs for r in results[0][i].responses] == [r.logprobs for r in expected[i].responses]


def train() -> float:
    """A few deterministic steps of something else."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator)
    layer = torch.nn.Linear(32, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 32))
        layer.bias.zero_()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (layer(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def process_state() -> tuple[Any, ...]:
    """What a library has no business changing."""
    root = logging.getLogger()
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD, signal.SIGUSR1)],
        list(root.handlers),
        root.level,
    )
