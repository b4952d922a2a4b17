from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mvcompile.runtime import Session, load, selftest, selftest_switches
from mvcompile.runtime.selftesting import _compare

NAN, INF = float("nan"), float("inf")


def test_a_sound_bundle_passes_with_every_switch(session: Session) -> None:
    session.select("dense1", 1)
    result = selftest(session)
    assert result.passed
    assert (result.selection, result.reference) == ((0, 1, 0), "numpy")
    assert [output.name for output in result.outputs] == ["y", "hidden"]
    assert all(output.elements == 128 and 0 < output.max_rel_error < 1e-4 for output in result.outputs)
    switches = list(selftest_switches(session))
    assert [(one.layer, one.variant, one.result.selection) for one in switches] == [
        ("dense0", 1, (1, 1, 0)),
        ("dense1", 0, (0, 0, 0)),
    ]
    assert all(one.result.passed for one in switches)
    assert session.selection == (0, 1, 0)


def test_a_variant_that_computes_something_else_is_found(doubling: Path) -> None:
    with load(doubling) as session:
        assert selftest(session).passed
        results = {one.layer: one.result for one in selftest_switches(session)}
        assert not results["dense0"].passed
        assert [output.passed for output in results["dense1"].outputs] == [False, True]  # hidden comes before dense1
        worst = results["dense0"].outputs[1]
        assert worst.max_rel_error == pytest.approx(1.0, rel=1e-3)
        assert 0 < worst.errors <= worst.elements


def test_switches_that_are_not_finished_leave_the_selection(session: Session) -> None:
    switches = selftest_switches(session)
    next(switches)
    assert session.selection == (1, 0, 0)
    switches.close()  # type: ignore[attr-defined]
    assert session.selection == (0, 0, 0)


@pytest.mark.parametrize(
    ("found", "expected", "errors", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0.0, 0.0),
        ([1.0, 2.1], [1.0, 2.0], 0, 0.1, 0.05),  # within 0.05 + 0.1 * 2
        ([1.0, 2.5], [1.0, 2.0], 1, 0.5, 0.25),
        ([0.04, 0.0], [0.0, 0.0], 0, 0.04, 0.0),
        ([0.06, 0.0], [0.0, 0.0], 1, 0.06, 0.0),
        ([NAN, INF], [NAN, INF], 0, 0.0, 0.0),
        ([NAN, 1.0], [1.0, 1.0], 1, INF, INF),
        ([1.0, 1.0], [NAN, 1.0], 1, INF, 0.0),
        ([INF, 1.0], [-INF, 1.0], 1, INF, 0.0),
        ([1.0, 1.0], [INF, 1.0], 1, INF, 0.0),
    ],
)
def test_how_outputs_are_compared(
    found: list[float], expected: list[float], errors: int, absolute: float, relative: float
) -> None:
    check = _compare("y", np.array(found), np.array(expected), rtol=0.1, atol=0.05)
    assert (check.errors, check.passed) == (errors, errors == 0)
    assert check.max_abs_error == pytest.approx(absolute)
    assert check.max_rel_error == pytest.approx(relative)


def test_integers_and_booleans_are_compared() -> None:
    assert _compare("y", np.array([True, False]), np.array([True, True]), 0.0, 0.0).errors == 1
    assert _compare("y", np.array([1, 2**40]), np.array([1, 2**40 + 1]), 0.0, 0.0).errors == 1
