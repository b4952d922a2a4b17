"""Measures candidates in worker processes: builds side by side on all cores, times one at a time on one core, all others idle.

A worker that crashes or overruns its time limit is replaced, and what it was doing becomes the outcome of that candidate.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import selectors
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mvcompile.errors import EnvironmentProblem
from mvcompile.measure.protocol import Candidate, Outcome, Raised, Subject
from mvcompile.types import Argument, HostTarget, Objectives, Status, Verification


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds a worker may take: to start, to prepare a task (its reference is slow, unscheduled code), to build one candidate,
    to check and time one candidate."""

    start_s: float = 120.0
    load_s: float = 600.0
    build_s: float = 20.0
    run_s: float = 60.0


COMPARE_ROUNDS = 7
_START = "import sys; sys.path[:] = sys.argv[2:]; from mvcompile.measure.worker import main; main(sys.argv[1:2])"
"""Workers import what the parent imports. (`python -m` would look in the working directory first, whatever lies there.)"""


class _Gone(Exception):
    """The worker did not answer as it should: it died, it raised an exception, or its time was up. It has been ended."""

    def __init__(self, timed_out: bool, detail: str) -> None:
        super().__init__(detail)
        self.timed_out = timed_out

    def outcome(self, running: bool) -> Outcome:
        """What that makes of the candidate that was being built, or run."""
        failure = Status.RUN_ERROR if running else Status.BUILD_ERROR
        message = f"{'running' if running else 'building'}: {self}"
        return Outcome(Status.TIMEOUT if self.timed_out else failure, message=message)


