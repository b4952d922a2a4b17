from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mvcompile.errors import EnvironmentProblem
from mvcompile.measure.load import Counters, Work
from mvcompile.measure.residence import stays, stays_as_before
from mvcompile.testing.machines import TARGET
from mvcompile.types import HostTarget

MIB = 2**20
HOST = replace(TARGET, l2_bytes=2 * MIB, llc_bytes=480 * MIB)


def _never() -> bool:
    raise AssertionError("measured again")


class Memory:
    """A machine of which `seen_bytes` of cache can be had: reading a larger set, over and over, takes as long as memory does."""

    def __init__(self, seen_bytes: int, cached: float = 30e9, memory: float = 17e9) -> None:
        self._seen, self._cached, self._memory = seen_bytes, cached, memory
        self._work, self._seconds, self.started, self.stopped = Work(), 0.0, 0, 0

    def start(self, core: int, llc_bytes: int) -> Memory:
        self.started += 1
        return self

    def apply(self, work: Work) -> None:
        self._work, self._seconds = work, 0.0

    def counters(self) -> Counters:
        fits = self._work.read_window <= self._seen
        return Counters(self._seconds, read_bytes=round(self._seconds * (self._cached if fits else self._memory)))

    def sleep(self, seconds: float) -> None:
        self._seconds += seconds

    def stop(self) -> None:
        self.stopped += 1

    def keeps(self, model_bytes: int, host: HostTarget = HOST) -> bool:
        return stays(model_bytes, host, 0, start=self.start, sleep=self.sleep)


@pytest.mark.parametrize(("model_mib", "expected"), [(16, True), (60, True), (100, False), (400, False)])
def test_a_model_stays_if_the_cache_that_is_seen_holds_it(model_mib: int, expected: bool) -> None:
    memory = Memory(64 * MIB)
    assert memory.keeps(model_mib * MIB) is expected
    assert (memory.started, memory.stopped) == (1, 1)


def test_a_cache_that_holds_everything_or_is_no_faster_than_memory_keeps_everything() -> None:
    assert Memory(2**40).keeps(100 * MIB)
    assert Memory(64 * MIB, memory=28e9).keeps(100 * MIB)


@pytest.mark.parametrize(("model_bytes", "expected"), [(481 * MIB, False), (8 * MIB, True), (0, True)])
def test_what_the_reported_sizes_answer_is_not_measured(model_bytes: int, expected: bool) -> None:
    memory = Memory(64 * MIB)
    assert memory.keeps(model_bytes) is expected
    assert memory.started == 0


def test_a_machine_that_gets_no_time_is_no_error() -> None:
    memory = Memory(64 * MIB, cached=0.0, memory=0.0)
    assert memory.keeps(100 * MIB)


def test_the_first_answer_holds(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    assert stays_as_before(path, lambda: False) is False
    assert stays_as_before(path, _never) is False
    for damage in ("", "[]", '{"stays": 1}', "\0"):
        path.write_text(damage)
        assert stays_as_before(path, lambda: True) is True
        assert stays_as_before(path, _never) is True


def test_an_answer_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"cache\.json cannot be written: .*; free space and run again"):
        stays_as_before(tmp_path / "missing" / "cache.json", lambda: True)
