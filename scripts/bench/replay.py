#!/usr/bin/env python3
"""Search strategies compared without measuring: on the records of work directories, as if they were asked for anew.

    scripts/bench/replay.py WORK [WORK ...] [--seeds 3] [--least 24] [--json FILE]

Every task with at least `--least` measured candidates of structured spaces is a pool. First tables: each pool is searched by
itself with every strategy and as many trials as 10, 20, 30 and 50 % of it; what is found is compared with what the whole pool
holds (best latency found / best latency; hypervolume of the front found / of the front). `related` means that all records of the
other tasks of the same directory are known before. Second tables: all pools of a directory are tuned in one run, as `mvcompile
compile` would, tasks taking turns and learning from each other as they go. Nothing is compiled or timed, so it may run beside
anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mvcompile import pareto
from mvcompile.config import TuningConfig
from mvcompile.measure.protocol import Candidate, Outcome, Subject
from mvcompile.records import MemoryStore
from mvcompile.records.codec import decode
from mvcompile.records.disk import FILE
from mvcompile.records.lines import complete_bytes, read_lines
from mvcompile.search.strategy import Allocation, PoolStrategy, Shares, Strategy
from mvcompile.tuning.decisions import DecisionModel
from mvcompile.tuning.fronts import MAX_SLOWDOWN
from mvcompile.tuning.loop import Tuner, TuningTask
from mvcompile.types import Objectives, Record

PERCENT = (10, 20, 30, 50)
BATCH = 16
UNSTRUCTURED = ("default", "generic")
BY_LATENCY = Shares(random=0.2, front=0.0)

Results = list[tuple[Candidate, Objectives | None]]


@dataclass(frozen=True, slots=True)
class Pool:
    """A task's measured candidates (the last record of each), its first record, and what its whole front is worth."""

    key: str
    first: Record
    found: Mapping[Candidate, Record]
    corner: np.ndarray
    volume: float
    best_s: float

    def quality(self, candidates: Sequence[Candidate]) -> tuple[float, float]:
        """Best latency among `candidates` over the pool's, and hypervolume of their front over the pool's."""
        points = vectors(self.found[each] for each in candidates)
        if not len(points):
            return float("inf"), 0.0
        return float(points[:, 0].min()) / self.best_s, pareto.hypervolume(points, self.corner) / self.volume


def vectors(records: Iterable[Record]) -> np.ndarray:
    """Objectives of those that were timed, shape (n, 3)."""
    return np.array([each.objectives.vector() for each in records if each.objectives is not None]).reshape(-1, 3)


def pools_of(work: Path, least: int) -> list[Pool]:
    """The pools of one work directory, of the target and preparation with most records."""
    data = (work / FILE).read_bytes()
    records = [decode(line.value) for line in read_lines(data[: complete_bytes(data)]) if not line.reason]
    groups: dict[tuple[str, str], dict[str, list[Record]]] = {}
    for record in records:
        groups.setdefault((record.target_key, record.fingerprint), {}).setdefault(record.task_key, []).append(record)
    if not groups:
        return []
    largest = max(groups.values(), key=lambda tasks: sum(map(len, tasks.values())))
    made = (pool(key, found) for key, found in largest.items())
    return [each for each in made if each is not None and len(each.found) >= least]


def pool(key: str, records: Sequence[Record]) -> Pool | None:
    """A task's pool; None if nothing of a structured space was timed."""
    found = {Candidate(each.trace, each.space): each for each in records if each.space not in UNSTRUCTURED}
    points = vectors(found.values())
    if not len(points):
        return None
    best = float(points[:, 0].min())
    corner = pareto.reference_point(points[points[:, 0] <= MAX_SLOWDOWN * best])
    corner[0] = 1.01 * MAX_SLOWDOWN * best
    return Pool(key, records[0], found, corner, pareto.hypervolume(points, corner), best)


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy: what batches are made of, whether related tasks are learnt from, and whether stagnating tasks wait."""

    name: str
    shares: Shares
    related: bool = False
    wait: bool = False


WAYS = (
    Way("by latency", BY_LATENCY),
    Way("share for the front", Shares()),
    Way("by latency, related", BY_LATENCY, related=True),
    Way("front, related", Shares(), related=True),
)
RUNS = (
    Way("by latency", BY_LATENCY),
    Way("share for the front", Shares()),
    Way("front, related", Shares(), related=True),
    Way("all, stagnating ones wait", Shares(), related=True, wait=True),
)


class Unrelated:
    """A strategy that is told nothing of other tasks."""

    def __init__(self, inner: Strategy[Candidate]) -> None:
        self._inner = inner

    def ask(self, count: int) -> list[Candidate]:
        """See `Strategy`."""
        return self._inner.ask(count)

    def tell(self, results: Sequence[tuple[Candidate, Objectives | None]]) -> None:
        """See `Strategy`."""
        self._inner.tell(results)

    @property
    def remaining(self) -> int | None:
        return self._inner.remaining

    def relate(self, tasks: Sequence[Sequence[tuple[Candidate, Objectives | None]]]) -> None:
        """Nothing."""


def strategy(way: Way, one: Pool, seed: int) -> Strategy[Candidate]:
    """A search of a pool; candidates are shuffled by seed and task."""
    seed = (seed * 1_000_003 + int(one.key[:6], 16)) % 2**30
    order = sorted(one.found, key=lambda candidate: candidate.trace)
    made = PoolStrategy(order, seed=seed, model=DecisionModel(seed), shares=way.shares)
    return made if way.related else Unrelated(made)


def alone(way: Way, one: Pool, others: Sequence[Results], seed: int, trials: int) -> tuple[float, float]:
    """What `trials` candidates of a pool find."""
    search = strategy(way, one, seed)
    tried: list[Candidate] = []
    search.relate(others)
    while len(tried) < trials:
        asked = search.ask(min(BATCH, trials - len(tried)))
        search.tell([(each, one.found[each].objectives) for each in asked])
        tried += asked
    return one.quality(tried)


class Replayer:
    """A measurer that looks up what it is asked to measure."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = {each.key: each for each in pools}
        self.tried: dict[str, list[Candidate]] = {each.key: [] for each in pools}

    def measure(self, subject: Subject, candidates: Sequence[Candidate], best_latency_s: float | None) -> list[Outcome]:
        """See `Measurer`."""
        one = self._pools[subject.key]
        self.tried[subject.key] += [each for each in candidates if each in one.found]
        records = [one.found.get(each, one.first) for each in candidates]
        return [Outcome(r.status, r.objectives, r.latency_spread, r.verification, r.message) for r in records]

    def compare(self, subject: Subject, candidates: Sequence[Candidate]) -> list[Outcome]:
        """See `Measurer`."""
        return self.measure(subject, candidates, None)

    def close(self) -> None:
        """Nothing to end."""


