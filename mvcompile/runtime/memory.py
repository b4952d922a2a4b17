"""Memory that kernels work in: aligned, and tensors over it that TVM's calling convention takes as they are."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm_ffi

from mvcompile.errors import EnvironmentProblem
from mvcompile.types import ALIGNMENT_BYTES, align

Array = npt.NDArray[Any]

_HUGE_PAGE_BYTES = 2 * 2**20
_VERSIONED_DLPACK = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""Whether numpy lends read-only arrays; before, it has no way to say that they are."""


def allocate(nbytes: int) -> Array:
    """`nbytes` zero bytes (uint8) at a multiple of 4096; at a multiple of 2 MiB, in huge pages where the system has them, if that
    is worth it. Pages are taken from the system when they are first touched.

    Raises EnvironmentProblem if the system has not that much memory.
    """
    huge = nbytes >= _HUGE_PAGE_BYTES
    room = align(nbytes, _HUGE_PAGE_BYTES) + _HUGE_PAGE_BYTES if huge else max(nbytes, 1)
    try:
        # Not shared, which is mmap's default: whether the system has huge pages for shared memory is another setting, mostly off.
        mapping = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        remedy = "free memory or raise the process's limit (ulimit -v)"
        raise EnvironmentProblem(f"no memory for {nbytes} bytes of tensors: {error}; {remedy}") from error
    if huge:
        with suppress(OSError, AttributeError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(mapping, np.uint8)
    skip = -address(block) % _HUGE_PAGE_BYTES if huge else 0
    return block[skip : skip + nbytes]


def copied(data: memoryview) -> memoryview:
    """A read-only copy of `data` (bytes), aligned and in huge pages as `allocate` gives it. Raises EnvironmentProblem."""
    block = allocate(data.nbytes)
    np.copyto(block, np.frombuffer(data, np.uint8))
    block.flags.writeable = False
    return memoryview(block)  # type: ignore[arg-type]


def allocate_array(dtype: str, shape: tuple[int, ...]) -> Array:
    """A C-contiguous array of zeros, aligned for kernels."""
    block = allocate(int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
    return block.view(dtype).reshape(shape)


def array_at(block: Array, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
    """The tensor that starts at byte `offset` of `block`, a one-dimensional uint8 array. No copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return block[offset : offset + nbytes].view(dtype).reshape(shape)


def tensor(array: Array) -> tvm_ffi.Tensor:
    """`array` as a kernel's argument: the same memory, which it keeps alive. Read-only arrays must not be written through it.

    Raises BufferError for a read-only array if numpy is older than 2.1.
    """
    return tvm_ffi.from_dlpack(array.__dlpack__(max_version=(1, 0)) if _VERSIONED_DLPACK else array)


def bindable(array: Array) -> tvm_ffi.Tensor | None:
    """`array` as a kernel's argument if a kernel may work on it in place (C-contiguous and aligned), else None."""
    if not array.flags.c_contiguous:
        return None
    try:
        found = tensor(array)
    except BufferError:
        return None
    return found if found.data_ptr() % ALIGNMENT_BYTES == 0 else None


def address(array: Array) -> int:
    """The address of the first byte."""
    return int(array.__array_interface__["data"][0])
