from __future__ import annotations

from pathlib import Path

import pytest

from mvcompile.records import DiskStore, MemoryStore, RecordStore
from mvcompile.testing.records import RecordStoreContract


class TestMemoryStore(RecordStoreContract):
    def open_store(self) -> RecordStore:
        return MemoryStore()


class TestDiskStore(RecordStoreContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def open_store(self) -> RecordStore:
        return DiskStore(self.directory / "deep" / "work")
