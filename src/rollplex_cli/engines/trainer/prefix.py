"""Prefixes of one or several prompts in one pass, and the boundary that each prompt has of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from rollplex_cli.engines.trainer.model.language import KeyValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollplex_cli.data.types import Media
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.trainer.model.vision import Encoded
    from rollplex_cli.engines.trainer.stages import Carry

PrefixMode = Literal["keep", "device", "host", "recompute", "none"]
"""What prefix backward uses: the graph, stage inputs kept on the device or on the host, a second forward; `none` has no
backward."""


@dataclass(frozen=True, slots=True)
class PrefixInput:
    """Positions 0..P-2 of prompts, end to end: N tokens in all."""

    token_ids: tuple[int, ...]
    """[N]."""
    position_ids: torch.Tensor
    """[3, N] int64."""
    media: tuple[Media, ...]
    media_spans: tuple[tuple[int, int], ...]
    """First and last placeholder index (inclusive) of each medium among the N tokens."""
    lengths: tuple[int, ...]
    """Tokens of each prompt; one is never seen by another."""

    @classmethod
    def of(cls, prompts: Sequence[PromptInput]) -> PrefixInput:
        """Raises ValueError if the last token of a prompt is a media placeholder."""
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for prompt in prompts:
            end, base = prompt.num_tokens - 1, len(ids)
            if any(last >= end for _, last in prompt.media_spans):
                raise ValueError("the last prompt token must not be a media placeholder")
            spans += [(base + first, base + last) for first, last in prompt.media_spans]
            ids += prompt.prompt.token_ids[:end]
        positions = [prompt.position_ids[:, : prompt.num_tokens - 1] for prompt in prompts]
        return cls(
            token_ids=tuple(ids),
            position_ids=torch.cat(positions, dim=1) if len(positions) > 1 else positions[0],
            media=tuple(medium for prompt in prompts for medium in prompt.prompt.media),
            media_spans=tuple(spans),
            lengths=tuple(prompt.num_tokens - 1 for prompt in prompts),
        )

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.token_ids)


@dataclass(slots=True)
class PrefixPack:
    """What the backward of prefixes that ran in one pass needs. It runs when each of the prompts has handed in its
    gradients or dropped out, in one pass again."""

    input: PrefixInput
    mode: PrefixMode
    outputs: tuple[KeyValue, ...] = ()
    """Keys and values attached to the graph, [1, KV heads, N, head_dim] (`keep`)."""
    stage_inputs: list[Carry] = field(default_factory=list)
    """Input of each stage (`device`, `host`)."""
    media: Encoded | None = None
    """The frozen tower's output, from which a recomputation starts (`recompute`)."""
    stream: torch.cuda.Stream | None = None
    """What the forward ran on (`keep`, on a GPU)."""
    on_release: Callable[[], None] | None = None
    """Called once, when the pack is released."""
    _gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Of the boundary of each prompt, by its place: keys and values of every layer."""
    _open: set[int] = field(default_factory=set)
    """Places of prompts that are still to come."""

    def states(self, boundary: tuple[KeyValue, ...]) -> list[PrefixState]:
        """A state for each prompt from the boundary of all, [1, KV heads, N, head_dim] a layer: parts of it, leaves
        where there is a backward."""
        lengths = self.input.lengths
        self._open = set(range(len(lengths)))
        parts = [[torch.split_with_sizes(tensor, lengths, 2) for tensor in pair] for pair in boundary]
        return [
            PrefixState(self, place, tuple(KeyValue(*(self._leaf(t[place]) for t in pair)) for pair in parts))
            for place in range(len(lengths))
        ]

    def _leaf(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.mode == "none" else part.detach().requires_grad_()

    def end(self, place: int, gradients: list[torch.Tensor] | None) -> bool:
        """A prompt hands in its gradients, or None for none; whether a backward is due: it was the last, and there
        are any. A pack without any is released by its last."""
        self._open.discard(place)
        if gradients is not None:
            self._gradients[place] = gradients
        if self._open:
            return False
        if not self._gradients:
            self.release()
        return bool(self._gradients)

    @property
    def is_open(self) -> bool:
        """Whether a prompt is still to come."""
        return bool(self._open)

    @property
    def owes(self) -> bool:
        """Whether there are gradients that no backward has taken."""
        return bool(self._gradients)

    def take_gradients(self) -> list[torch.Tensor]:
        """Those of all prompts, keys and values of every layer [1, KV heads, N, head_dim]; else zeros."""
        if len(self.input.lengths) == 1:
            return list(self._gradients[0])
        joined = []
        # Layer by layer, so that there are two copies of one layer's at a time.
        for _ in next(iter(self._gradients.values())).copy():
            given = {place: gradients.pop(0) for place, gradients in self._gradients.items()}
            like = next(iter(given.values()))
            rows = [
                given[place] if place in given else like.new_zeros(*like.shape[:2], length, like.shape[3])
                for place, length in enumerate(self.input.lengths)
            ]
            joined.append(torch.cat(rows, dim=2))
        return joined

    def release(self) -> None:
        """Drop every tensor; no backward can follow."""
        if self.on_release is not None:
            self.on_release()
            self.on_release = None
        self.outputs, self.stage_inputs, self.media = (), [], None
        self._gradients = {}


@dataclass(slots=True)
class PrefixState:
    """The boundary of one prompt group.

    `boundary[layer]` holds leaves [1, KV heads, P - 1, head_dim] that collect gradients. Consumed by one
    `prefix_backward` or dropped; suffixes may read it any number of times before.
    """

    pack: PrefixPack
    place: int
    """Among the prompts of the pack."""
    boundary: tuple[KeyValue, ...]
    consumed: bool = False

    @property
    def mode(self) -> PrefixMode:
        """What the backward uses."""
        return self.pack.mode

    @property
    def num_tokens(self) -> int:
        """Prefix length, P - 1; 0 for a prompt of one token."""
        return self.pack.input.lengths[self.place]

    @property
    def boundary_bytes(self) -> int:
        """Size of the boundary keys and values."""
        return sum(t.numel() * t.element_size() for pair in self.boundary for t in pair)

    def take_gradients(self) -> list[torch.Tensor]:
        """Those that suffixes left at the boundary; the state cannot be used afterwards.

        Raises ValueError if it has no backward, was consumed, or no suffix backward ran before.
        """
        if self.mode == "none" or self.consumed:
            raise ValueError("this prefix has no backward" if self.mode == "none" else "prefix backward ran twice")
        found = [t.grad for pair in self.boundary for t in pair] if self.num_tokens else []
        given = [grad for grad in found if grad is not None]
        if len(given) < len(found):
            raise ValueError("no suffix backward has reached the boundary of this group")
        self.boundary, self.consumed = (), True
        return given

    def release(self) -> bool:
        """The group has no use for its boundary any more, and no gradients. Whether the backward of the others of its
        pack is due (`SplitModel.release`)."""
        if self.consumed:
            return False
        self.boundary, self.consumed = (), True
        return self.pack.end(self.place, None)
