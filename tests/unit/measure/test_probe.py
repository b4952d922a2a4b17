"""The probe's patterns and slowdowns on a machine that is not there, and its chain in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mvcompile.errors import UsageError
from mvcompile.measure.generator import Generator
from mvcompile.measure.load import Work
from mvcompile.measure.load_worker import Buffer, build_chain
from mvcompile.measure.probe import Probe, Rate, Sample, Slowdown, compare, summary
from mvcompile.testing.machines import MIB, Machine
from mvcompile.types import Dials


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def probe(machine: Machine) -> Iterator[Probe]:
    with Probe(0, 32 * MIB, start=machine.start, sleep=machine.sleep) as probe:
        yield probe
    assert machine.loads[0].stopped


@pytest.fixture
def neighbour(machine: Machine, probe: Probe) -> Generator:
    probe.baseline()
    return Generator(1, 32 * MIB, start=machine.start)


def test_alone_nothing_is_slower_and_in_between_it_sleeps(machine: Machine, probe: Probe) -> None:
    baseline = probe.baseline(0.4)
    assert baseline.memory.per_s == pytest.approx(16e9)
    slowdown = probe.slowdown(probe.sample(0.2))
    assert slowdown.cache == pytest.approx(1)
    assert slowdown.memory == pytest.approx(1)
    assert slowdown.pressure == pytest.approx(0, abs=1e-3)
    worked = machine.loads[0].applied
    assert worked[:4] == [Work(chase_bytes=8 * MIB, parallel=True), Work(), Work(read_rate=-1.0), Work()]


def test_a_resident_set_is_felt_in_the_cache(probe: Probe, neighbour: Generator) -> None:
    neighbour.set(Dials(resident_bytes=30 * MIB))
    slowdown = probe.slowdown(probe.sample(0.2))
    assert slowdown.cache > 2
    assert slowdown.memory == pytest.approx(1)
    assert slowdown.pressure > 0.4


def test_a_stream_is_felt_in_memory(probe: Probe, neighbour: Generator) -> None:
    neighbour.set(Dials(write_bytes_per_s=1e9))
    slowdown = probe.slowdown(probe.sample(0.2))
    assert slowdown.memory == pytest.approx(1.5)
    assert slowdown.cache == pytest.approx(1)


def test_what_can_be_asked_for(probe: Probe) -> None:
    with pytest.raises(UsageError, match="no baseline"):
        probe.slowdown(Sample(Rate(1.0, 0.0), Rate(1.0, 0.0)))
    with pytest.raises(UsageError, match="a sample of 0 s"):
        probe.sample(0)
    for size in (0, 33 * MIB):
        with pytest.raises(UsageError, match="does not live in a cache"):
            Probe(0, 32 * MIB, size, start=Machine().start)


def test_a_probe_that_got_no_time_is_infinitely_slow() -> None:
    one, none = Rate(1.0, 0.0), Rate(0.0, 0.0)
    assert compare(Sample(one, one), Sample(none, one)) == Slowdown(float("inf"), 1.0)


def test_summary_is_the_median_and_its_spread() -> None:
    assert summary([1.0, 2.0, 3.0, 4.0, 100.0]) == Rate(3.0, pytest.approx(2 / 3))
    assert summary([0.0, 0.0]) == Rate(0.0, 0.0)


def test_a_chain_passes_every_line_once() -> None:
    buffer = Buffer(MIB)
    places = build_chain(buffer, 64 * 1000)
    seen, at = set(), buffer.address
    for _ in range(1000):
        seen.add(at)
        at = int(buffer.words[(at - buffer.address) // 8])
    assert at == buffer.address
    assert seen == {buffer.address + 64 * line for line in range(1000)}
    assert len(set(places)) == 8
    assert seen >= set(places)
    assert np.all(buffer.words[8 * 1000 :] == 1)
