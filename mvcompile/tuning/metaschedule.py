"""MetaSchedule behind our own roles: its XGBoost cost model, and its evolutionary search over the generic space."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Schedule

from mvcompile import traces
from mvcompile.measure.protocol import Candidate
from mvcompile.spaces import GENERIC_SPACE

FAILED_SECONDS = 1e10
"""MetaSchedule's own convention for a candidate that did not run; it stays inside this module."""
_LOGGER = logging.getLogger("mvcompile.metaschedule")
_LOGGER.setLevel(logging.ERROR)
_LOGGER.propagate = False


_INTRINSICS = "tvm.s_tir.tensor_intrin"


@contextmanager
def _without_intrinsics() -> Iterator[None]:
    """Keeps TuneContext from importing TVM's tensor intrinsics of all devices, which takes 20 s (each of some hundred programs
    inspects the whole call stack) and which the rules for float32 on CPUs do not use."""
    absent = _INTRINSICS not in sys.modules
    if absent:
        sys.modules[_INTRINSICS] = ModuleType(_INTRINSICS)
    try:
        yield
    finally:
        if absent:
            del sys.modules[_INTRINSICS]


def _context(module: tvm.IRModule, target: tvm.target.Target, seed: int, **roles: Any) -> ms.TuneContext:
    with _without_intrinsics():
        return ms.TuneContext(module, target=target, num_threads=1, rand_state=seed + 1, logger=_LOGGER, **roles)


def _model() -> ms.cost_model.XGBModel:
    return ms.cost_model.XGBModel(num_warmup_samples=8, verbose_eval=0, num_tuning_cores=1)


def _result(latency_s: float | None) -> ms.runner.RunnerResult:
    return ms.runner.RunnerResult([FAILED_SECONDS if latency_s is None else latency_s], None)


class XgbCostModel:
    """MetaSchedule's XGBoost model (per-store features) of one task, as a `search.CostModel` over candidates."""

    def __init__(self, module: tvm.IRModule, target: tvm.target.Target, seed: int) -> None:
        self._module = module
        self._context = _context(module, target, seed)
        self._arguments = ms.arg_info.ArgInfo.from_entry_func(module, remove_preproc=True)
        self._model = _model()
        self._scheduled: dict[Candidate, Any] = {}
        self._known = 0

    def fit(self, results: Sequence[tuple[Candidate, float | None]]) -> None:
        """See `CostModel.fit`; candidates that do not replay are left out."""
        fresh = [(self._measurable(candidate), latency) for candidate, latency in results[self._known :]]
        self._known = len(results)
        usable = [(candidate, _result(latency)) for candidate, latency in fresh if candidate is not None]
        if usable:
            self._model.update(self._context, [each[0] for each in usable], [each[1] for each in usable])

    def predict(self, candidates: Sequence[Candidate]) -> list[float]:
        """See `CostModel.predict`."""
        measurable = [self._measurable(candidate) for candidate in candidates]
        usable = [each for each in measurable if each is not None]
        scores = iter(self._model.predict(self._context, usable).tolist() if usable else [])
        return [float("-inf") if each is None else float(next(scores)) for each in measurable]

    def _measurable(self, candidate: Candidate) -> Any:
        if candidate not in self._scheduled:
            try:
                schedule = traces.replay(self._module, candidate.trace)
                self._scheduled[candidate] = ms.MeasureCandidate(schedule, self._arguments)
            except Exception:  # an invalid trace: its outcome says so when it is measured
                self._scheduled[candidate] = None
        return self._scheduled[candidate]


class EvolutionStrategy:
    """MetaSchedule's evolutionary search with its generic CPU rules, as a `search.Strategy`."""

    def __init__(self, module: tvm.IRModule, target: tvm.target.Target, *, seed: int, batch: int) -> None:
        self._module = module
        search = ms.search_strategy.EvolutionarySearch(
            population_size=64, init_min_unmeasured=batch, genetic_num_iters=2, max_fail_count=2
        )
        space = ms.space_generator.PostOrderApply(sch_rules="llvm", postprocs="llvm", mutator_probs="llvm")
        self._context = _context(module, target, seed, space_generator=space, search_strategy=search)
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(module)
        self._arguments = ms.arg_info.ArgInfo.from_entry_func(module, remove_preproc=True)
        self._target, self._batch = target, batch
        self._model = _model()
        self._started = self._ended = False
        self._pending: list[tuple[Candidate, Any]] = []
        self._seen: set[str] = set()

    @property
    def remaining(self) -> int | None:
        return 0 if self._ended else None

    def _start(self) -> None:
        designs = self._context.generate_design_space()
        self._context.pre_tuning(1 << 20, self._batch, designs, self._database, self._model)
        self._started = True

    def ask(self, count: int) -> list[Candidate]:
        """See `Strategy.ask`; MetaSchedule decides the batch's size (the constructor's `batch`)."""
        if not self._started:
            self._start()
        proposals = None if self._ended else self._context.generate_measure_candidates()
        self._pending = []
        for proposal in proposals or ():
            candidate = Candidate(traces.dump(proposal.sch.trace), GENERIC_SPACE)
            if candidate.trace not in self._seen:
                self._seen.add(candidate.trace)
                self._pending.append((candidate, proposal))
        self._ended = not self._pending
        return [candidate for candidate, _ in self._pending]

    def tell(self, results: Sequence[tuple[Candidate, float | None]]) -> None:
        """See `Strategy.tell`; candidates of other spaces are ignored, since their traces cannot be mutated by these rules."""
        generic = [(candidate, latency) for candidate, latency in results if candidate.space == GENERIC_SPACE]
        proposals = dict(self._pending)
        for candidate, latency in generic:
            self._seen.add(candidate.trace)
            if latency is not None:
                self._remember(candidate, latency)
        told = [(proposals[candidate], _result(latency)) for candidate, latency in generic if candidate in proposals]
        if told:
            self._model.update(self._context, [each[0] for each in told], [each[1] for each in told])
            self._context.notify_runner_results([each[0] for each in told], [each[1] for each in told])

    def _remember(self, candidate: Candidate, latency: float) -> None:
        """Gives a measured schedule to the search's own database, which it draws parents from."""
        try:
            schedule: Schedule = traces.replay(self._module, candidate.trace)
        except Exception:  # recorded by another version of the rules: it still counts as measured, but not as a parent
            return
        record = ms.database.TuningRecord(schedule.trace, self._workload, [latency], self._target, self._arguments)
        self._database.commit_tuning_record(record)