class _Process:
    """One worker process and the pipes to it."""

    def __init__(self, target: HostTarget, references: Path, core: int, cores: frozenset[int], limits: Limits) -> None:
        self._start = (target, references, set(cores))
        self._core, self._limits = core, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._subject: Subject | None = None
        self._asked = 0.0

    @property
    def running(self) -> bool:
        return self._process is not None

    def load(self, subject: Subject) -> None:
        """Starts the process if need be and gives it the task."""
        if self._process is None:
            self._spawn()
        if self._subject != subject:
            self._subject = None
            try:
                self.ask(self._limits.load_s, "load", subject)
            except _Gone as gone:
                raise EnvironmentProblem(
                    f"the unscheduled program of task {subject.key} could not be run for reference ({gone}); "
                    "see to it that there is enough memory and disk space, and run again to resume"
                ) from gone
            self._subject = subject

    def post(self, *message: Any) -> None:
        """Sends a request without waiting. If the process is dead, `receive` says so."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._asked = time.monotonic()
        with contextlib.suppress(OSError):
            self._process.stdin.write(pickle.dumps(message))
            self._process.stdin.flush()

    def ask(self, seconds: float, *message: Any) -> Any:
        """Sends a request and waits for the answer; _Gone when there is none in time (the process is then replaced)."""
        self.post(*message)
        return self.receive(seconds)

    def receive(self, seconds: float) -> Any:
        """The answer to the last request; _Gone when there is none within `seconds` of it."""
        deadline = self._asked + seconds
        (length,) = struct.unpack("<Q", self._read(8, deadline))
        answer = pickle.loads(self._read(length, deadline))
        if isinstance(answer, Raised):
            self.stop()
            raise _Gone(False, answer.text)
        return answer

    def _read(self, count: int, deadline: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, parts = self._process.stdout.fileno(), bytearray()
        with selectors.DefaultSelector() as ready:
            ready.register(descriptor, selectors.EVENT_READ)
            while len(parts) < count:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    raise self._lost(True, "its time was up")
                chunk = os.read(descriptor, count - len(parts))
                if not chunk:
                    raise self._lost(False, "it died")
                parts += chunk
        return bytes(parts)

    def _lost(self, timed_out: bool, detail: str) -> _Gone:
        code = self.stop()
        if not timed_out and code is not None and code < 0:
            detail = f"it was killed by {signal.Signals(-code).name}"
        return _Gone(timed_out, detail)

    def _spawn(self) -> None:
        environment = dict(os.environ, TVM_NUM_THREADS="1", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(self._core), *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the parent only, which then ends its workers
            )
        except OSError as error:
            raise EnvironmentProblem(
                f"a measuring process cannot be started: {error}; free memory, or raise the limit on processes (`ulimit -u`)"
            ) from error
        try:
            self.ask(self._limits.start_s, *self._start)
        except _Gone as gone:
            raise EnvironmentProblem(
                f"a measuring process did not start ({gone}); `{sys.executable} -m mvcompile.measure.worker --check` shows why"
            ) from gone

    def stop(self) -> int | None:
        """Ends the process at once; its exit code, when it ran."""
        process, self._process, self._subject = self._process, None, None
        if process is None:
            return None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        process.kill()
        return process.wait()


class PoolMeasurer:
    """A `Measurer` that works in processes: one per core of `cores`, timing on the first core.

    `references` is a directory for the reference outputs of tasks. Raises EnvironmentProblem when a worker cannot start.
    """

    def __init__(
        self, target: HostTarget, references: Path, *, cores: Sequence[int] | None = None, limits: Limits | None = None
    ) -> None:
        allowed = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
        limits = limits or Limits()
        self._limits = limits
        everywhere = frozenset(allowed)
        self._workers = [_Process(target, references, allowed[0], everywhere, limits) for _ in allowed]

    def measure(self, subject: Subject, candidates: Sequence[Candidate], best_latency_s: float | None) -> list[Outcome]:
        """See `Measurer.measure`."""
        outcomes: dict[int, Outcome] = {}
        shares = [list(range(i, len(candidates), len(self._workers))) for i in range(len(self._workers))]
        self._build(subject, candidates, shares, outcomes)
        best = best_latency_s
        for worker, share in zip(self._workers, shares, strict=True):
            for position in share:
                if position in outcomes:
                    continue
                outcomes[position] = self._time(worker, subject, candidates[position], best)
                done = outcomes[position].objectives
                best = best if done is None else min(done.latency_s, best or done.latency_s)
            self._forget(worker)
        return [outcomes[position] for position in range(len(candidates))]

    def _build(
        self, subject: Subject, candidates: Sequence[Candidate], shares: list[list[int]], outcomes: dict[int, Outcome]
    ) -> None:
        """Builds every worker's share at the same time; a failure becomes an outcome."""
        for turn in itertools.zip_longest(*shares):
            busy = [(worker, place) for worker, place in zip(self._workers, turn, strict=True) if place is not None]
            for worker, position in busy:
                worker.load(subject)
                worker.post("build", *_named(candidates[position]))
            for worker, position in busy:
                try:
                    status, message = worker.receive(self._limits.build_s)
                except _Gone as gone:
                    outcomes[position] = gone.outcome(running=False)
                    continue
                if status is not Status.OK:
                    outcomes[position] = Outcome(status, message=message)

    def _time(self, worker: _Process, subject: Subject, candidate: Candidate, best: float | None) -> Outcome:
        """Checks and times one built candidate; built again when its worker had to be replaced since."""
        running = False
        try:
            worker.load(subject)
            status, message = worker.ask(self._limits.build_s, "build", *_named(candidate))
            if status is not Status.OK:
                return Outcome(status, message=message)
            running = True
            answer = worker.ask(self._limits.run_s, "measure", candidate.trace, best)
        except _Gone as gone:
            return gone.outcome(running)
        if answer[0] is not Status.OK:
            return Outcome(answer[0], message=answer[1])
        _, seconds, traffic, verification = answer
        return _outcome(seconds, traffic, verification)

    def compare(self, subject: Subject, candidates: Sequence[Candidate]) -> list[Outcome]:
        """See `Measurer.compare`."""
        worker = self._workers[0]
        outcomes = [self._time(worker, subject, candidate, None) for candidate in candidates]
        alive = [i for i, outcome in enumerate(outcomes) if outcome.status is Status.OK]
        seconds: dict[int, list[float]] = {i: [] for i in alive}
        place = 0
        try:
            for place in alive:
                worker.load(subject)
                worker.ask(self._limits.build_s, "build", *_named(candidates[place]))
            for _ in range(COMPARE_ROUNDS):
                for place in alive:
                    seconds[place] += worker.ask(self._limits.run_s, "time", candidates[place].trace, 2)
        except _Gone as gone:  # for the others, what was measured before stands
            outcomes[place] = gone.outcome(running=True)
            return outcomes
        for i in alive:
            before = outcomes[i]
            assert before.objectives is not None
            assert before.verification is not None
            traffic = (before.objectives.footprint_bytes, before.objectives.traffic_bytes)
            outcomes[i] = _outcome(seconds[i], traffic, before.verification)
        self._forget(worker)
        return outcomes

    def verify(self, subject: Subject, library: Path, symbols: Sequence[str], arguments: tuple[Argument, ...]) -> list[Outcome]:
        """Runs functions of a linked library, which all take `arguments`, and compares them with the task's reference. Outcomes
        carry no objectives; those of functions that ran to their end carry a verification, right or wrong.

        A library that is written anew needs another name: a process may hold the old one under this name.
        """
        worker, outcomes = self._workers[0], []
        for symbol in symbols:
            try:
                worker.load(subject)
                worker.ask(self._limits.build_s, "adopt", str(library), symbol, arguments)
                correct, verification = worker.ask(self._limits.run_s, "check", symbol)
            except _Gone as gone:
                outcomes.append(gone.outcome(running=True))
                continue
            status, message = (Status.OK, "") if correct else (Status.WRONG_RESULT, "differs in the linked library")
            outcomes.append(Outcome(status, verification=verification, message=message))
        self._forget(worker)
        return outcomes

    @staticmethod
    def _forget(worker: _Process) -> None:
        if worker.running:
            with contextlib.suppress(_Gone):
                worker.ask(5.0, "drop")

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> PoolMeasurer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _named(candidate: Candidate) -> tuple[str, str]:
    return candidate.trace, candidate.space


def _outcome(seconds: Sequence[float], traffic: tuple[float, float], verification: Verification) -> Outcome:
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median] * 3
    objectives = Objectives(median, traffic[0], traffic[1])
    return Outcome(Status.OK, objectives, (quartiles[2] - quartiles[0]) / median, verification)
