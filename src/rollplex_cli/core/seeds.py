"""Every random number of a run is a function of (run seed, purpose, step, group, sample): nothing to save."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, purpose: str, *indices: int) -> int:
    """A 31-bit seed, independent for different arguments."""
    text = f"{run_seed}/{purpose}/" + "/".join(str(i) for i in indices)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & 0x7FFFFFFF
