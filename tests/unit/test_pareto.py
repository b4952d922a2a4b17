from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mvcompile import pareto
from mvcompile.errors import UsageError

Points = NDArray[np.float64]


@st.composite
def clouds(draw: st.DrawFn, least: int = 0, most: int = 10, objectives: tuple[int, ...] = (1, 2, 3, 4)) -> Points:
    """Points on a coarse grid of integers, so that ties and duplicates are common and volumes are exact."""
    d = draw(st.sampled_from(objectives))
    rows = draw(st.lists(st.lists(st.integers(0, 6), min_size=d, max_size=d), min_size=least, max_size=most))
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), d)


def values(points: Points, indices: NDArray[np.int64]) -> list[tuple[float, ...]]:
    return sorted(map(tuple, points[indices].tolist()))


def inclusion_exclusion(points: Points, reference: Points) -> float:
    """Hypervolume from its definition as the volume of a union of boxes."""
    total = 0.0
    for size in range(1, len(points) + 1):
        for subset in combinations(points, size):
            total += (-1) ** (size + 1) * np.prod(np.maximum(reference - np.max(subset, axis=0), 0))
    return total


def sphere(n: int, d: int, seed: int = 0) -> Points:
    """A front of n points, none dominated."""
    raw = np.abs(np.random.default_rng(seed).normal(size=(n, d)))
    return np.asarray(1.0 - raw / np.linalg.norm(raw, axis=1)[:, None])


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [((1, 2), (1, 3), True), ((1, 2), (1, 2), False), ((1, 3), (2, 2), False), ((2, 3), (1, 2), False), ((1,), (2,), True)],
)
def test_dominates(a: tuple[float, ...], b: tuple[float, ...], expected: bool) -> None:
    assert pareto.dominates(a, b) is expected


@given(clouds())
def test_front_members_do_not_dominate_each_other_and_stand_for_all(points: Points) -> None:
    front = pareto.front(points)
    assert list(front) == sorted(set(front.tolist()))
    for i, j in combinations(front, 2):
        assert not pareto.dominates(points[i], points[j])
        assert not pareto.dominates(points[j], points[i])
        assert not np.array_equal(points[i], points[j])
    for point in points:
        assert any(pareto.dominates(points[i], point) or np.array_equal(points[i], point) for i in front)


@given(clouds(most=16), st.randoms(use_true_random=False))
def test_front_and_thinning_do_not_depend_on_row_order(points: Points, random: Any) -> None:
    order = list(range(len(points)))
    random.shuffle(order)
    shuffled = points[order]
    reference = np.full(points.shape[1], 7.0)
    for rtol in (0.0, 0.3):
        assert values(points, pareto.front(points, rtol=rtol)) == values(shuffled, pareto.front(shuffled, rtol=rtol))
    assert values(points, pareto.thin(points, 3, reference)) == values(shuffled, pareto.thin(shuffled, 3, reference))


def test_of_equal_points_the_first_is_kept() -> None:
    assert pareto.front([(2, 2), (1, 3), (1, 3), (2, 2)]).tolist() == [0, 1]


@given(clouds(), st.sampled_from([0.05, 0.3, 1.0]))
def test_front_within_noise(points: Points, rtol: float) -> None:
    kept = points[pareto.front(points, rtol=rtol)]
    for i, j in combinations(range(len(kept)), 2):
        assert np.any(kept[i] > kept[j] * (1 + rtol))
        assert np.any(kept[j] > kept[i] * (1 + rtol))
    for point in points:
        assert np.any(np.all(kept <= point * (1 + rtol) ** 2 + 1e-12, axis=1))


def test_noise_keeps_the_faster_of_equals_but_not_a_worse_one() -> None:
    assert pareto.front([(1.01, 99.0), (1.0, 100.0)], rtol=0.05).tolist() == [1]
    assert pareto.front([(1.0, 100.0), (1.01, 10.0)], rtol=0.05).tolist() == [1]
    assert pareto.front([(1.0, 100.0), (1.2, 10.0)], rtol=0.05).tolist() == [0, 1]
    assert pareto.front([(1.0, 100.0), (1.2, 10.0)], rtol=(0.3, 0.05)).tolist() == [1]
    assert pareto.front([(1.0, 100.0), (1.2, 99.0)], rtol=(0.05, 0.0)).tolist() == [0, 1]


def test_a_long_chain_of_nearly_equal_points_does_not_shrink_to_one() -> None:
    steps = 1.04 ** np.arange(50)
    chain = np.column_stack((steps, steps[::-1]))
    kept = pareto.front(chain, rtol=0.05)
    assert 0 in kept
    assert 20 <= len(kept) <= 26


@given(clouds(most=8))
def test_hypervolume_is_the_volume_of_the_union(points: Points) -> None:
    reference = np.asarray([5.0, 6.0, 7.0, 6.0])[: points.shape[1]]
    assert pareto.hypervolume(points, reference) == inclusion_exclusion(points, reference)


@pytest.mark.parametrize("d", [2, 3, 4])
def test_hypervolume_of_a_large_front_against_sampling(d: int) -> None:
    points = sphere(200, d)
    samples = np.random.default_rng(1).random((5_000, d))
    share = np.mean([np.any(np.all(points <= sample, axis=1)) for sample in samples])
    assert pareto.hypervolume(points, np.ones(d)) == pytest.approx(share, abs=0.03)


