"""A neighbour with dials: traffic from one core that takes cache and memory bandwidth from the others (the "bubble" of
Bubble-Up, MICRO 2011, with two dials in place of one)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from mvcompile.errors import UsageError
from mvcompile.measure.load import Load, LoadProcess, Work
from mvcompile.types import UNLIMITED_BYTES_PER_S, Dials

IDLE = Dials()


@dataclass(frozen=True, slots=True)
class Achieved:
    """What a generator did since its dials were set, `seconds` long.

    `resident_bytes` is what it touched of its resident set, `walk_bytes_per_s` how fast it went through that. A written line
    counts once, though memory sees it twice: it is fetched before it is written.
    """

    resident_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    walk_bytes_per_s: float
    seconds: float

    @property
    def dials(self) -> Dials:
        """The part that is set by dials, as bundles keep it."""
        return Dials(self.resident_bytes, self.read_bytes_per_s, self.write_bytes_per_s)


class Generator:
    """One process pinned to `core`, which must be one that this process may use and none that is measured.

    It starts with all dials at 0, when it sleeps. What the dials ask for, it does in turns of some 10 microseconds: the resident
    set is walked in all the time that the rates leave. It is killed when the thread that made it ends.

    Raises UsageError for a core that may not be used, EnvironmentProblem if the process cannot be had.
    """

    def __init__(self, core: int, llc_bytes: int, *, start: Callable[[int, int], Load] = LoadProcess) -> None:
        self.core = core
        self._llc_bytes = llc_bytes
        self._dials = IDLE
        self._load = start(core, llc_bytes)

    @property
    def dials(self) -> Dials:
        """What it is set to."""
        return self._dials

    def set(self, dials: Dials) -> None:
        """Sets the dials; returns when the traffic has changed, usually within half a millisecond.

        A rate of `UNLIMITED_BYTES_PER_S` or more, or below 0, is as fast as it can. Raises UsageError for a resident set that is
        larger than the cache, EnvironmentProblem if the process is gone.
        """
        if not 0 <= dials.resident_bytes <= self._llc_bytes:
            raise UsageError(
                f"resident_bytes is {dials.resident_bytes}; give 0 to {self._llc_bytes}, the size of the last-level cache"
            )
        self._load.apply(
            Work(dials.resident_bytes, read_rate=_rate(dials.read_bytes_per_s), write_rate=_rate(dials.write_bytes_per_s))
        )
        self._dials = dials

    def achieved(self) -> Achieved:
        """Averages since the last `set`. Raises EnvironmentProblem if the process is gone."""
        done = self._load.counters()
        if done.seconds <= 0:
            return Achieved(0, 0.0, 0.0, 0.0, 0.0)
        return Achieved(
            min(done.walked_bytes, self._dials.resident_bytes),
            done.read_bytes / done.seconds,
            done.written_bytes / done.seconds,
            done.walked_bytes / done.seconds,
            done.seconds,
        )

    def stop(self) -> None:
        """Ends the process; it cannot be set again. May be called twice."""
        self._load.stop()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _rate(bytes_per_s: float) -> float:
    return -1.0 if bytes_per_s < 0 or bytes_per_s >= UNLIMITED_BYTES_PER_S else bytes_per_s
