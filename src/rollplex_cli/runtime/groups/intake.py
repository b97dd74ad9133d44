"""Which prompt groups a step starts: new ones, and those that the step before left unfinished.

With `algorithm.max_refills` a step may ask for further ones meanwhile (`refills.py`).
With `rollout.extra_groups` a rank always has more groups in flight than it trains; a step ends when its share is
complete, in the logical order of decode steps. What is left goes on in the next step: from the tokens it has
(`rollout.keep_partial`), or anew under the newer weights. A group that was left `rollout.max_carries` times is waited
for, so that long responses are late, not lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.inputs import build_prompt_input

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollplex_cli.data.loader import PromptLoader
    from rollplex_cli.engines.inputs import MediaTokens, PromptInput
    from rollplex_cli.profile.schema import Profile


@dataclass(slots=True, kw_only=True)
class Started:
    """A group in flight."""

    number: int
    """Place in the rank's endless line of prompts."""
    input: PromptInput
    seeds: tuple[int, ...]
    times: int = 0
    """Steps that left it unfinished."""
    engine_id: int | None = None
    """Its id in the rollout engine, where its tokens are kept there."""


class Intake:
    """The groups of a rank from step to step. Called from one thread.

    Its state (`to_json`) is what a checkpoint needs: kept tokens are not part of it, so whoever writes a checkpoint
    drops them first, and a resumed run goes on as the one that wrote it did.
    """

    def __init__(self, profile: Profile, loader: PromptLoader, media_tokens: MediaTokens) -> None:
        self._profile, self._loader, self._media_tokens = profile, loader, media_tokens
        self._taken = 0
        self._left: list[Started] = []
        self._numbers: list[tuple[int, int]] = []
        """(number, times) of groups that a checkpoint left, until they are built again."""

    def start(self) -> list[Started]:
        """The groups of the next step: what was left first, then new ones."""
        wanted = self._loader.prompts_per_rank + self._profile.rollout.extra_groups
        left = self._left + [self._new(number, times) for number, times in self._numbers]
        self._numbers, self._left = [], []
        count = wanted - len(left)
        return left + self.further(count)

    def further(self, count: int) -> list[Started]:
        """The next `count` groups of the line. Raises DataError as the loader does."""
        prompts = self._loader.take(self._taken, count)
        numbers = range(self._taken, self._taken + count)
        self._taken += count
        return [self._started(n, p) for n, p in zip(numbers, prompts, strict=True)]

    def leave(self, groups: Sequence[Started]) -> None:
        """What the step did not finish."""
        for group in groups:
            group.times += 1
        self._left = list(groups)

    def drop_partial(self) -> list[int]:
        """Forget kept tokens; returns the engine's ids of the groups that have any."""
        ids = [group.engine_id for group in self._left if group.engine_id is not None]
        for group in self._left:
            group.engine_id = None
        return ids

    def to_json(self) -> dict[str, Any]:
        """As plain data for a checkpoint."""
        left = [(group.number, group.times) for group in self._left] or self._numbers
        return {"taken": self._taken, "left": [list(pair) for pair in left]}

    def load(self, states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> None:
        """Go on from the `to_json` of every rank.

        Raises UsageError where the number of ranks changed: which groups are in flight belongs to the ranks.
        """
        if len(states) != num_ranks:
            raise UsageError(
                f"a run with `rollout.extra_groups` or `algorithm.max_refills` goes on with as many ranks as before "
                f"({len(states)}), not: {num_ranks}"
            )
        self._taken = int(states[rank]["taken"])
        self._numbers = [(int(number), int(times)) for number, times in states[rank]["left"]]

    def _new(self, number: int, times: int) -> Started:
        (prompt,) = self._loader.take(number, 1, prefetch=False)
        return self._started(number, prompt, times)

    def _started(self, number: int, prompt: Any, times: int = 0) -> Started:
        position = self._loader.position(number)
        seeds = tuple(
            derive_seed(self._profile.runtime.seed, "rollout position", position, i)
            for i in range(self._profile.rollout.group_size)
        )
        built = build_prompt_input(prompt, self._media_tokens)
        return Started(number=number, input=built, seeds=seeds, times=times)
