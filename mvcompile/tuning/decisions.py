"""A cost model of a finite space: what its candidates take, learnt from what their traces decide.

MetaSchedule's model looks at every loop of the scheduled program. To rank a convolution's 40 to 100 candidates it needs 5 to 25
seconds (replaying 70 ms a candidate, features 40 to 160 ms), in which dozens of candidates could be measured instead. Within one
space a candidate is known by its design and the numbers in its trace, and reading those takes a millisecond. The same holds for
footprint and traffic: they need the scheduled program, and follow from the same numbers (docs/design/008-search-for-fronts.md).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import xgboost
from numpy.typing import NDArray

from mvcompile.measure.protocol import Candidate
from mvcompile.types import Objectives

LEAST_RESULTS = 8
"""Fewer say nothing of their own: without related tasks all candidates are alike then."""
LEAST_RELATED = 4
"""A related task with fewer results says nothing about which of its candidates are better than others."""
GROWTH = 1.2
"""What related tasks teach is learnt anew when there are this many times more results of them."""
FAILED_SLOWDOWN = 10.0
"""A failed candidate counts as this many times slower than the slowest one that ran."""
SOFTENING = 0.02
SMALLEST_MEAN_BYTES = 4096.0
"""Bytes are learnt as log(bytes + SOFTENING * their mean), since footprints may be 0; the mean is at least a page."""
_PARAMETERS = {
    "max_depth": 4,
    "eta": 0.2,
    "min_child_weight": 1,
    "subsample": 1.0,
    "nthread": 1,
    "objective": "reg:squarederror",
    "verbosity": 0,
    "base_score": 0.0,
}
_ROUNDS = 60
_SHAPES, _NUMBERS, _DESIGNS = 64, 20, 64
"""Columns for shapes of designs, numbers and designs: more than any space has so far."""
_EPILOGUE = {
    "GetSBlock",
    "GetChildBlocks",
    "GetLoops",
    "GetConsumers",
    "GetProducers",
    "ComputeInline",
    "ReverseComputeInline",
}
"""Instructions whose number depends on what is fused into the operator, and not on how it is scheduled."""

Results = Sequence[tuple[Candidate, Objectives | None]]
Rows = NDArray[np.float64]
Table = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a trace says: `design` is everything but the values decided for; `shape` is what designs of other tasks have in common
    with it, which are the instructions and the order of their loops, without any extent; `numbers` are the values decided for,
    the largest one of each decision, and the constants of the instructions."""

    design: str
    shape: str
    numbers: tuple[float, ...]


