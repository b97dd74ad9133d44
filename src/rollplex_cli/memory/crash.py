"""Name the region when a raw pointer is used after its memory was unmapped.

Nothing can be saved then: the process dies by the signal as it would have. But the last lines say which region it was
and since when it is unmapped, instead of leaving an address. One table per process, because signals are per process.

A fault *in a kernel of a GPU* raises no signal: PyTorch reports an illegal memory access without an address. For it
there is `unmapped_ranges`, to be printed beside the error.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any, NamedTuple


class UnmappedRange(NamedTuple):
    """Addresses [start, end) of a region that have no memory now; `state` says since when, as in `unmapped after X`."""

    start: int
    end: int
    region: str
    state: str


_lock = threading.Lock()
# Replaced as a whole at each change, so the signal handler reads it without the lock. Guarded by `_lock` for writers.
_ranges: tuple[UnmappedRange, ...] = ()


def mark_unmapped(start: int, size: int, region: str, state: str) -> None:
    """Enter a range, or replace the entry that starts at the same address."""
    global _ranges
    with _lock:
        others = tuple(entry for entry in _ranges if entry.start != start)
        _ranges = (*others, UnmappedRange(start, start + size, region, state))


def forget(start: int) -> None:
    """Take out the range that starts at `start`: it is mapped, or its addresses are nobody's."""
    global _ranges
    with _lock:
        _ranges = tuple(entry for entry in _ranges if entry.start != start)


def unmapped_ranges() -> tuple[UnmappedRange, ...]:
    """Every range that has an entry now."""
    return _ranges


def explain(address: int) -> str | None:
    """What is known of an address without memory: one line, or None."""
    for entry in _ranges:
        if entry.start <= address < entry.end:
            return f"address {address:#x} is in region `{entry.region}`, {entry.state}"
    return None


class _SigAction(ctypes.Structure):
    """`struct sigaction` of glibc and musl on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_SA_SIGINFO = 4
_SA_NODEFER = 0x40000000
# Offsets in `siginfo_t` of 64-bit Linux. The sender's process id is where a fault has its address.
_CODE_OFFSET = 8
_ADDRESS_OFFSET = 16
_SIGNALS = (signal.SIGSEGV, signal.SIGBUS)
_HINT = b"hint: something kept a tensor or a pointer beyond the lease of its task\n"

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_previous: dict[int, _SigAction] = {}
_raised_again: set[int] = set()
_told: list[str] = []


def _on_fault(number: int, information: int, _context: int) -> None:
    """The signal handler: as few Python operations as the message needs.

    It returns with the previous handler back in place; the faulting instruction runs again and faults again, into the
    previous handler (a traceback of `faulthandler`, or death by the signal).
    """
    code = ctypes.c_int.from_address(information + _CODE_OFFSET).value
    if code <= 0 and number not in _raised_again:
        # Sent and not a fault. `faulthandler` sends the signal again after its traceback, which hides the address;
        # if it did, the instruction faults once more and comes back here with the address.
        _raised_again.add(number)
        if ctypes.c_int.from_address(information + _ADDRESS_OFFSET).value == os.getpid():
            return
    if code > 0:
        address = ctypes.c_uint64.from_address(information + _ADDRESS_OFFSET).value
        text = explain(address)
        # The threads of one kernel fault together; one message is enough.
        if text is not None and not _told:
            _told.append(text)
            os.write(2, b"rollplex: " + text.encode("utf-8", "replace") + b"\n" + _HINT)
    _libc.sigaction(number, ctypes.byref(_previous[number]), None)
    if code <= 0:
        os.kill(os.getpid(), number)


_handler: Any = _Handler(_on_fault)


def install() -> None:
    """Put the handler in front of what handles SIGSEGV and SIGBUS now. Idempotent; once per process, in a worker.

    `faulthandler` may be enabled before or after.

    Raises:
        OSError: the system refused.
    """
    with _lock:
        for number in _SIGNALS:
            if number in _previous:
                continue
            action, previous = _SigAction(), _SigAction()
            action.handler = ctypes.cast(_handler, ctypes.c_void_p).value
            action.flags = _SA_SIGINFO | _SA_NODEFER
            if _libc.sigaction(int(number), ctypes.byref(action), ctypes.byref(previous)) != 0:
                fault = ctypes.get_errno()
                raise OSError(fault, os.strerror(fault))
            _previous[number] = previous
