from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mvcompile.errors import StoreError
from mvcompile.records import BadLine, DiskStore, RecordStore, Recovery, disk, migrations
from mvcompile.records.codec import dumps, encode
from mvcompile.records.lines import header_line, record_line
from mvcompile.testing.records import failed_record, measured_record
from mvcompile.types import Record

PREPARED = ("task", "target", "prepared")


def traces(store: RecordStore) -> list[str]:
    return [record.trace for record in store.records(*PREPARED)]


def file_of(directory: Path) -> Path:
    return directory / disk.FILE


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A directory with the records 0 to 5, in batches of two."""
    with DiskStore(tmp_path) as store:
        for start in (0, 2, 4):
            store.append([measured_record(str(start)), failed_record(str(start + 1))])
    return tmp_path


def start(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_records_are_found_again(filled: Path) -> None:
    with DiskStore(filled) as store:
        assert store.recovered is None
        assert traces(store) == list("012345")
        store.append([measured_record("6")])
    with DiskStore(str(filled)) as store:
        assert traces(store) == list("0123456")


def test_every_line_is_json(filled: Path) -> None:
    lines = [json.loads(line) for line in file_of(filled).read_text().splitlines()]
    assert lines[0] == {"format": "mvcompile-records", "version": 1}
    assert lines[1]["record"]["objectives"] == {"latency_s": 1.25e-3, "footprint_bytes": 65536.0, "traffic_bytes": 1e6}


def test_a_batch_cut_anywhere_loses_only_its_unfinished_records(filled: Path) -> None:
    whole = file_of(filled).read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(ends[3], len(whole), 7):
        file_of(filled).write_bytes(whole[:length])
        complete = sum(length >= line_end for line_end in ends[1:])
        with DiskStore(filled) as store:
            assert traces(store) == list("012345")[:complete]
            if length in ends:
                assert store.recovered is None
            else:
                assert store.recovered is not None
                assert store.recovered.cut_bytes == length - ends[complete]
                assert f"cut off {length - ends[complete]} bytes" in str(store.recovered)
            store.append([measured_record("next")])
        with DiskStore(filled) as store:
            assert store.recovered is None
            assert traces(store) == [*list("012345")[:complete], "next"]


def damage_byte(line: bytes) -> bytes:
    at = line.index(b'"task"') + 2
    return line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (damage_byte, "checksum"),
        (lambda line: b"", "checksum"),
        (lambda line: line[:30], "checksum"),
        (lambda line: bytes(len(line)), "checksum"),
        (lambda line: record_line({"task_key": "task"})[:-1], "lacks"),
        (lambda line: line.replace(b'":', b'": ', 1), "checksum"),
    ],
    ids=["bit", "empty", "short", "zeros", "no record", "other json"],
)
def test_a_bad_line_is_skipped_and_reported(filled: Path, replacement: object, reason: str) -> None:
    assert callable(replacement)
    lines = file_of(filled).read_bytes().split(b"\n")
    lines[3] = replacement(lines[3])
    damaged = b"\n".join(lines)
    file_of(filled).write_bytes(damaged)
    with DiskStore(filled) as store:
        assert traces(store) == list("01345")
        assert store.recovered is not None
        assert [bad.number for bad in store.recovered.bad_lines] == [4]
        assert reason in store.recovered.bad_lines[0].reason
        assert "skipped line 4" in str(store.recovered)
        store.append([measured_record("6")])
        assert traces(store) == list("013456")
    assert file_of(filled).read_bytes().startswith(damaged)


def test_many_bad_lines_are_counted() -> None:
    text = str(Recovery("records.jsonl", bad_lines=tuple(BadLine(number, "odd") for number in range(2, 12))))
    assert text == "records.jsonl: skipped " + ", ".join(f"line {n} (odd)" for n in range(2, 7)) + " and 5 more"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b'{"format":"mvcompile-records","version":1}',
        b'{"format":"other","version":1}\n',
        b"[]\n",
        b"PK\3\4\n",
        header_line(-1),
    ],
)
def test_a_file_that_is_no_record_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file_of(tmp_path).write_bytes(content)
    with pytest.raises(StoreError, match=r"records\.jsonl is no record file: .* move it away"):
        DiskStore(tmp_path)
    assert file_of(tmp_path).read_bytes() == content


def test_a_newer_version_is_refused(filled: Path) -> None:
    body = file_of(filled).read_bytes()
    newer = body.replace(header_line(1), header_line(2))
    file_of(filled).write_bytes(newer)
    with pytest.raises(StoreError, match=r"version 2, this program reads up to 1: use the newer mvcompile"):
        DiskStore(filled)
    assert file_of(filled).read_bytes() == newer
    file_of(filled).write_bytes(body)
    with DiskStore(filled) as store:  # a refusal does not keep the lock
        assert store.count == 6


def older_file(records: list[Record], torn: bytes = b"") -> bytes:
    """What an imagined version 0 would have written: it called the space `design`, and had no messages."""
    lines = [header_line(0)]
    for record in records:
        value = json.loads(dumps(encode(record)))
        value.update(version=0, design=value.pop("space"))
        del value["message"]
        lines.append(record_line(value))
    lines.append(record_line({"design": 1}))
    return b"".join(lines) + torn


def test_an_older_version_is_migrated_and_kept_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_version_0(value: dict[str, object]) -> dict[str, object]:
        rest = {name: field for name, field in value.items() if name not in ("design", "version")}
        return {**rest, "version": 1, "space": value["design"], "message": ""}

    monkeypatch.setitem(migrations.MIGRATIONS, 0, from_version_0)
    records = [measured_record("0"), measured_record("1", task="other")]
    old = older_file(records, torn=b'{"crc')
    file_of(tmp_path).write_bytes(old)
    with DiskStore(tmp_path) as store:
        assert store.records(*PREPARED) == (records[0],)
        assert store.count == 2
        assert store.recovered is not None
        assert store.recovered.migrated_from == 0
        assert store.recovered.cut_bytes == 5
        assert [bad.number for bad in store.recovered.bad_lines] == [4]
        assert Path(store.recovered.backup).read_bytes() == old
        assert "migrated from format version 0" in str(store.recovered)
        store.append([measured_record("2")])
    with DiskStore(tmp_path) as store:
        assert store.recovered is None
        assert traces(store) == ["0", "2"]


def test_an_older_version_without_a_migration_is_refused(tmp_path: Path) -> None:
    file_of(tmp_path).write_bytes(older_file([measured_record()]))
    with pytest.raises(StoreError, match="version 0, which this program"):
        DiskStore(tmp_path)


HOLD = """
import sys
from mvcompile.records import DiskStore
store = DiskStore(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_refused_with_the_first_ones_pid(filled: Path) -> None:
    holder = start(HOLD, filled)
    try:
        assert first_line(holder) == b"open\n"
        with pytest.raises(StoreError, match=rf"in use by another process \(pid {holder.pid}\): wait for it, stop it"):
            DiskStore(filled)
    finally:
        end(holder)
    with DiskStore(filled) as store:
        assert store.count == 6


def test_a_second_writer_in_the_process_is_refused_and_does_not_free_the_first_ones_lock(filled: Path) -> None:
    with DiskStore(filled):
        with pytest.raises(StoreError, match="already open in this process"):
            DiskStore(filled / ".." / filled.name)
        other = start(HOLD, filled)
        assert first_line(other) == b""
        end(other)


FORK = """
import os, sys, time
from mvcompile.records import DiskStore
store = DiskStore(sys.argv[1])
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_worker_that_outlives_its_killed_parent_does_not_hold_the_lock(filled: Path) -> None:
    parent = start(FORK, filled)
    worker = int(first_line(parent))
    parent.kill()
    parent.wait()
    try:
        with DiskStore(filled) as store:
            assert store.count == 6
    finally:
        os.kill(worker, signal.SIGKILL)
        parent.communicate()


WRITE = """
import sys
from mvcompile.records import DiskStore
from mvcompile.types import Record, Status
def record(trace):
    return Record("task", "target", "prepared", trace, "dense", Status.TIMEOUT)
with DiskStore(sys.argv[1]) as store:
    batch = store.count
    while True:
        store.append([record(f"{batch} {i} " + "x" * 60_000) for i in range(8)])
        print(batch, flush=True)
        batch += 1
"""


def test_killed_ten_times_and_every_finished_batch_is_there(tmp_path: Path) -> None:
    chance = random.Random(7)
    finished: set[int] = set()
    for _ in range(10):
        writer = start(WRITE, tmp_path)
        first = first_line(writer)
        time.sleep(chance.uniform(0.0, 0.05))
        writer.kill()
        rest, _ = writer.communicate()
        finished.update(map(int, (first + rest).split()))
        with DiskStore(tmp_path) as store:
            assert store.recovered is None or not store.recovered.bad_lines
            found = {trace[: trace.rindex(" ")] for trace in traces(store)}
            assert found >= {f"{batch} {i}" for batch in finished for i in range(8)}
            assert len(found) == store.count
    assert len(finished) >= 10


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """As a disk that gets full: a write beyond `size` bytes is short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_only_the_batch_that_does_not_fit(filled: Path) -> None:
    with DiskStore(filled) as store:
        size = file_of(filled).stat().st_size
        with file_size_limit(size + 900), pytest.raises(StoreError, match=r"3 records .* could not be written .* make room"):
            store.append([measured_record("lost")] * 3)
        assert file_of(filled).stat().st_size == size
        assert traces(store) == list("012345")
        store.append([measured_record("6")])
    with DiskStore(filled) as store:
        assert store.recovered is None
        assert traces(store) == list("0123456")


def test_a_batch_that_can_neither_be_written_nor_taken_back_closes_the_store(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with DiskStore(filled) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            patch.setattr(os, "ftruncate", fail)
            with pytest.raises(StoreError, match="Input/output error"):
                store.append([measured_record("6")])
        with pytest.raises(StoreError, match="closed"):
            store.append([measured_record("7")])
    with DiskStore(filled) as store:
        assert traces(store)[:6] == list("012345")


def test_an_interrupted_append_leaves_no_half_batch(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with DiskStore(filled) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.append([measured_record("lost")])
        store.append([measured_record("6")])
        assert traces(store) == list("0123456")
    with DiskStore(filled) as store:
        assert traces(store) == list("0123456")


def test_a_file_that_was_removed_under_the_store_is_noticed(filled: Path) -> None:
    with DiskStore(filled) as store:
        file_of(filled).unlink()
        with pytest.raises(StoreError, match="removed while it was in use"):
            store.append([measured_record("6")])


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/work"):
        DiskStore(tmp_path / "file" / "work")


def test_the_package_needs_the_standard_library_only(tmp_path: Path) -> None:
    script = "import sys, mvcompile.records; print(sorted(m for m in ('numpy', 'tvm', 'onnx') if m in sys.modules), flush=True)"
    process = start(script)
    assert first_line(process) == b"[]\n"
    end(process)
