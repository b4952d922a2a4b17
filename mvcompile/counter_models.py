"""Fits the linear model from counters to the level to a bundle on this host, as VELTAIR does (ASPLOS 2022, arXiv 2201.06212).

The bundle runs beside the neighbour of each level of its own profile. Levels, and at each level selections, take turns in random
order, so that what drifts, drifts for all; the selections, because a monitor has to know a level whatever was selected before.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from mvcompile import runtime
from mvcompile.bundle.codec import Signed
from mvcompile.bundle.interference import Interference, interference_of
from mvcompile.bundle.reader import open_bundle
from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.host_profile import PERF, RESCTRL, CounterModel
from mvcompile.measure.generator import Generator
from mvcompile.measure.load import Load, LoadProcess
from mvcompile.runtime import counters, resctrl
from mvcompile.runtime.calibrated import kernels_sha256
from mvcompile.runtime.linear import LinearModel, Sample, Vector, fit_linear, points_of
from mvcompile.types import Dials, Level

CORES = 1
LEAST_ROUNDS, MOST_ROUNDS = 4, 12
WINDOW_S = 0.1
SETTLE_S = 0.01
"""How long a neighbour runs before the run that fills the caches."""
MOST_SELECTIONS = 4
"""At a level in a round, so that a profile of many levels takes no longer than it has to."""


class Source(Protocol):
    """Counters: `runtime.counters.PerfCounters` or `runtime.resctrl.Resctrl`."""

    def read(self) -> Any:
        """What they show now. Raises EnvironmentProblem."""

    def close(self) -> None:
        """Give them back."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of counters: `open` opens those of a core or raises EnvironmentProblem, `between` makes values of `features` of two
    readings."""

    name: str
    features: tuple[str, ...]
    open: Callable[[int], Source]
    between: Callable[[Any, Any], Vector]


KINDS = (
    Kind(PERF, runtime.PERF_FEATURES, lambda core: counters.PerfCounters([core]), counters.features),
    Kind(RESCTRL, runtime.RESCTRL_FEATURES, lambda core: resctrl.Resctrl(), resctrl.features),
)


class Network(Protocol):
    """What is used of a `runtime.Session`."""

    def run(self, inputs: Mapping[str, Any]) -> object:
        """The model once."""

    def select_all(self, selection: Sequence[int]) -> None:
        """One variant per layer."""


class Neighbour(Protocol):
    """What is used of a `Generator`."""

    def set(self, dials: Dials) -> None:
        """Let it take this from now on."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The bundle that is run, and what its profile says."""

    path: str
    name: str
    kernels_sha256: str
    interference: Interference

    @property
    def selections(self) -> tuple[tuple[int, ...], ...]:
        """The different ones that its levels have."""
        profile = next(one for one in self.interference.profiles if one.cores == CORES)
        return tuple(dict.fromkeys(selection.variants for selection in profile.selections))


@dataclass(frozen=True, slots=True)
class Window:
    """What the counters showed in about `WINDOW_S` of runs: values of features by kind."""

    round: int
    level: int
    features: Mapping[str, Vector]


@dataclass(slots=True)
class Stand:
    """A network on its core, the neighbour beside it, and the counters (`sources`, by kind) that are read. What cannot be read
    any more leaves it, with a note."""

    network: Network
    inputs: Mapping[str, Any]
    neighbour: Neighbour
    sources: dict[str, tuple[Kind, Source]]
    levels: tuple[Level, ...]
    selections: tuple[tuple[int, ...], ...]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    notes: list[str] = field(default_factory=list)

    def window(self) -> dict[str, Vector]:
        """Runs for WINDOW_S, once at least."""
        before = self._read()
        until = self.clock() + WINDOW_S
        while True:
            self.network.run(self.inputs)
            if self.clock() >= until:
                break
        after = self._read()
        return {name: self.sources[name][0].between(before[name], after[name]) for name in after if name in before}

    def _read(self) -> dict[str, Any]:
        found = {}
        for name, (_, source) in list(self.sources.items()):
            try:
                found[name] = source.read()
            except EnvironmentProblem as error:
                self.notes.append(f"there is no model of {name} counters: {error}")
                del self.sources[name]
        return found


def subject_of(path: str | os.PathLike[str], cpu_model: str) -> Subject:
    """The bundle at `path`, which has to have been profiled on one core of a CPU of this kind.

    Raises UsageError that names the remedy if it was not, and what `open_bundle` raises.
    """
    with open_bundle(path) as bundle:
        found = interference_of(bundle)
        name, digest = bundle.manifest.model.name, kernels_sha256(bundle)
    again = f"run `mvcompile profile {os.fspath(path)}` on this host first"
    if found is None:
        raise UsageError(f"{path} has no profile, so there are no levels to find by counters: {again}")
    if not found.source.startswith("measured: ") or all(one.cores != CORES for one in found.profiles):
        raise UsageError(f"{path} has no measured profile of {CORES} core: {again}")
    if found.cpu_model != cpu_model:
        raise UsageError(f"{path} was profiled on {found.cpu_model}, this host has {cpu_model}: {again}")
    return Subject(os.fspath(path), name, digest, found)


