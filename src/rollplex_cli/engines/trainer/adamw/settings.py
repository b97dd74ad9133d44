"""What the optimizer is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MasterMode = Literal["full", "split"]
"""What the host keeps of the master weights: all 32 bits, or what the device's BF16 weights lack of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """The profile's `optimizer` section; same names, defaults and meanings."""

    lr: float
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    chunk_elements: int = 16_777_216
    master: MasterMode = "full"

    def learning_rate(self, step: int) -> float:
        """Rate of update `step` (0-based): linear warm-up, then constant."""
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.lr


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """What the chunks of one update moved on this rank, and how long that took."""

    elements: int
    """Masters updated here, pad included: this rank's share where data-parallel ranks share them out."""
    to_device_bytes: int
    """Host to device; 0 where the device is the host."""
    to_host_bytes: int
    exchanged_bytes: int
    """New weights received from other data-parallel ranks."""
    staging_bytes: int
    """Device memory of the update, from its first chunk to its last."""
    seconds: float
    """From the first chunk's load to the last one's arrival on the host; without the gradient norm."""
