"""Sharing policies: how decode and the trainer's work divide one GPU while both run.

Each is a few numbers over one mechanism: the priority of the trainer's stream, the SMs kept from it, the SMs kept from
decode, and whether they run at the same time at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_FENCE_SMS = 32
"""SMs that `auto` keeps from the trainer until it has measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingPolicy:
    """One parsed policy."""

    name: str
    """As written in the profile."""
    overlap: bool = True
    """Whether the trainer works beside decode."""
    equal_priority: bool = False
    """Give the trainer's stream the priority of decode, which otherwise has the higher one."""
    reserved_sms: int = 0
    """SMs that the trainer may not use while decode runs."""
    decode_percent: int | None = None
    """Share of the SMs that decode is confined to, the trainer to the rest; None leaves decode free."""
    measured: bool = False
    """Choose among `serial`, `priority` and `fence` by measurement (`auto`)."""


_FIXED = {
    "serial": SharingPolicy(name="serial", overlap=False),
    "streams": SharingPolicy(name="streams", equal_priority=True),
    "priority": SharingPolicy(name="priority"),
    "auto": SharingPolicy(name="auto", reserved_sms=DEFAULT_FENCE_SMS, measured=True),
}
KNOWN = (*_FIXED, "fence:R", "partition:D/P")
_MPS = (
    "MPS divides a GPU between processes by a percentage for each, and decode and training are one process here; "
    "expected `fence:R`, which keeps R SMs from the trainer within the process"
)


def parse_policy(text: str) -> SharingPolicy:
    """The policy that `schedule.policy` names.

    `fence:R` confines the trainer to all but R SMs and leaves decode free; `partition:D/P` confines decode to D and
    the trainer to P percent of them.

    Raises:
        ValueError: an unknown policy or a number out of range; the text completes "got X, ...".
    """
    if text in _FIXED:
        return _FIXED[text]
    if text == "mps" or text.startswith("mps:"):
        raise ValueError(_MPS)
    if match := re.fullmatch(r"fence:(\d{1,3})", text):
        reserved = int(match[1])
        if not 1 <= reserved <= 128:
            raise ValueError("expected from 1 to 128 SMs")
        return SharingPolicy(name=text, reserved_sms=reserved)
    if match := re.fullmatch(r"partition:(\d{1,2})/(\d{1,2})", text):
        decode, prefix = int(match[1]), int(match[2])
        if decode + prefix != 100 or not decode or not prefix:
            raise ValueError("expected two percentages that sum to 100, decode first")
        return SharingPolicy(name=text, decode_percent=decode)
    raise ValueError(f"expected one of: {', '.join(KNOWN)}")
