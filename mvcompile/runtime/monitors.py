"""What tells a session the level: four kinds of monitor, described by frozen values and started by `start`."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from mvcompile.bundle.interference import NONE, Interference
from mvcompile.errors import EnvironmentProblem, ProfileWarning, UsageError
from mvcompile.host_profile import PERF, RESCTRL
from mvcompile.runtime import counters, resctrl
from mvcompile.runtime.calibrated import any_model, model_for
from mvcompile.runtime.counters import PERF_FEATURES, PerfCounters
from mvcompile.runtime.host import cpu_model
from mvcompile.runtime.linear import LinearModel
from mvcompile.runtime.memory import Array
from mvcompile.runtime.policy import PROFILE, Variants, profile_of
from mvcompile.runtime.resctrl import RESCTRL_FEATURES, Resctrl
from mvcompile.runtime.residual import Belief, Expectation, Residual, believe, expectation, told_apart


@dataclass(frozen=True, slots=True)
class Perf:
    """Hardware counters of the session's cores (or of its thread, where only that is permitted) through `model`, which reads
    `PERF_FEATURES`."""

    model: LinearModel

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Perf:
        """With the model that `mvcompile calibrate --bundle` left in the host profile at `path`.

        Raises UsageError for a file that cannot be read or has no such model, and for one of another kind of CPU.
        """
        return cls(model_for(path, PERF))


@dataclass(frozen=True, slots=True)
class ResctrlMonitor:
    """Occupancy and bandwidth as resctrl shows them, through `model`, which reads `RESCTRL_FEATURES`."""

    model: LinearModel

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ResctrlMonitor:
        """With the model of a host profile: see `Perf.read`."""
        return cls(model_for(path, RESCTRL))


@dataclass(frozen=True, slots=True)
class Manual:
    """Whoever calls `Session.set_level`; `level` until then."""

    level: str = NONE


@dataclass(frozen=True, slots=True)
class Auto:
    """The counters that `model` reads where they can be read, else the residual monitor."""

    model: LinearModel | None = None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Auto:
        """With the model of a host profile, that of perf_event if it has both, or without one if it has none.

        Raises UsageError for a file that cannot be read, and for one of another kind of CPU.
        """
        return cls(any_model(path))


MonitorSpec: TypeAlias = Residual | Perf | ResctrlMonitor | Manual | Auto

_NAMES: dict[str, MonitorSpec] = {"residual": Residual(), "manual": Manual(), "auto": Auto()}
_WITH_MODEL = {"perf": "Perf", "resctrl": "ResctrlMonitor"}


class Monitor(Protocol):
    """`level` is what it holds to be the case; `ratio` the logarithm of how much likelier that was than the level before, when it
    took over, or None if it does not reckon with likelihoods; `suspects` is whether another level seems to be the case, so that
    it had better be asked again soon. One thread at a time."""

    @property
    def name(self) -> str: ...

    @property
    def level(self) -> int: ...

    @property
    def ratio(self) -> float | None: ...

    @property
    def suspects(self) -> bool: ...

    def see(self, seconds: Array, variants: Variants) -> None:
        """Take in `seconds` (run, step) of runs that had all of `variants` from their first step on; there may be none."""

    def certain(self, variants: Variants) -> bool:
        """Whether it would find out, while `variants` run, that the level is `none` again."""

    def close(self) -> None:
        """Give back what it holds of the system."""


def monitor_spec(monitor: str | MonitorSpec) -> MonitorSpec:
    """The monitor that is meant. Raises UsageError."""
    if isinstance(monitor, (Residual, Perf, ResctrlMonitor, Manual, Auto)):
        return monitor
    if isinstance(monitor, str) and monitor in _NAMES:
        return _NAMES[monitor]
    if isinstance(monitor, str) and monitor in _WITH_MODEL:
        raise UsageError(
            f"monitor {monitor!r} needs the model of this machine's counters: pass "
            f"{_WITH_MODEL[monitor]}.read(path) of a host profile that `mvcompile calibrate --bundle MODEL.mvb` wrote, or use "
            "'residual', which needs none"
        )
    raise UsageError(
        f"monitor is {monitor!r}, expected {', '.join(map(repr, [*_NAMES, *_WITH_MODEL]))} or a monitor of mvcompile.runtime"
    )


def start(spec: MonitorSpec, interference: Interference | None, levels: Sequence[str], cores: Sequence[int]) -> Monitor:
    """The monitor, ready. `levels` are those that it may report.

    Raises UsageError if the bundle or the model does not fit it, EnvironmentProblem for counters that cannot be read.
    """
    if isinstance(spec, Manual):
        return ManualMonitor(level_named(spec.level, levels))
    if isinstance(spec, Residual):
        return _residual(spec, interference, len(cores))
    if isinstance(spec, Auto):
        try:
            if spec.model is not None:
                return _counting(spec.model, levels, cores)
        except EnvironmentProblem:
            pass  # what `Auto` is for
        return _residual(Residual(), interference, len(cores))
    expected = PERF_FEATURES if isinstance(spec, Perf) else RESCTRL_FEATURES
    if spec.model.features != expected:
        raise UsageError(
            f"the model reads {', '.join(spec.model.features)}, this monitor shows {', '.join(expected)}: fit another"
        )
    return _counting(spec.model, levels, cores)


def model_of(spec: MonitorSpec) -> LinearModel | None:
    """The model of counters that the monitor was given."""
    return spec.model if isinstance(spec, (Perf, ResctrlMonitor, Auto)) else None


def level_named(name: str, levels: Sequence[str]) -> int:
    """The index of level `name`. Raises UsageError."""
    if name in levels:
        return list(levels).index(name)
    like = difflib.get_close_matches(str(name), levels, n=2)
    hint = f"did you mean {' or '.join(map(repr, like))}?" if like else f"there are {', '.join(levels)}"
    raise UsageError(f"there is no level {name!r}: {hint}")


class ManualMonitor:
    """Holds what it is told."""

    name = "manual"
    ratio: float | None = None
    suspects = False

    def __init__(self, level: int) -> None:
        self.level = level

    def see(self, seconds: Array, variants: Variants) -> None:
        return

    def certain(self, variants: Variants) -> bool:
        return True

    def close(self) -> None:
        return


class ResidualMonitor:
    """`residual.py` with a memory."""

    name = "residual"

    def __init__(self, options: Residual, interference: Interference, cores: int) -> None:
        self._options = options
        self._profile = profile_of(interference, cores)
        self._levels = tuple(map(self._profile.group.index, dict.fromkeys(self._profile.group)))
        self._belief = Belief()
        self._expected: dict[Variants, Expectation] = {}

    @property
    def level(self) -> int:
        return self._levels[self._belief.group]

    @property
    def ratio(self) -> float | None:
        return self._belief.ratio

    @property
    def suspects(self) -> bool:
        return bool(self._belief.sums)

    def see(self, seconds: Array, variants: Variants) -> None:
        if not len(seconds):
            return
        self._belief = believe(self._belief, self.expected(variants), seconds, self._options)

    def certain(self, variants: Variants) -> bool:
        return self._belief.group == 0 or told_apart(self.expected(variants), self._belief.group, 0, self._options)

    def expected(self, variants: Variants) -> Expectation:
        """What the profile says of `variants`; kept, because working it out takes a millisecond."""
        found = self._expected.get(variants)
        if found is None:
            if len(self._expected) >= 4 * len(self._profile.selections):
                self._expected.clear()
            found = self._expected[variants] = expectation(self._profile, variants, self._options)
        return found

    def close(self) -> None:
        return


class CountingMonitor:
    """A linear model of counters. A level counts when two readings in a row say so."""

    ratio: float | None = None

    def __init__(self, name: str, source: PerfCounters | Resctrl, model: LinearModel) -> None:
        self.name = name
        self.level = 0
        self._source = source
        self._model = model
        self._before = source.read()
        self._said = 0

    @property
    def suspects(self) -> bool:
        return self._said != self.level

    def see(self, seconds: Array, variants: Variants) -> None:
        before, self._before = self._before, self._source.read()
        said = self._model.level(_features(before, self._before))
        if said == self._said:
            self.level = said
        self._said = said

    def certain(self, variants: Variants) -> bool:
        return True

    def close(self) -> None:
        self._source.close()


def _features(before: counters.Counts | resctrl.Traffic, after: counters.Counts | resctrl.Traffic) -> tuple[float, ...]:
    if isinstance(before, counters.Counts) and isinstance(after, counters.Counts):
        return counters.features(before, after)
    assert isinstance(before, resctrl.Traffic)
    assert isinstance(after, resctrl.Traffic)
    return resctrl.features(before, after)


def _residual(options: Residual, interference: Interference | None, cores: int) -> ResidualMonitor:
    if interference is None or not interference.source.startswith("measured: "):
        what = "has no profile" if interference is None else "has estimated times only"
        raise UsageError(f"the bundle {what}, so there is nothing to compare step times with: {PROFILE}, or use monitor='manual'")
    here = cpu_model()
    if interference.cpu_model != here:
        warnings.warn(
            f"the bundle was profiled on {interference.cpu_model}, this host has {here}: step times differ for that reason, "
            "too, and the residual monitor may take that for a neighbour; profile the bundle here (`mvcompile profile`)",
            ProfileWarning,
            stacklevel=2,
        )
    return ResidualMonitor(options, interference, cores)


def _counting(model: LinearModel, levels: Sequence[str], cores: Sequence[int]) -> CountingMonitor:
    if model.levels != tuple(levels):
        raise UsageError(
            f"the model knows the levels {', '.join(model.levels)}, the bundle has {', '.join(levels)}: fit a model of these"
        )
    if model.features == PERF_FEATURES:
        return CountingMonitor("perf", PerfCounters(cores), model)
    if model.features == RESCTRL_FEATURES:
        return CountingMonitor("resctrl", Resctrl(), model)
    raise UsageError(
        f"the model reads {', '.join(model.features)}: there are monitors of {', '.join(PERF_FEATURES)} "
        f"and of {', '.join(RESCTRL_FEATURES)}"
    )
