"""The process that candidates are built, checked and timed in: `main([CORE])`.

It reads pickled requests from standard input and answers on standard output. A candidate that crashes or hangs takes this
process with it and nothing else; the parent (`pool.py`) watches the clock. Compiled code stays in memory (LLVM JIT): nothing is
linked, so no C compiler is needed here.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tvm

from mvcompile import prefetch, traces
from mvcompile.algorithms import Programs, transform
from mvcompile.measure.protocol import Raised, Subject
from mvcompile.measure.references import read_reference, write_reference
from mvcompile.measure.traffic import estimate
from mvcompile.measure.verify import RTOL, Array, absolute_tolerance, compare, random_arguments, reduction_length
from mvcompile.target import tvm_target
from mvcompile.types import Argument, HostTarget, Status, Verification

SEED = 20220228
COARSE_ROUNDS = 3
PRECISE_ROUNDS = 10
MUCH_SLOWER = 1.5
"""A candidate this many times slower than the task's best is timed coarsely: it enters the front only by its traffic."""
HOPELESS = 8.0
"""One call says enough of a candidate this many times slower."""
CACHE_LINE = 64
_PR_SET_PDEATHSIG = 1


def send(stream: BinaryIO, message: Any) -> None:
    """Writes one length-prefixed pickle."""
    body = pickle.dumps(message)
    stream.write(struct.pack("<Q", len(body)) + body)
    stream.flush()


@dataclass(slots=True)
class _Built:
    """A kernel, what it takes, and its footprint and traffic in bytes (nothing is known of a linked library's)."""

    kernel: Any
    arguments: tuple[Argument, ...]
    traffic: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class _Loaded:
    """A task with its arguments and reference outputs, and the kernels built for it by their trace, or symbol."""

    subject: Subject
    programs: Programs
    arrays: list[Array]
    expected: list[Array]
    terms: int
    kernels: dict[str, _Built] = field(default_factory=dict)
    tensors: dict[Argument, Any] = field(default_factory=dict)

    def tensor(self, argument: Argument) -> Any:
        """The tensor to call kernels with. An output is the same one for all kernels."""
        if argument not in self.tensors:
            array = transform(argument.form, self.arrays[argument.position])
            self.tensors[argument] = tvm.runtime.tensor(array)
        return self.tensors[argument]

    @property
    def outputs(self) -> list[Any]:
        return [self.tensor(Argument(i)) for i in range(len(self.arrays) - self.subject.num_outputs, len(self.arrays))]


