"""Sizes and byte ranges of tensors, checked so that no arithmetic on them overflows 63 bits in any reader."""

from __future__ import annotations

from mvcompile.bundle.codec import INTEGER_LIMIT, fault, mismatch
from mvcompile.types import DTYPE_BYTES

MAX_RANK = 32
"""Dimensions a tensor may have: what every numpy can hold."""


def checked_nbytes(dtype: str, shape: tuple[int, ...], path: str) -> int:
    """Bytes of a dense tensor. Raises BundleError at `path` for an unknown dtype, a dimension below 1 or a size from 2^63 on."""
    if dtype not in DTYPE_BYTES:
        raise fault(f"{path}.dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    if len(shape) > MAX_RANK:
        raise fault(f"{path}.shape", shape, f"at most {MAX_RANK} dimensions")
    nbytes = DTYPE_BYTES[dtype]
    for size in shape:
        if size < 1:
            raise fault(f"{path}.shape", shape, "dimensions of at least 1")
        nbytes *= size
        if nbytes >= INTEGER_LIMIT:
            raise fault(f"{path}.shape", shape, "fewer than 2^63 bytes")
    return nbytes


def require_range(offset: int, length: int, alignment: int, limit: int, path: str, where: str = "the file") -> None:
    """Raise BundleError unless [offset, offset + length) starts at a multiple of `alignment` and lies in the `limit` bytes of
    `where`."""
    if offset < 0 or offset % alignment:
        raise fault(path, offset, f"an offset that is a multiple of {alignment}")
    if length < 0 or offset + length > limit:
        raise mismatch(path, f"offset {offset} and length {length}", f"an end within the {limit} bytes of {where}")
