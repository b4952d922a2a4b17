"""A session that adapts: a monitor tells the level, a policy what to run, and this puts them to work beside the runs.

Nothing is done after most runs but to count them and look at the clock: what a monitor computes costs 0.2 to 0.4 ms in the
caches that a run leaves behind. It is done so seldom that it stays below a hundredth of the time that runs take.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import MappingProxyType

import numpy as np

from mvcompile.errors import UsageError
from mvcompile.runtime.events import LayerChange, Stats, Switch
from mvcompile.runtime.integers import integer
from mvcompile.runtime.memory import Array
from mvcompile.runtime.monitors import ManualMonitor, Monitor, level_named
from mvcompile.runtime.policy import Costs, Decision, Policy, Situation, Variants
from mvcompile.runtime.program import Program
from mvcompile.runtime.stamps import ROWS, StampRing
from mvcompile.runtime.tracing import Trace

_PERIOD_NS = 20_000_000
"""Time between analyses, at least: two of them and the run in which a level begins have to take less than 100 ms."""
_COST_SHARE = 1 / 125
"""Of the runs' time, what analyses take."""
_MOST_SHARE = 1 / 105
"""Of the runs' time, what they may have taken for a suspicion to hasten the next one."""
_FIRST_COST_NS = 300_000.0
_LATENCIES = 1024
_SWITCHES = 32