def fit_counters(
    subject: Subject,
    measured: int,
    neighbour: int | None,
    llc_bytes: int,
    budget_s: float,
    *,
    kinds: Sequence[Kind] = KINDS,
    start: Callable[[int, int], Load] = LoadProcess,
) -> tuple[tuple[CounterModel, ...], tuple[str, ...]]:
    """A model for each kind of counters that can be read on core `measured`, in about `budget_s`, and notes for people: where
    there are none, one that says why.

    Raises what `runtime.load` does for the bundle, UsageError for levels that no neighbour on this host can make.
    """
    if neighbour is None:
        return (), (f"there is no model of counters for {subject.name}: a neighbour needs a core of its own",)
    with ExitStack() as stack:
        session = stack.enter_context(runtime.load(subject.path, cores=[measured], share_cores=True))
        sources = _opened(kinds, measured, stack)
        if not sources:
            return (), (
                f"no counters can be read here, so there is no model of them for {subject.name}; the residual monitor needs none",
            )
        found = subject.interference
        with Generator(neighbour, llc_bytes, start=start) as generator:
            stand = Stand(session, runtime.selftest_inputs(session), generator, sources, found.levels, subject.selections)
            windows = sample(stand, budget_s)
    models = tuple(_model(kind, windows, subject) for kind, _ in stand.sources.values())
    return models, tuple(stand.notes)


def _opened(kinds: Sequence[Kind], core: int, stack: ExitStack) -> dict[str, tuple[Kind, Source]]:
    """What can be read."""
    sources = {}
    for kind in kinds:
        with suppress(EnvironmentProblem):
            source = kind.open(core)
            stack.callback(source.close)
            sources[kind.name] = (kind, source)
    return sources


def sample(stand: Stand, budget_s: float, seed: int = 0) -> list[Window]:
    """Windows in rounds over all levels until `budget_s` is spent, at least LEAST_ROUNDS and at most MOST_ROUNDS."""
    chance = random.Random(seed)
    windows: list[Window] = []
    begin = stand.clock()
    for number in range(MOST_ROUNDS):
        spent = stand.clock() - begin
        if not stand.sources or (number >= LEAST_ROUNDS and spent + spent / number > budget_s):
            break
        for level in chance.sample(range(len(stand.levels)), len(stand.levels)):
            stand.neighbour.set(stand.levels[level].dials)
            if stand.levels[level].dials != Dials():
                stand.sleep(SETTLE_S)
            for selection in chance.sample(stand.selections, min(len(stand.selections), MOST_SELECTIONS)):
                stand.network.select_all(selection)
                stand.network.run(stand.inputs)  # into the caches, beside this neighbour
                windows.append(Window(number, level, stand.window()))
    stand.neighbour.set(Dials())
    return windows


def _model(kind: Kind, windows: Sequence[Window], subject: Subject) -> CounterModel:
    found = subject.interference
    names, points = tuple(level.name for level in found.levels), points_of(found)

    def fit(chosen: Sequence[Window]) -> LinearModel:
        return fit_linear([Sample(one.level, one.features[kind.name]) for one in chosen], kind.features, names, points)

    linear = fit(windows)
    return CounterModel(
        kind.name,
        subject.name,
        subject.kernels_sha256,
        CORES,
        len(windows),
        right_shares(kind.name, windows, len(names), fit),
        linear.features,
        linear.levels,
        linear.points,
        linear.mean,
        linear.scale,
        tuple(tuple(map(Signed, row)) for row in linear.coefficients),
        tuple(map(Signed, linear.intercept)),
    )


def right_shares(
    kind: str, windows: Sequence[Window], levels: int, fit: Callable[[Sequence[Window]], LinearModel]
) -> tuple[float, ...]:
    """Per level, the share of its windows that the model of all other rounds takes for it: leave one round out, because windows
    of a round are more alike than those of another minute."""
    right, count = [0] * levels, [0] * levels
    for number in {one.round for one in windows}:
        model = fit([one for one in windows if one.round != number])
        for one in windows:
            if one.round == number:
                count[one.level] += 1
                right[one.level] += model.level(one.features[kind]) == one.level
    return tuple(hits / all_of for hits, all_of in zip(right, count, strict=True))
