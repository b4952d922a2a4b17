"""What the benchmarks make of repeated timings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """Median of repeated measurements, and their interquartile range over it."""

    median: float
    spread: float


def figure(values: Sequence[float]) -> Figure:
    """Of one or more values."""
    median = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (median, median, median)
    return Figure(median, (high - low) / median if median else 0.0)


def paired_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median of the rounds' own ratios: a drift of the machine's speed is in both of a round's times and cancels."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))
