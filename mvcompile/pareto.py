"""Pareto mathematics on plain arrays: dominance, fronts, hypervolume, and thinning a front to a few points.

Points are rows of an array of shape (n, d), converted to float64; every objective is minimised. An array with NaN or
infinity, or of another shape, raises `UsageError`. Indices that are returned are int64 arrays in ascending order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mvcompile.errors import UsageError

__all__ = ["coverage", "dominates", "front", "hypervolume", "reference_point", "thin"]

Points = NDArray[np.float64]
Indices = NDArray[np.int64]
_Volume = Callable[[Iterable[int]], float]

EXACT_SUBSETS = 4096
"""`thin` tries all subsets up to this many (0.1-0.2 s with three objectives and five points kept)."""


def dominates(a: ArrayLike, b: ArrayLike) -> bool:
    """Whether `a` (shape (d,)) is nowhere worse than `b` and somewhere better."""
    left, right = _point(a), _point(b)
    if left.shape != right.shape:
        raise UsageError(f"points of {len(left)} and {len(right)} objectives cannot be compared: give both the same objectives")
    return bool(np.all(left <= right) and np.any(left < right))


def front(points: ArrayLike, *, rtol: float | Sequence[float] = 0.0) -> Indices:
    """Indices of the non-dominated rows of `points`; of equal rows the first.

    With `rtol` > 0 (one for all objectives, or one for each; objectives must not be negative then) a point is also left out if
    another is no worse than it by more than that share in any objective: what is left are points that differ by more than noise.
    No kept point is dominated within noise by another kept one, and for each point left out some kept one is nowhere worse by
    more than a factor (1 + rtol)^2. The square is the price of dominance within noise not being transitive: three points can
    dominate each other in a circle.
    """
    array = _points(points)
    noise = np.asarray(rtol, dtype=np.float64)
    if not (np.isfinite(noise) & (noise >= 0)).all() or (noise.ndim and len(array) and noise.shape != array.shape[1:]):
        raise UsageError(f"rtol is {rtol}, expected a finite number that is not negative, or one for each objective")
    if noise.any() and np.any(array < 0):
        raise UsageError("a relative tolerance needs objectives that are not negative")
    order = _lexicographic(array)
    kept = _sweep(array, order, np.float64(1.0))
    if noise.any():
        # The faster of two equals goes first and stays; then the slower one that is otherwise clearly better ousts the faster.
        kept = _sweep(array, _sweep(array, kept, 1.0 + noise)[::-1], 1.0 + noise)
    return np.sort(kept)


def hypervolume(points: ArrayLike, reference: ArrayLike) -> float:
    """Volume of the region that `points` dominate and that dominates `reference` (shape (d,)), in the product of the units.

    Exact. Points that are not better than the reference in every objective count nothing. Three objectives take one sweep
    along the last over a staircase of the first two, O(n log n) comparisons (Beume, Fonseca, Lopez-Ibanez, Paquete,
    Vahrenhold: On the Complexity of Computing the Hypervolume Indicator, IEEE Trans. Evol. Comput. 13(5), 2009); every
    further objective is cut into slices (While, Hingston, Barone, Huband: A Faster Algorithm for Calculating Hypervolume,
    ibid. 10(1), 2006) and costs another factor n, so this is meant for d <= 4.
    """
    array = _points(points)
    limit = _reference(reference, array)
    if not len(array):
        return 0.0
    inside = array[np.all(array < limit, axis=1)]
    return _volume(inside, tuple(limit.tolist()))


def reference_point(points: ArrayLike, *, margin: float = 0.1) -> Points:
    """A reference for `hypervolume`, shape (d,): the worst of each objective, plus `margin` times its range over `points`.

    With a margin of zero the extreme points would count nothing (Ishibuchi, Imada, Setoguchi, Nojima: How to Specify a
    Reference Point in Hypervolume Calculation for Fair Performance Comparison, Evol. Comput. 26(3), 2018). An objective that
    does not vary gets the margin on its magnitude instead. Raises `UsageError` without points or with a margin that is not
    positive.
    """
    array = _points(points)
    if not len(array):
        raise UsageError("a reference point needs at least one point")
    if not (math.isfinite(margin) and margin > 0):
        raise UsageError(f"margin is {margin}, expected a positive number")
    worst, best = array.max(axis=0), array.min(axis=0)
    scale = np.where(worst > best, worst - best, np.where(worst != 0, np.abs(worst), 1.0))
    # A range of a few units in the last place would vanish in the sum.
    result: Points = np.maximum(worst + margin * scale, np.nextafter(worst, np.inf))
    return result


def thin(points: ArrayLike, k: int, reference: ArrayLike, *, keep: Sequence[int] | None = None) -> Indices:
    """Indices of min(k, n) of the `points` (a front) that always hold `keep` and have a large hypervolume.

    `keep` is the point with the least first objective by default (of several, the one that is best in the next). The subset
    of largest hypervolume is found by trying all of them while there are at most `EXACT_SUBSETS`. Beyond that points are
    added one by one, each time the one that adds most, which reaches at least 1 - 1/e of what can be added (hypervolume is
    submodular; Nemhauser, Wolsey, Fisher: An Analysis of Approximations for Maximizing Submodular Set Functions I, Math.
    Program. 14, 1978), and then exchanged one by one while that helps. The choice does not depend on the order of rows.
    Raises `UsageError` if `k` is less than 1 or than the number of points to keep.
    """
    array = _points(points)
    limit = _reference(reference, array)
    if k < 1:
        raise UsageError(f"k is {k}, expected at least 1")
    if len(array) <= k and keep is None:
        return np.arange(len(array))
    order = _lexicographic(array)
    fixed = _positions(order, keep)
    if len(fixed) > k:
        raise UsageError(f"{len(fixed)} points are to be kept, more than k = {k}: raise k")
    chosen = _choose(array[order], fixed, min(k, len(array)), limit)
    return np.sort(order[np.asarray(chosen, dtype=np.int64)])


def coverage(kept: ArrayLike, everything: ArrayLike, reference: ArrayLike) -> float:
    """Hypervolume of the `kept` points over that of `everything`, 0 to 1.

    1 if there was nothing to keep, and 1 if what there is has no volume (every point touches the reference) and something was
    kept.
    """
    limit = np.asarray(reference, dtype=np.float64)
    total = hypervolume(everything, limit)
    if total > 0:
        return min(1.0, hypervolume(kept, limit) / total)
    return 1.0 if len(_points(kept)) or not len(_points(everything)) else 0.0


def _points(points: ArrayLike) -> Points:
    try:
        array = np.asarray(points, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"points are no array of numbers: {error}") from error
    if array.size == 0 and array.ndim < 2:
        array = array.reshape(0, 0)
    if array.ndim != 2:
        raise UsageError(f"points have shape {array.shape}, expected (points, objectives)")
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        row, column = bad[0]
        raise UsageError(f"objective {column} of point {row} is {array[row, column]}: leave out points that were not measured")
    return array


def _point(point: ArrayLike) -> Points:
    row: Points = _points(cast("ArrayLike", [point]))[0]
    return row


def _reference(reference: ArrayLike, points: Points) -> Points:
    limit = _point(reference)
    if len(points) and len(limit) != points.shape[1]:
        raise UsageError(f"the reference has {len(limit)} objectives and the points {points.shape[1]}: give both the same")
    return limit


def _lexicographic(points: Points) -> Indices:
    """Row indices by first objective, then second, ...; equal rows in their order."""
    order: Indices = np.lexsort(points.T[::-1]) if len(points) else np.arange(0)
    return order


def _sweep(points: Points, order: Indices, factor: Any) -> Indices:
    """Those of `order`, in that order, that no point kept before them is at least as good as, within `factor` (one, or one for
    each objective).

    In lexicographic order and with factor 1 that is the front, since a point can only be dominated by an earlier one.
    """
    kept: list[int] = []
    members = np.empty_like(points)
    for index in order.tolist():
        if not np.any(np.all(members[: len(kept)] <= points[index] * factor, axis=1)):
            members[len(kept)] = points[index]
            kept.append(index)
    return np.asarray(kept, dtype=np.int64)


def _volume(points: Points, limit: tuple[float, ...]) -> float:
    """Hypervolume of points that are all better than `limit` in every objective."""
    if not len(points):
        return 0.0
    if len(limit) == 1:
        return limit[0] - float(points.min())
    if len(limit) <= 3:
        depths = points[:, 2] if len(limit) == 3 else np.zeros(len(points))
        order = np.argsort(depths, kind="stable")
        rows = np.column_stack((points[order, :2], depths[order])).tolist()
        return _staircase_sweep(rows, (limit[0], limit[1], limit[2] if len(limit) == 3 else 1.0))
    points = points[np.argsort(points[:, -1], kind="stable")]
    ends = np.append(points[1:, -1], limit[-1])
    total = 0.0
    members = np.empty((0, points.shape[1] - 1))
    for row, end in zip(points, ends, strict=True):
        new = row[:-1]
        if not np.any(np.all(members <= new, axis=1)):  # only the front of a slice matters
            members = np.vstack((members[~np.all(members >= new, axis=1)], new))
        thickness = float(end - row[-1])
        if thickness > 0:
            total += thickness * _volume(members, limit[:-1])
    return total


def _staircase_sweep(rows: list[list[float]], limit: tuple[float, float, float]) -> float:
    """Volume of (x, y, z) rows, sorted by z, below `limit`: the area of their staircase in x, y, summed along z."""
    right, top, end = limit
    xs, ys = [-math.inf, right], [top, -math.inf]  # steps with x ascending and y descending, between two sentinels
    volume = area = 0.0
    for index, (x, y, z) in enumerate(rows):
        at = bisect_left(xs, x)
        if ys[at - 1] > y and not (xs[at] == x and ys[at] <= y):
            after = at
            while ys[after] >= y:  # steps that the new one covers
                after += 1
            # The new area: between the heights of the steps from the left neighbour on, and y.
            edges, heights = [x, *xs[at : after + 1]], ys[at - 1 : after]
            area += sum((edges[i + 1] - edges[i]) * (height - y) for i, height in enumerate(heights))
            xs[at:after], ys[at:after] = [x], [y]
        following = rows[index + 1][2] if index + 1 < len(rows) else end
        volume += area * (following - z)
    return volume


def _positions(order: Indices, keep: Sequence[int] | None) -> tuple[int, ...]:
    """Where in `order` the points of `keep` are, without repetition."""
    if keep is None:
        return (0,) if len(order) else ()
    for index in keep:
        if not 0 <= index < len(order):
            raise UsageError(f"point {index} cannot be kept: there are {len(order)} points, from 0")
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    return tuple(sorted({int(places[index]) for index in keep}))


def _choose(points: Points, fixed: tuple[int, ...], k: int, limit: Points) -> list[int]:
    """`k` rows that hold the `fixed` ones: all subsets tried, or greedily with exchanges."""
    inside = np.all(points < limit, axis=1)
    bound = tuple(limit.tolist())

    def volume(rows: Iterable[int]) -> float:
        chosen = np.asarray(sorted(rows), dtype=np.int64)
        return _volume(points[chosen[inside[chosen]]], bound)

    free = [row for row in range(len(points)) if row not in fixed]
    if math.comb(len(free), k - len(fixed)) <= EXACT_SUBSETS:
        return list(max(((*fixed, *rest) for rest in combinations(free, k - len(fixed))), key=volume))
    chosen = list(fixed)
    while len(chosen) < k:
        chosen.append(max((row for row in free if row not in chosen), key=lambda row: volume([*chosen, row])))
    return _exchange(chosen, len(fixed), free, volume)


def _exchange(chosen: list[int], first: int, free: list[int], volume: _Volume) -> list[int]:
    """Exchange one row of `chosen[first:]` at a time for the best of `free`, while the volume grows."""
    best = volume(chosen)
    improved = True
    while improved:
        improved = False
        for place in range(first, len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            row = max((row for row in free if row not in others), key=lambda row: volume([*others, row]))
            found = volume([*others, row])
            if found > best * (1 + 1e-12):  # rounding must not make it go round in circles
                chosen[place], best, improved = row, found, True
    return chosen
