#!/usr/bin/env python3
"""Outputs of a bundle against ONNX Runtime's on the same model and inputs: is it right, and does the comparison mean anything?

    scripts/bench/compare.py MODEL.onnx BUNDLE.mvb [--inputs 3] [--selections 0] [--json FILE]

Every output is compared with |a-b| <= 1e-5 + 1e-3 |b|, for several sets of random inputs with every layer on its variant 0, and
for `--selections` random choices of variants. An output that barely varies is passed by almost any wrong kernel, so its spread is
shown and has to be there too. Exit code 1 if an output is wrong or says nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from mvcompile import runtime
from mvcompile.frontend.reference import integer_limits, random_inputs

RTOL, ATOL = 1e-3, 1e-5
FEW = 8
"""An output with more elements than this must have more distinct values than this."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output, worst over all runs. `errors`: elements beyond the tolerance; `of_tolerance`: largest error over what was
    allowed; `std`, `distinct`: standard deviation and number of different values of the reference (least over inputs)."""

    output: str
    elements: int
    errors: int
    max_abs_error: float
    max_rel_error: float
    of_tolerance: float
    std: float
    distinct: int

    @property
    def telling(self) -> bool:
        """Whether the reference varies enough for a wrong kernel to show."""
        return self.std > 0 and self.distinct > min(FEW, self.elements - 1)

    @property
    def passed(self) -> bool:
        """Whether every element was within the tolerance, and the output varies."""
        return self.errors == 0 and self.telling


def compare(name: str, found: np.ndarray, expected: np.ndarray) -> Comparison:
    """`found` against the reference `expected`."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        raise SystemExit(f"output {name}: {found.dtype} {found.shape}, ONNX Runtime gives {expected.dtype} {expected.shape}")
    one, other = found.astype(np.float64), expected.astype(np.float64)
    absolute = np.where(np.isfinite(one) & np.isfinite(other), np.abs(one - other), np.inf)
    allowed = ATOL + RTOL * np.abs(other)
    nonzero = other != 0
    return Comparison(
        output=name,
        elements=found.size,
        errors=int(np.count_nonzero(~(absolute <= allowed))),
        max_abs_error=float(absolute.max(initial=0.0)),
        max_rel_error=float((absolute[nonzero] / np.abs(other[nonzero])).max(initial=0.0)),
        of_tolerance=float((absolute / allowed).max(initial=0.0)),
        std=float(other.std()),
        distinct=int(np.unique(other).size),
    )


def worst(runs: list[Comparison]) -> Comparison:
    """All runs of one output as one."""
    return Comparison(
        runs[0].output,
        runs[0].elements,
        sum(run.errors for run in runs),
        *(max(getattr(run, field) for run in runs) for field in ("max_abs_error", "max_rel_error", "of_tolerance")),
        min(run.std for run in runs),
        min(run.distinct for run in runs),
    )


def compare_bundle(model: Path, bundle: Path, inputs: int, selections: int, seed: int) -> list[Comparison]:
    """One comparison for each output of the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    reference = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    limits = integer_limits(onnx.load(model))
    names = list(dict.fromkeys(info.name for info in reference.get_outputs()))
    chance = random.Random(seed)
    runs: dict[str, list[Comparison]] = {name: [] for name in names}
    with runtime.load(bundle) as session:
        wanted = {info.name for info in reference.get_inputs()}
        for number in range(inputs):
            values = random_inputs(session.inputs, seed + number, limits)
            expected = reference.run(names, {name: value for name, value in values.items() if name in wanted})
            for choice in range(1 + -(-selections // inputs)):
                session.select_all([chance.randrange(len(v)) for v in session.variants.values()] if choice else 0)
                found = session.run(values)
                for name, right in zip(names, expected, strict=True):
                    runs[name].append(compare(name, found[name], right))
    return [worst(found) for found in runs.values()]


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Plain values."""
    return {**asdict(comparison), "telling": comparison.telling, "passed": comparison.passed}


def main() -> int:
    """Prints a line for each output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--inputs", type=int, default=3, help="sets of random inputs (default: 3)")
    parser.add_argument("--selections", type=int, default=0, help="random choices of variants (default: 0)")
    parser.add_argument("--seed", type=int, default=100, help="of inputs and choices (default: 100)")
    parser.add_argument("--json", type=Path, help="write the comparisons to this file")
    options = parser.parse_args()
    comparisons = compare_bundle(options.model, options.bundle, options.inputs, options.selections, options.seed)
    for one in comparisons:
        print(
            f"{'ok  ' if one.passed else 'FAIL'} {one.output}: {one.errors} of {one.elements} elements off, "
            f"largest error {one.max_abs_error:.3g} absolute, {one.max_rel_error:.3g} relative, "
            f"{one.of_tolerance:.3g} of the tolerance; standard deviation {one.std:.3g}, {one.distinct} distinct values"
        )
    if options.json:
        options.json.write_text(json.dumps([to_json(one) for one in comparisons], indent=1) + "\n")
    return 0 if all(one.passed for one in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
