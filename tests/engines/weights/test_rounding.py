"""Masters to BF16 weights and back, against the definition and in every corner of float32."""

from __future__ import annotations

import math
import struct

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollplex_cli.engines.weights.rounding import join_into, rounded, take_remainder

CORNERS = [
    0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-127), math.inf, -math.inf,
    3.4028234663852886e38, -3.4028234663852886e38, 1.00390625, -1.00390625, 1.01171875, 1.003906250001,
]  # fmt: skip
"""Zeros, denormals, infinities, the largest finite values, ties (1 + 2^-8 and 1 + 3 * 2^-8) and one just above."""


def weights_and_masters(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of masters [n], and the masters put together again from weights and remainders."""
    weights, joined = rounded(master, torch.bfloat16), torch.zeros_like(master)
    remainder = torch.empty(len(master), dtype=torch.int16)
    take_remainder(master, remainder)
    join_into(weights, remainder, joined)
    return weights, joined


def nearest(value: float) -> float:
    """The nearest BF16 value, ties away from zero, by its definition: exact arithmetic on Python's floats."""
    if value == 0 or math.isinf(value):
        return value
    # BF16 has 8 significant bits, down to a fixed step below 2^-126.
    step = 2.0 ** (max(math.frexp(abs(value))[1], -125) - 8)
    found = math.floor(abs(value) / step + 0.5) * step
    return math.copysign(math.inf if found >= 2.0**128 else found, value)


@settings(deadline=None, max_examples=300)
@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
@example(values=CORNERS)
def test_nearest_with_ties_away_from_zero(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    weights, joined = weights_and_masters(master)
    assert [struct.pack("<f", v) for v in weights.float().tolist()] == [struct.pack("<f", nearest(v)) for v in values]
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))


def test_every_lower_half_comes_back() -> None:
    """All 65,536 lower halves under upper halves of every kind, both signs."""
    low = torch.arange(1 << 16, dtype=torch.int32)
    for high in (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7F):
        for sign in (0, 0x8000):
            bits = torch.tensor((high | sign) << 16, dtype=torch.int64).to(torch.int32) | low
            _, joined = weights_and_masters(bits.view(torch.float32))
            assert torch.equal(joined.view(torch.int32), bits), hex(high)


def test_differs_from_pytorch_in_ties_only() -> None:
    master = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(rounded(master, torch.bfloat16)[~ties], master.bfloat16()[~ties])
    master = (master.view(torch.int32) & ~0xFFFF | 0x8000).view(torch.float32)
    up = (master.view(torch.int32) >> 16) + 1
    assert torch.equal(rounded(master, torch.bfloat16).view(torch.int16).to(torch.int32), up)
    share = float((rounded(master, torch.bfloat16) != master.bfloat16()).float().mean())
    assert 0.45 < share < 0.55


def test_nan_stays_nan() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, 0x7FFF8000], dtype=torch.int32)
    weights, joined = weights_and_masters(bits.view(torch.float32))
    assert weights.isnan().all() and joined.isnan().all()


def test_shape_and_type_are_kept() -> None:
    master = torch.randn(4, 6)[:, 1:4]
    assert rounded(master, torch.bfloat16).shape == (4, 3)
    assert rounded(master, torch.float32) is master
