"""A cost model of a finite space: which of its candidates are fast, learnt from what their traces decide.

MetaSchedule's model looks at every loop of the scheduled program. To rank a convolution's 40 to 100 candidates it needs 5 to 25
seconds (replaying 70 ms a candidate, features 40 to 160 ms), in which dozens of candidates could be measured instead. Within one
space a candidate is known by its design and the numbers in its trace, and reading those takes a millisecond.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import xgboost
from numpy.typing import NDArray

from mvcompile.measure.protocol import Candidate

LEAST_RESULTS = 8
"""Fewer say nothing: all candidates are alike then."""
FAILED_SLOWDOWN = 10.0
"""A failed candidate counts as this many times slower than the slowest one that ran."""
_PARAMETERS = {
    "max_depth": 4,
    "eta": 0.2,
    "min_child_weight": 1,
    "subsample": 1.0,
    "nthread": 1,
    "objective": "reg:squarederror",
    "verbosity": 0,
}
_ROUNDS = 60


class DecisionModel:
    """Gradient-boosted trees (XGBoost) over design and numbers of a trace, as a `search.CostModel` of one task's candidates."""

    def __init__(self, seed: int) -> None:
        self._parameters = {**_PARAMETERS, "seed": seed}
        self._designs: dict[str, int] = {}
        self._known: dict[Candidate, tuple[int, list[float]]] = {}
        self._trees: xgboost.Booster | None = None

    def fit(self, results: Sequence[tuple[Candidate, float | None]]) -> None:
        """See `CostModel.fit`."""
        measured = [latency for _, latency in results if latency is not None]
        if len(measured) < LEAST_RESULTS:
            return
        failed = FAILED_SLOWDOWN * max(measured)
        targets = np.log([failed if latency is None else latency for _, latency in results])
        data = xgboost.DMatrix(self._table([candidate for candidate, _ in results]), label=targets - targets.mean())
        self._trees = xgboost.train(self._parameters, data, _ROUNDS)

    def predict(self, candidates: Sequence[Candidate]) -> list[float]:
        """See `CostModel.predict`. All are alike until the model has seen enough."""
        if self._trees is None or not candidates:
            return [0.0] * len(candidates)
        found: NDArray[np.float32] = self._trees.predict(xgboost.DMatrix(self._table(candidates)))
        return [-float(each) for each in found]

    def _table(self, candidates: Sequence[Candidate]) -> NDArray[np.float32]:
        """A row per candidate: which design it is (a column each, of those seen when the trees were grown), then its numbers."""
        rows = [self._features(candidate) for candidate in candidates]
        designs, numbers = _WIDTH
        table = np.full((len(rows), designs + numbers), math.nan, np.float32)
        table[:, :designs] = 0.0
        for row, (design, values) in enumerate(rows):
            table[row, design % designs] = 1.0
            table[row, designs : designs + len(values)] = values[:numbers]
        return table

    def _features(self, candidate: Candidate) -> tuple[int, list[float]]:
        """The number of the design; the values decided for, then the constants that its instructions name."""
        if candidate not in self._known:
            try:
                instructions, decisions = json.loads(candidate.trace)
            except ValueError:  # a record of something else: a design of its own
                instructions, decisions = [], []
            options = {place: each[2][0] for place, each in enumerate(instructions) if each[0] == "SampleCategorical"}
            decided = [float(options[place][choice]) for place, choice in decisions if place in options]
            constants = [float(each) for _, inputs, *_ in instructions for each in inputs if isinstance(each, int)]
            design = json.dumps([candidate.space, instructions])
            self._known[candidate] = (self._designs.setdefault(design, len(self._designs)), decided + constants)
        return self._known[candidate]


_WIDTH = (48, 48)
"""Columns for designs and for numbers: more than any space has so far."""
