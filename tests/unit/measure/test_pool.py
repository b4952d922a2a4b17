"""Real worker processes on tiny programs: every way a candidate can end, and what is left of the processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mvcompile.algorithms import Programs
from mvcompile.build import Kernel, build_library
from mvcompile.errors import EnvironmentProblem
from mvcompile.measure.pool import Limits, PoolMeasurer
from mvcompile.measure.protocol import Candidate, Outcome, Subject
from mvcompile.measure.references import write_reference
from mvcompile.target import detect_target
from mvcompile.testing import programs
from mvcompile.types import Status

TARGET = detect_target()
PATIENT = Limits(start_s=300.0, load_s=300.0, build_s=120.0, run_s=4.0)
"""Machines stall; only what hangs on purpose is to overrun its time. That takes `run_s`."""
MODULE = programs.fragile()
SUBJECT = programs.subject(MODULE, constants=(1,))
GOOD = programs.unscheduled(MODULE)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.fixture(scope="module")
def pool(references: Path) -> Iterator[PoolMeasurer]:
    """Two workers that several tests wear out; in the end no process and no descriptor is left of them."""
    before, descriptors = children(os.getpid()), len(os.listdir("/proc/self/fd"))
    with PoolMeasurer(TARGET, references, limits=PATIENT) as measurer:
        yield measurer
        assert len(children(os.getpid())) > len(before)
    assert children(os.getpid()) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def children(pid: int) -> list[int]:
    """Process ids, zombies included."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Patience is long, because machines stall; it is not what is tested."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def ended(pid: int) -> bool:
    """Whether the process is gone; a zombie that nobody has reaped yet is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def require_ok(outcome: Outcome) -> None:
    assert outcome.status is Status.OK, outcome
    assert outcome.objectives is not None
    assert outcome.objectives.latency_s > 0
    assert outcome.objectives.traffic_bytes > 0
    assert outcome.latency_spread is not None
    assert outcome.latency_spread >= 0
    assert outcome.verification is not None
    assert outcome.verification.max_abs_error <= outcome.verification.atol


def test_every_way_a_candidate_can_end_in_one_batch_without_harm_to_the_others(pool: PoolMeasurer) -> None:
    # With two workers even places are one's and odd places the other's: see whose neighbours the bad ones are.
    candidates = {
        "good": GOOD,
        "also good": programs.splitting(MODULE, "y", 4),
        "no trace": Candidate("nonsense", "test"),
        "for another program": Candidate(
            GOOD.trace.replace("[[],[]]", '[[["GetSBlock",[],["absent","main"],["b0"]]],[]]'), "test"
        ),
        "not compilable": programs.not_compilable(MODULE, "y"),
        "crash": programs.breaking(MODULE, "signal"),
        "wrong": programs.breaking(MODULE, "factor"),
        "good behind the crash": programs.splitting(MODULE, "factor", 8),
        "good behind the wrong one": programs.splitting(MODULE, "y", 8),
        "hang": programs.breaking(MODULE, "seconds"),
        "also good behind the wrong one": programs.splitting(MODULE, "y", 2),
        "good behind the hang": programs.splitting(MODULE, "y", 16),
    }
    assert candidates["for another program"].trace != GOOD.trace
    outcomes = dict(zip(candidates, pool.measure(SUBJECT, list(candidates.values()), None), strict=True))
    for name, outcome in outcomes.items():
        if "good" in name:
            require_ok(outcome)
        else:
            assert outcome.objectives is None
            assert outcome.message
    assert outcomes["no trace"].status is Status.INVALID
    assert outcomes["for another program"].status is Status.INVALID
    assert outcomes["not compilable"].status is Status.BUILD_ERROR
    assert outcomes["crash"].status is Status.RUN_ERROR
    assert "SIGSEGV" in outcomes["crash"].message
    assert outcomes["hang"].status is Status.TIMEOUT
    assert outcomes["hang"].message.startswith("running")
    assert outcomes["wrong"].status is Status.WRONG_RESULT
    assert "largest error" in outcomes["wrong"].message


def test_workers_have_one_thread_on_one_core(pool: PoolMeasurer) -> None:
    candidates = [programs.parallel(MODULE, "y"), programs.parallel(MODULE, "factor")]
    for outcome in pool.measure(SUBJECT, candidates, None):
        require_ok(outcome)
    workers = children(os.getpid())
    assert len(workers) == min(2, len(os.sched_getaffinity(0)))
    for worker in workers:
        assert os.sched_getaffinity(worker) == {min(os.sched_getaffinity(0))}
        assert len(os.listdir(f"/proc/{worker}/task")) == 1
        assert b"TVM_NUM_THREADS=1" in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")


def test_compares_candidates_and_drops_what_fails_in_between(pool: PoolMeasurer) -> None:
    outcomes = pool.compare(SUBJECT, [GOOD, programs.breaking(MODULE, "factor"), programs.splitting(MODULE, "y", 4)])
    require_ok(outcomes[0])
    assert outcomes[1].status is Status.WRONG_RESULT
    require_ok(outcomes[2])


def test_verifies_functions_of_a_library(pool: PoolMeasurer, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    kernels = [("right", GOOD), ("wrong", programs.breaking(MODULE, "factor"))]
    build_library(library, [Kernel(symbol, MODULE, candidate.trace) for symbol, candidate in kernels], TARGET)
    wrong, right = pool.verify(SUBJECT, library, ["wrong", "right"], Programs(MODULE).arguments(""))
    assert wrong.status is Status.WRONG_RESULT
    assert wrong.verification is not None
    assert wrong.verification.max_abs_error > 100 * wrong.verification.atol
    assert right.status is Status.OK
    assert right.verification is not None
    assert right.verification.max_abs_error <= right.verification.atol


def test_the_check_can_fail(pool: PoolMeasurer, references: Path) -> None:
    """A right program differs from a reference in which one element is off by a thousandth."""
    altered = programs.subject(MODULE, key="altered", constants=(1,))
    require_ok(pool.measure(altered, [GOOD], None)[0])
    path = references / "altered.npz"
    with np.load(path) as archive:
        output = archive["output0"]
    output[np.abs(output).argmax()] *= 1.001
    write_reference(path, False, [output])
    assert pool.measure(SUBJECT, [], None) == []
    require_ok(pool.measure(SUBJECT, [GOOD], None)[0])  # the worker has now forgotten the other task
    assert pool.measure(altered, [GOOD], None)[0].status is Status.WRONG_RESULT


def test_ends_a_compilation_that_overruns_its_time(tmp_path: Path) -> None:
    module, candidate = programs.endless_to_compile()
    limits = Limits(start_s=300.0, load_s=300.0, build_s=0.5, run_s=300.0)
    with PoolMeasurer(TARGET, tmp_path, cores=[min(os.sched_getaffinity(0))], limits=limits) as measurer:
        outcome = measurer.measure(programs.subject(module), [candidate], None)[0]
    assert outcome.status is Status.TIMEOUT
    assert outcome.message.startswith("building")


def test_a_task_whose_reference_cannot_be_had_is_no_outcome(pool: PoolMeasurer, references: Path) -> None:
    """Without a reference nothing can be measured: that is the set-up's fault, not the candidate's."""
    (references / "file").write_text("a file where a folder is needed")
    with pytest.raises(EnvironmentProblem, match=r"file/key .*Error: .*disk space"):
        pool.measure(programs.subject(MODULE, key="file/key"), [GOOD], None)


def test_a_worker_that_cannot_start_says_how_to_find_out_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with PoolMeasurer(TARGET, tmp_path, limits=PATIENT) as measurer, pytest.raises(EnvironmentProblem, match="--check"):
        measurer.measure(SUBJECT, [GOOD], None)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with PoolMeasurer(TARGET, tmp_path, limits=PATIENT) as measurer, pytest.raises(EnvironmentProblem, match="/nowhere/python"):
        measurer.measure(SUBJECT, [GOOD], None)


SCRIPT = """
import pickle, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
from pathlib import Path
from mvcompile.measure.pool import PoolMeasurer
target, folder, core, subject, candidate = pickle.load(sys.stdin.buffer)
with PoolMeasurer(target, Path(folder), cores=[core]) as measurer:
    measurer.measure(subject, [candidate], None)
"""
"""A user's script: no `if __name__ == "__main__"`."""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(ending: signal.Signals, tmp_path: Path) -> None:
    """Even in the middle of a kernel that hangs, in a script like people write, started where a file has a module's name."""
    here = tmp_path / "folder"
    here.mkdir()
    (here / "numpy.py").write_text("raise ImportError('not the numpy that was meant')")
    (tmp_path / "script.py").write_text(SCRIPT)
    mark = tmp_path / "it hangs now"
    module = programs.marking_then_hanging(str(mark))
    hanging: Subject = programs.subject(module)
    write_reference(tmp_path / "references" / f"{hanging.key}.npz", False, [np.zeros(1, np.float32)])
    message = (TARGET, str(tmp_path / "references"), min(os.sched_getaffinity(0)), hanging, programs.unscheduled(module))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)},
    )
    workers: list[int] = []
    try:
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(message))
        process.stdin.close()
        wait_until(lambda: mark.exists() or process.poll() is not None, "the kernel runs")
        assert process.poll() is None
        workers = children(process.pid)
        assert len(workers) == 1
        process.send_signal(ending)
        assert process.wait(120) != 0
        wait_until(lambda: ended(workers[0]), "the worker ends")
    finally:
        process.kill()
        process.wait()
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
