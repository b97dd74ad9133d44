"""How the trainer's weights lie in the rollout's copy of them, by role: what is shared and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from rollplex_cli.plan.model import shard_count

if TYPE_CHECKING:
    from rollplex_cli.plan.model import ModelShape, Split

Kind = Literal["identical", "view", "rebuilt"]
KINDS: tuple[Kind, ...] = ("identical", "view", "rebuilt")

STAGING_BYTES = 64 * 2**20
"""Column ranges are exchanged by blocks of rows of at most this size, all ranks' parts together."""

PAPER = {
    "model": "Qwen2.5-VL-32B", "train_tp": 8, "rollout_tp": 4,
    "identical_percent": 60.0, "view_percent": 32.8, "rebuilt_percent": 7.2,
    "extra_gib": 1.1, "second_copy_gib": 7.6,
}  # fmt: skip
"""What arXiv 2608.14498 reports for its own weight sharing."""
_PAPER_PARAMETERS = (32e9, 35e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightClass:
    """Parameters of one role, in all layers together."""

    name: str
    split: Split
    kind: Kind
    """`identical`: the training shard is a run of the rollout shard's bytes; `view`: some of its columns, read with
    its row stride; `rebuilt`: a copy of its own (there is none)."""
    parameters: int
    """Of the whole model, pad included."""
    shard_bytes: int
    """Of one rank's training shard."""
    received_bytes: int
    """What the other ranks of the exchange group send to one rank after an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSharing:
    """All roles of a model under a pair of degrees."""

    train_tp: int
    rollout_tp: int
    classes: tuple[WeightClass, ...]
    second_copy_bytes: int
    """What a training shard of its own would take."""
    staging_bytes: int
    """Held for the duration of a publish, on one rank."""

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of a kind in one rank's training shard."""
        return sum(row.shard_bytes for row in self.classes if row.kind == kind)

    def percent_of(self, kind: Kind) -> float:
        """Share of a kind among all parameters."""
        total = sum(row.parameters for row in self.classes)
        return 100.0 * sum(row.parameters for row in self.classes if row.kind == kind) / total

    @property
    def extra_bytes(self) -> int:
        """Bytes that the second view costs on one rank between publishes."""
        return self.bytes_of("rebuilt")

    @property
    def received_bytes(self) -> int:
        """What one rank receives in a publish."""
        return sum(row.received_bytes for row in self.classes)

    def to_dict(self, shape: ModelShape) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "train_tp": self.train_tp,
            "rollout_tp": self.rollout_tp,
            "classes": [
                {
                    "name": row.name, "split": row.split, "kind": row.kind, "parameters": row.parameters,
                    "shard_bytes": row.shard_bytes, "received_bytes": row.received_bytes,
                }
                for row in self.classes
            ],
            **{f"{kind}_bytes": self.bytes_of(kind) for kind in KINDS},
            **{f"{kind}_percent": self.percent_of(kind) for kind in KINDS},
            "extra_bytes": self.extra_bytes,
            "staging_bytes": self.staging_bytes,
            "received_bytes": self.received_bytes,
            "second_copy_bytes": self.second_copy_bytes,
            "paper": PAPER if is_of_the_paper(shape, self) else None,
        }  # fmt: skip


@lru_cache(maxsize=64)
def weight_sharing(shape: ModelShape, train_tp: int, rollout_tp: int, bytes_per_value: int) -> WeightSharing:
    """Classify every role of a model. Pure."""
    q = train_tp // rollout_tp
    classes = []
    for group in shape.groups():
        own = shard_count(group, train_tp, shape.num_kv_heads)
        held = shard_count(group, rollout_tp, shape.num_kv_heads)
        classes.append(
            WeightClass(
                name=group.name,
                split=group.split,
                kind="view" if group.split == "columns" and q > 1 else "identical",
                parameters=group.count,
                shard_bytes=own * bytes_per_value,
                received_bytes=(held - own) * bytes_per_value,
            )
        )
    exchanged = any(row.kind == "view" for row in classes)
    return WeightSharing(
        train_tp=train_tp,
        rollout_tp=rollout_tp,
        classes=tuple(classes),
        second_copy_bytes=shape.shard_parameters(train_tp) * bytes_per_value,
        # All ranks' parts of a block, and this rank's once more, contiguous.
        staging_bytes=STAGING_BYTES + STAGING_BYTES // q if exchanged else 0,
    )


def is_of_the_paper(shape: ModelShape, sharing: WeightSharing) -> bool:
    """Whether these are the model and the degrees that the paper reports."""
    low, high = _PAPER_PARAMETERS
    degrees = (sharing.train_tp, sharing.rollout_tp) == (PAPER["train_tp"], PAPER["rollout_tp"])
    return degrees and low < shape.num_parameters < high
