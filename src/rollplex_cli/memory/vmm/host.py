"""The driver of a machine without a GPU: memfd pages mapped into reserved ranges of the process.

It does for real what the CUDA driver does: addresses without memory, memory without an address, one memory at several
addresses, memory that goes back to the system while its address stays.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_MAP_FAILED = ctypes.c_void_p(-1).value
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

# The standard library's mmap chooses addresses itself and cannot punch holes.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _check(call: str, result: int) -> None:
    if result != 0:
        raise DriverCallError(call, os.strerror(ctypes.get_errno()))


def _mmap(address: int | None, size: int, protection: int, flags: int, file: int) -> int:
    result = _libc.mmap(address, size, protection, flags, file, 0)
    if result is None or result == _MAP_FAILED:
        raise DriverCallError("mmap", os.strerror(ctypes.get_errno()), hint=_hint(ctypes.get_errno()))
    return int(result)


def _hint(code: int) -> str | None:
    if code == errno.ENOMEM:
        return "the process may have too many mappings (`vm.max_map_count`) or too little address space (`ulimit -v`)"
    if code == errno.EMFILE:
        return "every handle is an open file: raise `ulimit -n` or use larger handles"
    return None


def available_bytes() -> int:
    """Bytes of memory that the system could give to processes now (`MemAvailable`)."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise DriverCallError("meminfo", "no line `MemAvailable`")


class HostDriver:
    """Implements `MemoryDriver` with memfd, mmap and mprotect. A handle is a file descriptor.

    Args:
        capacity_bytes: size of this driver's memory, an upper bound that `create` holds; None takes what the machine
            has available now. Unlike a GPU's memory, the machine's serves everybody else too.
    """

    device = "cpu"
    granularity = mmap.PAGESIZE
    zeroes_new_memory = True

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._capacity_bytes = available_bytes() if capacity_bytes is None else capacity_bytes
        self._allocated_bytes = 0

    def reserve(self, size: int, alignment: int) -> int:
        """See `MemoryDriver.reserve`."""
        # mmap aligns to pages only: take more, then give back both ends.
        slack = alignment if alignment > self.granularity else 0
        start = _mmap(None, size + slack, _PROT_NONE, _RESERVED, -1)
        address = -(-start // alignment) * alignment
        before, after = address - start, start + slack - address
        if before:
            _check("munmap", _libc.munmap(start, before))
        if after:
            _check("munmap", _libc.munmap(address + size, after))
        return address

    def free(self, address: int, size: int) -> None:
        """See `MemoryDriver.free`."""
        _check("munmap", _libc.munmap(address, size))

    def create(self, size: int) -> int:
        """See `MemoryDriver.create`."""
        if size > self.free_bytes():
            raise OutOfMemoryError("a handle", wanted_bytes=size, free_bytes=self.free_bytes())
        try:
            file = os.memfd_create("rollplex", os.MFD_CLOEXEC)
        except OSError as error:
            raise DriverCallError("memfd_create", error.strerror or "", hint=_hint(error.errno or 0)) from error
        try:
            os.ftruncate(file, size)
            # Without this the pages would come at the first write, where nobody can handle that there are none.
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            os.close(file)
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise OutOfMemoryError("a handle", wanted_bytes=size, free_bytes=available_bytes()) from error
            raise DriverCallError("fallocate", error.strerror or "") from error
        self._allocated_bytes += size
        return file

    def release(self, handle: int, size: int) -> None:
        """See `MemoryDriver.release`."""
        # A forked child holds a copy of the descriptor, which would keep the pages alive.
        _check("fallocate", _libc.fallocate(handle, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, 0, size))
        os.close(handle)
        self._allocated_bytes -= size

    def map(self, address: int, size: int, handle: int) -> None:
        """See `MemoryDriver.map`."""
        _mmap(address, size, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, handle)
        # Shared pages would let a forked child write into the parent's tensors.
        if _libc.madvise(address, size, mmap.MADV_DONTFORK) != 0:
            fault = os.strerror(ctypes.get_errno())
            self.unmap(address, size)
            raise DriverCallError("madvise", fault)

    def set_access(self, address: int, size: int) -> None:
        """See `MemoryDriver.set_access`."""
        _check("mprotect", _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE))

    def unmap(self, address: int, size: int) -> None:
        """See `MemoryDriver.unmap`."""
        # Replaced in one call: at no time could another mmap of the process take the range.
        _mmap(address, size, _PROT_NONE, _RESERVED | _MAP_FIXED, -1)

    def free_bytes(self) -> int:
        """See `MemoryDriver.free_bytes`."""
        return self._capacity_bytes - self._allocated_bytes

    def total_bytes(self) -> int:
        """See `MemoryDriver.total_bytes`."""
        return self._capacity_bytes

    def pin(self, address: int, size: int) -> None:
        """Nothing to do: no device copies to or from host memory here."""

    def unpin(self, address: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to let go of."""
