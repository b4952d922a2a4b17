"""Records in memory, by what makes them comparable."""

from __future__ import annotations

from collections.abc import Iterable

from mvcompile.types import Record


class Index:
    """Records grouped by task, target and fingerprint, each group in the order of arrival."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._groups: dict[tuple[str, str, str], list[Record]] = {}
        self.count = 0
        self.add(records)

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            self._groups.setdefault((record.task_key, record.target_key, record.fingerprint), []).append(record)
            self.count += 1

    def get(self, task_key: str, target_key: str, fingerprint: str) -> tuple[Record, ...]:
        return tuple(self._groups.get((task_key, target_key, fingerprint), ()))

    def tasks(self, target_key: str, fingerprint: str) -> tuple[str, ...]:
        return tuple(task for task, target, prepared in self._groups if (target, prepared) == (target_key, fingerprint))
