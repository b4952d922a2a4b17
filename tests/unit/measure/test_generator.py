"""The generator's dials on a machine that is not there, and one real process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.measure.generator import Achieved, Generator
from mvcompile.measure.load import LoadProcess, Work
from mvcompile.testing.machines import MIB, Machine
from mvcompile.types import UNLIMITED_BYTES_PER_S, Dials

SMALL_LLC = 4 * MIB
"""Real processes fill their buffers: these are small."""


def test_dials_become_work_and_work_is_reported() -> None:
    machine = Machine()
    with Generator(1, 32 * MIB, start=machine.start) as generator:
        (load,) = machine.loads
        assert generator.dials == Dials()
        assert generator.achieved() == Achieved(0, 0.0, 0.0, 0.0, 0.0)
        generator.set(Dials(MIB, 2e9, UNLIMITED_BYTES_PER_S))
        assert load.work == Work(MIB, read_rate=2e9, write_rate=-1.0)
        machine.sleep(0.5)
        achieved = generator.achieved()
        assert achieved.dials == Dials(MIB, pytest.approx(2e9), pytest.approx(16e9))
        assert achieved.walk_bytes_per_s > 0
        generator.set(Dials(write_bytes_per_s=-1.0))
        assert load.work == Work(write_rate=-1.0)
        assert generator.achieved().seconds == 0
    assert load.stopped


def test_what_was_not_walked_yet_is_not_resident() -> None:
    machine = Machine()
    with Generator(1, 32 * MIB, start=machine.start) as generator:
        generator.set(Dials(32 * MIB))
        machine.sleep(0.001)
        assert 0 < generator.achieved().resident_bytes < 32 * MIB


@pytest.mark.parametrize("size", [-1, 32 * MIB + 1])
def test_a_resident_set_has_to_fit(size: int) -> None:
    with Generator(1, 32 * MIB, start=Machine().start) as generator, pytest.raises(UsageError, match=rf"{size}; give 0 to"):
        generator.set(Dials(size))


def test_a_core_that_is_not_allowed_is_named() -> None:
    core = max(os.sched_getaffinity(0)) + 1
    with pytest.raises(UsageError, match=f"core {core} is not among the cores"):
        Generator(core, SMALL_LLC)


@pytest.fixture(scope="module")
def generator() -> Iterator[Generator]:
    descriptors = len(os.listdir("/proc/self/fd"))
    with Generator(max(os.sched_getaffinity(0)), SMALL_LLC) as real:
        yield real
        real.set(Dials(MIB))
    real.stop()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    "dials",
    [
        Dials(resident_bytes=MIB),
        Dials(read_bytes_per_s=UNLIMITED_BYTES_PER_S),
        Dials(write_bytes_per_s=UNLIMITED_BYTES_PER_S),
        Dials(MIB, 2e8, 1e8),
    ],
)
def test_a_real_process_does_what_the_dials_say(generator: Generator, dials: Dials) -> None:
    generator.set(dials)
    achieved = wait_for_all(generator, dials)
    assert achieved.resident_bytes == dials.resident_bytes
    assert (achieved.walk_bytes_per_s > 0) == (dials.resident_bytes > 0)
    for done, asked in (
        (achieved.read_bytes_per_s, dials.read_bytes_per_s),
        (achieved.write_bytes_per_s, dials.write_bytes_per_s),
    ):
        assert (done > 0) == (asked > 0)
        assert done <= 1.1 * asked


def wait_for_all(generator: Generator, dials: Dials) -> Achieved:
    """What is achieved once every dial shows; the last state when they do not."""
    for _ in range(1000):
        time.sleep(0.02)
        achieved = generator.achieved()
        done = achieved.dials
        if (
            done.resident_bytes == dials.resident_bytes
            and (done.read_bytes_per_s > 0) == (dials.read_bytes_per_s > 0)
            and (done.write_bytes_per_s > 0) == (dials.write_bytes_per_s > 0)
        ):
            break
    return achieved


def test_with_all_dials_at_zero_the_process_sleeps() -> None:
    with LoadProcess(max(os.sched_getaffinity(0)), SMALL_LLC) as load:
        load.apply(Work(counting=True))
        load.apply(Work())
        status = Path(f"/proc/{load.pid}/stat")
        for _ in range(500):
            if status.read_text().rpartition(")")[2].split()[0] == "S":
                break
            time.sleep(0.02)
        before = processor_ticks(status)
        time.sleep(0.2)
        assert processor_ticks(status) == before
        os.kill(load.pid, 9)
        os.waitid(os.P_PID, load.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(EnvironmentProblem, match=r"has ended \(exit code -9\)"):
            load.counters()


def processor_ticks(status: Path) -> list[str]:
    return status.read_text().rpartition(")")[2].split()[11:13]


def test_the_process_dies_with_its_parent() -> None:
    code = (
        "import os, sys\n"
        "from mvcompile.measure.load import LoadProcess, Work\n"
        f"load = LoadProcess(max(os.sched_getaffinity(0)), {SMALL_LLC})\n"
        "load.apply(Work(read_rate=-1.0))\n"
        "print(load.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    start = f"import sys; sys.path[:] = {sys.path!r}\n"
    found = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)
    child = int(found.stdout)
    for _ in range(500):
        if not running(child):
            break
        time.sleep(0.02)
    assert not running(child)


def running(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sizes_beyond_the_buffers_and_a_failed_start_are_told() -> None:
    with pytest.raises(UsageError, match="of 0 bytes is none"):
        LoadProcess(max(os.sched_getaffinity(0)), 0)
    with pytest.raises(EnvironmentProblem, match=r"did not start .*MiB of memory"):
        LoadProcess(max(os.sched_getaffinity(0)), 2**50)