@given(clouds(least=1))
def test_hypervolume_is_monotone_and_that_of_the_front(points: Points) -> None:
    reference = np.full(points.shape[1], 6.0)
    total = pareto.hypervolume(points, reference)
    assert pareto.hypervolume(points[:-1], reference) <= total
    assert pareto.hypervolume(points[pareto.front(points)], reference) == total
    assert pareto.hypervolume(points, reference + 1) > total


@given(clouds(least=1), st.integers(1, 6))
def test_thin_contains_the_fastest_and_is_best_of_all_subsets(points: Points, k: int) -> None:
    front = points[pareto.front(points)]
    reference = pareto.reference_point(front)
    chosen = pareto.thin(front, k, reference)
    fastest = min(range(len(front)), key=lambda i: tuple(front[i]))
    assert len(chosen) == min(k, len(front))
    assert fastest in chosen
    subsets = [list(subset) for subset in combinations(range(len(front)), len(chosen)) if fastest in subset]
    best = max(pareto.hypervolume(front[subset], reference) for subset in subsets)
    assert pareto.hypervolume(front[chosen], reference) == pytest.approx(best)


def test_thin_of_many_points_is_nearly_as_good_as_trying_all(monkeypatch: pytest.MonkeyPatch) -> None:
    points = sphere(16, 3)
    reference = pareto.reference_point(points)
    exact = pareto.hypervolume(points[pareto.thin(points, 5, reference)], reference)
    monkeypatch.setattr(pareto, "EXACT_SUBSETS", 1)
    greedy = pareto.thin(points, 5, reference)
    assert len(greedy) == 5
    assert int(np.argmin(points[:, 0])) in greedy
    assert 0.95 * exact <= pareto.hypervolume(points[greedy], reference) <= exact


def test_thin_keeps_what_it_is_told_to_keep() -> None:
    points = sphere(12, 2)
    assert set(pareto.thin(points, 3, (1.5, 1.5), keep=(7, 2, 7))) > {2, 7}
    assert pareto.thin(points, 2, (1.5, 1.5), keep=(7, 2)).tolist() == [2, 7]
    assert len(pareto.thin(points, 1, (1.5, 1.5), keep=())) == 1


def test_thin_fills_up_with_points_that_have_no_volume() -> None:
    assert pareto.thin([(1, 3), (2, 2), (3, 1)], 2, (1, 1)).tolist() == [0, 1]


def test_coverage() -> None:
    points = np.asarray([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)])
    reference = (4.0, 4.0)
    assert pareto.coverage(points[[0, 2]], points, reference) == pytest.approx(5 / 6)
    assert pareto.coverage(points, points, reference) == 1.0
    assert pareto.coverage(points[:1], points[:1], pareto.reference_point(points[:1])) == 1.0
    assert pareto.coverage([], points, reference) == 0.0


def test_coverage_without_volume_is_whole_if_something_was_kept() -> None:
    assert pareto.coverage([], [], (1.0, 1.0)) == 1.0
    assert pareto.coverage([(1.0, 2.0)], [(1.0, 2.0)], (1.0, 2.0)) == 1.0
    assert pareto.coverage([], [(1.0, 2.0)], (1.0, 2.0)) == 0.0


@given(clouds(least=1))
def test_every_point_is_better_than_the_reference_point(points: Points) -> None:
    assert np.all(points < pareto.reference_point(points))


def test_reference_point_of_constant_and_barely_varying_objectives() -> None:
    smallest_step = np.nextafter(1.0, 2.0)
    points = np.asarray([(5.0, 0.0, -2.0, 1.0), (5.0, 0.0, -2.0, smallest_step)])
    reference = pareto.reference_point(points, margin=0.1)
    assert reference[:3].tolist() == pytest.approx([5.5, 0.1, -1.8])
    assert reference[3] > smallest_step


@pytest.mark.parametrize(
    "call",
    [
        lambda: pareto.front([(1.0, float("nan"))]),
        lambda: pareto.hypervolume([(1.0, float("inf"))], (2.0, 2.0)),
        lambda: pareto.hypervolume([(1.0, 1.0)], (2.0, float("nan"))),
        lambda: pareto.hypervolume([(1.0, 1.0)], (2.0, 2.0, 2.0)),
        lambda: pareto.front([1.0, 2.0]),
        lambda: pareto.front([(1.0,), (1.0, 2.0)]),
        lambda: pareto.front("fast"),
        lambda: pareto.front([(-1.0, 2.0)], rtol=0.1),
        lambda: pareto.front([(1.0, 2.0)], rtol=-0.1),
        lambda: pareto.dominates((1.0,), (1.0, 2.0)),
        lambda: pareto.thin([(1.0, 2.0)], 0, (3.0, 3.0)),
        lambda: pareto.thin([(1.0, 2.0), (2.0, 1.0)], 1, (3.0, 3.0), keep=(0, 1)),
        lambda: pareto.thin([(1.0, 2.0)], 1, (3.0, 3.0), keep=(1,)),
        lambda: pareto.reference_point([]),
        lambda: pareto.reference_point([(1.0, 2.0)], margin=0.0),
        lambda: pareto.coverage([(1.0, 2.0)], [(1.0, 2.0)], (3.0,)),
    ],
)
def test_bad_input_is_refused(call: Any) -> None:
    with pytest.raises(UsageError):
        call()
