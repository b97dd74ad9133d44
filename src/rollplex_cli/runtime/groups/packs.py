"""Which groups of a step run their prefixes in one pass, and what the first of them has computed for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from rollplex_cli.core.names import TaskKind
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.trainer.prefix import PrefixState


def packs_of(inputs: Mapping[int, PromptInput], limit: int, alone: Collection[int]) -> list[tuple[int, ...]]:
    """Groups by id, in runs of at most `limit` prompt tokens; those in `alone`, and prompts of one token, by
    themselves.

    It depends on the prompts alone, so every rank of a training group and every schedule has the same: a pass of
    several prompts rounds otherwise than theirs one by one.
    """
    if not limit:
        return [(group,) for group in sorted(inputs)]
    packs: list[tuple[int, ...]] = []
    tokens = 0
    for group in sorted(inputs):
        length = inputs[group].num_tokens
        joins = tokens and group not in alone and length > 1 and tokens + length <= limit
        if joins:
            packs[-1] += (group,)
            tokens += length
        else:
            packs.append((group,))
            tokens = length if group not in alone and length > 1 else 0
    return packs


class PrefixPacks:
    """The passes of one step on one rank. Called from the trainer thread.

    The prefix task of the first group of a pack to come runs the pass; those of the others take their part of it.

    Args:
        inputs: prompts by local group id; may grow, by groups that run alone.
        limit: tokens of a pass.
        alone: groups that take part in none.
    """

    def __init__(self, inputs: Mapping[int, PromptInput], limit: int, alone: Collection[int] = ()) -> None:
        self._inputs = inputs
        self._packs = {group: pack for pack in packs_of(inputs, limit, alone) for group in pack}
        self._waiting: dict[tuple[TaskKind, int], PrefixState] = {}

    def members(self, group: int) -> tuple[int, ...]:
        """Groups of its pass, itself included."""
        return self._packs.get(group, (group,))

    def waits(self, kind: TaskKind, group: int) -> bool:
        """Whether the pass of a group has run and its part was not taken."""
        return (kind, group) in self._waiting

    def take(
        self, kind: TaskKind, group: int, run: Callable[[Sequence[PromptInput]], Sequence[PrefixState]]
    ) -> PrefixState:
        """A group's boundary for the role of a prefix task of this `kind`; `run` makes those of several prompts."""
        if not self.waits(kind, group):
            members = self.members(group)
            states = run([self._inputs[member] for member in members])
            self._waiting |= {(kind, member): state for member, state in zip(members, states, strict=True)}
        return self._waiting.pop((kind, group))
