"""Seeded weights that are the same bits on every machine, scaled so that activations stay in range through a deep network.

Only raw words of PCG64 (which NumPy promises never to change), shifts, multiplications and square roots are used: nothing that
depends on a mathematical library, as a normal distribution would. Each tensor has its own stream, keyed by network and tensor
name, so the values do not depend on the order in which tensors are made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float32]

BLOCK = 1 << 16
"""Elements made at a time, an even number: what is in flight stays in cache."""

RESIDUAL, PROJECTED = 0.35, 0.7
"""Scale of a batch norm that ends in a residual sum: x1.12 in variance per block, so that 16 of them stay in range. Where both
summands are normalised (a projected shortcut), each brings half of the variance."""


def uniform(key: str, shape: Sequence[int], low: float, high: float) -> Weights:
    """Float32 values in [low, high), a function of `key` and `shape` only."""
    count = math.prod(shape)
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little")
    stream = np.random.PCG64(seed)
    values = np.empty(count, np.float32)
    for start in range(0, count, BLOCK):
        block = values[start : start + BLOCK]
        words = stream.random_raw((len(block) + 1) // 2).astype("<u8", copy=False).view("<u4")[: len(block)]
        block[:] = words >> np.uint32(8)
        block *= np.float32(2.0**-24)
        block *= np.float32(high - low)
        block += np.float32(low)
    return values.reshape(tuple(shape))


def kernel(key: str, shape: Sequence[int], fan_in: int, gain: float) -> Weights:
    """Weights of variance gain / fan_in: 2 keeps the second moment behind a rectifier (He et al., ICCV 2015), 1 elsewhere."""
    limit = math.sqrt(3.0 * gain / fan_in)
    return uniform(key, shape, -limit, limit)


def bias(key: str, shape: Sequence[int]) -> Weights:
    """Small offsets around 0."""
    return uniform(key, shape, -0.1, 0.1)


def scale(key: str, shape: Sequence[int], around: float = 1.0) -> Weights:
    """Positive factors whose mean square is `around` squared, up to 2 %."""
    return uniform(key, shape, 0.8 * around, 1.17 * around)


def variance(key: str, shape: Sequence[int]) -> Weights:
    """Running variances near 1: normalising by them neither blows up nor damps a deep network."""
    return uniform(key, shape, 0.75, 1.25)
