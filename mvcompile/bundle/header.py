"""The 64 bytes a bundle starts with (docs/bundle-format.md, "Header"). Every bit of them is checked against something else."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from mvcompile.bundle.schema import FORMAT_VERSION, HEADER_BYTES, MAGIC
from mvcompile.errors import BundleError, IncompatibleBundleError

_VERSION = struct.Struct("<8sI")
_HEADER = struct.Struct("<8sIIQ32sQ")


@dataclass(frozen=True, slots=True)
class Header:
    """Lengths in bytes; `manifest_sha256` is the raw digest."""

    manifest_length: int
    manifest_sha256: bytes
    file_length: int

    def pack(self) -> bytes:
        """The header's 64 bytes."""
        return _HEADER.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES, self.manifest_length, self.manifest_sha256, self.file_length)


def parse_header(data: bytes, file_length: int) -> Header:
    """The header in `data`, the first 64 bytes (or all, if fewer) of a file of `file_length` bytes.

    Raises IncompatibleBundleError for a newer format and BundleError for everything else. The version is judged before anything
    but the magic, because a newer format may mean something else by the bytes that follow.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise _no_magic(data, file_length)
    if len(data) < _VERSION.size:
        raise BundleError(f"the file ends after {file_length} bytes, inside the header of {HEADER_BYTES} bytes: it is truncated")
    version = _VERSION.unpack_from(data)[1]
    if version > FORMAT_VERSION:
        raise IncompatibleBundleError(
            f"the bundle has format version {version}, this mvcompile reads versions up to {FORMAT_VERSION}: "
            "update mvcompile here, or compile the model with this mvcompile"
        )
    if version < 1:
        raise BundleError(f"the header gives format version {version}, expected 1 to {FORMAT_VERSION}: it is damaged")
    if len(data) < HEADER_BYTES:
        raise BundleError(f"the file ends after {file_length} bytes, inside the header of {HEADER_BYTES} bytes: it is truncated")
    return _parse_v1(data, file_length)


def _parse_v1(data: bytes, file_length: int) -> Header:
    _, _, header_length, manifest_length, manifest_sha256, stated_length = _HEADER.unpack_from(data)
    if header_length != HEADER_BYTES:
        raise BundleError(f"the header gives its own length as {header_length} bytes, expected {HEADER_BYTES}: it is damaged")
    if stated_length != file_length:
        change = "it is truncated" if file_length < stated_length else "something was appended, or the header is damaged"
        raise BundleError(f"the file has {file_length} bytes, its header says {stated_length}: {change}")
    if manifest_length > file_length - HEADER_BYTES:
        raise BundleError(
            f"the header gives a manifest of {manifest_length} bytes, only {file_length - HEADER_BYTES} follow it: it is damaged"
        )
    return Header(manifest_length, manifest_sha256, stated_length)


def _no_magic(data: bytes, file_length: int) -> BundleError:
    if file_length == 0:
        return BundleError("the file is empty, expected a bundle")
    if data[:4] == MAGIC[:4]:
        return BundleError(
            f"the file starts with {data[: len(MAGIC)].hex(' ')}, a bundle with {MAGIC.hex(' ')}: "
            "it is truncated or was transferred as text; transfer it in binary mode"
        )
    return BundleError(f"the file starts with {data[: len(MAGIC)].hex(' ')}, a bundle with {MAGIC.hex(' ')}: it is no bundle")
