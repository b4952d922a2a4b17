"""Open a bundle: verify it and map it. Standard library only, because the runtime imports this module."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from mvcompile.bundle.check import check_manifest
from mvcompile.bundle.codec import decode_manifest
from mvcompile.bundle.digest import combine, pieces
from mvcompile.bundle.header import parse_header
from mvcompile.bundle.schema import HEADER_BYTES, PIECE_BYTES, Manifest, Member
from mvcompile.errors import BundleError, EnvironmentProblem, UsageError

# Two threads verify twice as fast as one; more would take cores from whoever else lives on this machine.
_THREADS = 2
_WRONG_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)


class Bundle:
    """An open bundle: its manifest and its members, mapped copy-on-write.

    Writing to a member's memory changes this process's copy, never the file. The file must not be changed in place while it is
    open (`write_bundle` replaces files instead, so an open bundle keeps the bytes it was opened with).
    """

    def __init__(self, path: Path, manifest: Manifest, digest: str, mapping: mmap.mmap) -> None:
        self.path = path
        self.manifest = manifest
        self.digest = digest
        """SHA-256 (hex) of the manifest, and through the manifest of every member: the identity of the bundle."""
        self._mapping = mapping
        self._members = {member.name: member for member in manifest.members}

    def member(self, name: str) -> memoryview:
        """The bytes of member `name`, without a copy; its first byte is at a multiple of 4096 in memory.

        Raises BundleError if there is no such member, UsageError if the bundle was closed.
        """
        if name not in self._members:
            raise BundleError(f"{self.path} has no member {name!r}, its members are {', '.join(sorted(self._members))}")
        if self._mapping.closed:
            raise UsageError(f"{self.path} was closed: take its members before that")
        member = self._members[name]
        return memoryview(self._mapping)[member.offset : member.offset + member.length]

    def close(self) -> None:
        """Unmap the file. While views of members are in use the mapping stays, and goes with the last of them."""
        try:
            self._mapping.close()
        except BufferError:
            return

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_bundle(path: str | os.PathLike[str], *, verify: bool = True) -> Bundle:
    """Open the bundle at `path` and check that it is sound: header, manifest, what the manifest means, and with `verify` the
    digest of every member and that the bytes between members are zero, so that any changed bit of the file is found.

    Raises UsageError if the file cannot be read, IncompatibleBundleError if its format is newer than this package, BundleError
    if it is truncated, altered or breaks its format, EnvironmentProblem if it cannot be mapped. Each names `path`.
    """
    path = Path(path)
    mapping, file_length = _map(path)
    try:
        return _open(path, mapping, file_length, verify)
    except BundleError as error:
        raise type(error)(f"{path}: {error}") from error


def _map(path: Path) -> tuple[mmap.mmap | None, int]:
    """The file mapped copy-on-write (None when it is empty, which cannot be mapped) and its length in bytes."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before opening it: opening a pipe waits for its other end
            raise UsageError(f"{path} is not a regular file, expected a bundle (*.mvb)")
        with path.open("rb") as file:
            file_length = os.fstat(file.fileno()).st_size
            if file_length == 0:
                return None, 0
            return mmap.mmap(file.fileno(), file_length, access=mmap.ACCESS_COPY), file_length
    except OSError as error:
        if error.errno in _WRONG_PATH:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        raise EnvironmentProblem(
            f"{path} cannot be mapped: {error}; look at memory, limits (ulimit -v, ulimit -n) and disk"
        ) from error
    except ValueError as error:  # a NUL in the path, or the file became shorter just now
        raise UsageError(f"{path} cannot be read: {error}") from error


def _open(path: Path, mapping: mmap.mmap | None, file_length: int, verify: bool) -> Bundle:
    header = parse_header(mapping[:HEADER_BYTES] if mapping is not None else b"", file_length)
    assert mapping is not None  # an empty file has no header
    manifest_end = HEADER_BYTES + header.manifest_length
    text = mapping[HEADER_BYTES:manifest_end]
    digest = sha256(text)
    if digest.digest() != header.manifest_sha256:
        raise BundleError(
            f"the manifest's SHA-256 is {digest.hexdigest()}, the header says {header.manifest_sha256.hex()}: "
            "the file is damaged, copy it again or compile the model again"
        )
    manifest = decode_manifest(text)
    check_manifest(manifest, file_length, manifest_end)
    if verify:
        view = memoryview(mapping)
        _verify_members(view, manifest.members)
        _verify_gaps(view, manifest.members, manifest_end)
    return Bundle(path, manifest, digest.hexdigest(), mapping)


def _verify_members(view: memoryview, members: tuple[Member, ...]) -> None:
    ranges = [piece for member in members for piece in pieces(member.offset, member.length)]
    digests = [b""] * len(ranges)

    def work(first: int) -> None:  # hashlib gives up the interpreter lock
        for index in range(first, len(ranges), _THREADS):
            begin, end = ranges[index]
            digests[index] = sha256(view[begin:end]).digest()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(1, _THREADS)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    done = iter(digests)
    for member in members:
        found = combine([next(done) for _ in pieces(member.offset, member.length)])
        if found != member.sha256:
            raise BundleError(
                f"the SHA-256 of member {member.name} is {found}, the manifest says {member.sha256}: "
                "the file is damaged, copy it again or compile the model again"
            )


def _verify_gaps(view: memoryview, members: tuple[Member, ...], manifest_end: int) -> None:
    """Check that every byte that belongs to nothing is zero."""
    end = manifest_end
    for member in sorted(members, key=lambda member: (member.offset, member.length)):
        for begin in range(end, member.offset, PIECE_BYTES):
            gap = bytes(view[begin : min(begin + PIECE_BYTES, member.offset)])
            if gap.count(0) != len(gap):
                raise BundleError(
                    f"the bytes before member {member.name} are not all zero between {begin} and {begin + len(gap)}"
                )
        end = member.offset + member.length
