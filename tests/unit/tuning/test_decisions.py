"""The cost model of finite spaces."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from mvcompile import spaces
from mvcompile.measure.protocol import Candidate
from mvcompile.search.strategy import PoolStrategy
from mvcompile.target import detect_target
from mvcompile.testing.networks import network, only_task
from mvcompile.tuning.decisions import LEAST_RELATED, LEAST_RESULTS, DecisionModel
from mvcompile.types import Objectives

HOST = detect_target()


def pool_of(channels: int, size: int) -> list[Candidate]:
    """A convolution's dense and Winograd candidates."""
    task = only_task(network(lambda graph, x: graph.relu(graph.conv(x, channels, 3)), (1, 16, size, size)), HOST)
    found = spaces.structured_candidates(task.module, HOST)
    assert len(found) > 60
    return found


@pytest.fixture(scope="module")
def pool() -> list[Candidate]:
    return pool_of(32, 12)


@pytest.fixture(scope="module")
def larger() -> list[Candidate]:
    """Those of another convolution: more pixels and channels, so that most designs differ."""
    return pool_of(64, 28)


def decided(candidate: Candidate) -> int:
    """The value of the first decision: rows of a tile in most designs, rows of a strip in the others."""
    instructions, ((place, choice), *_) = json.loads(candidate.trace)
    return int(instructions[place][2][0][choice])


def slower_with_few_rows(candidate: Candidate) -> float:
    return 1e-3 / (1 + decided(candidate))


def slower_by_design(candidate: Candidate) -> float:
    return 1e-3 * (1 + len(json.loads(candidate.trace)[0]) % 7)


def taking(latency_s: float, footprint: float = 0.0, traffic: float = 1e6) -> Objectives:
    return Objectives(latency_s, footprint, traffic)


def results(
    candidates: list[Candidate], latency: Callable[[Candidate], float], scale: float = 1.0
) -> list[tuple[Candidate, Objectives | None]]:
    """Traffic grows with the rows; Winograd has a footprint and the others have none."""
    return [
        (each, taking(scale * latency(each), scale * 1e6 * each.space.startswith("winograd"), scale * 1e5 * decided(each)))
        for each in candidates
    ]


def correlation(model: DecisionModel, candidates: list[Candidate], latency: Callable[[Candidate], float]) -> float:
    predicted = model.predict(candidates)
    assert predicted is not None
    return float(np.corrcoef(np.log(predicted[:, 0]), [np.log(latency(each)) for each in candidates])[0, 1])


@pytest.mark.parametrize("latency", [slower_with_few_rows, slower_by_design])
def test_ranks_what_it_has_not_seen(latency: Callable[[Candidate], float], pool: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    model.fit(results(pool[::2], latency))
    assert correlation(model, pool[1::2], latency) > 0.8


def test_predicts_every_objective_in_its_unit(pool: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    model.fit(results(pool[::2], slower_with_few_rows))
    predicted = model.predict(pool[1::2])
    assert predicted is not None
    actual = np.array([found.vector() for _, found in results(pool[1::2], slower_with_few_rows) if found is not None])
    assert predicted.shape == actual.shape
    assert (predicted >= 0).all()
    assert np.median(np.abs(predicted[:, 0] / actual[:, 0] - 1)) < 0.1
    assert np.abs(predicted[:, 1] - actual[:, 1]).max() < 1e5
    assert np.median(np.abs(predicted[:, 2] / actual[:, 2] - 1)) < 0.1


def test_knows_nothing_before_it_has_seen_enough(pool: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    assert model.predict(pool[:5]) is None
    model.fit([*((candidate, taking(1e-3)) for candidate in pool[: LEAST_RESULTS - 1]), (pool[-1], None)])
    assert model.predict(pool[:5]) is None
    model.fit([(candidate, taking(1e-3)) for candidate in pool[:LEAST_RESULTS]])
    assert model.predict(pool[:5]) is not None
    assert model.predict([]) is None


def test_learns_what_fails(pool: list[Candidate]) -> None:
    fails = [candidate for candidate in pool if decided(candidate) <= 3]
    model = DecisionModel(seed=0)
    model.fit([(candidate, None if candidate in fails else taking(1e-3)) for candidate in pool[::2]])
    predicted = model.predict(pool[1::2])
    assert predicted is not None
    latencies = dict(zip(pool[1::2], predicted[:, 0], strict=True))
    good = [latency for candidate, latency in latencies.items() if candidate not in fails]
    bad = [latency for candidate, latency in latencies.items() if candidate in fails]
    assert np.median(bad) > 2.7 * np.median(good)


def test_records_of_other_spaces_do_no_harm(pool: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    others = [Candidate("not a trace", "generic"), Candidate("[[],[]]", "default")]
    model.fit([*((each, taking(5e-3)) for each in others), *results(pool[:40], slower_with_few_rows)])
    assert np.isfinite(model.predict([*others, *pool])).all()


def test_learns_from_related_tasks_before_it_has_results(pool: list[Candidate], larger: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    model.relate([results(larger, slower_with_few_rows, scale=30.0)])
    assert correlation(model, pool, slower_with_few_rows) > 0.8


def test_own_results_correct_what_related_tasks_say(pool: list[Candidate], larger: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    model.relate([results(larger, lambda each: 1e-6 / slower_with_few_rows(each))])
    assert correlation(model, pool[1::2], slower_with_few_rows) < -0.5
    model.fit(results(pool[:3], slower_with_few_rows, scale=7.0))
    few = model.predict(pool[:3])
    assert few is not None
    assert np.log(few[:, 0]).mean() == pytest.approx(
        np.mean([np.log(7.0 * slower_with_few_rows(each)) for each in pool[:3]]), abs=0.01
    )
    model.fit(results(pool[::2], slower_with_few_rows))
    assert correlation(model, pool[1::2], slower_with_few_rows) > 0.8


def test_tasks_of_other_spaces_or_with_too_few_results_are_not_related(pool: list[Candidate], larger: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    foreign = [(Candidate(each.trace, "generic"), found) for each, found in results(larger, slower_with_few_rows)]
    few = results(larger[: LEAST_RELATED - 1], slower_with_few_rows)
    failed: list[tuple[Candidate, Objectives | None]] = [(each, None) for each in larger]
    model.relate([foreign, failed, *([few] * 9)])
    assert model.predict(pool) is None


def test_hears_of_new_results_of_related_tasks(pool: list[Candidate], larger: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    model.relate([results(larger[:LEAST_RESULTS], lambda each: 1e-3)])
    assert model.predict(pool) is not None
    model.relate([results(larger, slower_with_few_rows)])
    assert correlation(model, pool, slower_with_few_rows) > 0.8


@pytest.mark.parametrize("related", [False, True])
def test_a_guided_pool_is_repeatable_and_finds_the_best_early(
    related: bool, pool: list[Candidate], larger: list[Candidate]
) -> None:
    runs = []
    for _ in range(2):
        strategy = PoolStrategy(pool, seed=1, model=DecisionModel(seed=1))
        if related:
            strategy.relate([results(larger, slower_with_few_rows)])
        found: list[Candidate] = []
        for _ in range(3):
            asked = strategy.ask(10)
            strategy.tell(results(asked, slower_with_few_rows))
            found += asked
        runs.append(found)
    assert runs[0] == runs[1]
    guided, blind = (
        np.mean([decided(each) for each in batch[:6]]) for batch in (runs[0][:10] if related else runs[0][10:], pool)
    )
    assert guided > 1.2 * blind
