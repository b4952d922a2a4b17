"""What every record store must do, as a suite of tests: derive from `RecordStoreContract` and give `open_store`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mvcompile.errors import StoreError
from mvcompile.records import RecordStore
from mvcompile.types import Objectives, Record, Status, Verification

__all__ = ["RecordStoreContract", "failed_record", "measured_record"]


def measured_record(trace: str = "[]", *, task: str = "task", target: str = "target", fingerprint: str = "prepared") -> Record:
    """A candidate that was measured."""
    return Record(
        task_key=task,
        target_key=target,
        fingerprint=fingerprint,
        trace=trace,
        space="dense",
        status=Status.OK,
        objectives=Objectives(latency_s=1.25e-3, footprint_bytes=65536.0, traffic_bytes=1.0e6),
        latency_spread=0.02,
        verification=Verification(max_abs_error=1e-6, max_rel_error=2e-5, rtol=1e-3, atol=1e-5),
    )


def failed_record(trace: str = "[]", *, status: Status = Status.TIMEOUT, message: str = "no answer after 10 s") -> Record:
    """A candidate that was not."""
    return Record("task", "target", "prepared", trace, "dense", status, message=message)


class RecordStoreContract:
    """Tests of a store that `open_store` gives, empty, as often as it is called within a test."""

    def open_store(self) -> RecordStore:
        raise LookupError("a suite that derives from this one gives open_store")

    def test_is_empty_at_first(self) -> None:
        with self.open_store() as store:
            assert store.count == 0
            assert store.recovered is None
            assert store.records("task", "target", "prepared") == ()

    def test_gives_back_equal_records_in_order(self) -> None:
        batches = [[measured_record("1"), failed_record("2")], [], [measured_record("1"), measured_record("3")]]
        with self.open_store() as store:
            for batch in batches:
                store.append(batch)
            assert store.records("task", "target", "prepared") == tuple(record for batch in batches for record in batch)
            assert store.count == 4

    def test_never_mixes_tasks_targets_or_fingerprints(self) -> None:
        wanted = measured_record("wanted")
        others = [measured_record(task="other"), measured_record(target="other"), measured_record(fingerprint="other")]
        with self.open_store() as store:
            store.append([*others, wanted, *others])
            assert store.records("task", "target", "prepared") == (wanted,)
            assert store.records("task", "other", "prepared") == (others[1],) * 2
            assert store.records("other", "other", "prepared") == ()
            assert store.count == 7

    def test_lists_the_tasks_of_one_target_and_fingerprint(self) -> None:
        with self.open_store() as store:
            assert store.tasks("target", "prepared") == ()
            store.append([measured_record(task="b"), measured_record(task="a", target="other")])
            store.append([measured_record(task="c", fingerprint="other"), measured_record(task="a"), measured_record(task="b")])
            assert store.tasks("target", "prepared") == ("b", "a")
            assert store.tasks("other", "prepared") == ("a",)

    def test_what_it_gave_does_not_change_later(self) -> None:
        with self.open_store() as store:
            store.append([measured_record("1")])
            before = store.records("task", "target", "prepared")
            store.append([measured_record("2")])
            assert len(before) == 1

    @pytest.mark.parametrize("status", list(Status))
    def test_keeps_every_status(self, status: Status) -> None:
        record = measured_record() if status is Status.OK else failed_record(status=status, message="why: \"'\n\t\0\u2028ü\udc80")
        with self.open_store() as store:
            store.append([record])
            assert store.records("task", "target", "prepared") == (record,)

    def test_keeps_long_traces(self) -> None:
        record = measured_record("x" * 1_000_000)
        with self.open_store() as store:
            store.append([record])
            assert store.records("task", "target", "prepared") == (record,)

    @pytest.mark.parametrize(
        "bad",
        [
            replace(measured_record(), latency_spread=float("nan")),
            replace(measured_record(), objectives=Objectives(float("inf"), 1.0, 1.0)),
            replace(measured_record(), version=2),
        ],
        ids=["nan", "infinite", "version"],
    )
    def test_refuses_a_batch_with_a_record_that_cannot_be_stored(self, bad: Record) -> None:
        with self.open_store() as store:
            with pytest.raises(StoreError, match="task"):
                store.append([measured_record(), bad])
            assert store.count == 0
            store.append([measured_record()])
            assert store.count == 1

    def test_cannot_be_used_after_it_was_closed(self) -> None:
        store = self.open_store()
        store.close()
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.append([measured_record()])
        with pytest.raises(StoreError, match="closed"):
            store.records("task", "target", "prepared")
        with pytest.raises(StoreError, match="closed"):
            store.tasks("target", "prepared")
        with pytest.raises(StoreError, match="closed"):
            _ = store.count
        with pytest.raises(StoreError, match="closed"):
            _ = store.recovered
