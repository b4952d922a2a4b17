"""A reporter: a calibrated access pattern whose slowdown is the pressure of what runs on other cores (Bubble-Up, MICRO 2011).

There are two patterns, because there are two things to take: loads in random order through lines that live in the last-level
cache (they come later when somebody evicts them), and a stream of reads from memory (slower when somebody uses the bandwidth).
They run one after the other: the stream would evict the lines.

The loads are those of several chains at once. Who touches its lines seldom loses them: on a host whose other tenants used the
cache, one chain of dependent loads kept 2 MiB of 32 (170 ns per load beyond that), while loads that did not wait for each other
had 8 MiB at 1.2 ns per line, as a kernel's would.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from mvcompile.errors import UsageError
from mvcompile.measure.load import Counters, Load, LoadProcess, Work
from mvcompile.measure.load_loops import LINE_BYTES

CHAIN_SHARE = 4
"""The chain is the last-level cache over this, unless its size is given: what a busy host's virtual machine still gets of it."""
WINDOWS = 8
"""A pattern's rate is the median of this many windows."""
SETTLE_S = 0.5
"""The chain is followed once before it counts, but no longer than this."""
_STEP_S = 0.005


@dataclass(frozen=True, slots=True)
class Rate:
    """A pattern's work per second, median of windows, and their interquartile range over it."""

    per_s: float
    spread: float


@dataclass(frozen=True, slots=True)
class Sample:
    """`cache`: loads per second; `memory`: bytes read per second."""

    cache: Rate
    memory: Rate


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times slower each pattern was than alone."""

    cache: float
    memory: float

    @property
    def pressure(self) -> float:
        """Both in one number, 0 when nothing is felt (0.1: the probe is 10 % slower): the geometric mean less one."""
        return math.sqrt(self.cache * self.memory) - 1.0


class Probe:
    """One process pinned to `core`, asleep but during `baseline` and `sample`.

    `llc_bytes` is the size of the last-level cache, `chain_bytes` that of the chain, which has to live in there (what `mvcompile
    calibrate` finds, default: a `CHAIN_SHARE`th). Raises as `LoadProcess` does.
    """

    def __init__(
        self,
        core: int,
        llc_bytes: int,
        chain_bytes: int | None = None,
        *,
        start: Callable[[int, int], Load] = LoadProcess,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.core = core
        self.chain_bytes = llc_bytes // CHAIN_SHARE if chain_bytes is None else chain_bytes
        if not 0 < self.chain_bytes <= llc_bytes:
            raise UsageError(f"a chain of {chain_bytes} bytes does not live in a cache of {llc_bytes}; give 1 to {llc_bytes}")
        self._sleep = sleep
        self._baseline: Sample | None = None
        self._load = start(core, llc_bytes)

    def baseline(self, seconds: float = 0.5) -> Sample:
        """Measures the probe alone, which is what `slowdown` compares with from then on. Nothing else may run meanwhile."""
        self._baseline = self.sample(seconds)
        return self._baseline

    def sample(self, seconds: float = 0.5) -> Sample:
        """Rates in the next `seconds`, half of which each pattern has, beside whatever runs on other cores. The calling thread
        sleeps meanwhile."""
        if not seconds > 0:
            raise UsageError(f"a sample of {seconds} s is none; give more than 0")
        return Sample(self.cache(seconds / 2), self.memory(seconds / 2))

    def cache(self, seconds: float) -> Rate:
        """The loads' rate alone."""
        return follow(self._load, self.chain_bytes, seconds, self._sleep, parallel=True)

    def memory(self, seconds: float) -> Rate:
        """The stream's rate alone."""
        return rate(self._load, Work(read_rate=-1.0), _read, seconds, self._sleep)

    def slowdown(self, sample: Sample) -> Slowdown:
        """`sample` against the baseline. Raises UsageError when there is none yet."""
        if self._baseline is None:
            raise UsageError("the probe has no baseline; call baseline() first, while nothing else runs")
        return compare(self._baseline, sample)

    def stop(self) -> None:
        """Ends the process. May be called twice."""
        self._load.stop()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def compare(baseline: Sample, sample: Sample) -> Slowdown:
    """How much slower `sample` is; a rate of 0 would be infinitely slow and counts as a window that was all stall."""
    return Slowdown(_ratio(baseline.cache, sample.cache), _ratio(baseline.memory, sample.memory))


def _ratio(baseline: Rate, sample: Rate) -> float:
    return baseline.per_s / sample.per_s if sample.per_s > 0 else math.inf


def follow(
    load: Load, chain_bytes: int, seconds: float, sleep: Callable[[float], None] = time.sleep, parallel: bool = False
) -> Rate:
    """Loads per second through `chain_bytes`, each dependent on the one before or, in `parallel`, several at once, after the
    chain has been followed once."""
    lines = chain_bytes // LINE_BYTES

    def settle() -> None:
        waited = 0.0
        while load.counters().chased_loads < lines and waited < SETTLE_S:
            sleep(_STEP_S)
            waited += _STEP_S

    return rate(load, Work(chase_bytes=chain_bytes, parallel=parallel), _chased, seconds, sleep, settle)


def rate(
    load: Load,
    work: Work,
    count: Callable[[Counters], int],
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    settle: Callable[[], None] = lambda: None,
    windows: int = WINDOWS,
) -> Rate:
    """What `count` counts of `work` per second, in `windows` windows of `seconds` together; the process sleeps afterwards."""
    load.apply(work)
    settle()
    rates: list[float] = []
    before = load.counters()
    while len(rates) < windows:
        sleep(seconds / windows)
        now = load.counters()
        passed = now.seconds - before.seconds
        rates.append((count(now) - count(before)) / passed if passed > 0 else 0.0)
        before = now
    load.apply(Work())
    return summary(rates)


def summary(values: list[float]) -> Rate:
    """Median and interquartile range over it."""
    middle = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Rate(middle, (high - low) / middle if middle > 0 else 0.0)


def _read(counters: Counters) -> int:
    return counters.read_bytes


def _chased(counters: Counters) -> int:
    return counters.chased_loads
