"""MetaSchedule behind our roles, on programs small enough to search in seconds."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te, topi

from mvcompile import spaces, traces
from mvcompile.frontend.prepare import prepare
from mvcompile.measure.protocol import Candidate
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import extract
from mvcompile.testing.programs import module_of, small_network
from mvcompile.tuning.metaschedule import EvolutionStrategy
from mvcompile.types import Objectives

HOST = detect_target()
TARGET = tvm_target(HOST)
BATCH = 4


def pooling() -> tvm.IRModule:
    data = te.placeholder((1, 16, 16, 32), name="data")
    return module_of(data, topi.nn.pool2d(data, [2, 2], [2, 2], [1, 1], [0, 0, 0, 0], "max", layout="NHWC"))


def convolution() -> tvm.IRModule:
    tasks = extract(prepare(small_network(), HOST)).tasks
    return next(task.module for task in tasks if task.kind.startswith("conv2d"))


def latency(candidate: Candidate) -> float:
    """Some function of the trace."""
    return 1e-3 * (1 + len(candidate.trace) % 17)


def told(candidates: list[Candidate]) -> list[tuple[Candidate, Objectives | None]]:
    return [(candidate, Objectives(latency(candidate), 0.0, 0.0)) for candidate in candidates]


def evolution(module: tvm.IRModule, seed: int = 0) -> EvolutionStrategy:
    return EvolutionStrategy(module, TARGET, seed=seed, batch=BATCH)


def test_proposes_valid_distinct_candidates_again_and_again_and_no_more_than_asked(capfd: pytest.CaptureFixture[str]) -> None:
    module = pooling()
    strategy = evolution(module)
    assert strategy.remaining is None
    found: list[Candidate] = []
    for count in (BATCH, BATCH - 1, BATCH + 3):
        asked = strategy.ask(count)
        assert 0 < len(asked) <= count
        strategy.tell(told(asked))
        found += asked
    assert len(set(found)) == len(found) > BATCH
    assert {candidate.space for candidate in found} == {spaces.GENERIC_SPACE}
    for candidate in found[::BATCH]:
        kernel = tvm.compile(traces.replay(module, candidate.trace).mod, target=TARGET)["main"]
        data = np.random.default_rng(0).standard_normal((1, 16, 16, 32)).astype(np.float32)
        output = tvm.runtime.tensor(np.zeros((1, 8, 8, 32), np.float32))
        kernel(tvm.runtime.tensor(data), output)
        assert np.array_equal(output.numpy(), data.reshape(1, 8, 2, 8, 2, 32).max(axis=(2, 4)))
    assert capfd.readouterr() == ("", "")


def test_is_repeatable_and_leaves_the_global_generator_alone() -> None:
    runs = []
    for _ in range(2):
        np.random.seed(7)
        strategy, found = evolution(pooling(), seed=5), []
        for _ in range(2):
            asked = strategy.ask(BATCH)
            strategy.tell(told(asked))
            found += asked
        runs.append(found)
        assert np.random.random() == pytest.approx(0.07630828937395717)
    assert runs[0] == runs[1]


def test_goes_on_after_an_interruption_with_what_is_new() -> None:
    module = pooling()
    first = evolution(module)
    known = first.ask(BATCH)
    resumed = evolution(module)
    foreign = Candidate(traces.dump(tvm.s_tir.Schedule(module).trace), spaces.DEFAULT_SPACE)
    unreadable = Candidate("not a trace", spaces.GENERIC_SPACE)
    resumed.tell([*told(known[:-1]), (known[-1], None), *told([foreign, unreadable])])
    more = resumed.ask(BATCH)
    assert more
    assert not set(more) & set(known)
    resumed.tell([(candidate, None) for candidate in more])
    assert resumed.remaining is None


def test_ends_when_there_is_nothing_new() -> None:
    data = te.placeholder((1, 4), name="data")
    strategy, found = evolution(module_of(data, topi.nn.relu(data))), 0
    while asked := strategy.ask(BATCH):
        strategy.tell(told(asked))
        found += len(asked)
        assert found < 20
    assert strategy.remaining == 0
    assert strategy.ask(BATCH) == []


def test_a_program_without_blocks_does_no_harm() -> None:
    data = te.placeholder((4, 36), name="data")
    module = module_of(data, topi.cumsum(data, axis=1))
    for candidate in evolution(module).ask(BATCH):
        traces.replay(module, candidate.trace)


def test_a_program_that_the_rules_cannot_handle_has_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise tvm.error.InternalError("Check failed: a rule met something it does not know")

    monkeypatch.setattr(tvm.s_tir.meta_schedule.TuneContext, "generate_design_space", fail)
    strategy = evolution(pooling())
    assert strategy.ask(BATCH) == []
    assert strategy.remaining == 0
