"""Where tuning records are kept: in memory, or append-only on disk (docs/design/004-records.md)."""

from mvcompile.records.disk import DiskStore
from mvcompile.records.memory import MemoryStore
from mvcompile.records.store import BadLine, RecordStore, Recovery

__all__ = ["BadLine", "DiskStore", "MemoryStore", "RecordStore", "Recovery"]
