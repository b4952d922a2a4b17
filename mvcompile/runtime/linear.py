"""From counters to a level by a linear model, as VELTAIR does it (ASPLOS 2022, arXiv 2201.06212).

The model says where on the grid of what neighbours take (cache, reading, writing) the counters put us; the level is the one that
is nearest to there. Pure functions of explicit values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mvcompile.bundle.interference import Interference
from mvcompile.errors import UsageError

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a model was fitted to: the network `bundle`, whose kernels have this digest (as in its manifest), on so many cores."""

    bundle: str
    kernels_sha256: str
    cores: int


@dataclass(frozen=True, slots=True)
class LinearModel:
    """`features` names what it reads; `points` says where each level lies (level, coordinate), and the coordinates that features
    x stand for are `intercept` + `coefficients` (coordinate, feature) @ ((x - `mean`) / `scale`). `fitted` is None if nobody has
    said; otherwise it serves sessions of that kind only."""

    features: tuple[str, ...]
    levels: tuple[str, ...]
    points: tuple[Vector, ...]
    mean: Vector
    scale: Vector
    coefficients: tuple[Vector, ...]
    intercept: Vector
    fitted: Fitted | None = None

    def level(self, features: Sequence[float]) -> int:
        """Index of the level that is nearest to where `features` are."""
        terms = [(value - mean) / scale for value, mean, scale in zip(features, self.mean, self.scale, strict=True)]
        found = [
            start + sum(weight * term for weight, term in zip(row, terms, strict=True))
            for start, row in zip(self.intercept, self.coefficients, strict=True)
        ]
        distances = [sum((one - other) ** 2 for one, other in zip(point, found, strict=True)) for point in self.points]
        return distances.index(min(distances))


@dataclass(frozen=True, slots=True)
class Sample:
    """What the counters showed (in the order of a model's features) while `level` (an index) was the case."""

    level: int
    features: Vector


def points_of(interference: Interference) -> tuple[Vector, ...]:
    """Where each level lies: what its neighbour took of cache, reads and writes, as shares of the most that any level's did."""
    taken = [(one.resident_bytes, one.read_bytes_per_s, one.write_bytes_per_s) for one in interference.achieved]
    most = [max(column) or 1.0 for column in zip(*taken, strict=True)]
    return tuple(tuple(value / limit for value, limit in zip(row, most, strict=True)) for row in taken)


def fit_linear(
    samples: Sequence[Sample], features: Sequence[str], levels: Sequence[str], points: Sequence[Vector]
) -> LinearModel:
    """The least-squares model of `samples`, with `points` (see `points_of`) for where the levels lie.

    Features that do not vary, or only together with others, get the smallest coefficients that fit as well (minimum norm).

    Raises UsageError if there is no sample of a level, or one of another length.
    """
    wrong = [one for one in samples if len(one.features) != len(features) or not 0 <= one.level < len(levels)]
    if wrong or len(points) != len(levels):
        raise UsageError(
            f"{len(wrong)} of {len(samples)} samples do not fit {len(features)} features and {len(levels)} levels "
            f"at {len(points)} points: give each sample a value per feature and the index of its level"
        )
    unseen = [name for level, name in enumerate(levels) if all(one.level != level for one in samples)]
    if unseen:
        raise UsageError(f"there is no sample of the levels {', '.join(unseen)}: measure some of each, or leave those levels out")
    seen = np.array([one.features for one in samples], np.float64).reshape(len(samples), -1)
    mean, scale = seen.mean(axis=0), seen.std(axis=0)
    scale[scale == 0] = 1.0
    wanted = np.array([points[one.level] for one in samples], np.float64)
    # Levels of which there are many samples must not count more than others.
    counts = np.bincount([one.level for one in samples], minlength=len(levels))
    weight = np.sqrt(1 / counts[[one.level for one in samples]])[:, None]
    design = np.hstack((np.ones((len(samples), 1)), (seen - mean) / scale))
    solution = np.linalg.lstsq(design * weight, wanted * weight, rcond=None)[0]
    return LinearModel(
        tuple(features),
        tuple(levels),
        tuple(tuple(map(float, point)) for point in points),
        tuple(mean.tolist()),
        tuple(scale.tolist()),
        tuple(tuple(row) for row in solution[1:].T.tolist()),
        tuple(solution[0].tolist()),
    )
