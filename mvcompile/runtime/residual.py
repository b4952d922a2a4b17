"""Which level explains the times that steps took: maximum likelihood over the levels of a bundle's profile.

Pure functions of explicit values. What they have to cope with:

- A run in a hundred has a step that takes three times as long as ever. So the median over the runs at hand counts, and what is
  far from every level's time costs each level about the same (Student's t distribution in place of the normal one).
- The core's clock is not what it was when the profile was measured. So each level is given the common factor that explains the
  times best, at a price that grows with its distance from the factor of late.
- The table is some percent off, for good: other memory, other pages. Such errors repeat from run to run, so more runs do not
  make them more credible: `Residual.floor`, which no number of runs lowers, is how far off a step may be.
- Noise comes in bursts. So evidence is added up from batch to batch (Page's CUSUM, 1954), and no batch is enough on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mvcompile.bundle.interference import CoreProfile
from mvcompile.errors import UsageError
from mvcompile.runtime.policy import PROFILE, Variants

Floats = npt.NDArray[np.float64]

add: Callable[[Floats, int], Floats] = np.add.reduce

_NORMAL_IQR = 1.349
"""Interquartile range of a normal distribution with a standard deviation of 1."""
_TAILS = 3.0
"""Degrees of freedom of the t distribution."""
_MOST_RUNS = 4
"""From so many runs on, their median is as good as of any number: what is left is the floor."""
_FEW = 3
"""Runs of a batch that are looked at one by one."""
_LEAST_S = 1e-9
"""A time of less is none."""
_SHARE = 0.4
"""Of the threshold, what a run, or half a batch of runs, counts at most: three of them decide."""
_UNKNOWN_CLOCK = 0.2
"""Standard deviation of the logarithm of the clock's factor before anything was seen."""
_SLOWEST_CLOCK = 0.25
"""How far the clock's logarithm may wander from that of the profile."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Parameters of the monitor that compares step times with the profile. Natural logarithms throughout.

    Chosen on 22,000 runs of two networks on a virtual machine whose other tenants came and went: the least strict ones with which
    nothing was found where nothing ran.

    `threshold`: how much likelier than the present level another one has to be, in sum over batches, to take its place.
    `drift`: what is taken off for each batch; a level that fits no better than that never takes over.
    `floor`: how far off the table may be, as a standard deviation of the logarithm of a step's time.
    `overhead_s`: the same in seconds, of calling a step and reading the clock.
    `clock`: standard deviation of what the core's clock does at once.
    `follow`: share of the way that the expected clock goes per batch towards the one that was found.
    """

    threshold: float = 12.0
    drift: float = 3.0
    floor: float = 0.05
    overhead_s: float = 0.5e-6
    clock: float = 0.1
    follow: float = 0.1


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected of `variants` at the levels, those of one group being one: mean of the logarithms of step times (group,
    step), and, for the median of one run, two, three, and more, the inverse of their variance over the degrees of freedom (step).
    `levels` has the first level of each group, which stands for it; `steps` are those that say something."""

    variants: Variants
    levels: tuple[int, ...]
    steps: npt.NDArray[np.intp]
    mean: Floats
    precision: tuple[Floats, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Per group of levels: log-likelihood of what was seen, and the logarithm of the clock's factor that it was found with."""

    likelihood: Floats
    clock: Floats


@dataclass(frozen=True, slots=True)
class Belief:
    """What is held to be the case: a group of levels (its place in `Expectation.levels`), how much each group has been likelier
    of late (empty: nothing was), and the logarithm of the clock's factor (None: nothing was seen yet). `ratio` is that sum for
    the present group when it took over."""

    group: int = 0
    sums: tuple[float, ...] = ()
    clock: float | None = None
    ratio: float = 0.0


def expectation(profile: CoreProfile, variants: Variants, options: Residual) -> Expectation:
    """What `profile` says of `variants`. Raises UsageError if it has no times of theirs."""
    chosen = tuple(enumerate(variants))
    seconds = np.array([[rows[step][variant] for step, variant in chosen] for rows in profile.latency_s])
    steps = np.flatnonzero((seconds > 0).all(axis=0))
    if not steps.size:
        raise UsageError(f"the bundle's profile for {profile.cores} cores has no times of its layers: {PROFILE}")
    seconds = seconds[:, steps]
    # The scatter beside nothing, for all levels: beside a neighbour it is as wide as what the neighbour's effect varies, up to
    # 40 % on a virtual machine, and a level must not lose against the others because it could explain so much.
    scatter = np.array([profile.spread[0][step][variant] for step, variant in chosen])[steps] / _NORMAL_IQR
    lasting = options.floor**2 + (options.overhead_s / seconds[0]) ** 2
    precision = tuple(1 / (_TAILS * (lasting + scatter**2 / runs)) for runs in range(1, _MOST_RUNS + 1))
    # The mean of a group, and not whichever of its levels fits best: what differs within it is noise, and the best of many
    # explains more than one that stands alone.
    numbers = tuple(dict.fromkeys(profile.group))
    means = [np.log(seconds[[own == number for own in profile.group]]).mean(axis=0) for number in numbers]
    return Expectation(variants, tuple(map(profile.group.index, numbers)), steps, np.array(means), precision)


