"""A bundle's own test: inputs that travel with it, and what the reference made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mvcompile.bundle.schema import SELFTEST
from mvcompile.runtime.memory import Array, array_at
from mvcompile.runtime.session import Session
from mvcompile.types import TensorSpec


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """How far one output was from the reference. `errors` counts the elements beyond the tolerance (|a-b| <= atol + rtol*|b|);
    the largest errors are over all elements, relative ones over those whose reference is finite and not 0. An element that is
    NaN or infinite on one side only is infinitely far off."""

    name: str
    elements: int
    errors: int
    max_abs_error: float
    max_rel_error: float

    @property
    def passed(self) -> bool:
        """Whether every element is within the tolerance."""
        return self.errors == 0


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Outcome of one run of the self-test with `selection` (the variant of each layer)."""

    selection: tuple[int, ...]
    reference: str
    rtol: float
    atol: float
    outputs: tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether every output is within the tolerance."""
        return all(output.passed for output in self.outputs)


@dataclass(frozen=True, slots=True)
class SwitchResult:
    """Outcome of the self-test with one layer switched to another variant."""

    layer: str
    variant: int
    result: SelfTestResult


def selftest(session: Session) -> SelfTestResult:
    """Run the bundle's self-test with the current selection.

    Raises what `Session.run` raises; a wrong output is a result, not an error.
    """
    test = session.manifest.selftest
    selection = session.selection
    outputs = session.run(selftest_inputs(session))
    expected = _arrays(session, session.outputs, test.output_offsets)
    checks = tuple(_compare(name, outputs[name], expected[name], test.rtol, test.atol) for name in outputs)
    return SelfTestResult(selection, test.reference, test.rtol, test.atol, checks)


def selftest_inputs(session: Session) -> dict[str, Array]:
    """The inputs of the bundle's self-test, by name, without a copy."""
    return _arrays(session, session.inputs, session.manifest.selftest.input_offsets)


def selftest_switches(session: Session) -> Iterator[SwitchResult]:
    """Run the self-test once for every layer and every variant of it that is not selected, with the other layers as they are.

    Yields each result as it comes, for progress to be shown; the selection is as before when the iterator ends or is closed.
    """
    before = session.selection
    try:
        for layer, selected in zip(session.layers, before, strict=True):
            for variant in session.variants[layer]:
                if variant.index != selected:
                    session.select(layer, variant.index)
                    yield SwitchResult(layer, variant.index, selftest(session))
            session.select(layer, selected)
    finally:
        session.select_all(before)


def _arrays(session: Session, specs: tuple[TensorSpec, ...], offsets: tuple[int, ...]) -> dict[str, Array]:
    block = np.frombuffer(session.member(SELFTEST), np.uint8)
    return {spec.name: array_at(block, offset, spec.dtype, spec.shape) for spec, offset in zip(specs, offsets, strict=True)}


def _compare(name: str, found: Array, expected: Array, rtol: float, atol: float) -> OutputCheck:
    # Integers beyond 2^53 lose their last digits here; what could hide in them is below any rtol in use.
    one, other = found.astype(np.float64), expected.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    comparable = np.isfinite(one) & np.isfinite(other)
    with np.errstate(invalid="ignore"):  # infinity minus itself
        absolute = np.where(same, 0.0, np.where(comparable, np.abs(one - other), np.inf))
    nonzero = np.isfinite(other) & (other != 0)
    relative = absolute[nonzero] / np.abs(other[nonzero])
    errors = int(np.count_nonzero(~same & ~(comparable & (absolute <= atol + rtol * np.abs(other)))))
    return OutputCheck(name, found.size, errors, float(absolute.max(initial=0.0)), float(relative.max(initial=0.0)))
