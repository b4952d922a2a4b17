from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mvcompile.errors import UsageError
from mvcompile.runtime import load
from mvcompile.runtime.cores import CoreRegistry

REMEDIES = r"close that session, name other cores=\.\.\., or pass share_cores=True"


def registry(
    cores: int = 4, quota: float | None = None, siblings: Callable[[int], frozenset[int]] = lambda core: frozenset({core})
) -> CoreRegistry:
    return CoreRegistry(lambda: frozenset(range(cores)), lambda: quota, siblings)


def test_leases_do_not_overlap_and_end_with_release() -> None:
    found = registry(4)
    first = found.lease("a.mvb", 2, None, share=False)
    second = found.lease("b.mvb", 2, None, share=False)
    assert (first.cores, second.cores) == ((0, 1), (2, 3))
    found.release(first)
    found.release(first)
    assert found.lease("c.mvb", 1, None, share=False).cores == (0,)


def test_explicit_cores_keep_their_order() -> None:
    found = registry(4)
    assert found.lease("a.mvb", 1, np.array([3, 1]), share=False).cores == (3, 1)  # type: ignore[arg-type]
    assert found.lease("b.mvb", 2, [2, 0], share=False).cores == (2, 0)


def test_too_few_free_cores() -> None:
    found = registry(3)
    found.lease("a.mvb", 2, None, share=False)
    message = rf"2 cores are needed, only 1 is free of the cores 0, 1, 2 .*: cores 0, 1 are held by a.mvb; {REMEDIES}"
    with pytest.raises(UsageError, match=message):
        found.lease("b.mvb", 2, None, share=False)
    found.lease("c.mvb", 1, None, share=False)
    with pytest.raises(UsageError, match=r"1 core is needed, none is free .* held by a.mvb, core 2 is held by c.mvb"):
        found.lease("b.mvb", 1, None, share=False)


def test_explicit_cores_that_cannot_be_had() -> None:
    found = registry(4)
    found.lease("a.mvb", 2, None, share=False)
    with pytest.raises(UsageError, match=rf"cores 1, 2 cannot be leased: core 1 is held by a.mvb; {REMEDIES}"):
        found.lease("b.mvb", 1, [2, 1], share=False)
    for share in (False, True):
        with pytest.raises(UsageError, match=r"core 9 cannot be used, this process may use the cores 0, 1, 2, 3"):
            found.lease("b.mvb", 1, [3, 9], share=share)


def test_shared_cores_are_those_with_the_fewest_users() -> None:
    found = registry(3)
    found.lease("a.mvb", 2, None, share=False)
    assert found.lease("b.mvb", 2, None, share=True).cores == (0, 2)
    assert found.lease("c.mvb", 1, None, share=True).cores == (1,)
    assert found.lease("d.mvb", 1, [0], share=True).cores == (0,)


def test_more_threads_than_cores() -> None:
    for share in (False, True):
        with pytest.raises(
            UsageError, match="5 threads were asked for, this process may use the cores 0, 1, 2, 3 only: use threads=4"
        ):
            registry(4).lease("a.mvb", 5, None, share=share)


def test_separate_physical_cores_come_first() -> None:
    def pairs(core: int) -> frozenset[int]:
        return frozenset({core, core ^ 1})

    found = registry(8, siblings=pairs)
    assert found.lease("a.mvb", 2, None, share=False).cores == (0, 2)
    assert found.lease("b.mvb", 3, None, share=False).cores == (1, 4, 6)


@pytest.mark.parametrize(("quota", "allowed"), [(0.5, 1), (1.0, 1), (2.9, 2)])
def test_the_quota_bounds_the_threads(quota: float, allowed: int) -> None:
    registry(8, quota).lease("a.mvb", allowed, None, share=False)
    message = rf"the cgroup's quota of {quota:g} CPUs is enough for {allowed}: .*; use threads={allowed} or fewer"
    with pytest.raises(UsageError, match=message):
        registry(8, quota).lease("a.mvb", allowed + 1, None, share=False)


def test_the_quota_is_one_for_all_sessions() -> None:
    found = registry(8, 2.0)
    found.lease("a.mvb", 1, None, share=False)
    with pytest.raises(UsageError, match=rf"enough for 2, and core 0 is held by a.mvb: .*; {REMEDIES}"):
        found.lease("b.mvb", 2, None, share=False)
    assert found.lease("b.mvb", 2, None, share=True).cores == (1, 2)
    assert found.lease("c.mvb", 1, [5, 6, 7], share=False).cores == (5, 6, 7)


@pytest.mark.parametrize("threads", [0, -1, 1.0, "2", None, True])
def test_wrong_thread_counts(threads: object) -> None:
    with pytest.raises(UsageError, match=r"threads is .*, expected an integer of at least 1"):
        registry().lease("a.mvb", threads, None, share=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("cores", [[], [0, 0], [-1], [True], [0.0], "01", 3, [None]])
def test_wrong_core_lists(cores: object) -> None:
    with pytest.raises(UsageError, match=r"cores is .*, expected one or more distinct core numbers"):
        registry().lease("a.mvb", 1, cores, share=False)  # type: ignore[arg-type]


def test_threads_and_cores_that_contradict() -> None:
    with pytest.raises(UsageError, match="threads is 3, but cores names 2"):
        registry().lease("a.mvb", 3, [0, 1], share=False)


def test_sessions_hold_their_cores_until_closed(bundle: Path) -> None:
    everything = sorted(os.sched_getaffinity(0))
    with load(bundle, cores=everything) as session:
        assert session.cores == tuple(everything)
        with pytest.raises(UsageError, match=f"held by {bundle}"):
            load(bundle)
        with pytest.raises(UsageError, match=f"held by {bundle}"):
            load(bundle, cores=everything[-1:])
        with load(bundle, share_cores=True) as other:
            assert set(other.cores) <= set(everything)
    load(bundle, cores=everything).close()


def test_a_session_that_is_dropped_gives_its_cores_back(bundle: Path) -> None:
    everything = sorted(os.sched_getaffinity(0))
    session = load(bundle, cores=everything)
    del session
    gc.collect()
    load(bundle, cores=everything).close()
