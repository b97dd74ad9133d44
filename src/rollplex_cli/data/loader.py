"""Prompts for each step, built ahead of it by worker threads."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Protocol

from rollplex_cli.core.errors import DataError, LongPromptError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rollplex_cli.data.order import BatchOrder
    from rollplex_cli.data.types import Prompt, Sample

log = logging.getLogger("rollplex.data")

DEFAULT_CACHE_BYTES = 1 << 30
PREFETCH_STEPS = 2
MAX_BAD_ROWS = 1000
MAX_REPLACEMENTS = 8
"""Bad samples in a row for one slot of a batch before the run stops, even where it may skip them."""


class Builder(Protocol):
    """Makes a prompt of a sample; `data.processor.PromptBuilder` is the real one. Called from several threads."""

    def build(self, sample: Sample) -> Prompt:
        """Raises DataError for a sample that cannot be used."""


class PromptCache:
    """Keeps built prompts up to a number of bytes. Safe from several threads.

    What came first stays: the order visits every sample once per epoch, so evicting the oldest would evict
    exactly what is needed next.
    """

    def __init__(self, builder: Builder, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._builder = builder
        self._max_bytes = max_bytes
        self._prompts: dict[str, Prompt] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0
        """Bytes of the patches held."""

    def build(self, sample: Sample) -> Prompt:
        """The prompt of a sample, from the cache where it is there."""
        if (cached := self._prompts.get(sample.sample_id)) is not None and cached.sample == sample:
            return cached
        prompt = self._builder.build(sample)
        size = sum(medium.patches.nbytes for medium in prompt.media)
        with self._lock:
            if sample.sample_id not in self._prompts and self.num_bytes + size <= self._max_bytes:
                self._prompts[sample.sample_id] = prompt
                self.num_bytes += size
        return prompt

    def close(self) -> None:
        """Close the builder, where it holds processes."""
        close = getattr(self._builder, "close", None)
        if close is not None:
            close()


class PromptLoader:
    """Hands out the prompts of a step, in the order's order, and builds the next steps' meanwhile.

    The prompts depend on the order, the step and the files only: not on the workers, not on what was asked before.
    A sample that cannot be used is an error, or with `on_bad_media="skip"` (`on_long_prompt` for one that is too
    long) is replaced by the sample that the same slot has in the next step (then the one after), is entered in
    `skipped`, and is an error after `MAX_REPLACEMENTS` in a row or `max_bad_rows` in all.

    Args:
        samples: rows of the split; as many as the order was made for.
        num_workers: threads that build ahead; 0 builds when asked.
        prefetch_steps: how many steps ahead to build.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        builder: Builder,
        order: BatchOrder,
        *,
        num_workers: int = 1,
        on_bad_media: Literal["error", "skip"] = "error",
        on_long_prompt: Literal["error", "skip"] = "error",
        max_bad_rows: int = MAX_BAD_ROWS,
        prefetch_steps: int = PREFETCH_STEPS,
    ) -> None:
        if len(samples) != order.num_samples:
            raise ValueError(f"order was made for {order.num_samples} samples, got: {len(samples)}")
        self._samples = samples
        self._builder = builder
        self._order = order
        self._skip_bad, self._skip_long = on_bad_media == "skip", on_long_prompt == "skip"
        self._max_bad_rows = max_bad_rows
        self._prefetch_steps = prefetch_steps
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="prompts") if num_workers else None
        self._pending: dict[int, Future[Prompt]] = {}
        self.skipped: dict[str, str] = {}
        """Samples left out so far, by id, with the reason."""

    def batch(self, step: int) -> list[Prompt]:
        """This rank's prompts of a step. Blocks until they are built; one caller at a time.

        Raises:
            DataError: a sample cannot be used; the first one of the batch in its order.
        """
        share = self._order.prompts_per_rank
        return self.take(step * share, share)

    def take(self, first: int, count: int, *, prefetch: bool = True) -> list[Prompt]:
        """`count` prompts from element `first` on of this rank's own endless line (`BatchOrder.position`).

        Raises as `batch` does. With `prefetch` the elements that follow are built ahead, and only those.
        """
        if self._pool is not None and prefetch:
            self._keep_ahead(self._pool, first, count + self._prefetch_steps * self._order.prompts_per_rank)
        return [self._result(self._order.position(first + i)) for i in range(count)]

    def build(self, sample: Sample) -> Prompt | None:
        """The prompt of any sample, of another split too; None where it is left out. Raises as `batch` does."""
        try:
            return self._builder.build(sample)
        except DataError as error:
            if not (self._skip_long if isinstance(error, LongPromptError) else self._skip_bad):
                raise
            if sample.sample_id not in self.skipped:
                log.warning("left out: %s", error.message)
            self.skipped[sample.sample_id] = error.message
            if len(self.skipped) > self._max_bad_rows:
                raise DataError(
                    f"more unusable samples than `data.max_bad_rows` allows ({self._max_bad_rows}), the last one: "
                    f"{error.message}"
                ) from None
        return None

    def position(self, number: int) -> int:
        """See `BatchOrder.position`."""
        return self._order.position(number)

    @property
    def prompts_per_rank(self) -> int:
        """Prompts of a batch that are this rank's."""
        return self._order.prompts_per_rank

    def close(self, *, wait: bool = True) -> None:
        """Stop the workers; what is being built is finished and dropped, unless `wait` is off: a worker may sit on a
        file that never answers."""
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> PromptLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _keep_ahead(self, pool: ThreadPoolExecutor, first: int, count: int) -> None:
        wanted = [self._order.position(first + i) for i in range(count)]
        for position in set(self._pending) - set(wanted):
            self._pending.pop(position).cancel()
        for position in wanted:
            if position not in self._pending:
                self._pending[position] = pool.submit(self._build, position)

    def _result(self, position: int) -> Prompt:
        future = self._pending.pop(position, None)
        return self._build(position) if future is None else future.result()

    def _build(self, position: int) -> Prompt:
        for attempt in range(MAX_REPLACEMENTS + 1):
            sample = self._samples[self._order.index(position + attempt * self._order.prompts_per_step)]
            prompt = self.build(sample)
            if prompt is not None:
                return prompt
        raise DataError(
            f"too many unusable samples ({len(self.skipped)} so far, {MAX_REPLACEMENTS + 1} in a row), the last one: "
            f"{self.skipped[sample.sample_id]}",
            hint="check the data, or set `data.on_bad_media: error` to stop at the first",
        )


def build_all(samples: Sequence[Sample], builder: Builder, *, num_workers: int = 1) -> list[Prompt]:
    """Prompts of all `samples`, in their order; for evaluation and the cold start.

    Raises:
        DataError: a sample cannot be used.
    """
    if num_workers <= 1:
        return [builder.build(sample) for sample in samples]
    with ThreadPoolExecutor(num_workers, thread_name_prefix="prompts") as pool:
        return list(pool.map(builder.build, samples))
