"""The reward of a profile: a weighted sum of built-in types and users' functions, or the task's own function."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import logging
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import RewardError, UsageError
from rollplex_cli.core.workers import WorkerCallError, WorkerDiedError, WorkerPool, WorkerTimeoutError
from rollplex_cli.rl.rewards.guard import RewardResult, checked, place, score
from rollplex_cli.rl.rewards.types import ISOLATED, TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollplex_cli.profile.schema import RewardProfile
    from rollplex_cli.rl.rewards.guard import RewardFunction


log = logging.getLogger("rollplex.rewards")


class Scorer:
    """Scores the responses to a prompt.

    A part is a built-in type, or `file.py:function` with the arguments of a task's `reward` (see `RewardFunction`),
    sync or async. Users' functions and types that can hang run in worker processes with a limit on every call; the
    rest runs where it is called. Parts are logged times their weights, so that they add up to the reward.

    Args:
        profile: the section `reward`; without parts, `default_parts` are taken, and without those `task_reward`.
        task_reward: the task's own function.
        default_parts: the task's own weights of reward types.

    Raises:
        UsageError: no such type, file or function.
    """

    def __init__(
        self, profile: RewardProfile, task_reward: RewardFunction, default_parts: Mapping[str, float] | None = None
    ) -> None:
        self._profile, self._task_reward = profile, task_reward
        self._weights = dict(profile.parts or default_parts or {})
        self.num_errors = 0
        """Calls that failed and counted 0 (`reward.on_error: zero`, and built-in types that took too long)."""
        isolated = [name for name in self._weights if name in ISOLATED or name not in TYPES]
        for name in isolated:
            if name not in TYPES:
                _split(name)
        self._pool: WorkerPool | None = None
        self._threads: ThreadPoolExecutor | None = None
        if isolated:
            self._pool = WorkerPool(_set_up, (isolated,), num_workers=profile.num_workers, name="rollplex-reward")
            self._threads = ThreadPoolExecutor(profile.num_workers, thread_name_prefix="reward")
            # The first call of a run is the worst moment to learn that a file does not import.
            try:
                self._pool.call(None)
            except WorkerCallError as error:
                self._pool.close()
                raise UsageError(f"reward functions do not load ({error}): {', '.join(isolated)}") from None

    def score(self, sample: Any, texts: Sequence[str], finished: Sequence[bool]) -> list[RewardResult]:
        """Rewards of responses to one sample, in their order.

        Raises:
            RewardError: a function raised, ran too long, ended its process or returned no number; never with
                `reward.on_error: zero`, under which such a call counts 0. A built-in type that runs too long counts 0
                in any case: that is the response's doing, and it cannot be known what it is worth.
        """
        if not self._weights:
            return [self._one("", sample, t, f) for t, f in zip(texts, finished, strict=True)]
        jobs = list(zip(texts, finished, strict=True))
        results = [self._part(name, sample, jobs) for name in self._weights]
        return [self._sum(row) for row in zip(*results, strict=True)]

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _part(self, name: str, sample: Any, jobs: Sequence[tuple[str, bool]]) -> list[RewardResult]:
        if self._threads is None or (name in TYPES and name not in ISOLATED):
            return [self._one(name, sample, *job) for job in jobs]
        return list(self._threads.map(lambda job: self._one(name, sample, *job), jobs))

    def _one(self, name: str, sample: Any, text: str, finished: bool) -> RewardResult:
        try:
            if not name:
                return score(self._task_reward, sample, text, finished)
            if name in TYPES and name not in ISOLATED:
                return score(TYPES[name], sample, text, finished)
            return self._isolated(name, sample, text, finished)
        except RewardError:
            if self._profile.on_error == "error":
                raise
            self.num_errors += 1
            return RewardResult(total=0.0, parts={"reward": 0.0})

    def _isolated(self, name: str, sample: Any, text: str, finished: bool) -> RewardResult:
        assert self._pool is not None
        where, started = place(name, sample), time.monotonic()
        try:
            value = self._pool.call((name, sample, text, finished), self._profile.timeout_s)
        except WorkerCallError as error:
            raise RewardError(f"{where} raised {error}") from None
        except (WorkerTimeoutError, WorkerDiedError) as error:
            if name in TYPES:
                self.num_errors += 1
                log.warning("%s counts 0: %s", where, error)
                return RewardResult(total=0.0, parts={"reward": 0.0})
            if isinstance(error, WorkerDiedError):
                seconds = time.monotonic() - started
                raise RewardError(f"{where} did not return after {seconds:.0f} s: {error}") from None
            raise RewardError(
                f"{where} did not return within `reward.timeout_s`: {self._profile.timeout_s:g} s",
                hint="its process was killed; raise `reward.timeout_s`, or set `reward.on_error: zero`",
            ) from None
        return checked(value, where)

    def _sum(self, row: Sequence[RewardResult]) -> RewardResult:
        parts: dict[str, float] = {}
        for (name, weight), result in zip(self._weights.items(), row, strict=True):
            short = name if name in TYPES else _split(name)[1]
            single = list(result.parts) == ["reward"]
            for part, value in result.parts.items():
                key = short if single else f"{short}.{part}"
                parts[key] = parts.get(key, 0.0) + weight * value
        return RewardResult(total=math.fsum(parts.values()), parts=parts)


def _split(name: str) -> tuple[Path, str]:
    """File and function of `file.py:function`."""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise UsageError(
            f"no such reward type: {name}",
            hint=f"expected `file.py:function` or one of {', '.join(f'`{known}`' for known in TYPES)}",
        )
    if not Path(path).is_file():
        raise UsageError(f"no such reward file: {path}")
    return Path(path), function


def _set_up(names: Sequence[str]) -> Callable[[Any], Any]:
    """In a worker process: load the functions; the handler calls the one that is asked for."""
    functions: dict[str, Callable[..., Any]] = {n: TYPES[n] if n in TYPES else _load(n) for n in names}

    def handle(item: tuple[str, Any, str, bool] | None) -> Any:
        if item is None:
            return None
        name, sample, text, finished = item
        value = functions[name](sample, text, finished)
        return asyncio.run(_result_of(value)) if inspect.isawaitable(value) else value

    return handle


async def _result_of(value: Any) -> Any:
    return await value


def _load(name: str) -> Callable[..., Any]:
    path, function = _split(name)
    module_name = f"rollplex_reward_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Neighbours of the file are importable, as if it were run as a script.
        sys.path.insert(0, str(path.resolve().parent))
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found = getattr(sys.modules[module_name], function, None)
    if not callable(found):
        raise UsageError(f"no function `{function}` in: {path}")
    try:
        inspect.signature(found).bind(None, "", True)
    except TypeError:
        raise UsageError(f"reward function must be callable as `{function}(sample, text, finished)`: {path}") from None
    return found  # type: ignore[no-any-return]