class Sweeping(Allocation):
    """An allocation for which no front stagnates."""

    def batch_ended(self, task: str, best_before: float | None, growth: float, price: float = 1.0) -> None:
        """See `Allocation`."""
        super().batch_ended(task, best_before, 1.0, price)


def together(way: Way, pools: Sequence[Pool], seed: int, trials: int) -> tuple[float, float]:
    """One run over all pools: sum of best latencies over the least possible, and mean hypervolume."""
    tasks = [
        TuningTask(
            name=each.key,
            subject=Subject(each.key, "", (), 1, weights_cold=True),
            calls=1,
            flops=0.0,
            moved_bytes=0.0,
            default=Candidate(each.first.trace, each.first.space),
            strategy=partial(strategy, way, each, seed),
        )
        for each in pools
    ]
    measurer = Replayer(pools)
    with MemoryStore() as store:
        Tuner(
            tasks,
            store,
            measurer,
            target_key="replayed",
            fingerprint="replayed",
            config=TuningConfig(trials=trials, seed=seed, batch=BATCH),
            clock=SimpleNamespace(spent_s=0.0, add=lambda seconds: None),
            allocation=Allocation() if way.wait else Sweeping(),
        ).run()
    qualities = {each.key: each.quality(measurer.tried[each.key]) for each in pools}
    total = sum(min(qualities[each.key][0], 1e3) * each.best_s for each in pools) / sum(each.best_s for each in pools)
    return total, statistics.fmean(volume for _, volume in qualities.values())


def table(title: str, found: Mapping[str, Sequence[Sequence[tuple[float, float]]]], index: int) -> None:
    """Prints median and mean of one figure (`index`): a row for each way, a column for each percentage."""
    print(f"\n{title:26}" + "".join(f"{percent:14} %" for percent in PERCENT))
    for name, columns in found.items():
        values = [[each[index] for each in column] for column in columns]
        print(
            f"{name:26}" + "".join(f"{statistics.median(each):10.3f} {statistics.fmean(each):.3f}" for each in values), flush=True
        )


def judge_alone(works: Sequence[Sequence[Pool]], seeds: int) -> dict[str, list[list[tuple[float, float]]]]:
    """Per way and percentage: (best latency, hypervolume) of every pool and seed."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for way in WAYS:
        start = time.monotonic()
        rows: list[list[tuple[float, float]]] = [[] for _ in PERCENT]
        for pools in works:
            known = {each.key: [(candidate, r.objectives) for candidate, r in each.found.items()] for each in pools}
            for one in pools:
                others = [results for key, results in known.items() if key != one.key] if way.related else []
                for column, percent in enumerate(PERCENT):
                    trials = max(1, round(len(one.found) * percent / 100))
                    rows[column] += [alone(way, one, others, seed, trials) for seed in range(seeds)]
        found[way.name] = rows
        print(f"{way.name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def judge_together(works: Sequence[Sequence[Pool]], seeds: int) -> dict[str, list[list[tuple[float, float]]]]:
    """Per way and percentage: (sum of best latencies, hypervolume) of every directory and seed."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for way in RUNS:
        rows: list[list[tuple[float, float]]] = []
        for percent in PERCENT:
            runs = []
            for pools in works:
                trials = round(sum(len(each.found) for each in pools) * percent / 100)
                runs += [together(way, pools, seed, trials) for seed in range(seeds)]
            rows.append(runs)
        found[way.name] = rows
    return found


def main() -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="+", type=Path, metavar="WORK", help="work directories of compilations")
    parser.add_argument("--seeds", type=int, default=3, help="searches of every pool (default: 3)")
    parser.add_argument("--least", type=int, default=24, help="candidates that make a pool (default: 24)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    works = [pools for work in options.works if (pools := pools_of(work, options.least))]
    sizes = [len(each.found) for pools in works for each in pools]
    if not sizes:
        parser.error(f"no task has {options.least} measured candidates: give directories of longer runs, or a smaller --least")
    print(f"{len(sizes)} pools in {len(works)} directories, {min(sizes)} to {max(sizes)} candidates; median and mean")
    single = judge_alone(works, options.seeds)
    for index, title in enumerate(("best latency", "hypervolume")):
        table(title, single, index)
    runs = judge_together(works, options.seeds)
    for index, title in enumerate(("run: sum of latencies", "run: hypervolume")):
        table(title, runs, index)
    if options.json:
        options.json.write_text(json.dumps({"percent": PERCENT, "alone": single, "together": runs}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
