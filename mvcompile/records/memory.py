"""Records that are gone with the process: for tests and for compiling without a work directory."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from mvcompile.errors import StoreError
from mvcompile.records.codec import encode
from mvcompile.records.index import Index
from mvcompile.records.store import Recovery
from mvcompile.types import Record


class MemoryStore:
    """A `RecordStore` in memory. It refuses what the one on disk refuses."""

    def __init__(self) -> None:
        self._index: Index | None = Index()

    @property
    def count(self) -> int:
        return self._opened().count

    @property
    def recovered(self) -> Recovery | None:
        self._opened()
        return None

    def append(self, records: Sequence[Record]) -> None:
        index = self._opened()
        for record in records:
            try:
                encode(record)
            except ValueError as error:
                raise StoreError(f"a record of task {record.task_key} cannot be stored: {error}") from error
        index.add(records)

    def records(self, task_key: str, target_key: str, fingerprint: str) -> tuple[Record, ...]:
        return self._opened().get(task_key, target_key, fingerprint)

    def tasks(self, target_key: str, fingerprint: str) -> tuple[str, ...]:
        return self._opened().tasks(target_key, fingerprint)

    def close(self) -> None:
        self._index = None

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _opened(self) -> Index:
        if self._index is None:
            raise StoreError("the record store is closed: open a new one")
        return self._index
