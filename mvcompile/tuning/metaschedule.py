"""MetaSchedule behind our own roles: its evolutionary search over the generic space, with its XGBoost cost model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Schedule, ScheduleError

from mvcompile import traces
from mvcompile.measure.protocol import Candidate
from mvcompile.spaces import GENERIC_SPACE
from mvcompile.types import Objectives

FAILED_SECONDS = 1e10
"""MetaSchedule's own convention for a candidate that did not run; it stays inside this module."""
_LOGGER = logging.getLogger("mvcompile.metaschedule")
_LOGGER.setLevel(logging.ERROR)
_LOGGER.propagate = False

REPEATED_ROUNDS = 5
"""So many rounds in a row may propose nothing but what an earlier run has measured (which MetaSchedule does not know)."""
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


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Gives numpy's global generator a seed for a while: TVM's model guesses with it as long as it has seen too little."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def _model() -> ms.cost_model.XGBModel:
    return ms.cost_model.XGBModel(num_warmup_samples=8, verbose_eval=0, num_tuning_cores=1)


def _result(latency_s: float | None) -> ms.runner.RunnerResult:
    return ms.runner.RunnerResult([FAILED_SECONDS if latency_s is None else latency_s], None)


def _plain(module: tvm.IRModule) -> tvm.IRModule:
    """`module` without the wish of some operators (pools) for a schedule rule of their own: there is none, of which TVM warns."""
    schedule = Schedule(module)
    try:
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    except ScheduleError:  # a program that is not made of blocks
        return module
    for block in blocks:
        if "schedule_rule" in schedule.get(block).annotations:
            schedule.unannotate(block, "schedule_rule")
    return schedule.mod


class _Measurables:
    """Candidates of one task as MetaSchedule has them."""

    def __init__(self, module: tvm.IRModule) -> None:
        self._module = module
        self.arguments = ms.arg_info.ArgInfo.from_entry_func(module, remove_preproc=True)
        self._known: dict[Candidate, Any] = {}

    def add(self, candidate: Candidate, measurable: Any) -> None:
        self._known[candidate] = measurable

    def of(self, candidate: Candidate) -> Any:
        """A `MeasureCandidate`, or None if the trace does not replay: its outcome says so when it is measured."""
        if candidate not in self._known:
            try:
                schedule = traces.replay(self._module, candidate.trace)
                self._known[candidate] = ms.MeasureCandidate(schedule, self.arguments)
            except Exception:  # TVM raises several types
                self._known[candidate] = None
        return self._known[candidate]

    def of_all(self, results: Sequence[tuple[Candidate, float | None]]) -> tuple[list[Any], list[Any]]:
        """What of `results` replays, and its outcomes, as a model learns from them."""
        usable = [(self.of(candidate), latency) for candidate, latency in results if self.of(candidate) is not None]
        return [each for each, _ in usable], [_result(latency) for _, latency in usable]


class EvolutionStrategy:
    """MetaSchedule's evolutionary search with its generic CPU rules, as a `search.Strategy`.

    A program that the rules cannot handle has no candidates.
    """

    def __init__(self, module: tvm.IRModule, target: tvm.target.Target, *, seed: int, batch: int) -> None:
        module = _plain(module)
        self._module, self._target, self._seed, self._batch = module, target, seed, batch
        self._measurables = _Measurables(module)
        self._model = _model()
        self._features = _context(module, target, seed)
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(module)
        self._search: Any = None
        self._waiting: list[Candidate] = []
        self._seen: set[str] = set()
        self._ended = False

    @property
    def remaining(self) -> int | None:
        return 0 if self._ended else None

    def ask(self, count: int) -> list[Candidate]:
        """See `Strategy.ask`. MetaSchedule proposes in rounds of the constructor's `batch`; what is not asked for waits."""
        if not self._waiting and not self._ended:
            self._waiting = self._new_candidates()
            self._ended = not self._waiting
        asked, self._waiting = self._waiting[:count], self._waiting[count:]
        return asked

    def relate(self, tasks: Sequence[Sequence[tuple[Candidate, Objectives | None]]]) -> None:
        """See `Strategy.relate`. MetaSchedule's model learns from programs, which other tasks' traces alone do not give."""

    def tell(self, results: Sequence[tuple[Candidate, Objectives | None]]) -> None:
        """See `Strategy.tell`; candidates of other spaces are ignored, since their traces cannot be mutated by these rules."""
        generic = [
            (candidate, None if found is None else found.latency_s)
            for candidate, found in results
            if candidate.space == GENERIC_SPACE
        ]
        for candidate, latency in generic:
            self._seen.add(candidate.trace)
            if latency is not None:
                self._remember(candidate, latency)
        candidates, outcomes = self._measurables.of_all(generic)
        if not candidates:
            return
        self._model.update(self._features, candidates, outcomes)
        if self._search is not None:
            self._search.notify_runner_results(candidates, outcomes)

    def _new_candidates(self) -> list[Candidate]:
        for _ in range(REPEATED_ROUNDS):
            try:
                proposals = self._propose()
            except Exception:  # TVM raises several types for programs that its rules cannot handle
                return []
            fresh = {Candidate(traces.dump(each.sch.trace), GENERIC_SPACE): each for each in proposals}
            fresh = {candidate: each for candidate, each in fresh.items() if candidate.trace not in self._seen}
            self._seen.update(candidate.trace for candidate in fresh)
            for candidate, proposal in fresh.items():
                self._measurables.add(candidate, proposal)
            if fresh or not proposals:
                return list(fresh)
        return []

    def _propose(self) -> Sequence[Any]:
        seed = (self._seed + len(self._seen)) % 2**30
        with _seeded(seed):
            if self._search is None:
                # Another seed when the search goes on after an interruption: the same one would propose what is known already.
                search = ms.search_strategy.EvolutionarySearch(
                    population_size=64, init_min_unmeasured=self._batch, genetic_num_iters=2, max_fail_count=2
                )
                space = ms.space_generator.PostOrderApply(sch_rules="llvm", postprocs="llvm", mutator_probs="llvm")
                context = _context(self._module, self._target, seed, space_generator=space, search_strategy=search)
                designs = context.generate_design_space()
                context.pre_tuning(1 << 20, self._batch, designs, self._database, self._model)
                self._search = context
            return self._search.generate_measure_candidates() or ()

    def _remember(self, candidate: Candidate, latency: float) -> None:
        """Gives a measured schedule to the search's own database, which it draws parents from. (One that was recorded by another
        version of the rules and does not replay counts as measured, but not as a parent.)"""
        measurable = self._measurables.of(candidate)
        if measurable is not None:
            record = ms.database.TuningRecord(
                measurable.sch.trace, self._workload, [latency], self._target, self._measurables.arguments
            )
            self._database.commit_tuning_record(record)
