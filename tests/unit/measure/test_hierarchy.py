"""Levels in curves of latency over working set."""

from __future__ import annotations

import pytest

from mvcompile.host_profile import CurvePoint
from mvcompile.measure.hierarchy import Seen, levels_seen, reported_levels, working_sets

KIB = 1024
MIB = 1024 * KIB
REPORTED = (("L1d", 32 * KIB), ("L2", 512 * KIB), ("LLC", 32 * MIB))


def curve(llc_bytes: int, llc_ns: float = 15.0) -> list[CurvePoint]:
    """Steps at the sizes of the caches."""
    points = []
    for size in working_sets(128 * MIB):
        ns = next((ns for limit, ns in ((32 * KIB, 1.0), (512 * KIB, 4.0), (llc_bytes, llc_ns)) if size <= limit), 90.0)
        points.append(CurvePoint(size, ns / 1e9, 0.0, ns / 2e9, 0.0))
    return points


def test_working_sets_rise_by_halves() -> None:
    assert working_sets(32 * KIB) == (8 * KIB, 12 * KIB, 16 * KIB, 24 * KIB, 32 * KIB)


@pytest.mark.parametrize("llc_bytes", [32 * MIB, 12 * MIB])
def test_sizes_and_latencies_are_those_of_the_curve(llc_bytes: int) -> None:
    assert levels_seen(curve(llc_bytes), REPORTED) == (
        Seen("L1d", 32 * KIB, 32 * KIB, 1 / 1e9),
        Seen("L2", 512 * KIB, 512 * KIB, 4 / 1e9),
        Seen("LLC", 32 * MIB, llc_bytes, 15 / 1e9),
        Seen("memory", 0, 0, 90 / 1e9),
    )


def test_a_quarter_of_misses_ends_a_level() -> None:
    times = {8 * KIB: 1e-9, 16 * KIB: 2.9e-9, 24 * KIB: 3.1e-9, MIB: 9e-9}
    points = [CurvePoint(size, 1e-9, 0.0, seconds, 0.0) for size, seconds in times.items()]
    assert levels_seen(points, (("L1d", 32 * KIB),))[0].seen_bytes == 16 * KIB


def test_levels_of_one_latency_are_not_told_apart() -> None:
    assert levels_seen(curve(32 * MIB, llc_ns=85.0), REPORTED)[2].seen_bytes == 0


def test_a_machine_whose_last_level_is_its_l2_has_two() -> None:
    assert reported_levels(32 * KIB, MIB, MIB) == (("L1d", 32 * KIB), ("L2", MIB))
    assert [seen.name for seen in levels_seen(curve(32 * MIB), (("L1d", 32 * KIB), ("L2", MIB)))] == ["L1d", "L2", "memory"]
