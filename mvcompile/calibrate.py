"""Measure this host: its caches, its memory, its noise, and what a neighbour does to a probe (docs/interference.md)."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mvcompile.counter_models import KINDS, Kind, fit_counters, subject_of
from mvcompile.errors import EnvironmentProblem, UsageError
from mvcompile.host_profile import (
    HOST_PROFILE_VERSION,
    CounterModel,
    CounterSupport,
    CurvePoint,
    Effect,
    HostProfile,
    LevelFound,
    Noise,
)
from mvcompile.measure.generator import Achieved, Generator
from mvcompile.measure.hierarchy import MEMORY, Seen, levels_seen, reported_levels, working_sets
from mvcompile.measure.host_verdict import notes_of, verdict_of
from mvcompile.measure.load import Counters, Load, LoadProcess, Work
from mvcompile.measure.probe import CHAIN_SHARE, Probe, Rate, Sample, compare, follow, rate, summary
from mvcompile.runtime.counters import EVENTS, PerfCounters
from mvcompile.runtime.cpus import cache_sharers, neighbour_of
from mvcompile.runtime.resctrl import RESCTRL_FEATURES, Resctrl
from mvcompile.types import UNLIMITED_BYTES_PER_S, Dials, HostTarget

DEFAULT_BUDGET_S = 60.0
MIN_BUDGET_S = 10.0
CURVE_S = 0.04
"""Per working set and kind of load."""
BANDWIDTH_S = 0.1
NOISE_S = 0.8
NOISE_WINDOWS = 40
ROUNDS = 5
LONGEST_SAMPLE_S = 1.0
FIXED_S = 8.0
"""What everything but the effects takes, roughly; the rest of the budget is divided among those."""
MODEL_SHARE = 0.5
"""Of the budget, on top of it, what goes to the model of counters."""

Stage = Callable[[str], None]
Start = Callable[[int, int], Load]


@dataclass(frozen=True, slots=True)
class Clockwork:
    """How processes are started, time passes and counters are opened; tests have a machine of their own."""

    start: Start = LoadProcess
    sleep: Callable[[float], None] = time.sleep
    stolen: Callable[[int], tuple[float, float]] | None = None
    kinds: tuple[Kind, ...] = KINDS


_REAL = Clockwork()


def calibrate(
    target: HostTarget,
    budget_s: float = DEFAULT_BUDGET_S,
    *,
    cores: Sequence[int] | None = None,
    bundle: str | os.PathLike[str] | None = None,
    stage: Stage = lambda name: None,
    clockwork: Clockwork = _REAL,
) -> HostProfile:
    """Measures the host that `target` describes in about `budget_s` seconds, on `cores` (default: those this process may use).

    The probe runs on the first core; the neighbour on the last one that shares its last-level cache and none of its execution
    units. With one core everything but the effects is measured. With a `bundle`, half as long again goes to the model from
    counters to the levels of its profile, where counters can be read.

    Raises UsageError for a budget that is too short and for a bundle without a profile of this kind of CPU, and what
    `runtime.load` raises for the bundle.
    """
    if not budget_s >= MIN_BUDGET_S:
        raise UsageError(f"a budget of {budget_s:g} s is too short to measure a host; give at least {MIN_BUDGET_S:.0f}s")
    subject = None if bundle is None else subject_of(bundle, target.cpu_model)
    allowed = sorted(os.sched_getaffinity(0) if cores is None else cores)
    measured = allowed[0]
    neighbour = neighbour_of(measured, allowed)
    read_stolen = clockwork.stolen or _processor_times
    before = read_stolen(measured)
    reported = reported_levels(target.l1d_bytes, target.l2_bytes, target.llc_bytes)
    with ExitStack() as stack:
        load = clockwork.start(measured, target.llc_bytes)
        stack.callback(load.stop)
        stage("noise")
        arithmetic = rate(load, Work(counting=True), _counted, NOISE_S, clockwork.sleep, windows=NOISE_WINDOWS)
        stage("caches and memory")
        curve = _curve(load, target.llc_bytes, clockwork)
        seen = levels_seen(curve, reported)
        levels = _bandwidths(load, seen, clockwork)
        chain = _chain_bytes(seen, target)
        load.stop()
        stage("what a neighbour does")
        probe = stack.enter_context(Probe(measured, target.llc_bytes, chain, start=clockwork.start, sleep=clockwork.sleep))
        effects: tuple[Effect, ...] = ()
        floor = drift = 0.0
        probe_noise = probe.sample(NOISE_S)
        if neighbour is not None:
            generator = stack.enter_context(Generator(neighbour, target.llc_bytes, start=clockwork.start))
            settings = dial_settings(target.llc_bytes, levels[-1])
            effects, floor, drift = _effects(probe, generator, settings, budget_s - FIXED_S)
    noise = Noise(
        arithmetic.spread,
        probe_noise.cache.spread,
        probe_noise.memory.spread,
        floor,
        drift,
        _share(before, read_stolen(measured)),
    )
    verdict = verdict_of(noise, effects, neighbour is not None)
    models: tuple[CounterModel, ...] = ()
    notes = notes_of(verdict, noise, levels, neighbour is not None and neighbour not in cache_sharers(measured))
    if subject is not None:
        stage("counters")
        models, more = fit_counters(
            subject, measured, neighbour, target.llc_bytes, MODEL_SHARE * budget_s, kinds=clockwork.kinds, start=clockwork.start
        )
        notes += more
    return HostProfile(
        version=HOST_PROFILE_VERSION,
        target_key=target.key,
        cpu_model=target.cpu_model,
        verdict=verdict,
        notes=notes,
        measured_core=measured,
        neighbour_core=neighbour,
        probe_chain_bytes=chain,
        levels=levels,
        curve=curve,
        effects=effects,
        noise=noise,
        counters=counter_support(measured),
        counter_models=models,
    )


def dial_settings(llc_bytes: int, memory: LevelFound) -> tuple[tuple[str, Dials], ...]:
    """The settings whose effect is measured: each dial at parts of what it can do, and together. A `memory` level tells how fast
    one core reads and writes."""
    full = UNLIMITED_BYTES_PER_S
    return (
        ("resident, quarter", Dials(llc_bytes // 4)),
        ("resident, half", Dials(llc_bytes // 2)),
        ("resident, whole", Dials(llc_bytes)),
        ("read, half rate", Dials(read_bytes_per_s=memory.read_bytes_per_s / 2)),
        ("read", Dials(read_bytes_per_s=full)),
        ("write, half rate", Dials(write_bytes_per_s=memory.write_bytes_per_s / 2)),
        ("write", Dials(write_bytes_per_s=full)),
        ("resident, half, and read", Dials(llc_bytes // 2, read_bytes_per_s=full)),
    )


def counter_support(core: int) -> CounterSupport:
    """Whether hardware counters (of `core`, or of a thread of this process) and resctrl can be read, or why they cannot."""
    perf, perf_reason = _offered(lambda: PerfCounters([core]), tuple(EVENTS))
    resctrl, resctrl_reason = _offered(Resctrl, RESCTRL_FEATURES)
    return CounterSupport(perf, perf_reason, resctrl, resctrl_reason)


def _offered(reader: Callable[[], PerfCounters | Resctrl], names: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    try:
        reader().close()
    except EnvironmentProblem as error:
        return (), str(error)
    return names, ""


def _curve(load: Load, llc_bytes: int, clockwork: Clockwork) -> tuple[CurvePoint, ...]:
    points = []
    for size in working_sets(4 * llc_bytes):
        waiting = follow(load, size, CURVE_S, clockwork.sleep)
        parallel = follow(load, size, CURVE_S, clockwork.sleep, parallel=True)
        points.append(CurvePoint(size, _each_s(waiting), waiting.spread, _each_s(parallel), parallel.spread))
    return tuple(points)


def _each_s(loads: Rate) -> float:
    return 1.0 / loads.per_s if loads.per_s > 0 else 0.0


def _bandwidths(load: Load, seen: Sequence[Seen], clockwork: Clockwork) -> tuple[LevelFound, ...]:
    """Reads and writes of lines from each level but the first: a core takes more from that than a line per access shows."""
    found = []
    inner = 0
    for index, level in enumerate(seen):
        window = 0 if level.name == MEMORY else max(2 * inner, (level.seen_bytes or level.reported_bytes) // 2)
        reads = writes = 0.0
        if index > 0:
            reads = rate(load, Work(read_rate=-1.0, read_window=window), _read, BANDWIDTH_S, clockwork.sleep).per_s
            writes = rate(load, Work(write_rate=-1.0, write_window=window), _written, BANDWIDTH_S, clockwork.sleep).per_s
        found.append(LevelFound(level.name, level.reported_bytes, level.seen_bytes, level.latency_s, reads, writes))
        inner = level.reported_bytes
    return tuple(found)


def _chain_bytes(seen: Sequence[Seen], target: HostTarget) -> int:
    """Three quarters of the last-level cache as seen, but beyond the caches of the core. On a shared host (Zen 3, 8 MiB seen)
    half of it felt no neighbour at all, while all of it was lost now and then without one."""
    shared = seen[-2].seen_bytes * 3 // 4 or target.llc_bytes // CHAIN_SHARE
    return min(max(shared, min(2 * target.l2_bytes, target.llc_bytes)), target.llc_bytes)


def _effects(
    probe: Probe, generator: Generator, settings: Sequence[tuple[str, Dials]], left_s: float
) -> tuple[tuple[Effect, ...], float, float]:
    """The effects, the noise floor and the drift. In each round every setting has its turn after the probe alone, and is compared
    with that."""
    seconds = min(max(left_s, 1.0) / (ROUNDS * (len(settings) + 1)), LONGEST_SAMPLE_S)
    alone: list[Sample] = []
    beside: list[list[tuple[Sample, Achieved]]] = [[] for _ in settings]
    for _ in range(ROUNDS):
        generator.set(Dials())
        alone.append(probe.sample(seconds))
        for (_, dials), samples in zip(settings, beside, strict=True):
            generator.set(dials)
            sample = probe.sample(seconds)
            samples.append((sample, generator.achieved()))
    generator.set(Dials())
    alone.append(probe.sample(seconds))
    effects = tuple(_effect(name, dials, alone, samples) for (name, dials), samples in zip(settings, beside, strict=True))
    repeats = [compare(first, second) for first, second in itertools.pairwise(alone)]
    floor = statistics.median(max(abs(each.cache - 1), abs(each.memory - 1)) for each in repeats)
    end = compare(alone[0], alone[-1])
    return effects, floor, max(abs(end.cache - 1), abs(end.memory - 1))


def _effect(name: str, dials: Dials, alone: Sequence[Sample], samples: Sequence[tuple[Sample, Achieved]]) -> Effect:
    slowdowns = [compare(_between(*alone[index : index + 2]), sample) for index, (sample, _) in enumerate(samples)]
    cache, memory = summary([each.cache for each in slowdowns]), summary([each.memory for each in slowdowns])
    middle = sorted((achieved for _, achieved in samples), key=_moved)[len(samples) // 2]
    return Effect(name, dials, middle.dials, middle.walk_bytes_per_s, cache.per_s, cache.spread, memory.per_s, memory.spread)


def _between(before: Sample, after: Sample) -> Sample:
    """The probe alone around a round: a host that drifts does so on both sides."""
    return Sample(
        Rate((before.cache.per_s + after.cache.per_s) / 2, 0.0), Rate((before.memory.per_s + after.memory.per_s) / 2, 0.0)
    )


def _moved(achieved: Achieved) -> float:
    return achieved.walk_bytes_per_s + achieved.read_bytes_per_s + achieved.write_bytes_per_s


def _processor_times(core: int) -> tuple[float, float]:
    """(stolen, all) clock ticks of a core so far; zeros where Linux does not say."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    for line in lines:
        name, *ticks = line.split()
        if name == f"cpu{core}" and len(ticks) >= 8:
            return float(ticks[7]), float(sum(map(int, ticks[:8])))
    return 0.0, 0.0


def _share(before: tuple[float, float], after: tuple[float, float]) -> float:
    passed = after[1] - before[1]
    return max(after[0] - before[0], 0.0) / passed if passed > 0 else 0.0


def _counted(counters: Counters) -> int:
    return counters.counted_steps


def _read(counters: Counters) -> int:
    return counters.read_bytes


def _written(counters: Counters) -> int:
    return counters.written_bytes
