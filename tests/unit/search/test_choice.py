"""Which points are worth measuring for a front."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mvcompile.search import choice
from mvcompile.search.choice import for_the_front
from mvcompile.tuning import fronts

KNOWN = np.array([[1.0, 9.0, 9.0], [1.8, 1.0, 1.0]])


def test_agrees_with_the_fronts_that_are_kept() -> None:
    assert choice.MAX_SLOWDOWN == fronts.MAX_SLOWDOWN


def test_prefers_the_front_under_any_weights_and_takes_the_rest_last() -> None:
    front = [[1.0, 8.0, 8.0], [1.2, 4.0, 4.0], [1.5, 2.0, 6.0], [1.5, 6.0, 2.0], [1.7, 1.0, 1.0]]
    beaten = [[latency + 0.3, footprint + 1, traffic + 1] for latency, footprint, traffic in front]
    predicted = np.array(beaten + front)
    first = {for_the_front(predicted, [], KNOWN, 1, random.Random(seed))[0] for seed in range(60)}
    assert first == {5, 6, 7, 8, 9}
    assert set(for_the_front(predicted, [], KNOWN, 5, random.Random(0))) > {5, 6}


def test_reaches_points_of_a_front_that_is_not_convex() -> None:
    predicted = np.array([[1.0, 9.0, 0.0], [1.55, 6.0, 0.0], [1.8, 1.0, 0.0]])  # a weighted sum never takes the middle one
    first = {for_the_front(predicted, [], KNOWN, 1, random.Random(seed))[0] for seed in range(60)}
    assert first == {0, 1, 2}


def test_takes_nothing_twice_and_nothing_that_is_taken() -> None:
    predicted = np.linspace([1.0, 9.0, 9.0], [1.8, 1.0, 1.0], 6)
    assert sorted(for_the_front(predicted, [1, 4], KNOWN, 9, random.Random(0))) == [0, 2, 3, 5]
    assert for_the_front(predicted, range(6), KNOWN, 9, random.Random(0)) == []
    assert for_the_front(predicted, [], KNOWN, 0, random.Random(0)) == []


@pytest.mark.parametrize("objective", [0, 1, 2])
def test_an_objective_that_does_not_vary_decides_nothing(objective: int) -> None:
    predicted = np.array([[1.3, 5.0, 5.0], [1.2, 4.0, 4.0], [1.1, 3.0, 3.0]])
    predicted[:, objective] = KNOWN[0, objective]
    known = KNOWN.copy()
    known[:, objective] = KNOWN[0, objective]
    assert for_the_front(predicted, [], known, 1, random.Random(0)) == [2]


def test_the_dice_decide() -> None:
    predicted = np.linspace([1.0, 9.0, 9.0], [1.8, 1.0, 1.0], 40)
    chosen = [for_the_front(predicted, [], KNOWN, 6, random.Random(seed)) for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
