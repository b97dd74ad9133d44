"""PyTorch tensors over addresses that somebody else owns, without a copy."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def num_bytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


class _DeviceSpan:
    """A range of device memory in the form that PyTorch takes without a copy (CUDA array interface, version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (num_bytes,),
            "strides": None,
            # Bytes: the interface has no name for BF16, and a storage has no type.
            "typestr": "|u1",
            "stream": None,
        }


def tensor_at(
    address: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    on_dead: Callable[[], object] | None = None,
) -> torch.Tensor:
    """A contiguous tensor of `shape` and `dtype` whose storage is exactly the bytes at `address` of `device`.

    The memory must be mapped and accessible now: the CUDA runtime looks the address up. It is not copied and not
    owned: whoever owns it keeps the range reserved until `on_dead` was called, which happens in any thread, once,
    when the last tensor that shares this storage is gone. `on_dead` must not take locks.

    Raises:
        ValueError: no elements, or an address that does not suit the type.
    """
    num_bytes = num_bytes_of(shape, dtype)
    if num_bytes == 0:
        raise ValueError(f"a tensor over memory has at least one element, shape: {tuple(shape)}")
    if address % dtype.itemsize:
        raise ValueError(f"address {address:#x} is no multiple of the size of `{dtype}`: {dtype.itemsize}")
    if device.startswith("cuda"):
        span: Any = _DeviceSpan(address, num_bytes)
        flat = torch.as_tensor(span, device=device)
    else:
        span = (ctypes.c_char * num_bytes).from_address(address)
        flat = torch.frombuffer(span, dtype=torch.uint8)
    if on_dead is not None:
        finalizer = weakref.finalize(span, on_dead)
        # At the end of the process the system takes everything back anyway.
        finalizer.atexit = False
    # Not a view of `flat`: autograd treats views of other tensors in their own way when they are written in place.
    tensor = torch.empty(0, dtype=dtype, device=flat.device)
    tensor.set_(flat.untyped_storage(), 0, tuple(shape), _contiguous_strides(shape))
    return tensor


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def host_buffer(num_bytes: int, *, on_dead: Callable[[], object] | None = None) -> torch.Tensor:
    """Fresh zeroed host memory as a byte tensor of shape (num_bytes,), page-aligned, given back with its last tensor.

    PyTorch's own pinned allocator rounds up to powers of two and keeps what it once had, so neither its size nor its
    end could be accounted for. A forked child does not get these pages: copy-on-write would move pages that a device
    writes into.

    Raises:
        OSError: the system has no such memory.
        ValueError: no bytes.
    """
    if num_bytes <= 0:
        raise ValueError(f"a buffer has at least one byte: {num_bytes}")
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    # Of ordinary pages a device's registration of 50 GB takes most of a minute.
    with suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    # PyTorch holds a reference to the object and not its buffer: nobody may call `close` on it.
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    if on_dead is not None:
        weakref.finalize(pages, on_dead).atexit = False
    return tensor
