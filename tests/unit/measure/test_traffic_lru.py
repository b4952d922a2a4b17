"""The static estimate against a simulated LRU cache, over schedules and capacities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mvcompile.measure.traffic import NEAR_COMPULSORY, analyse
from mvcompile.measure.traffic_boxes import LINE_BYTES
from mvcompile.testing import loop_nests, lru

SCHEDULES = {
    **{f"matmul {order}": loop_nests.matmul(24, 32, 24, order) for order in ("ijk", "ikj", "jki", "kij")},
    "matmul tiled": loop_nests.matmul(32, 32, 40, "ijkIJK", {"i": 8, "j": 16, "k": 8}),
    "matmul tiled, reduction outermost": loop_nests.matmul(32, 32, 40, "kjiIKJ", {"i": 8, "j": 16, "k": 10}),
    **{f"conv {order}": loop_nests.packed_conv(6, 16, 64, 3, 1, 3, 16, order) for order in ("cyx", "yxc", "ycx")},
    **{f"conv with stride {order}": loop_nests.packed_conv(9, 16, 48, 3, 2, 5, 16, order) for order in ("cyx", "yxc")},
    "conv, half a panel": loop_nests.packed_conv(6, 16, 64, 3, 1, 3, 16, "yxc", panel=32),
    "conv 1x1, ragged": loop_nests.packed_conv(7, 64, 64, 1, 1, 4, 16, "yxc"),
    "strips of 2": loop_nests.strip_conv(8, 16, 32, 2, 16),
    "strips of 4": loop_nests.strip_conv(8, 16, 32, 4, 16),
    "flat 3x3": loop_nests.flat_conv(9, 16, 32, 3, 7, 16),
    "flat 1x1, ragged": loop_nests.flat_conv(7, 32, 64, 1, 6, 16),
    "winograd": loop_nests.winograd(8, 16, 32),
}
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Capacities of the simulated cache, as shares of the lines that a schedule touches."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Estimated and simulated bytes moved at each capacity, both over the simulated compulsory bytes."""

    estimated: list[float]
    simulated: list[float]
    compulsory: float
    """Estimated over simulated compulsory bytes."""
    workspace: tuple[int, int]
    kept_ratio: float
    """Simulated bytes over compulsory ones with a cache of the estimated working set, and 3 % more for ties."""


@pytest.fixture(scope="module")
def comparisons() -> dict[str, Comparison]:
    return {name: compare(loop_nests.function(sch)) for name, sch in SCHEDULES.items()}


def compare(func: object) -> Comparison:
    trace, (footprints, curve) = lru.trace(func), analyse(func)
    lines = trace.lines
    sizes = [int(lines * share) for share in SHARES]
    compulsory = trace.bytes_moved(lines)
    working_set = int(curve.working_set_bytes(NEAR_COMPULSORY) / LINE_BYTES * 1.03) + 2
    return Comparison(
        [curve.bytes_below(size * LINE_BYTES) / compulsory for size in sizes],
        [trace.bytes_moved(size) / compulsory for size in sizes],
        curve.compulsory_bytes / compulsory,
        (footprints.workspace_bytes(), trace.workspace_bytes),
        trace.bytes_moved(working_set) / compulsory,
    )


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; values within 1 % of each other are ties, ranked by their mean."""

    def ranks(values: list[float]) -> np.ndarray:
        rounded = np.round(np.log(values), 2)
        return np.array([(rounded < v).sum() + (rounded == v).sum() / 2 for v in rounded])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def test_compulsory_bytes_are_exact(comparisons: dict[str, Comparison]) -> None:
    assert {name: c.compulsory for name, c in comparisons.items()} == pytest.approx(dict.fromkeys(comparisons, 1.0), abs=1e-6)


def test_workspaces_have_the_size_that_lowering_gives_them(comparisons: dict[str, Comparison]) -> None:
    assert {name: c.workspace[0] for name, c in comparisons.items()} == {name: c.workspace[1] for name, c in comparisons.items()}


def test_estimates_are_close_to_the_simulation(comparisons: dict[str, Comparison]) -> None:
    ratios = np.array([e / s for c in comparisons.values() for e, s in zip(c.estimated, c.simulated, strict=True)])
    # Measured: median 1.00, 5th to 95th percentile 0.98 to 1.12, all in 0.5 to 2.35: a capacity next to a threshold of the
    # estimate falls on its other side in the simulation, and the smallest caches hold a dozen lines.
    assert np.median(ratios) == pytest.approx(1.0, abs=0.02)
    assert np.quantile(ratios, 0.05) > 0.93
    assert np.quantile(ratios, 0.90) < 1.25
    assert ratios.min() > 0.4
    assert ratios.max() < 3.0


def test_estimates_rank_schedules_and_capacities_as_the_simulation_does(comparisons: dict[str, Comparison]) -> None:
    estimated = [e for c in comparisons.values() for e in c.estimated]
    simulated = [s for c in comparisons.values() for s in c.simulated]
    assert spearman(estimated, simulated) > 0.97


def test_estimates_rank_schedules_at_one_share(comparisons: dict[str, Comparison]) -> None:
    for i, share in enumerate(SHARES[:-1]):  # with three quarters nearly all move what is compulsory
        estimated, simulated = [c.estimated[i] for c in comparisons.values()], [c.simulated[i] for c in comparisons.values()]
        assert spearman(estimated, simulated) > 0.9, f"capacity {share} of the lines"


def test_a_cache_of_the_working_set_keeps_traffic_near_compulsory(comparisons: dict[str, Comparison]) -> None:
    assert {name: c.kept_ratio for name, c in comparisons.items() if c.kept_ratio > 1.1} == {}


def test_tiles_that_run_across_rows_are_bounded() -> None:
    # Quotients and remainders that do not divide, and a copy loop of varying extent: all of it intervals. Measured 1.0 to 4.2.
    result = compare(loop_nests.function(loop_nests.flat_conv(9, 16, 32, 3, 4, 16, staged=True)))
    assert 1.0 <= result.compulsory < 1.05
    assert result.workspace[1] <= result.workspace[0]
    for estimated, simulated in zip(result.estimated, result.simulated, strict=True):
        assert 0.95 < estimated / simulated < 6.0
