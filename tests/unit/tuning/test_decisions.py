"""The cost model of finite spaces."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mvcompile import spaces
from mvcompile.measure.protocol import Candidate
from mvcompile.search.strategy import PoolStrategy
from mvcompile.target import detect_target
from mvcompile.testing.networks import network, only_task
from mvcompile.tuning.decisions import LEAST_RESULTS, DecisionModel

HOST = detect_target()


@pytest.fixture(scope="module")
def pool() -> list[Candidate]:
    """A convolution's dense and Winograd candidates."""
    task = only_task(network(lambda graph, x: graph.relu(graph.conv(x, 32, 3)), (1, 16, 12, 12)), HOST)
    found = spaces.structured_candidates(task.module, HOST)
    assert len(found) > 60
    return found


def decided(candidate: Candidate) -> int:
    """The value of the first decision: rows of a tile in most designs, rows of a strip in the others."""
    instructions, ((place, choice), *_) = json.loads(candidate.trace)
    return int(instructions[place][2][0][choice])


def slower_with_few_rows(candidate: Candidate) -> float:
    return 1e-3 / (1 + decided(candidate))


def slower_by_design(candidate: Candidate) -> float:
    return 1e-3 * (1 + len(json.loads(candidate.trace)[0]) % 7)


@pytest.mark.parametrize("latency", [slower_with_few_rows, slower_by_design])
def test_ranks_what_it_has_not_seen(latency: object, pool: list[Candidate]) -> None:
    assert callable(latency)
    model = DecisionModel(seed=0)
    seen, unseen = pool[::2], pool[1::2]
    model.fit([(candidate, latency(candidate)) for candidate in seen])
    scores = np.array(model.predict(unseen))
    speeds = np.array([-np.log(latency(candidate)) for candidate in unseen])
    assert np.corrcoef(scores, speeds)[0, 1] > 0.8


def test_knows_nothing_before_it_has_seen_enough(pool: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    assert model.predict(pool[:5]) == [0.0] * 5
    model.fit([*((candidate, 1e-3) for candidate in pool[: LEAST_RESULTS - 1]), (pool[-1], None)])
    assert model.predict(pool[:5]) == [0.0] * 5
    assert model.predict([]) == []


def test_learns_what_fails(pool: list[Candidate]) -> None:
    fails = [candidate for candidate in pool if decided(candidate) <= 3]
    model = DecisionModel(seed=0)
    model.fit([(candidate, None if candidate in fails else 1e-3) for candidate in pool[::2]])
    scores = dict(zip(pool[1::2], model.predict(pool[1::2]), strict=True))
    good = [score for candidate, score in scores.items() if candidate not in fails]
    bad = [score for candidate, score in scores.items() if candidate in fails]
    assert np.median(bad) < np.median(good) - 1.0  # of the logarithm: e times slower


def test_records_of_other_spaces_do_no_harm(pool: list[Candidate]) -> None:
    model = DecisionModel(seed=0)
    others = [Candidate("not a trace", "generic"), Candidate("[[],[]]", "default")]
    model.fit([*((each, 5e-3) for each in others), *((each, slower_with_few_rows(each)) for each in pool[:40])])
    assert np.isfinite(model.predict([*others, *pool])).all()


def test_a_guided_pool_is_repeatable_and_finds_the_best_early(pool: list[Candidate]) -> None:
    runs = []
    for _ in range(2):
        strategy = PoolStrategy(pool, seed=1, model=DecisionModel(seed=1))
        found: list[Candidate] = []
        for _ in range(3):
            asked = strategy.ask(10)
            strategy.tell([(candidate, slower_with_few_rows(candidate)) for candidate in asked])
            found += asked
        runs.append(found)
    assert runs[0] == runs[1]
    guided, blind = (np.mean([decided(each) for each in batch]) for batch in (runs[0][10:], runs[0][:10]))
    assert guided > blind
