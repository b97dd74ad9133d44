"""Which part of every parameter a rank trains, and where that part lies in its rollout shard.

Everything follows from one function, `_box`: the box of a Hugging Face tensor that shard s of a degree holds. It is
asked at the training degree for what the trainer trains, and at the rollout degree for what lies in the rollout's
tensors; with q = train degree / rollout degree, training shard q * i + b lies inside rollout shard i by arithmetic.
Coordinates are those of the tensors with padded vision widths, the same at every degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.weights.names import (
    VISION_QKV_PARTS,
    VOCAB_ROWS,
    Location,
    Split,
    rollout_location,
    vision_qkv,
)
from rollplex_cli.plan.model import VOCAB_PAD, ModelShape, shape_from_config

if TYPE_CHECKING:
    from collections.abc import Mapping

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor."""

    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def slices(self, origin: Shape | None = None) -> tuple[slice, ...]:
        """Index of the box in a tensor whose first element is at `origin` of the coordinates (default: zero)."""
        start = origin or (0,) * len(self.offset)
        return tuple(slice(o - s, o - s + n) for o, s, n in zip(self.offset, start, self.shape, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """What two boxes of one tensor have in common; None for nothing."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        high = tuple(min(a + n, b + m) for a, n, b, m in ends)
        shape = tuple(h - o for h, o in zip(high, low, strict=True))
        return Box(low, shape) if all(size > 0 for size in shape) else None

    def moved(self, by: Shape) -> Box:
        """The box of the same elements in coordinates whose origin lies `by` before this one's."""
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.shape)

    def contains(self, other: Box) -> bool:
        """Whether `other` lies within this box."""
        return self.intersection(other) == other


@dataclass(frozen=True, slots=True, kw_only=True)
class HomePart:
    """One part of a stacked rollout tensor (the only one of a plain one)."""

    tensor: str
    """Hugging Face tensor it holds a box of."""
    box: Box
    first_row: int
    """Where it begins in the rollout tensor."""
    rows: int
    """Rows reserved for it: more than the box has where vocabulary rows are padded."""
    split: Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One trainer parameter of one rank."""

    name: str
    """In the trainer's module."""
    tensor: str
    """Hugging Face tensor; differs from `name` only for the parts of a vision q/k/v matrix."""
    split: Split
    full: Shape
    """Shape of the Hugging Face tensor, vision widths padded."""
    box: Box
    """What this rank trains of it."""
    home: str
    """Rollout tensor."""
    home_box: Box
    """The same elements in the rollout tensor's coordinates."""
    sharers: int
    """Ranks of the training group that hold the same box: all for `replicated`, several where they outnumber the
    key/value heads, else 1."""
    primary: bool
    """Whether this rank is the first of them: it counts the box in norms and writes it to checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The weights of one rank. Pure data: the same on every machine for the same configuration and place."""

    shape: ModelShape
    train_tp: int
    training_shard: int
    rollout_tp: int
    rollout_shard: int
    placements: dict[str, Placement]
    """By parameter name, in the module's order; tied parameters once."""
    homes: dict[str, tuple[HomePart, ...]]
    """Parts of every rollout tensor, in row order."""

    @property
    def replicas(self) -> int:
        """q, training shards in a rollout shard."""
        return self.train_tp // self.rollout_tp

    @property
    def replica(self) -> int:
        """b, which of them this rank trains."""
        return self.training_shard % self.replicas

    @property
    def vocab_start(self) -> int:
        """First token id of the embedding and head rows trained here."""
        return self.placements["model.language_model.embed_tokens.weight"].box.offset[0]


def plan_shards(
    config: Any,
    full_shapes: Mapping[str, Shape],
    *,
    train_tp: int = 1,
    training_shard: int = 0,
    rollout_tp: int = 1,
) -> ShardPlan:
    """The plan of a rank.

    Args:
        config: the transformers configuration.
        full_shapes: parameters of the unsharded module with padded vision widths, in its order.
        training_shard: q * i + b for rollout shard i of replica b.

    Raises:
        UsageError: a degree that does not divide some width, naming the tensor.
        KeyError: a parameter that no rule covers.
    """
    if train_tp % rollout_tp or not 0 <= training_shard < train_tp:
        raise ValueError(f"no shard {training_shard} of train {train_tp} over rollout {rollout_tp}")
    shape = shape_from_config("", config.to_dict(), "the configuration")
    rollout_shard = training_shard // (train_tp // rollout_tp)
    homes = _homes(shape, full_shapes, rollout_tp, rollout_shard)
    placements = {}
    for name, tensor, part in _pieces(full_shapes, apart=train_tp > 1):
        location, full = rollout_location(name), full_shapes[tensor]
        box = _box(shape, location, tensor, full, part, train_tp, training_shard)
        sharers = _sharers(shape, location.split, train_tp)
        placements[name] = Placement(
            name=name,
            tensor=tensor,
            split=location.split,
            full=full,
            box=box,
            home=location.name,
            home_box=_in_home(homes[location.name], tensor, box),
            sharers=sharers,
            primary=training_shard % sharers == 0,
        )
    return ShardPlan(
        shape=shape,
        train_tp=train_tp,
        training_shard=training_shard,
        rollout_tp=rollout_tp,
        rollout_shard=rollout_shard,
        placements=placements,
        homes=homes,
    )


def _pieces(full_shapes: Mapping[str, Shape], *, apart: bool) -> list[tuple[str, str, int | None]]:
    """(parameter, Hugging Face tensor, part) in order; `apart` takes vision q, k and v as three parameters."""
    pieces: list[tuple[str, str, int | None]] = []
    for name in full_shapes:
        if apart and vision_qkv(name) is not None:
            stem, kind = name.rsplit(".", 1)
            pieces += [(f"{stem}.{part}.{kind}", name, part) for part in range(VISION_QKV_PARTS)]
        else:
            pieces.append((name, name, None))
    return pieces


def _homes(
    shape: ModelShape, full_shapes: Mapping[str, Shape], degree: int, shard: int
) -> dict[str, tuple[HomePart, ...]]:
    stacks: dict[str, list[tuple[int, HomePart]]] = {}
    for name, tensor, part in _pieces(full_shapes, apart=True):
        location, full = rollout_location(name), full_shapes[tensor]
        box = _box(shape, location, tensor, full, part, degree, shard)
        rows = padded_vocab(full[0]) // degree if location.name in VOCAB_ROWS else box.shape[0]
        home = HomePart(tensor=tensor, box=box, first_row=0, rows=rows, split=location.split)
        stacks.setdefault(location.name, []).append((location.part or 0, home))
    homes = {}
    for name, parts in stacks.items():
        placed, row = [], 0
        for _, home in sorted(parts, key=lambda pair: pair[0]):
            placed.append(HomePart(tensor=home.tensor, box=home.box, first_row=row, rows=home.rows, split=home.split))
            row += home.rows
        homes[name] = tuple(placed)
    return homes


def padded_vocab(rows: int) -> int:
    """Rows of embedding and head over all ranks of the rollout engine."""
    return -(-rows // VOCAB_PAD) * VOCAB_PAD


def _box(
    shape: ModelShape, location: Location, tensor: str, full: Shape, part: int | None, degree: int, shard: int
) -> Box:
    """What shard `shard` of `degree` holds of a tensor, or of one of its stacked parts."""
    if location.split == "replicated":
        return Box.whole(full)
    if location.split == "columns":
        width = _share(full[1], degree, tensor, "columns")
        return Box((0, shard * width, *(0 for _ in full[2:])), (full[0], width, *full[2:]))
    if location.split == "vocab":
        per_shard = _share(padded_vocab(full[0]), degree, tensor, "padded rows")
        first = min(shard * per_shard, full[0])
        rows = min(per_shard, full[0] - first)
        if rows == 0:
            raise UsageError(f"a vocabulary of {full[0]} leaves nothing for shard {shard} of: {degree}")
    elif location.split == "kv_rows":
        heads = shape.num_kv_heads
        if heads >= degree:
            rows = _share(heads, degree, tensor, "key/value heads") * shape.head_dim
            first = shard * rows
        else:
            rows = shape.head_dim
            first = shard // _share(degree, heads, tensor, "ranks over key/value heads") * rows
    else:
        whole = full[0] if part is None else full[0] // VISION_QKV_PARTS
        rows = _share(whole, degree, tensor, "rows")
        first = (part or 0) * whole + shard * rows
    return Box((first, *(0 for _ in full[1:])), (rows, *full[1:]))


def _share(size: int, ways: int, tensor: str, what: str) -> int:
    if size % ways:
        raise UsageError(
            f"`{tensor}` cannot be cut: {size} {what} / {ways} = {size / ways:.2f}",
            hint="`topology.train_tp` and `topology.rollout_tp` divide every width of the model",
        )
    return size // ways


def _sharers(shape: ModelShape, split: Split, degree: int) -> int:
    if split == "replicated":
        return degree
    return max(1, degree // shape.num_kv_heads) if split == "kv_rows" else 1


def _in_home(parts: tuple[HomePart, ...], tensor: str, box: Box) -> Box:
    """Where a box lies in a rollout tensor: from the part that holds its first element on."""
    for part in parts:
        inside = (
            all(o <= b < o + n for o, b, n in zip(part.box.offset, box.offset, part.box.shape, strict=True))
            and part.tensor == tensor
        )
        if inside:
            delta = tuple(b - o for b, o in zip(box.offset, part.box.offset, strict=True))
            return Box((part.first_row + delta[0], *delta[1:]), box.shape)
    raise AssertionError(f"{tensor} {box} is in no part")