class DecisionModel:
    """Gradient-boosted trees (XGBoost) over designs and numbers of traces, as a `search.CostModel` of one task's candidates.

    Trees of related tasks (those whose candidates come from the same spaces) predict each objective relative to its mean over the
    task. Trees of the task itself start from that and learn what is left. The numbers of designs are of this task; what is the
    same in other tasks is the shape.
    """

    def __init__(self, seed: int) -> None:
        self._parameters = {**_PARAMETERS, "seed": seed}
        self._shapes: dict[str, int] = {}
        self._designs: dict[str, int] = {}
        self._spaces: set[str] = set()
        self._related: list[Results] = []
        self._results: Results = ()
        self._learnt = 0
        self._stale = False
        self._prior: list[xgboost.Booster] = []
        self._trees: list[xgboost.Booster] = []
        self._offsets = np.zeros(3)
        self._softening = np.zeros(3)

    def relate(self, tasks: Sequence[Results]) -> None:
        """See `CostModel.relate`."""
        self._related = list(tasks)

    def fit(self, results: Results) -> None:
        """See `CostModel.fit`. Trees are grown when they are needed."""
        self._results, self._stale = list(results), True

    def predict(self, candidates: Sequence[Candidate]) -> Rows | None:
        """See `CostModel.predict`. None until there are LEAST_RESULTS, of the task or of related ones. Before the first result
        of the task itself predictions are right up to a factor for each objective."""
        self._spaces.update(candidate.space for candidate in candidates)
        if self._learn_from_related() or self._stale:
            self._learn_from_results()
        if not candidates or not (self._trees or self._prior):
            return None
        found = self._expected(candidates) + self._offsets
        if self._trees:
            table = self._table(candidates)
            found = np.column_stack([_predicted(tree, table, found[:, i]) for i, tree in enumerate(self._trees)])
        predicted: Rows = np.maximum(np.exp(found) - self._softening, 0.0)
        return predicted

    def _learn_from_related(self) -> bool:
        """Whether there was enough new to learn from: results of related tasks in the spaces that this task's candidates have."""
        known = [[each for each in task if each[0].space in self._spaces and each[1] is not None] for task in self._related]
        related = [task for task in known if len(task) >= LEAST_RELATED]
        count = sum(len(task) for task in related)
        if count < max(LEAST_RESULTS, GROWTH * self._learnt):
            return False
        self._learnt = count
        goals = []
        for task in related:
            points = _points(task)
            logarithms = _logarithms(points, _softening(points))
            goals.append(logarithms - logarithms.mean(axis=0))
        table = self._table([candidate for task in related for candidate, _ in task], own=False)
        self._prior = [self._grown(table, goal, np.zeros(len(goal))) for goal in np.vstack(goals).T]
        return True

    def _learn_from_results(self) -> None:
        self._stale = False
        measured = [candidate for candidate, found in self._results if found is not None]
        failed = [candidate for candidate, found in self._results if found is None]
        if not measured:
            return
        points = _points(self._results)
        self._softening = _softening(points)
        goals, prior = _logarithms(points, self._softening), self._expected(measured)
        self._offsets = (goals - prior).mean(axis=0)
        if len(measured) < LEAST_RESULTS:
            return
        table = self._table([*measured, *failed])
        start = np.vstack([prior, self._expected(failed)]) + self._offsets
        # Failed candidates get a latency to be kept away from; they have no other objectives.
        latencies = np.concatenate([goals[:, 0], np.full(len(failed), math.log(FAILED_SLOWDOWN * points[:, 0].max()))])
        self._trees = [self._grown(table, latencies, start[:, 0])]
        for objective in (1, 2):
            self._trees.append(self._grown(table[: len(measured)], goals[:, objective], start[: len(measured), objective]))

    def _expected(self, candidates: Sequence[Candidate]) -> Rows:
        """What related tasks say: logarithms relative to a task's mean, zeros if they say nothing."""
        if not self._prior or not candidates:
            return np.zeros((len(candidates), 3))
        table = self._table(candidates, own=False)
        return np.column_stack([_predicted(tree, table, np.zeros(len(candidates))) for tree in self._prior])

    def _grown(self, table: Table, goal: Rows, start: Rows) -> xgboost.Booster:
        return xgboost.train(self._parameters, xgboost.DMatrix(table, label=goal, base_margin=start), _ROUNDS)

    def _table(self, candidates: Sequence[Candidate], *, own: bool = True) -> Table:
        """A row per candidate: the shape of its design (a column each), numbers, and if `own` its design (a column each)."""
        table = np.zeros((len(candidates), _SHAPES + _NUMBERS + (_DESIGNS if own else 0)), np.float32)
        table[:, _SHAPES : _SHAPES + _NUMBERS] = math.nan
        for row, candidate in enumerate(candidates):
            reading = _read(candidate)
            numbers = reading.numbers[:_NUMBERS]
            table[row, self._shapes.setdefault(reading.shape, len(self._shapes)) % _SHAPES] = 1.0
            table[row, _SHAPES : _SHAPES + len(numbers)] = numbers
            if own:
                design = self._designs.setdefault(reading.design, len(self._designs)) % _DESIGNS
                table[row, _SHAPES + _NUMBERS + design] = 1.0
        return table


def _predicted(tree: xgboost.Booster, table: Table, start: Rows) -> Rows:
    found: Rows = tree.predict(xgboost.DMatrix(table, base_margin=start)).astype(np.float64)
    return found


def _points(results: Results) -> Rows:
    return np.array([found.vector() for _, found in results if found is not None], dtype=np.float64)


def _softening(points: Rows) -> Rows:
    means: Rows = SOFTENING * np.maximum(points.mean(axis=0), SMALLEST_MEAN_BYTES)
    means[0] = 0.0
    return means


def _logarithms(points: Rows, softening: Rows) -> Rows:
    found: Rows = np.log(points + softening)
    return found


@lru_cache(maxsize=16384)
def _read(candidate: Candidate) -> _Reading:
    """Reads a trace once, for all models of a run: it takes a third of a millisecond."""
    try:
        instructions, decisions = json.loads(candidate.trace)
    except ValueError:  # a record of something else: a design of its own
        instructions, decisions = [], []
    options = {place: each[2][0] for place, each in enumerate(instructions) if each[0] == "SampleCategorical"}
    decided = [float(options[place][choice]) for place, choice in decisions if place in options]
    largest = [float(max(values)) for values in options.values()]
    constants = [float(each) for name, inputs, *_ in instructions for each in inputs if isinstance(each, int)]
    return _Reading(
        _digest([candidate.space, instructions]),
        _digest([candidate.space, *_skeleton(instructions)]),
        (*decided, *largest, *constants),
    )


def _skeleton(instructions: Iterable[Any]) -> Iterable[Any]:
    """The instructions without extents, names and what only the operators around need: loops are numbered in their order."""
    for name, inputs, *_ in instructions:
        if name not in _EPILOGUE:
            loops = sorted({int(each[1:]) for each in inputs if _is_loop(each)})
            yield [name, *(loops.index(int(each[1:])) if _is_loop(each) else _kind(each) for each in inputs)]


def _is_loop(value: object) -> bool:
    return isinstance(value, str) and value[:1] == "l" and value[1:].isdigit()


def _kind(value: object) -> str:
    if isinstance(value, str):
        return "decided" if value[:1] == "v" and value[1:].isdigit() else "block"
    return type(value).__name__


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
