"""Counters, of a kernel that answers from pipes: what the system would say, not what this machine has."""

from __future__ import annotations

import errno
import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from mvcompile.errors import EnvironmentProblem
from mvcompile.runtime import counters, resctrl
from mvcompile.runtime.counters import EVENTS, PERF_FEATURES, Counts, PerfCounters
from mvcompile.runtime.resctrl import RESCTRL_FEATURES, Resctrl, Traffic


class Kernel:
    """Opens pipes that hold `values`, one per event, as the kernel would report them: counted in half of the time only."""

    def __init__(self, values: list[int], refuse_cores: int = 0, refuse_threads: int = 0) -> None:
        self.values = values
        self.refused = {-1: refuse_cores, 0: refuse_threads}
        self.opened: list[tuple[int, int, int]] = []
        self.ends: list[int] = []

    def open(self, attributes: bytes, process: int, core: int, leader: int) -> int:
        kind, size, event = struct.unpack_from("<IIQ", attributes)
        form, flags = struct.unpack_from("<QQ", attributes, 32)
        assert (kind, size, len(attributes)) == (0, 112, 112)
        assert flags & 0b1100000 == 0b1100000  # what the process itself does
        assert bool(flags & 2) == (process == 0)
        if self.refused[process]:
            raise OSError(self.refused[process], os.strerror(self.refused[process]))
        self.opened.append((process, core, event))
        reader, writer = os.pipe()
        if form & 8 and leader == -1:
            os.write(writer, struct.pack("<3Q", len(self.values), 200, 100) + struct.pack(f"<{len(self.values)}Q", *self.values))
        elif not form & 8:
            os.write(writer, struct.pack("<3Q", self.values[event], 200, 100))
        os.close(writer)
        self.ends.append(reader)
        return reader


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


VALUES = [1000, 2000, 100, 50]


def test_cores_are_counted_together() -> None:
    kernel = Kernel(VALUES)
    found = PerfCounters([3, 5], kernel.open)
    assert found.scope == "cores"
    assert kernel.opened == [(-1, core, event) for core in (3, 5) for event in (0, 1, 2, 3)]
    counts = found.read()
    assert (counts.cycles, counts.instructions, counts.llc_references, counts.llc_misses) == (4000, 8000, 400, 200)
    found.close()
    found.close()
    assert not any(map(is_open, kernel.ends))


def test_where_cores_may_not_be_seen_the_thread_is_counted() -> None:
    kernel = Kernel(VALUES, refuse_cores=errno.EACCES)
    found = PerfCounters([3, 5], kernel.open)
    assert found.scope == "thread"
    assert kernel.opened == [(0, -1, event) for event in (0, 1, 2, 3)]
    assert found.read().llc_misses == 100
    del found
    assert not any(map(is_open, kernel.ends))


@pytest.mark.parametrize(
    ("cores", "threads", "message"),
    [
        (errno.EACCES, errno.EACCES, r"may not read them \(kernel.perf_event_paranoid is .*\); set that to 2 .* CAP_PERFMON"),
        (errno.ENOENT, 0, "this machine shows no such counters .*; use the residual monitor, which needs none"),
        (errno.EPERM, errno.EOPNOTSUPP, "this machine shows no such counters"),
        (errno.EMFILE, 0, "the system refuses them: Too many open files"),
    ],
)
def test_why_there_are_none(cores: int, threads: int, message: str) -> None:
    with pytest.raises(EnvironmentProblem, match=f"hardware counters cannot be read: .*{message}"):
        PerfCounters([0], Kernel(VALUES, cores, threads).open)


def test_this_machine_counts_or_says_why_not() -> None:
    """It must say one or the other, and nothing else may happen."""
    found = None
    with suppress(EnvironmentProblem):
        found = PerfCounters(sorted(os.sched_getaffinity(0))[:1])
    if found is not None:
        before = found.read()
        assert sum(range(100_000)) > 0
        assert found.read().instructions >= before.instructions
        found.close()


def test_features_of_counters() -> None:
    before = Counts(10.0, 1e9, 1e9, 1e6, 1e5)
    after = Counts(12.0, 5e9, 3e9, 5e6, 1.1e6)
    named = dict(zip(PERF_FEATURES, counters.features(before, after), strict=True))
    assert named == {
        "llc_misses_per_s": 5e5,
        "llc_references_per_s": 2e6,
        "llc_miss_rate": 0.25,
        "instructions_per_cycle": 0.5,
        "misses_per_instruction": 5e-4,
    }
    assert counters.features(before, before) == (0.0,) * 5
    assert list(EVENTS.values()) == [0, 1, 2, 3]


def folder(path: Path, **values: object) -> Path:
    for domain in ("mon_L3_00", "mon_L3_01"):
        (path / "mon_data" / domain).mkdir(parents=True)
        for name, value in values.items():
            (path / "mon_data" / domain / name).write_text(f"{value}\n")
    return path


def test_what_resctrl_shows_is_added_up_over_caches(tmp_path: Path) -> None:
    found = Resctrl(folder(tmp_path, llc_occupancy=1000, mbm_total_bytes=50, mbm_local_bytes=40)).read()
    assert (found.occupancy_bytes, found.total_bytes, found.local_bytes) == (2000, 100, 80)


def test_why_resctrl_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"none cannot be read: No such file .*mount -t resctrl"):
        Resctrl(tmp_path / "none")
    (tmp_path / "empty" / "mon_data").mkdir(parents=True)
    with pytest.raises(EnvironmentProblem, match="mon_data is empty: this CPU monitors no cache"):
        Resctrl(tmp_path / "empty")
    unavailable = folder(tmp_path / "some", llc_occupancy=1000, mbm_total_bytes="Unavailable")
    with pytest.raises(EnvironmentProblem, match="mbm_total_bytes cannot be read: it holds no number"):
        Resctrl(unavailable)
    with pytest.raises(EnvironmentProblem, match="mbm_local_bytes cannot be read: No such file"):
        Resctrl(folder(tmp_path / "less", llc_occupancy=1000, mbm_total_bytes=0))


def test_features_of_resctrl() -> None:
    before, after = Traffic(1.0, 500.0, 1e9, 1e9), Traffic(3.0, 700.0, 5e9, 2e9)
    named = dict(zip(RESCTRL_FEATURES, resctrl.features(before, after), strict=True))
    assert named == {"occupancy_bytes": 700.0, "total_bytes_per_s": 2e9, "local_bytes_per_s": 5e8}
    assert resctrl.features(before, before) == (500.0, 0.0, 0.0)
