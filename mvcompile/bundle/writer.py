"""Write a bundle: one pass over the members, into a temporary file that replaces the target in one step."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, TypeAlias

from mvcompile.bundle.check import check_manifest
from mvcompile.bundle.codec import INTEGER_LIMIT, encode_manifest
from mvcompile.bundle.digest import MemberHash
from mvcompile.bundle.header import Header
from mvcompile.bundle.schema import HEADER_BYTES, PAGE_BYTES, PIECE_BYTES, Manifest, Member
from mvcompile.errors import EnvironmentProblem, MvcompileError, UsageError
from mvcompile.types import align

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""Contiguous bytes. Anything else with the buffer protocol, such as a C-contiguous numpy array, works too."""

Source: TypeAlias = "Buffer | os.PathLike[str] | Iterable[Buffer]"
"""Where a member's bytes come from: memory, a file, or buffers that follow each other (read once)."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_bundle(path: str | os.PathLike[str], manifest: Manifest, members: Mapping[str, Source]) -> Manifest:
    """Write a bundle to `path` and return its manifest: `manifest` with the field `members`, whose value is ignored, filled in.

    The same manifest and bytes give the same file, whatever the order of `members` and the kind of their sources. Members are
    read once, in pieces; nothing is kept. `path` is replaced when the new file is complete and on disk: a failure or a kill
    leaves what was there. (A kill can leave a file `.mvcompile-*.tmp` beside it, which may be deleted.)

    Raises BundleError if the manifest is wrong or a required member is missing, UsageError if a source or the folder cannot be
    used, EnvironmentProblem if the disk is full or fails.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    start = _first_offset(manifest, members)
    temporary = target.parent / f".mvcompile-{secrets.token_hex(8)}.tmp"
    need = start
    for name in sorted(members):
        need = align(need, PAGE_BYTES) + _known_length(members[name])
    try:
        if target.exists() and not target.is_file():
            raise UsageError(f"{path} exists and is not a regular file: name another file for the bundle")
        with temporary.open("xb") as file:
            complete = _write(file, manifest, members, start)
        temporary.replace(target)
    except OSError as error:
        raise _os_problem(error, target, need) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    _sync_folder(target.parent)
    return complete


def _first_offset(manifest: Manifest, members: Mapping[str, Source]) -> int:
    """Where the first member starts. Room is left for the longest manifest there can be, so that the members can be written
    before their lengths are known."""
    longest = tuple(Member(name, INTEGER_LIMIT - 1, INTEGER_LIMIT - 1, "0" * 64) for name in sorted(members))
    return align(HEADER_BYTES + len(encode_manifest(replace(manifest, members=longest))), PAGE_BYTES)


def _write(file: BinaryIO, manifest: Manifest, members: Mapping[str, Source], start: int) -> Manifest:
    """Members first, then what describes them; the gaps are holes, which read as zeros."""
    written: list[Member] = []
    end = start
    for name in sorted(members):
        offset = align(end, PAGE_BYTES)
        file.seek(offset)
        digest = MemberHash()
        for chunk in _chunks(name, members[name]):
            file.write(chunk)
            digest.update(chunk)
        end = file.tell()
        written.append(Member(name, offset, end - offset, digest.hexdigest()))
    file.truncate(end)  # a last member without bytes does not make the file reach its offset
    complete = replace(manifest, members=tuple(written))
    text = encode_manifest(complete)
    check_manifest(complete, end, HEADER_BYTES + len(text))
    file.seek(0)
    file.write(Header(len(text), sha256(text).digest(), end).pack())
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
    return complete


def _chunks(name: str, source: Source) -> Iterator[memoryview]:
    """The source's bytes in order, as views of bytes."""
    if isinstance(source, os.PathLike):
        yield from _file_chunks(name, Path(source))
        return
    view = _view(source)
    buffers = iter([view]) if view is not None else _buffers(name, source)
    while (buffer := _next(name, buffers)) is not None:
        if (view := _view(buffer)) is None:
            raise UsageError(f"member {name} holds a {type(buffer).__name__}, expected contiguous bytes")
        yield view


def _buffers(name: str, source: object) -> Iterator[object]:
    # A str is iterable, but it holds no bytes, and it might be meant as a path.
    if isinstance(source, str) or not isinstance(source, Iterable):
        raise UsageError(
            f"member {name} is a {type(source).__name__}, expected contiguous bytes, a pathlib.Path or an iterable of bytes"
        )
    return iter(source)


def _next(name: str, buffers: Iterator[object]) -> object | None:
    try:
        return next(buffers, None)
    except OSError as error:  # not to be taken for an error of the file that is written
        raise UsageError(f"member {name} cannot be read: {error}") from error


def _file_chunks(name: str, path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(PIECE_BYTES))
    try:
        with path.open("rb") as file:
            while count := file.readinto(buffer):
                yield buffer[:count]
    except OSError as error:
        raise UsageError(f"member {name} cannot be read from {path}: {error.strerror or error}") from error


def _view(source: object) -> memoryview | None:
    """A flat view of the bytes of a contiguous buffer, or None."""
    try:
        view = memoryview(source)  # type: ignore[arg-type]
    except TypeError:
        return None
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else None


def _known_length(source: Source) -> int:
    """Bytes of the source, as far as that is known before it is read."""
    if isinstance(source, os.PathLike):
        return os.path.getsize(source) if os.path.exists(source) else 0
    if isinstance(source, (list, tuple)):
        return sum(_known_length(buffer) for buffer in source)
    view = _view(source)
    return 0 if view is None else view.nbytes


def _os_problem(error: OSError, target: Path, need: int) -> MvcompileError:
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        return EnvironmentProblem(
            f"{target} cannot be written: {reason}; it needs at least {need} bytes free in {target.parent} "
            "beside the file that it replaces: free some, or name a file on another disk"
        )
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return UsageError(f"{target} cannot be written: there is no folder {target.parent}, create it or name another file")
    if isinstance(error, PermissionError):
        return UsageError(f"{target} cannot be written: {reason}; get write access to {target.parent} or name another file")
    return EnvironmentProblem(f"{target} cannot be written: {reason}; check the disk or name a file on another one")


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where the file system can: the bytes are on disk already."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
