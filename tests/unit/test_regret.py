"""Regret over levels: which candidates to keep, and which to run."""

from __future__ import annotations

import numpy as np
import pytest

from mvcompile import regret

# Candidates: 0 fastest alone, 1 fastest beside a reader, 2 fastest beside a writer, 3 and 4 never the best.
LATENCY = np.array([[1.0, 1.1, 1.2, 1.3, 1.05], [2.0, 1.2, 1.4, 1.3, 2.0], [3.0, 2.0, 1.3, 2.5, 2.9]])


def test_worst_regret_is_over_all_levels() -> None:
    assert regret.worst(LATENCY, [0, 1, 2]) == 1.0
    assert regret.worst(LATENCY, [0, 1]) == pytest.approx(2.0 / 1.3)
    assert regret.worst(LATENCY, [0]) == pytest.approx(3.0 / 1.3)


def test_choose_keeps_what_some_level_needs() -> None:
    assert regret.choose(LATENCY, 3, 0, 0.02, lambda chosen: 0.0) == [0, 1, 2]
    assert regret.choose(LATENCY, 2, 0, 0.02, lambda chosen: 0.0) == [0, 2]  # 1.17 beside the reader is the least loss
    assert regret.choose(LATENCY, 9, 0, 0.02, lambda chosen: 0.0) == [0, 1, 2, 3, 4]


def test_choose_takes_the_worthiest_of_equal_sets() -> None:
    flat = np.ones((3, 5))
    assert regret.choose(flat, 2, 1, 0.02, lambda chosen: float(3 in chosen)) == [1, 3]


def test_choose_beyond_exact_subsets_still_covers_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "EXACT_SUBSETS", 0)
    assert regret.choose(LATENCY, 3, 0, 0.02, lambda chosen: 0.0) == [0, 1, 2]


@pytest.mark.parametrize(
    ("latency", "spread", "expected"),
    [
        ((1.0, 0.5), (0.1, 0.1), 1),  # far beyond noise
        ((1.0, 0.99), (0.1, 0.1), 0),  # within noise
        ((1.0, 0.99), (0.001, 0.001), 1),  # the same difference, precise timings
        ((1.0, 0.9), (0.0, 1.0), 0),  # the noise of the better one counts
        ((1.0, 1.2), (0.0, 0.0), 0),
    ],
)
def test_select_needs_more_than_noise(latency: tuple[float, ...], spread: tuple[float, ...], expected: int) -> None:
    assert regret.select(latency, spread, samples=5) == expected


def test_clearly_better_needs_a_median_beyond_its_error() -> None:
    rng = np.random.default_rng(0)
    assert regret.clearly_better(rng.normal(1.0, 0.3, 20))
    assert not regret.clearly_better(rng.normal(0.0, 0.3, 20))
    assert not regret.clearly_better([1.0, 1.0])  # two runs prove nothing
    chance = sum(regret.clearly_better(rng.normal(0.0, 1.0, 7)) for _ in range(2000))
    assert chance < 0.04 * 2000


def test_groups_join_levels_that_cost_the_same() -> None:
    assert regret.groups([1.0, 1.01, 1.5, 1.49], 0.02) == (0, 0, 2, 2)
    assert regret.groups([1.0], 0.02) == (0,)
