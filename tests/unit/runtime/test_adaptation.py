"""Monitor and policy at work beside runs whose times a test decides."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from mvcompile.errors import UsageError
from mvcompile.runtime.adaptation import Adaptation
from mvcompile.runtime.counters import PERF_FEATURES, Counts
from mvcompile.runtime.events import LayerChange, Switch
from mvcompile.runtime.linear import LinearModel
from mvcompile.runtime.monitors import (
    Auto,
    CountingMonitor,
    Manual,
    Monitor,
    Perf,
    ResidualMonitor,
    level_named,
    monitor_spec,
    start,
)
from mvcompile.runtime.policy import Costs, Decision, Policy, Situation, adaptive, costs_of, fixed
from mvcompile.runtime.residual import Residual
from mvcompile.runtime.stamps import StampRing
from mvcompile.testing.bundles import tiny_manifest
from mvcompile.testing.profiles import interference_of

INTERFERENCE = interference_of(tiny_manifest(), seconds=(1e-4, 2e-4, 1e-4))
LAYERS = ("dense:0", "dense:1", "relu:0")
LEVELS = ("none", "llc", "read", "write")
FASTER = {"none": (0, 0, 0), "llc": (1, 1, 0), "read": (1, 1, 0), "write": (1, 1, 0)}


class Runs:
    """A program without kernels: `run` leaves the stamps of a run at a level, as the profile has it."""

    def __init__(self) -> None:
        self.changing = threading.RLock()
        self.changed_ns = time.monotonic_ns()
        self.variants: tuple[int, ...] = (0, 0, 0)
        self.ring: StampRing | None = None
        self.random = np.random.default_rng(0)

    def record(self, ring: StampRing | None) -> None:
        self.ring = ring

    def selected(self) -> tuple[int, ...]:
        return self.variants

    def select_all(self, variants: tuple[int, ...]) -> None:
        self.variants = variants
        self.changed_ns = time.monotonic_ns()

    def run(self, level: str = "none", *, due: bool = True, changed: bool = False, slower: float = 1.0) -> None:
        ring = self.ring
        assert ring is not None
        table = INTERFERENCE.profiles[0].latency_s[LEVELS.index(level)]
        seconds = [row[variant] * slower for row, variant in zip(table, self.variants, strict=True)]
        begin = time.monotonic_ns()
        steps = [int(1e9 * second * np.exp(0.02 * self.random.standard_normal())) for second in seconds]
        ring.write([begin, *(begin + int(end) for end in np.cumsum(steps))])
        if changed:
            self.changed_ns = time.monotonic_ns()
        ring.due_ns = 0 if due else 2**62
        ring.advance()


def adaptation(
    runs: Runs, policy: Policy | None = None, monitor: Monitor | None = None, told: list[Switch] | None = None
) -> Adaptation:
    found = Adaptation(
        runs,  # type: ignore[arg-type]
        LAYERS,
        costs_of(tiny_manifest(), INTERFERENCE, 1),
        adaptive(dwell_s=0.0) if policy is None else policy,
        ResidualMonitor(Residual(), INTERFERENCE, 1) if monitor is None else monitor,
        None if told is None else told.append,
    )
    found.start()
    found._least_runs = 1
    return found


def test_a_neighbour_that_comes_and_goes() -> None:
    runs = Runs()
    told: list[Switch] = []
    found = adaptation(runs, told=told)
    for level in ("none", "write", "none", "llc"):
        for _ in range(6):
            found._least_runs = 1
            runs.run(level)
        assert found.stats().level == level
        assert runs.variants == FASTER[level]
    assert [(one.before, one.after) for one in told] == [(None, "none"), ("none", "write"), ("write", "none"), ("none", "llc")]
    assert told[1].layers == (LayerChange("dense:0", 0, 1), LayerChange("dense:1", 0, 1))
    assert told[0].layers == ()
    assert [one.log_likelihood_ratio is None for one in told] == [True, False, False, False]
    assert all((one.log_likelihood_ratio or 9e9) > Residual().threshold for one in told)
    assert found.stats().switches == tuple(told)


def test_runs_in_which_the_selection_changed_say_nothing() -> None:
    runs = Runs()
    found = adaptation(runs)
    runs.run()
    for _ in range(20):
        found._least_runs = 1
        runs.run("write", changed=True)
    assert found.stats().level == "none"
    for _ in range(3):
        found._least_runs = 1
        runs.run("write")
    assert found.stats().level == "write"


def test_runs_between_two_analyses_count_together() -> None:
    runs = Runs()
    found = adaptation(runs)
    runs.run()
    for _ in range(7):
        runs.run("write", due=False)
    assert found._level == 0
    for held in ("none", "write"):  # both halves say so, and one run more
        found._least_runs = 1
        runs.run("write")
        assert found.stats().level == held


def test_asking_for_statistics_takes_nothing_from_the_monitor() -> None:
    runs = Runs()
    found = adaptation(runs)
    runs.run()
    for _ in range(7):
        runs.run("write", due=False)
        assert found.stats().level == "none"
    assert found.stats().runs == 8
    for held in ("none", "write"):
        found._least_runs = 1
        runs.run("write")
        assert found.stats().level == held


def test_after_a_switch_times_are_compared_with_those_of_what_runs() -> None:
    runs = Runs()
    found = adaptation(runs, fixed((1, 0, 0)))
    assert runs.variants == (1, 0, 0)
    for _ in range(50):
        found._least_runs = 1
        runs.run("none")
    assert found.stats().level == "none"
    runs.select_all((1, 1, 0))  # by hand
    for _ in range(50):
        found._least_runs = 1
        runs.run("none")
    assert found.stats().level == "none"
    assert runs.variants == (1, 1, 0)


def test_statistics() -> None:
    runs = Runs()
    found = adaptation(runs, fixed())
    empty = found.stats()
    assert (empty.runs, empty.latency_mean_s, empty.latency_p99_s, empty.monitor_share) == (0, 0.0, 0.0, 0.0)
    for _ in range(99):
        found._least_runs = 1
        runs.run()
    found._least_runs = 1
    runs.run(slower=10.0)
    stats = found.stats()
    assert (stats.runs, stats.monitor, stats.level) == (100, "residual", "none")
    assert stats.latency_median_s == pytest.approx(4e-4, rel=0.03)
    assert stats.latency_mean_s == pytest.approx(4e-4 * 1.09, rel=0.03)
    assert stats.latency_median_s < stats.latency_p99_s < 4.2e-3
    assert stats.monitor_s > 0
    assert stats.monitor_share == pytest.approx(stats.monitor_s / (100 * stats.latency_mean_s))
    assert set(stats.level_s) == set(LEVELS)
    assert stats.level_s["none"] > 0
    assert stats.level_s["write"] == 0


def test_a_level_that_is_set_is_taken_up_at_once_and_its_time_is_kept() -> None:
    runs = Runs()
    told: list[Switch] = []
    found = adaptation(runs, monitor=start(Manual("llc"), None, LEVELS, [0]), told=told)
    assert runs.variants == (1, 1, 0)
    found.set_level("none")
    assert runs.variants == (0, 0, 0)
    assert [(one.before, one.after) for one in told] == [(None, "llc"), ("llc", "none")]
    spent = found.stats().level_s
    assert spent["llc"] == pytest.approx(told[1].time_s - told[0].time_s, rel=0.5)
    with pytest.raises(UsageError, match="there is no level 'lcc': did you mean 'llc'"):
        found.set_level("lcc")
    with pytest.raises(UsageError, match="the residual monitor finds the level itself"):
        adaptation(Runs()).set_level("llc")


def test_a_policy_of_ones_own() -> None:
    def third(costs: Costs, situation: Situation, before: Decision) -> Decision:
        return before if before.level >= 0 else Decision((0, 1, 0), situation.level, situation.now_s, "mine")

    runs = Runs()
    told: list[Switch] = []
    adaptation(runs, third, told=told)
    assert runs.variants == (0, 1, 0)
    assert (told[0].reason, told[0].layers) == ("mine", (LayerChange("dense:1", 0, 1),))


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ((0, 2, 0), "variant 2 for layer 'dense:1', which has 0 to 1"),
        ((0, -1, 0), "variant -1 for layer 'dense:1'"),
        ((0, 0.0, 0), "variant 0.0 for layer"),
        ((0, 0), r"\(0, 0\), expected a tuple of 3 variants"),
        ([0, 0, 0], r"\[0, 0, 0\], expected a tuple of 3 variants"),
    ],
)
def test_a_policy_that_chooses_what_there_is_not(variants: object, message: str) -> None:
    runs = Runs()

    def wrong(costs: Costs, situation: Situation, before: Decision) -> Decision:
        return Decision(variants, situation.level)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=f"the policy .*wrong.* chose {message}"):
        adaptation(runs, wrong)
    assert runs.variants == (0, 0, 0)


def test_what_a_policy_or_a_callback_raises_reaches_the_run_and_the_next_one_goes_on() -> None:
    failing = [False]

    def policy(costs: Costs, situation: Situation, before: Decision) -> Decision:
        return replace(before, level=1 // (0 if failing[0] else 1))

    runs = Runs()
    found = adaptation(runs, policy)
    failing[0] = True
    with pytest.raises(ZeroDivisionError):
        runs.run()
    failing[0] = False
    found._least_runs = 1
    runs.run()
    assert found.stats().runs == 2


def test_analyses_stay_far_apart_if_they_take_long() -> None:
    """What an analysis takes decides when the next one is due: later for short runs, every run for long ones."""
    found = adaptation(Runs())
    for cost_ns, last_ns in ((300_000, 5_000_000), (300_000, 100_000_000), (100_000, 5_000_000), (2_000_000, 50_000_000)):
        found._cost_ns = float(cost_ns)
        found._schedule(0, cost_ns, last_ns)
        pause_ns = found._ring.due_ns - cost_ns + last_ns / 2
        assert pause_ns == pytest.approx(max(20e6, 125 * cost_ns), rel=0.01)
        assert found._least_runs == max(1, min(32, round(125 * cost_ns / last_ns)))


def test_a_suspicion_is_looked_into_soon_unless_that_gets_expensive() -> None:
    runs = Runs()
    found = adaptation(runs)
    runs.run()
    found._least_runs = 1
    runs.run("write")
    assert found._monitor.suspects
    for busy_ns, soon in ((1e12, True), (1.0, False)):
        found._busy_ns = busy_ns
        found._schedule(0, 400_000, 5_000_000)
        assert (found._least_runs == 1, found._ring.due_ns < 21_000_000) == (soon, soon)


def model(features: tuple[str, ...] = PERF_FEATURES, levels: tuple[str, ...] = LEVELS) -> LinearModel:
    """The first feature over 1e6 is the share of the heaviest traffic."""
    zeros = (0.0,) * len(features)
    scale = (1e6, *(1.0,) * (len(features) - 1))
    points = tuple((index / 3,) for index in range(len(levels)))
    return LinearModel(features, levels, points, zeros, scale, ((1.0, *zeros[1:]),), (0.0,))


class Source:
    """Counters that advance by `per_s` misses a second."""

    def __init__(self) -> None:
        self.seconds = self.misses = self.per_s = 0.0

    def read(self) -> Counts:
        self.seconds += 1
        self.misses += self.per_s
        return Counts(self.seconds, 1.0, 1.0, 1.0, self.misses)

    def close(self) -> None:
        self.seconds = -1.0


def test_counters_count_when_two_readings_agree() -> None:
    source = Source()
    monitor = CountingMonitor("perf", source, model())  # type: ignore[arg-type]
    levels = []
    for per_s in (0.0, 1e6, 0.0, 1e6, 1e6, 0.6e6, 0.7e6):
        source.per_s = per_s
        monitor.see(np.zeros((0, 3)), (0, 0, 0))
        levels.append(monitor.level)
    assert levels == [0, 0, 0, 0, 3, 3, 2]
    assert monitor.ratio is None
    monitor.close()
    assert source.seconds == -1.0


def test_names_of_monitors() -> None:
    assert [monitor_spec(name) for name in ("residual", "manual", "auto")] == [Residual(), Manual(), Auto()]
    own = Residual(threshold=12.0)
    assert monitor_spec(own) is own
    with pytest.raises(UsageError, match=r"monitor 'perf' needs the model .*: pass Perf\.read\(path\) of a host profile"):
        monitor_spec("perf")
    for wrong in ("residuals", 3):
        with pytest.raises(UsageError, match=r"monitor is .*, expected 'residual', 'manual', 'auto', 'perf', 'resctrl' or"):
            monitor_spec(wrong)  # type: ignore[arg-type]


def test_auto_takes_what_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(Auto(), INTERFERENCE, LEVELS, [0]).name == "residual"
    monkeypatch.setattr("mvcompile.runtime.monitors.PerfCounters", lambda cores: Source())
    assert start(Auto(model()), INTERFERENCE, LEVELS, [0]).name == "perf"
    monkeypatch.undo()
    monkeypatch.setattr("mvcompile.runtime.counters._SYSCALLS", {})
    assert start(Auto(model()), INTERFERENCE, LEVELS, [0]).name == "residual"


def test_monitors_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="the bundle has no profile, so there is nothing to compare step times with: run"):
        start(Residual(), None, LEVELS, [0])
    with pytest.raises(UsageError, match="the bundle has estimated times only"):
        start(Residual(), replace(INTERFERENCE, source="estimated: by hand"), LEVELS, [0])
    with pytest.raises(UsageError, match="the model reads a, this monitor shows llc_misses_per_s"):
        start(Perf(model(("a",))), INTERFERENCE, LEVELS, [0])
    with pytest.raises(UsageError, match="the model reads a: there are monitors of"):
        start(Auto(model(("a",))), INTERFERENCE, LEVELS, [0])
    with pytest.raises(UsageError, match="the model knows the levels none, the bundle has none, llc"):
        start(Perf(model(levels=("none",))), INTERFERENCE, LEVELS, [0])
    with pytest.raises(UsageError, match="there is no level 'x': there are none, llc, read, write"):
        level_named("x", LEVELS)


def test_what_is_expected_of_a_selection_is_worked_out_once() -> None:
    monitor = ResidualMonitor(Residual(), INTERFERENCE, 1)
    first = monitor.expected((0, 1, 0))
    assert monitor.expected((0, 1, 0)) is first
    for one in range(2):
        for other in range(2):
            assert monitor.expected((one, other, 0)).variants == (one, other, 0)
