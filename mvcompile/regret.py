"""What a choice of variants costs at levels of interference: regret, thinning by it, and selection. Plain arrays.

Latencies are arrays of shape (levels, candidates), seconds; `spread` is the interquartile range of the timings over their median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXACT_SUBSETS = 20_000
"""`choose` tries all subsets up to this many, a fraction of a second."""


def worst(latency: Array, chosen: Sequence[int]) -> float:
    """The worst over levels of the best chosen candidate's latency over the best of all candidates; 1.0 is the least."""
    return float((latency[:, list(chosen)].min(axis=1) / latency.min(axis=1)).max(initial=1.0))


def choose(latency: Array, k: int, fixed: int, noise: float, worth: Callable[[Sequence[int]], float]) -> list[int]:
    """At most `k` candidates, `fixed` among them, with the least worst regret; of several that differ by less than `noise`, those
    with the largest `worth` (a hypervolume, say).

    Exact while there are at most `EXACT_SUBSETS` subsets; beyond that candidates are added one by one, which for the worst of
    several minima is no approximation with a bound, but each level's best is tried.
    """
    count = latency.shape[1]
    if count <= k:
        return list(range(count))
    others = [index for index in range(count) if index != fixed]
    if math.comb(len(others), k - 1) <= EXACT_SUBSETS:
        sets = [(fixed, *rest) for rest in combinations(others, k - 1)]
        relative = latency / latency.min(axis=1, keepdims=True)
        regrets = np.array([relative[:, each].min(axis=1).max() for each in sets])
        near = np.flatnonzero(regrets <= max(1.0, float(regrets.min())) + noise)
        return sorted(max((sets[int(i)] for i in near), key=lambda each: worth(tuple(each))))
    chosen = [fixed]
    while len(chosen) < k:
        left = [index for index in others if index not in chosen]
        scored = [(max(1.0 + noise, worst(latency, [*chosen, index])), -worth([*chosen, index]), index) for index in left]
        chosen.append(min(scored)[2])
    return sorted(chosen)


def select(latency: Sequence[float], spread: Sequence[float], samples: int) -> int:
    """The variant to run: the fastest, if it is faster than variant 0 by more than medians of `samples` timings that spread like
    these can differ by chance (twice the standard error), else 0."""
    best = int(np.argmin(latency))
    margin = standard_error(max(spread[best], spread[0]), samples) * math.sqrt(2.0) * 2.0
    return best if latency[best] < latency[0] * (1.0 - margin) else 0


def standard_error(spread: float, samples: int) -> float:
    """Standard error of the median of `samples` normal values whose interquartile range is `spread` (1.349 sigma): 1.253 sigma
    over the root of their number."""
    return 1.253 * (spread / 1.349) / math.sqrt(max(samples, 1))


def clearly_better(differences: Any) -> bool:
    """Whether paired differences (old minus new, seconds) say that the new one is faster: their median is above zero by more than
    2.5 times its standard error, and three of four are positive."""
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 3:
        return False
    low, middle, high = np.percentile(values, (25, 50, 75))
    return bool(middle > 2.5 * standard_error(float(high - low), len(values)) and low > 0)


def groups(run_s: Sequence[float], noise: float) -> tuple[int, ...]:
    """A number for each level: of levels whose runs take the same time within the share `noise`, that of the first."""
    found: list[int] = []
    for index, seconds in enumerate(run_s):
        same = [other for other in sorted(set(found)) if abs(seconds / run_s[other] - 1.0) <= noise]
        found.append(same[0] if same else index)
    return tuple(found)