class Adaptation:
    """Watches the runs of a program and selects its variants. `start`, `stop` and `trace` are called between runs, the rest at
    any time. Nothing here refers to the session, so that the session can be collected."""

    def __init__(
        self,
        program: Program,
        layers: Sequence[str],
        costs: Costs,
        policy: Policy,
        monitor: Monitor,
        on_switch: Callable[[Switch], object] | None = None,
    ) -> None:
        self._program = program
        self._layers = tuple(layers)
        self._costs = costs
        self._policy = policy
        self._monitor = monitor
        self._on_switch = on_switch
        self._lock = threading.RLock()
        self._ring = StampRing(len(self._layers), self._listen)
        self._variants: Variants = ()
        self._changed_ns = -1
        self._decision = Decision(self._selected()[0])
        self._level: int | None = None
        self._level_since_s = time.monotonic()
        self._level_s = [0.0] * len(costs.levels)
        self._latencies_ns: deque[int] = deque(maxlen=_LATENCIES)
        self._busy_ns = 0.0
        self._switches: deque[Switch] = deque(maxlen=_SWITCHES)
        self._cost_ns = _FIRST_COST_NS
        self._spent_ns = 0
        self._pending: list[Array] = []  # stamps that the monitor has not seen
        self._collected = self._analysed = self._last_ns = 0
        self._least_runs = 1
        self._trace: Trace | None = None

    def start(self) -> None:
        """Watch from now on."""
        self._program.record(self._ring)
        self._tell(self._decide())

    def stop(self) -> None:
        """Watch no more. What is selected stays."""
        self._program.record(None)
        self._monitor.close()

    def set_level(self, name: str) -> None:
        """Let `name` be the level, at once. Raises UsageError for a level that there is not, or if the monitor is not manual."""
        level = level_named(name, self._costs.levels)
        if not isinstance(self._monitor, ManualMonitor):
            raise UsageError(f"the {self._monitor.name} monitor finds the level itself: to set it, use monitor='manual'")
        with self._lock:
            self._monitor.level = level
            told = self._decide()
        self._tell(told)

    def trace(self, trace: Trace | None) -> None:
        """Let every run leave its steps in `trace`, or none."""
        with self._lock:
            self._collect()
            self._trace = trace
            self._ring.due_ns = 0
            if trace is not None and self._level is not None:
                trace.level(time.monotonic_ns(), self._costs.levels[self._level])

    @property
    def traced(self) -> bool:
        """Whether runs leave their steps in a trace."""
        return self._trace is not None

    def stats(self) -> Stats:
        """What was done so far."""
        with self._lock:
            self._collect()
            known = np.array(self._latencies_ns) * 1e-9
            mean, median, p99 = (known.mean(), *np.percentile(known, (50, 99))) if len(known) else (0.0, 0.0, 0.0)
            level = self._level or 0
            spent = self._level_s.copy()
            spent[level] += time.monotonic() - self._level_since_s
            return Stats(
                runs=self._ring.runs,
                latency_mean_s=float(mean),
                latency_median_s=float(median),
                latency_p99_s=float(p99),
                monitor=self._monitor.name,
                level=self._costs.levels[level],
                level_s=MappingProxyType(dict(zip(self._costs.levels, spent, strict=True))),
                switches=tuple(self._switches),
                monitor_s=self._spent_ns * 1e-9,
                monitor_share=self._spent_ns / self._busy_ns if self._busy_ns else 0.0,
            )

    def _listen(self) -> None:
        """A run has ended, some time after the last analysis."""
        if self._ring.runs - self._analysed < self._least_runs and self._trace is None:
            return
        begin_ns = time.monotonic_ns()
        with self._lock:
            last_ns = self._analyse()
            told = self._decide()
            self._schedule(begin_ns, time.monotonic_ns(), last_ns)
        self._tell(told)

    def _analyse(self) -> int:
        """Show the monitor the runs since the last time; return how long the last one took (ns, 0 if there is none)."""
        self._collect()
        self._analysed = self._ring.runs
        if not self._pending:
            return 0
        stamps = self._pending[0] if len(self._pending) == 1 else np.concatenate(self._pending)
        self._pending.clear()
        variants, changed_ns = self._selected()
        if int(stamps[0, 0]) <= changed_ns:  # runs in order: the first ones had another selection, or part of one
            stamps = stamps[stamps[:, 0] > changed_ns]
        self._monitor.see((stamps[:, 1:] - stamps[:, :-1]) * 1e-9, variants)
        return self._last_ns

    def _collect(self) -> None:
        """Take in the runs since the last time, for the statistics and the trace."""
        stamps = self._ring.take()
        if not len(stamps):
            return
        self._pending.append(stamps)
        durations_ns = (stamps[:, -1] - stamps[:, 0]).tolist()
        self._latencies_ns.extend(durations_ns)
        self._last_ns = durations_ns[-1]
        self._busy_ns += sum(durations_ns) / len(durations_ns) * (self._ring.runs - self._collected)
        self._collected = self._ring.runs
        if self._trace is not None:
            variants, changed_ns = self._selected()
            for row in stamps:
                self._trace.run(row, variants if row[0] > changed_ns else None)

    def _selected(self) -> tuple[Variants, int]:
        """What is selected, and since when."""
        with self._program.changing:
            changed_ns = self._program.changed_ns
            if changed_ns != self._changed_ns:
                self._variants, self._changed_ns = self._program.selected(), changed_ns
            return self._variants, changed_ns

    def _decide(self) -> Switch | None:
        with self._lock:
            level, before = self._monitor.level, self._level
            now_s = time.monotonic()
            if level == before == self._decision.level and now_s < self._decision.until_s:
                return None
            situation = Situation(now_s, level, self._monitor.certain(self._selected()[0]))
            decision = self._policy(self._costs, situation, self._decision)
            changes: tuple[LayerChange, ...] = ()
            if decision is not self._decision:
                self._require_sound(decision)
                changes = self._select(decision.variants)
                self._decision = decision
            if level == before and not changes:
                return None
            if level != before:
                if before is not None:
                    self._level_s[before] += now_s - self._level_since_s
                self._level, self._level_since_s = level, now_s
            names = self._costs.levels
            ratio = None if level == before or before is None else self._monitor.ratio
            reason = decision.reason if decision.level == level else f"{names[level]} is new; {decision.reason}"
            switch = Switch(now_s, None if before is None else names[before], names[level], ratio, changes, reason)
            self._switches.append(switch)
            if self._trace is not None:
                self._trace.switch(switch)
            return switch

    def _select(self, variants: Variants) -> tuple[LayerChange, ...]:
        with self._program.changing:
            present, _ = self._selected()
            if present == variants:
                return ()
            self._program.select_all(variants)
            self._variants, self._changed_ns = variants, self._program.changed_ns
        changed = zip(self._layers, present, variants, strict=True)
        return tuple(LayerChange(layer, one, other) for layer, one, other in changed if one != other)

    def _require_sound(self, decision: Decision) -> None:
        """A policy may be anybody's."""
        counts = [len(row) for row in self._costs.latency_s[0]]
        variants = decision.variants
        if isinstance(variants, tuple) and len(variants) == len(counts):
            wrong = [
                step
                for step, (one, count) in enumerate(zip(variants, counts, strict=True))
                if integer(one) is None or not 0 <= one < count
            ]
            if not wrong:
                return
            step = wrong[0]
            what = f"variant {variants[step]!r} for layer {self._layers[step]!r}, which has 0 to {counts[step] - 1}"
        else:
            what = f"{variants!r}, expected a tuple of {len(counts)} variants"
        raise UsageError(f"the policy {self._policy!r} chose {what}")

    def _schedule(self, begin_ns: int, end_ns: int, last_ns: int) -> None:
        cost_ns = end_ns - begin_ns
        self._spent_ns += cost_ns
        self._cost_ns += (min(cost_ns, 4 * self._cost_ns) - self._cost_ns) / 5  # one that was interrupted says little
        if self._trace is not None:
            self._ring.due_ns = 0
            return
        soon = self._monitor.suspects and self._spent_ns <= _MOST_SHARE * self._busy_ns
        pause_ns = 0.0 if soon else self._cost_ns / _COST_SHARE
        # The run that ends next to the time, not the one after it.
        self._ring.due_ns = end_ns + int(max(_PERIOD_NS, pause_ns) - last_ns / 2)
        self._least_runs = min(ROWS // 2, max(1, round(pause_ns / last_ns))) if last_ns else 1

    def _tell(self, switch: Switch | None) -> None:
        if switch is not None and self._on_switch is not None:
            self._on_switch(switch)
