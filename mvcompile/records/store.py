"""What a record store is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from mvcompile.types import Record

LISTED_BAD_LINES = 5


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that was skipped: its number in the file, from 1, and why."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening a store had to leave out or change; `str()` of it is for people.

    `cut_bytes` of a batch that was being written when its writer died are gone from the end of `file`; `bad_lines` are still
    in it but not in the store; `migrated_from` is the older format version that the file had, if it had one, and `backup`
    where it is now.
    """

    file: str
    cut_bytes: int = 0
    bad_lines: tuple[BadLine, ...] = ()
    migrated_from: int | None = None
    backup: str = ""

    def __str__(self) -> str:
        parts = []
        if self.migrated_from is not None:
            parts.append(f"migrated from format version {self.migrated_from}; the old file is {self.backup}")
        if self.cut_bytes:
            parts.append(f"cut off {self.cut_bytes} bytes of a batch that was not completely written")
        if self.bad_lines:
            lines = [f"line {bad.number} ({bad.reason})" for bad in self.bad_lines[:LISTED_BAD_LINES]]
            more = len(self.bad_lines) - len(lines)
            parts.append("skipped " + ", ".join(lines) + (f" and {more} more" if more else ""))
        return f"{self.file}: " + "; ".join(parts)


class RecordStore(Protocol):
    """Keeps records in the order in which they were appended. One thread uses a store at a time.

    Every method but `close` raises `StoreError` once the store is closed. A store is a context manager that closes itself.
    """

    @property
    def count(self) -> int:
        """Number of records of every task, target and fingerprint."""
        ...

    @property
    def recovered(self) -> Recovery | None:
        """What opening the store had to leave out or change; None if nothing."""
        ...

    def append(self, records: Sequence[Record]) -> None:
        """Keep a batch: all of it, or none if this raises. Raises `StoreError` for a record that cannot be stored (a number
        that is not finite, a version of the future), and if the medium fails.
        """
        ...

    def records(self, task_key: str, target_key: str, fingerprint: str) -> tuple[Record, ...]:
        """The records of exactly this task, target and fingerprint, oldest first."""
        ...

    def tasks(self, target_key: str, fingerprint: str) -> tuple[str, ...]:
        """The keys of all tasks that have records of exactly this target and fingerprint, in the order of their first ones."""
        ...

    def close(self) -> None:
        """Let go of the medium. May be called twice."""
        ...

    def __enter__(self) -> RecordStore: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
