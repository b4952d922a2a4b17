"""A compilation that is killed or interrupted at any moment goes on where it stopped, and leaves no process behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import tvm

from mvcompile import pipeline, runtime

TRIALS = 96
BATCH = 16
WORKERS_END_S = 30.0
FINISH_S = 900.0
PROFILE_S = 3
MOMENTS = [
    ("import", 1.0),
    *[("tune", 15.0)] * 5,
    ("build", 0.5),
    ("build", 4.0),
    *[("profile", 3.0)] * (len(os.sched_getaffinity(0)) > 1),  # neighbours need a core of their own
    ("verify", 0.2),
    ("verify", 1.0),
]
"""Ten times or more: the stage that has to have begun, and within how many seconds after that the end comes."""


class Compilation:
    """`mvcompile compile` as a process in a group of its own, which the measuring processes do not belong to."""

    def __init__(self, model: Path, output: Path, environment: dict[str, str]) -> None:
        command = [
            sys.executable,
            "-m",
            "mvcompile.cli",
            "compile",
            str(model),
            "-o",
            str(output),
            f"--trials={TRIALS}",
            f"--profile-budget={PROFILE_S}",
            "--json",
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests that run in the background have it ignored
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=heed, **pipes)
        self.events: list[dict[str, Any]] = []
        self.err = ""

    def reach(self, stage: str) -> None:
        """Returns when `stage` has begun; fails the test if the process ends before."""
        for event in self._read():
            if event == {"event": "stage", "name": stage}:
                return
        pytest.fail(f"ended before {stage}, with {self._process.wait()}: {self._process.communicate()[1]}")

    def signal(self, number: int) -> tuple[int, list[psutil.Process]]:
        """Sends a signal to the group; returns the exit code and the processes that it had started."""
        try:
            os.killpg(self._process.pid, signal.SIGSTOP)  # nothing starts between looking and the signal
            started = psutil.Process(self._process.pid).children(recursive=True)
            os.killpg(self._process.pid, number)
            os.killpg(self._process.pid, signal.SIGCONT)
        except (ProcessLookupError, psutil.NoSuchProcess):
            started = []
        return self.finish(), started

    def finish(self) -> int:
        """Waits for the end; returns the exit code."""
        for _ in self._read():
            pass
        self.err = self._process.communicate(timeout=FINISH_S)[1]
        return self._process.returncode

    def trials(self) -> int:
        """Trials that were reported as recorded."""
        return max((event["trials"] for event in self.events if event["event"] == "progress"), default=0)

    def _read(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # the last one may be cut off by a kill
                self.events.append(json.loads(line))
                yield self.events[-1]


def recorded(work: Path) -> list[bytes]:
    """The complete lines of the record file."""
    path = work / "records.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def require_gone(started: list[psutil.Process]) -> None:
    """Fails if one of the processes is there after WORKERS_END_S, and ends it then."""
    alive = psutil.wait_procs(started, timeout=WORKERS_END_S)[1]
    named = [" ".join(process.cmdline()) for process in alive]
    for process in alive:
        process.kill()
    assert named == []


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "tiny-conv.mvb"


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_that_was_recorded(
    tiny_model: Path, output: Path, environment: dict[str, str], process: Callable[..., Any]
) -> None:
    work = output.with_name(f"{output.name}.work")
    chance = random.Random(0)
    before, acknowledged, kills = recorded(work), 0, 0
    for stage, within_s in MOMENTS:
        compilation = Compilation(tiny_model, output, environment)
        compilation.reach(stage)
        time.sleep(chance.uniform(0, within_s))
        code, started = compilation.signal(signal.SIGKILL)
        kills += code == -signal.SIGKILL
        require_gone(started)
        after = recorded(work)
        assert after[: len(before)] == before, "a record was lost"
        reported = [event["trials"] for event in compilation.events if event["event"] == "progress"]
        assert not reported or reported[0] >= acknowledged, "trials of the run before are not counted"
        acknowledged = max(acknowledged, compilation.trials())
        assert len(after) >= acknowledged, "trials were reported before they were recorded"
        if output.exists():
            assert process("validate", output).code == 0
        before = after
    assert kills >= len(MOMENTS) - 2, "most runs ended before they were killed: choose other moments"
    last = Compilation(tiny_model, output, environment)
    assert last.finish() == 0, last.err
    assert recorded(work)[: len(before)] == before
    assert last.events[-1]["trials"] >= min(TRIALS, acknowledged)
    done = process("validate", output)
    assert done.code == 0, done.out
    assert sorted(path.name for path in output.parent.iterdir()) == [output.name, work.name]


@pytest.mark.slow
def test_a_kill_while_the_bundle_is_replaced_leaves_the_old_or_the_new_one(
    tiny_model: Path, tiny_bundle: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    output = tmp_path / "again.mvb"
    output.write_bytes(tiny_bundle.read_bytes())
    compilation = Compilation(tiny_model, output, environment)
    compilation.reach("verify")
    compilation.signal(signal.SIGKILL)
    with runtime.load(output) as session:
        assert runtime.selftest(session).passed


def test_an_interruption_inside_a_callback_of_tvm_is_no_other_error() -> None:
    @tvm.transform.module_pass(opt_level=0, name="Interrupted")
    def interrupted(_module: tvm.IRModule, _context: object) -> tvm.IRModule:
        raise KeyboardInterrupt

    assert pipeline.compile_model  # importing the pipeline is what makes it so
    with pytest.raises(KeyboardInterrupt):
        tvm.transform.Sequential([interrupted])(tvm.IRModule({}))


def test_an_interruption_after_the_end_is_none(process: Callable[..., Any], tiny_bundle: Path) -> None:
    end = "atexit.register(os.kill, os.getpid(), signal.SIGINT)"
    program = f"import atexit, os, signal, sys; from mvcompile.cli import command; {end}; sys.exit(command())"
    done = process("inspect", tiny_bundle, prefix=[sys.executable, "-c", program])
    assert (done.code, done.err) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "after_s"),
    [
        ("import", 0.1),
        ("prepare", 0.1),
        ("prepare", 0.3),
        ("tune", 0.0),
        ("tune", 12.0),
        ("build", 1.0),
        *[("profile", 1.0)] * (len(os.sched_getaffinity(0)) > 1),
        ("verify", 0.1),
    ],
)
def test_an_interruption_says_so_and_ends_everything(
    tiny_model: Path, output: Path, environment: dict[str, str], stage: str, after_s: float
) -> None:
    compilation = Compilation(tiny_model, output, environment)
    compilation.reach(stage)
    time.sleep(after_s)
    code, started = compilation.signal(signal.SIGINT)
    require_gone(started)
    assert "Traceback" not in compilation.err, compilation.err
    if code != 0:
        assert code == 3, compilation.err
        assert "interrupted" in compilation.err
        assert "resumes" in compilation.err
    if code == 0 or output.exists():  # an interruption may come when everything is done
        assert stage == "verify"
        with runtime.load(output) as session:
            assert runtime.selftest(session).passed
    assert compilation.trials() <= len(recorded(output.with_name(f"{output.name}.work")))
