"""Which points of a finite space are worth measuring for the front, given what a model predicts: functions of plain arrays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mvcompile import pareto

Points = NDArray[np.float64]

MAX_SLOWDOWN = 2.0
"""Points this many times slower than the fastest are no choice at any pressure: `tuning.fronts.MAX_SLOWDOWN`."""
AUGMENTATION = 0.05
"""Share of the weighted sum in the scalarised objectives: of points with equal maxima, the one that is better otherwise wins."""


def for_the_front(predicted: Points, taken: Sequence[int], known: Points, count: int, dice: random.Random) -> list[int]:
    """Indices of at most `count` rows of `predicted`, none of `taken`, each the best under another random weighting.

    `predicted` and `known` (what was measured, not empty) have shape (n, d), latency first. Objectives are scaled to what is
    known of the front, from best to worst, and weighed by an augmented Chebyshev norm (Knowles: ParEGO, IEEE Trans. Evol.
    Comput. 10(1), 2006), which reaches every point of a front, also where it is not convex.
    """
    fastest = known[:, 0].min()
    near = known[known[:, 0] <= MAX_SLOWDOWN * fastest]
    worst = pareto.reference_point(near)
    worst[0] = MAX_SLOWDOWN * fastest
    best = np.minimum(near.min(axis=0), predicted.min(axis=0))
    scaled = (predicted - best) / np.maximum(worst - best, np.finfo(np.float64).tiny)
    free = [row for row in range(len(predicted)) if row not in set(taken)]
    chosen: list[int] = []
    while free and len(chosen) < count:
        weights = np.array([dice.expovariate(1.0) for _ in range(scaled.shape[1])])  # uniform on the simplex, once divided
        weighed = scaled[free] * (weights / weights.sum())
        chosen.append(free.pop(int(np.argmin(weighed.max(axis=1) + AUGMENTATION * weighed.sum(axis=1)))))
    return chosen
