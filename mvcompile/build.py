"""Kept schedules to one shared library, and a program to an execution plan."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.support import cc

from mvcompile import prefetch, traces
from mvcompile.bundle.schema import ARENA, CONSTANT, INPUT, Parameter, Plan, Step, Tensor
from mvcompile.errors import EnvironmentProblem
from mvcompile.plan import Lifetime, assign_offsets
from mvcompile.runtime.driver import DRIVER, LOOP, LOOP_IR
from mvcompile.runtime.entrance_ir import entrance_ir
from mvcompile.runtime.team_ir import team_ir
from mvcompile.target import tvm_target
from mvcompile.tasks import Program
from mvcompile.types import DTYPE_BYTES, HostTarget, align


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of the library: its symbol, the unscheduled program (`main`) and the trace that schedules it.

    `unread`: parameters of other kernels of its task, which it takes at these places (in rising order) and does not read."""

    symbol: str
    module: tvm.IRModule
    trace: str
    unread: tuple[tuple[int, Parameter], ...] = ()


def find_linker() -> list[str]:
    """The command that links a shared library. Raises EnvironmentProblem that says how to get one."""
    found = cc.get_cc()
    if found is not None:
        return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise EnvironmentProblem(
        "no C compiler was found, and one is needed to link the kernels. Install gcc or clang (Debian: `apt-get install gcc`), "
        "or, without root, `pip install ziglang`; or name one in the environment variable CC"
    )


def build_library(path: Path, kernels: Sequence[Kernel], target: HostTarget) -> None:
    """Compiles all kernels into one shared library at `path`. The same kernels give the same bytes.

    Raises EnvironmentProblem when the linker fails.
    """
    functions = {}
    for kernel in kernels:
        functions[kernel.symbol] = _function(kernel).with_attr("global_symbol", kernel.symbol)
    functions[DRIVER] = step_driver().with_attr("global_symbol", DRIVER)
    linker = find_linker()
    executable = tvm.compile(tvm.IRModule(functions), target=tvm_target(target))
    with tempfile.TemporaryDirectory(prefix="mvcompile-") as folder:
        more = map(str, runtime_objects(Path(folder), target.triple))
        executable.export_library(str(path), fcompile=lambda output, objects, **_: _link(linker, output, [*objects, *more]))


def _function(kernel: Kernel) -> Any:
    """The scheduled program, with the parameters that all kernels of its task have."""
    scheduled = prefetch.insert(traces.replay(kernel.module, kernel.trace).mod)["main"]
    parameters = list(scheduled.params)
    for place, unread in kernel.unread:
        parameters.insert(place, tirx.decl_buffer(unread.shape, unread.dtype, name=f"unread_{place}"))
    return tirx.PrimFunc(parameters, scheduled.body, ret_type=scheduled.ret_type, attrs=scheduled.attrs)


def step_driver() -> Any:
    """The call that makes a whole run (`mvcompile.runtime.driver`), a function to be compiled together with the kernels."""
    words = [tirx.Var(name, "int64") for name in ("run", "outputs", "times")]
    loop = tirx.Return(tirx.call_extern("int64", LOOP, *words))
    body = tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", tvm.ir.StringImm(LOOP_IR), loop)
    return tirx.PrimFunc(words, body)


def runtime_objects(folder: Path, triple: str) -> list[Path]:
    """Object files in `folder` that are to be linked too: the way into the driver for CPython (`mvcompile.runtime.entrance_ir`),
    and how a parallel loop is shared among threads (`mvcompile.runtime.team_ir`)."""
    found = []
    for name, ir in (("entrance", entrance_ir(triple)), ("team", team_ir(triple))):
        source = folder / f"{name}.ll"
        source.write_text(ir)
        found.append(source.with_suffix(".o"))
        tvm.runtime.load_module(str(source)).write_to_file(str(found[-1]), "o")
    return found


def _link(linker: list[str], output: str, objects: Sequence[str]) -> None:
    command = [*linker, "-shared", "-fPIC", "-s", "-Wl,--build-id=none", "-o", output, *objects, "-lm"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EnvironmentProblem(f"cannot run the linker {linker[0]}: {error.strerror}; install gcc, or set CC") from error
    if result.returncode != 0:
        tail = result.stderr.strip()[-800:] or "it printed nothing"
        raise EnvironmentProblem(f"linking the kernels failed ({' '.join(linker)} exited {result.returncode}): {tail}")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedModel:
    """The plan, and the constants in the order and at the offsets in which weights.bin holds them."""

    plan: Plan
    weights: tuple[tuple[int, np.ndarray], ...]
    weights_bytes: int


def make_plan(program: Program) -> PlannedModel:
    """Storage for every tensor that a step or an output uses: equal constants once, intermediates in one arena."""
    values = program.values
    used = sorted({index for layer in program.layers for index in layer.arguments} | set(program.outputs))
    places = _place_constants(program, used)
    offsets, arena_bytes = _place_intermediates(program)
    number = {index: position for position, index in enumerate(used)}
    tensors = []
    for index in used:
        value = values[index]
        if value.source == "input":
            storage, offset = INPUT, value.index
        elif value.source == "constant":
            storage, offset = CONSTANT, places.offsets[value.root]
        else:
            storage, offset = ARENA, offsets[value.root]
        tensors.append(Tensor(storage, offset, value.dtype, value.shape))
    steps = tuple(Step(layer.name, layer.task, tuple(number[i] for i in layer.arguments)) for layer in program.layers)
    plan = Plan(arena_bytes, tuple(tensors), steps, tuple(number[index] for index in program.outputs))
    return PlannedModel(plan, tuple(places.arrays), places.size)


@dataclass(slots=True)
class _Constants:
    offsets: dict[int, int]
    arrays: list[tuple[int, np.ndarray]]
    size: int


def _place_constants(program: Program, used: Sequence[int]) -> _Constants:
    placed = _Constants({}, [], 0)
    known: dict[tuple[Any, ...], int] = {}
    for root in dict.fromkeys(program.values[index].root for index in used):
        data = program.values[root].data
        if data is None:
            continue
        data = np.ascontiguousarray(data)
        identity = (str(data.dtype), data.shape, hashlib.sha256(data.data.cast("B") if data.size else b"").digest())
        if identity not in known:
            known[identity] = placed.size
            placed.arrays.append((placed.size, data))
            placed.size = align(placed.size + data.nbytes)
        placed.offsets[root] = known[identity]
    return placed


def _place_intermediates(program: Program) -> tuple[dict[int, int], int]:
    """Arena offsets of the root values that steps write."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, layer in enumerate(program.layers):
        for index in layer.arguments:
            root = program.values[index].root
            if program.values[root].source == "computed":
                first.setdefault(root, step)
                last[root] = step
    for index in program.outputs:
        root = program.values[index].root
        if root in last:
            last[root] = len(program.layers)
    roots = list(first)
    lifetimes = [Lifetime(_nbytes(program, root), first[root], last[root]) for root in roots]
    offsets, size = assign_offsets(lifetimes)
    return dict(zip(roots, offsets, strict=True)), size


def _nbytes(program: Program, index: int) -> int:
    value = program.values[index]
    return int(np.prod(value.shape, dtype=np.int64)) * DTYPE_BYTES[value.dtype]
