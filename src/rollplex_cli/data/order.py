"""Which samples a step takes: a pure function of the seed and the step."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class BatchOrder:
    """A shuffled pass over the samples per epoch, dealt out in batches of `prompts_per_step`.

    The order is one endless line of positions; step s takes positions s * prompts_per_step onwards, across the
    border of epochs where they do not divide. Data-parallel rank r owns the r-th contiguous slice of each batch,
    so the batch is the same for any degree. There is no state: resuming needs the step alone.

    Args:
        num_samples: rows of the split.
        seed: of the permutations.
        prompts_per_step: size of the batch over all ranks.
        rank, num_ranks: data-parallel rank and degree.

    Raises:
        ValueError: no samples, a rank out of range, or a degree that does not divide the batch.
    """

    def __init__(
        self, num_samples: int, *, seed: int, prompts_per_step: int, rank: int = 0, num_ranks: int = 1
    ) -> None:
        if num_samples < 1 or prompts_per_step < 1:
            raise ValueError(f"an order needs samples and prompts, got: {num_samples}, {prompts_per_step}")
        if not 0 <= rank < num_ranks or prompts_per_step % num_ranks:
            raise ValueError(f"{prompts_per_step} prompts cannot be dealt to rank {rank} of: {num_ranks}")
        self.num_samples = num_samples
        self.seed = seed
        self.prompts_per_step = prompts_per_step
        self.prompts_per_rank = prompts_per_step // num_ranks
        self.first_slot = rank * self.prompts_per_rank
        """Where this rank's slice starts in the batch: prompt i of the rank is number first_slot + i of the step."""

    def index(self, position: int) -> int:
        """Row at a position of the endless order."""
        epoch, offset = divmod(position, self.num_samples)
        return int(_permutation(self.num_samples, self.seed, epoch)[offset])

    def position(self, number: int) -> int:
        """Position of element `number` of this rank's own endless line: its slices of all batches, end to end."""
        step, slot = divmod(number, self.prompts_per_rank)
        return step * self.prompts_per_step + self.first_slot + slot

    def positions(self, step: int) -> list[int]:
        """Positions of this rank's slice of a step's batch."""
        first = step * self.prompts_per_step + self.first_slot
        return list(range(first, first + self.prompts_per_rank))

    def batch(self, step: int) -> list[int]:
        """Rows of this rank's slice of a step's batch."""
        return [self.index(position) for position in self.positions(step)]


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # The legacy generator is the one whose stream NumPy promises never to change: a run resumed with another
    # release of NumPy goes on with the same samples.
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(num_samples).astype(np.int64)
