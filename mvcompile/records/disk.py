"""Records in an append-only file of checksummed JSON lines (docs/design/004-records.md)."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mvcompile.errors import StoreError
from mvcompile.records.codec import VERSION, decode, encode
from mvcompile.records.index import Index
from mvcompile.records.lines import complete_bytes, header_line, read_lines, read_version, record_line
from mvcompile.records.lock import WriterLock
from mvcompile.records.migrations import has_path, migrate
from mvcompile.records.store import BadLine, Recovery
from mvcompile.types import Record

FILE = "records.jsonl"
LOCK = "records.lock"


class DiskStore:
    """A `RecordStore` in `directory`, which is made if it is missing. A batch is on disk when `append` returns.

    Raises `StoreError` if another store has the directory open, if the file is of a newer version or none of ours, or cannot be
    read or written. What a killed writer left unfinished is cut off and damaged lines are skipped; `recovered` says so.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._path = Path(directory) / FILE
        self._lock: WriterLock | None = None
        self._descriptor = -1
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(self._path.with_name(LOCK))
            self._open()
        except OSError as error:
            self.close()
            raise StoreError(f"the records in {directory} cannot be opened: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        self._require_open()
        return self._index.count

    @property
    def recovered(self) -> Recovery | None:
        self._require_open()
        return self._recovered

    def append(self, records: Sequence[Record]) -> None:
        self._require_open()
        lines = b"".join(_line(record) for record in records)
        if not lines:
            return
        try:
            _write(self._descriptor, lines)
            if not os.fstat(self._descriptor).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was removed while it was in use")
        except BaseException as error:
            self._cut()
            if isinstance(error, OSError):
                raise StoreError(
                    f"{len(records)} records ({len(lines)} bytes) could not be written to {self._path}: {error}; "
                    "what was appended before is kept. If the disk is full, make room; then run the command again"
                ) from error
            raise
        self._end += len(lines)
        self._index.add(records)

    def records(self, task_key: str, target_key: str, fingerprint: str) -> tuple[Record, ...]:
        self._require_open()
        return self._index.get(task_key, target_key, fingerprint)

    def tasks(self, target_key: str, fingerprint: str) -> tuple[str, ...]:
        self._require_open()
        return self._index.tasks(target_key, fingerprint)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._descriptor < 0:
            raise StoreError(f"the record store in {self._path.parent} is closed: open a new one")

    def _open(self) -> None:
        if not self._path.exists():
            _replace(self._path, header_line(VERSION))
        data = self._path.read_bytes()
        version = self._supported_version(data)
        self._end = complete_bytes(data)
        cut = len(data) - self._end
        records, bad = _read(data[: self._end], version)
        backup = ""
        if version != VERSION:
            backup = self._back_up(data, version)
            data = header_line(VERSION) + b"".join(map(_line, records))
            _replace(self._path, data)
            self._end = len(data)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if cut:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)
        self._index = Index(records)
        self._recovered: Recovery | None = None
        if cut or bad or backup:
            self._recovered = Recovery(str(self._path), cut, bad, version if backup else None, backup)

    def _supported_version(self, data: bytes) -> int:
        try:
            version = read_version(data)
        except ValueError as error:
            raise StoreError(f"{self._path} is no record file: {error}; move it away or use another directory") from error
        if version > VERSION:
            raise StoreError(
                f"{self._path} has format version {version}, this program reads up to {VERSION}: "
                "use the newer mvcompile that wrote it, or another directory"
            )
        if not has_path(version):
            raise StoreError(
                f"{self._path} has format version {version}, which this program (version {VERSION}) no longer reads: "
                "open it once with an older mvcompile, or use another directory"
            )
        return version

    def _back_up(self, data: bytes, version: int) -> str:
        """Keep the file as it was beside the migrated one; returns its path."""
        number = 0
        while (backup := self._path.with_name(f"{FILE}.v{version}.{number}")).exists():
            number += 1
        _replace(backup, data)
        return str(backup)

    def _cut(self) -> None:
        """Take back what a failed append may have written. If even that fails the store closes: the next one to open it cuts."""
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError:
            self.close()


def _line(record: Record) -> bytes:
    try:
        return record_line(encode(record))
    except ValueError as error:
        raise StoreError(f"a record of task {record.task_key} cannot be stored: {error}") from error


def _read(data: bytes, version: int) -> tuple[list[Record], tuple[BadLine, ...]]:
    records, bad = [], []
    for line in read_lines(data):
        reason = line.reason
        if not reason:
            try:
                records.append(decode(migrate(line.value, version)))
            except ValueError as error:
                reason = str(error)
        if reason:
            bad.append(BadLine(line.number, reason))
    return records, tuple(bad)


def _write(descriptor: int, data: bytes) -> None:
    """Write all of `data` and wait until it is on the disk. One write(2), unless the system takes only a part of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def _replace(path: Path, data: bytes) -> None:
    """Put a file in place at once: after a crash there is the old one or the new one."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        _write(descriptor, data)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
