from __future__ import annotations

import time

import numpy as np
import pytest

from mvcompile.runtime.stamps import ROWS, StampRing


def write(ring: StampRing, run: int) -> None:
    """A run of two steps that begins at `run` seconds and some nanoseconds."""
    first = run * 1_000_000_000 + 999_999_999
    ring.write([first, first + 1, first + 2_000_000_000])
    ring.advance()


def quiet() -> StampRing:
    ring = StampRing(2, lambda: None)
    ring.due_ns = 2**62
    return ring


def test_runs_are_given_out_once_in_their_order() -> None:
    ring = quiet()
    assert ring.take().shape == (0, 3)
    for run in range(3):
        write(ring, run)
    first = ring.take()
    assert first.dtype == np.int64
    assert first.tolist() == [[run * 10**9 + more for more in (999_999_999, 10**9, 2_999_999_999)] for run in range(3)]
    write(ring, 3)
    assert (ring.take()[:, 0] // 10**9).tolist() == [3]
    assert len(ring.take()) == 0


@pytest.mark.parametrize("before", [0, 10, ROWS - 1, ROWS])
@pytest.mark.parametrize("runs", [1, ROWS - 2, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
def test_the_last_runs_are_kept_whatever_was_taken_before(before: int, runs: int) -> None:
    ring = quiet()
    for run in range(before):
        write(ring, run)
    ring.take()
    for run in range(before, before + runs):
        write(ring, run)
    kept = min(runs, ROWS - 1)
    assert (ring.take()[:, 0] // 10**9).tolist() == list(range(before + runs - kept, before + runs))
    assert ring.runs == before + runs


def test_the_listener_is_called_when_it_is_due() -> None:
    calls: list[int] = []
    ring = StampRing(2, lambda: calls.append(ring.runs))
    write(ring, 0)
    ring.due_ns = time.monotonic_ns() + 10**12
    write(ring, 1)
    ring.due_ns = 0
    write(ring, 2)
    assert calls == [1, 3]


def test_what_the_listener_raises_comes_after_the_run_has_been_counted() -> None:
    ring = StampRing(2, lambda: 1 // 0)
    addresses = [ring.address]
    with pytest.raises(ZeroDivisionError):
        write(ring, 0)
    addresses.append(ring.address)
    assert ring.runs == 1
    assert addresses[1] - addresses[0] == 3 * 16