def evidence(expected: Expectation, seconds: Floats, before: Belief, options: Residual) -> Evidence:
    """What `seconds` (run, step: all steps of the model), run with the variants of `expected`, say of each level."""
    clock, deviation = (0.0, _UNKNOWN_CLOCK) if before.clock is None else (before.clock, options.clock)
    # One numpy call costs some microseconds in the caches that a run leaves behind, whatever it computes: few of them.
    times = np.maximum(_median(seconds), _LEAST_S)
    if len(times) != len(expected.steps):
        times = times[expected.steps]
    off = np.log(times) - expected.mean - clock
    # The clock's factor by one step of reweighted least squares, from the one of late.
    precision = expected.precision[min(len(seconds), _MOST_RUNS) - 1]
    weights = precision / (1 + precision * off * off)
    prior = 1 / (deviation * deviation * (_TAILS + 1))
    moved = add(weights * off, 1) / (add(weights, 1) + prior)
    off = off - moved[:, None]
    distance = add(np.log1p(precision * off * off), 1) + prior * moved * moved
    return Evidence((_TAILS + 1) / -2 * distance, moved + clock)


def told_apart(expected: Expectation, group: int, other: int, options: Residual) -> bool:
    """Whether some runs with the variants of `expected` at either of two groups would speak clearly against the other one."""
    precision = _TAILS * expected.precision[-1]
    apart = expected.mean[group] - expected.mean[other]
    clock = float((precision * apart).sum() / (precision.sum() + 1 / options.clock**2))
    ratio = ((precision * (apart - clock) ** 2).sum() + (clock / options.clock) ** 2) / 2
    return float(ratio) >= 2 * options.drift


def quiet(before: Belief, seen: Evidence, options: Residual) -> bool:
    """Whether nothing speaks for another group than that of `before`."""
    return not before.sums and float(seen.likelihood.max()) - float(seen.likelihood[before.group]) <= options.drift


def believe(before: Belief, expected: Expectation, seconds: Floats, options: Residual) -> Belief:
    """What to hold after runs that took `seconds` (run, step), in their order.

    If they speak for another group as a whole, they are looked at in two halves (up to three one by one): then what lasted for
    all of them counts twice, and a burst once.
    """
    whole = evidence(expected, seconds, before, options)
    if len(seconds) == 1 or quiet(before, whole, options):
        return update(before, whole, options)
    belief = before
    for part in np.array_split(seconds, len(seconds) if len(seconds) <= _FEW else 2):
        belief = update(belief, evidence(expected, part, belief, options), options)
    return belief


def update(before: Belief, seen: Evidence, options: Residual) -> Belief:
    """What to hold after `seen`."""
    likelihood, clocks = seen.likelihood.tolist(), seen.clock.tolist()
    present = before.group
    if quiet(before, seen, options):  # nearly always
        return Belief(present, (), _followed(before.clock, clocks[present], options), before.ratio)
    most = options.threshold * _SHARE
    sums = tuple(
        max(0.0, total + max(-most, min(most, one - likelihood[present] - options.drift)))
        for total, one in zip(before.sums or (0.0,) * len(likelihood), likelihood, strict=True)
    )
    over = [group for group, total in enumerate(sums) if total > options.threshold]
    if over:  # what each batch counts at most makes them equal: the last one tells them apart
        found = max(over, key=likelihood.__getitem__)
        return Belief(found, (), _limited(clocks[found]), sums[found])
    if any(sums):  # the clock must not be made to explain a level that is about to be found
        return Belief(present, sums, before.clock, before.ratio)
    return Belief(present, (), _followed(before.clock, clocks[present], options), before.ratio)


def _followed(clock: float | None, found: float, options: Residual) -> float:
    return _limited(found if clock is None else clock + options.follow * (found - clock))


def _limited(clock: float) -> float:
    return max(-_SLOWEST_CLOCK, min(_SLOWEST_CLOCK, clock))


def _median(rows: Floats) -> Floats:
    """Of each column; numpy's own costs three times as much for so few rows."""
    if len(rows) > 1:
        rows = np.sort(rows, axis=0)
    half = len(rows) // 2
    median: Floats = rows[half] if len(rows) % 2 else (rows[half - 1] + rows[half]) / 2
    return median