class Worker:
    """State of one worker process."""

    def __init__(self, target: HostTarget, references: Path, core: int, cores: set[int]) -> None:
        self._host = target
        self._target = tvm_target(target)
        self._references = references
        self._core, self._cores = core, cores
        self._task: _Loaded | None = None
        self._flush = tvm.get_global_func("cache_flush_cpu_non_first_arg")
        self._scratch = np.ones(max(target.l2_bytes * 2, 1 << 20) // 4, dtype=np.float32)
        self._dummy = tvm.runtime.tensor(np.zeros(16, dtype=np.float32))

    def load(self, subject: Subject) -> None:
        """Prepares arguments and reference outputs; the reference is the unscheduled program."""
        if self._task is not None and self._task.subject == subject:
            return
        self._task = None
        module = tvm.ir.load_json(subject.module)
        specs = [(str(each.dtype), tuple(int(e) for e in each.shape)) for each in module["main"].params]
        terms = reduction_length(module)
        arrays, expected = self._reference(subject, module, specs, terms)
        self._task = _Loaded(subject, Programs(module), arrays, expected, terms)

    def _reference(self, subject: Subject, module: tvm.IRModule, specs: list[Any], terms: int) -> tuple[list[Array], list[Array]]:
        """Arguments and reference outputs; the outputs are kept in the work directory for the other workers and later runs."""
        inputs, outputs = specs[: -subject.num_outputs], specs[-subject.num_outputs :]
        empty = [np.zeros(shape, dtype=dtype) for dtype, shape in outputs]
        path = self._references / f"{subject.key}.npz"
        stored = read_reference(path, outputs)
        if stored is not None:
            positive, expected = stored
            return random_arguments(inputs, SEED, positive, subject.constants, terms) + empty, expected
        kernel = tvm.compile(module, target=self._target).mod["main"]
        for positive in (False, True):
            arrays = random_arguments(inputs, SEED, positive, subject.constants, terms) + empty
            tensors = [tvm.runtime.tensor(array) for array in arrays]
            kernel(*tensors)
            expected = [tensor.numpy() for tensor in tensors[-subject.num_outputs :]]
            if all(np.isfinite(array).all() for array in expected if array.dtype.kind == "f"):
                break
        write_reference(path, positive, expected)
        return arrays, expected

    def build(self, trace: str, space: str = "") -> tuple[Status, str]:
        """Compiles a candidate (a trace of `space`) and estimates its traffic; any core may be used."""
        os.sched_setaffinity(0, self._cores)
        task = self._loaded()
        if trace in task.kernels:
            return Status.OK, ""
        try:
            schedule = traces.replay(task.programs.program(space), trace)
        except Exception as error:  # TVM raises several types here; each means that the trace does not fit
            return Status.INVALID, _last_line(error)
        try:
            kernel = tvm.compile(prefetch.insert(schedule.mod), target=self._target).mod["main"]
        except Exception as error:
            return Status.BUILD_ERROR, _last_line(error)
        moved = estimate(schedule.mod["main"], self._host)
        traffic = (float(moved.footprint_bytes), float(moved.traffic_bytes))
        task.kernels[trace] = _Built(kernel, task.programs.arguments(space), traffic)
        return Status.OK, ""

    def adopt(self, library: str, symbol: str, arguments: tuple[Argument, ...]) -> None:
        """Takes `symbol` of a linked library for a candidate of that name."""
        self._loaded().kernels[symbol] = _Built(tvm.runtime.load_module(library)[symbol], arguments)

    def check(self, trace: str) -> tuple[bool, Verification]:
        """Runs a built candidate once and compares its outputs with the reference."""
        task = self._loaded()
        built = task.kernels[trace]
        for tensor in task.outputs:
            tensor.copyfrom(np.full(tensor.shape, 77).astype(str(tensor.dtype)))
        built.kernel(*(task.tensor(each) for each in built.arguments))
        results = []
        for tensor, expected in zip(task.outputs, task.expected, strict=True):
            results.append(compare(tensor.numpy(), expected, RTOL, absolute_tolerance(expected, task.terms)))
        worst = max((verification for _, verification in results), key=lambda each: each.max_abs_error)
        return all(good for good, _ in results), worst

    def time(self, trace: str, rounds: int) -> list[float]:
        """Seconds of `rounds` single calls, each in the cache state of the network: the private caches hold other data, the
        input activations were just written, the weights are in the last-level cache, or nowhere when `weights_cold`."""
        os.sched_setaffinity(0, {self._core})
        task = self._loaded()
        kernel, arguments = task.kernels[trace].kernel, task.kernels[trace].arguments
        tensors = [task.tensor(each) for each in arguments]
        read = len(task.arrays) - task.subject.num_outputs
        weights = [task.tensor(each) for each in arguments if each.position in task.subject.constants]
        warm = [
            _lines(task.tensor(each))
            for each in arguments
            if each.position < read and each.position not in task.subject.constants
        ]
        seconds = []
        for _ in range(rounds):
            self._scratch.sum()
            if task.subject.weights_cold and weights:
                self._flush(self._dummy, *weights)
            for lines in warm:
                lines.sum()
            start = time.perf_counter()
            kernel(*tensors)
            seconds.append(time.perf_counter() - start)
        return seconds

    def measure(self, trace: str, best: float | None) -> tuple[Any, ...]:
        """(status, message) of a failure, or (ok, seconds, (footprint, traffic), verification)."""
        correct, verification = self.check(trace)
        if not correct:
            self._restore()
            tolerance = f"{verification.atol:.3g} + {verification.rtol:g} |reference|"
            return Status.WRONG_RESULT, f"largest error {verification.max_abs_error:.3g}, tolerance {tolerance}"
        seconds = self.time(trace, 1)
        if best is None or seconds[0] < HOPELESS * best:
            seconds += self.time(trace, COARSE_ROUNDS - 1)
        if best is None or min(seconds) < MUCH_SLOWER * best:
            seconds = self.time(trace, PRECISE_ROUNDS)
        return Status.OK, seconds, self._loaded().kernels[trace].traffic, verification

    def _restore(self) -> None:
        """Gives the next candidate its arguments back: a wrong one may have written to any of them."""
        task = self._loaded()
        task.tensors.clear()

    def drop(self) -> None:
        """Forgets the built kernels."""
        if self._task is not None:
            self._task.kernels.clear()

    def _loaded(self) -> _Loaded:
        if self._task is None:
            raise RuntimeError("a worker was asked to work before a task was loaded")
        return self._task


def _lines(tensor: Any) -> Array:
    """One byte of every cache line of a tensor, in its own memory."""
    whole: Array = np.from_dlpack(tensor)  # `numpy()` would copy: the copy would be warm, not the tensor
    return whole.reshape(-1).view(np.uint8)[::CACHE_LINE]


def _raised(error: Exception) -> Raised:
    return Raised(f"{type(error).__name__}: {_last_line(error)}")


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else repr(error))
    return text[-400:]


def main(arguments: list[str]) -> None:
    """Answers requests until the parent closes the pipe or dies. `--check` only shows that everything can be imported."""
    if arguments == ["--check"]:
        print(f"TVM {tvm.__version__} works")
        return
    # The end of the pipe is only seen between requests: a kernel that hangs would outlive a killed parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not land among the answers
    requests = sys.stdin.buffer
    target, references, cores = pickle.load(requests)
    try:
        worker = Worker(target, references, int(arguments[0]), cores)
    except Exception as error:
        send(answers, _raised(error))
        return
    send(answers, "ready")
    while True:
        try:
            verb, *rest = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = getattr(worker, verb)(*rest)
        except Exception as error:  # the parent decides what it means, and ends this process
            answer = _raised(error)
        send(answers, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
