from __future__ import annotations

import numpy as np
import pytest

from mvcompile.errors import UsageError
from mvcompile.runtime.linear import Sample, fit_linear, points_of
from mvcompile.testing.bundles import tiny_manifest
from mvcompile.testing.profiles import interference_of
from mvcompile.types import Dials

LEVELS = ("none", "light", "heavy", "llc")
POINTS = ((0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (1.0, 0.0))
FEATURES = ("misses", "references", "constant")


def samples(count: int, noise: float) -> list[Sample]:
    """Misses follow the traffic, references both; `light` lies between `none` and `heavy`."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        level = int(random.choice(4, p=(0.7, 0.1, 0.1, 0.1)))  # most of the time nothing runs
        cache, traffic = POINTS[level]
        exact = (1e6 + 4e7 * traffic, 5e7 + 2e8 * cache + 5e7 * traffic, 3.0)
        found.append(Sample(level, tuple(value * (1 + noise * random.standard_normal()) for value in exact[:2]) + exact[2:]))
    return found


def test_levels_are_told_apart_those_between_others_too() -> None:
    model = fit_linear(samples(200, 0.05), FEATURES, LEVELS, POINTS)
    assert (model.features, model.levels, model.points) == (FEATURES, LEVELS, POINTS)
    fresh = samples(400, 0.05)[200:]
    right = [model.level(one.features) == one.level for one in fresh]
    assert np.mean(right) > 0.98
    assert {model.level(one.features) for one in fresh} == {0, 1, 2, 3}


def test_an_exact_relation_is_found() -> None:
    model = fit_linear(samples(100, 0.0), FEATURES, LEVELS, POINTS)
    features = (2.1e7, 5e7 + 2e8 + 2.5e7, 3.0)
    terms = (np.array(features) - model.mean) / model.scale
    assert np.array(model.intercept) + np.array(model.coefficients) @ terms == pytest.approx([1.0, 0.5])
    assert np.array(model.coefficients)[:, 2] == pytest.approx([0.0, 0.0])  # what does not vary says nothing


def test_where_levels_lie() -> None:
    found = interference_of(tiny_manifest())
    levels = (Dials(), Dials(4_000, 0.0, 0.0), Dials(1_000, 2e9, 0.0), Dials(0, 1e9, 0.0))
    object.__setattr__(found, "achieved", levels)
    assert points_of(found) == ((0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.25, 1.0, 0.0), (0.0, 0.5, 0.0))


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(UsageError, match="there is no sample of the levels light, llc"):
        fit_linear([Sample(0, (1.0, 2.0, 3.0)), Sample(2, (1.0, 3.0, 3.0))], FEATURES, LEVELS, POINTS)
    for wrong in (Sample(0, (1.0, 2.0)), Sample(4, (1.0, 2.0, 3.0)), Sample(-1, (1.0, 2.0, 3.0))):
        with pytest.raises(UsageError, match="1 of 1 samples do not fit 3 features and 4 levels at 4 points"):
            fit_linear([wrong], FEATURES, LEVELS, POINTS)
    with pytest.raises(UsageError, match="4 levels at 3 points"):
        fit_linear(samples(100, 0.0), FEATURES, LEVELS, POINTS[:3])
