"""Relax modules of a few operators, targets as values, and kernels run in process: what the compiler's stages are tested on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

from mvcompile.build import PlannedModel, make_plan
from mvcompile.bundle.schema import ARENA, CONSTANT
from mvcompile.frontend.prepare import prepare
from mvcompile.measure.verify import random_arguments
from mvcompile.runtime import memory
from mvcompile.target import detect_target, tvm_target
from mvcompile.tasks import Program, Task, extract
from mvcompile.types import HostTarget

Array = NDArray[Any]
Shape = tuple[int, ...]
SEED = 7

_AVX2 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3")
_AVX512 = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")


def _target(arch: str, cpu: str, features: Sequence[str], bits: int, registers: int) -> HostTarget:
    names = tuple(sorted(features))
    return HostTarget(f"{arch}-unknown-linux-gnu", arch, cpu, names, 4, 32 << 10, 1 << 20, 16 << 20, bits, registers, "made up")


AVX2 = _target("x86_64", "haswell", _AVX2, 256, 16)
AVX512 = _target("x86_64", "skylake-avx512", [*_AVX2, *_AVX512], 512, 32)
SSE = _target("x86_64", "x86-64", ("sse3", "sse4.1", "ssse3"), 128, 16)
NEON = _target("aarch64", "generic", ("neon",), 128, 32)

VECTOR_FMA = {
    "avx2": (AVX2, r"vfmadd\w+ps\s.*%ymm"),
    "avx512": (AVX512, r"vfmadd\w+ps\s.*%zmm"),
    "neon": (NEON, r"fmla\s+v\d+\.4s"),
    "sse": (SSE, r"mulps\s.*%xmm"),
}
"""Targets, and how a multiplication of one of their whole vectors looks in assembly (where there is one, fused with the sum)."""


class Graph:
    """Emits operators into a Relax function; weights are seeded constants, scaled to keep activations in range."""

    def __init__(self, builder: relax.BlockBuilder) -> None:
        self._builder = builder
        self._random = np.random.default_rng(SEED)
        self.last_weight: Array = np.zeros(0, np.float32)

    def __call__(self, call: Any) -> Any:
        """The variable that `call` is bound to."""
        return self._builder.emit(call)

    def weight(self, *shape: int, fan_in: int = 1) -> Any:
        self.last_weight = self._random.standard_normal(shape, dtype=np.float32) / np.float32(fan_in**0.5)
        return relax.const(self.last_weight)

    def conv(
        self,
        x: Any,
        columns: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int | Sequence[int] | None = None,
        groups: int = 1,
        dilation: int = 1,
    ) -> Any:
        """A square convolution of an NCHW image, without bias; by default padded to keep its extent at stride 1."""
        channels = int(x.ty.shape[1]) // groups
        weight = self.weight(columns, channels, kernel, kernel, fan_in=channels * kernel**2)
        around = dilation * (kernel // 2) if padding is None else padding
        return self(relax.op.nn.conv2d(x, weight, strides=stride, padding=around, groups=groups, dilation=dilation))

    def bias(self, x: Any) -> Any:
        """Adds a vector along axis 1 of an image, along the last axis of anything else."""
        image = len(x.ty.shape) == 4
        extent = int(x.ty.shape[1 if image else -1])
        return self(relax.op.add(x, self.weight(1, extent, 1, 1) if image else self.weight(extent)))

    def dense(self, x: Any, columns: int) -> Any:
        """A product with a constant matrix."""
        rows = int(x.ty.shape[-1])
        return self(relax.op.matmul(x, self.weight(rows, columns, fan_in=rows)))

    def add(self, x: Any, y: Any) -> Any:
        return self(relax.op.add(x, y))

    def relu(self, x: Any) -> Any:
        return self(relax.op.nn.relu(x))

    def normalised(self, x: Any) -> Any:
        """An image times and plus two vectors, as exporters write it (they have no batch axis), and the activation."""
        for operation in (relax.op.multiply, relax.op.add, relax.op.multiply, relax.op.add):
            x = self(operation(x, self.weight(int(x.ty.shape[1]), 1, 1)))
        return self.relu(x)


def network(body: Callable[..., Any], *shapes: Shape, dtypes: Sequence[str] = ()) -> tvm.IRModule:
    """A module whose `main` takes one tensor per shape (float32 where `dtypes` ends) and returns what `body` makes of a Graph and
    them: an expression, or a list of expressions."""
    kinds = [*dtypes, *["float32"] * (len(shapes) - len(dtypes))]
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, kinds[i])) for i, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", inputs):
        with builder.dataflow():
            results = body(Graph(builder), *inputs)
            results = [builder.emit(each) for each in (results if isinstance(results, list) else [results])]
            output = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(output)
    return builder.get()


def programs_of(module: tvm.IRModule, target: HostTarget) -> Program:
    """The prepared module as tasks and layers."""
    return extract(prepare(module, target))


def only_task(module: tvm.IRModule, target: HostTarget) -> Task:
    """The task of a module that is one kernel, changes of layout at its ends not counted."""
    (task,) = [task for task in programs_of(module, target).tasks if task.kind not in ("transpose", "reshape")]
    return task


def arguments_of(task: Task) -> list[Array]:
    """Random inputs of a task, integers among them 0 or 1."""
    inputs = task.parameters[: -task.num_outputs]
    return random_arguments([(each.dtype, each.shape) for each in inputs], SEED)


def run_kernels(task: Task, modules: Sequence[tvm.IRModule], target: HostTarget) -> list[list[Array]]:
    """The outputs of each module, which are schedules of `task`, on the task's random inputs. Compiled at once: faster."""
    functions = {f"f{i}": module["main"].with_attr("global_symbol", f"f{i}") for i, module in enumerate(modules)}
    library = tvm.compile(tvm.IRModule(functions), target=tvm_target(target)).mod
    results = []
    for name in functions:
        outputs = [np.full(each.shape, 77).astype(each.dtype) for each in task.parameters[-task.num_outputs :]]
        tensors = [tvm.runtime.tensor(array) for array in (*arguments_of(task), *outputs)]
        library[name](*tensors)
        results.append([tensor.numpy() for tensor in tensors[-task.num_outputs :]])
    return results


def run_plan(planned: PlannedModel, kernels: Sequence[Callable[..., Any]], inputs: Sequence[Array]) -> list[Array]:
    """The outputs of a planned model; `kernels[i]` computes task i. Memory is laid out as the plan says."""
    weights = memory.allocate(planned.weights_bytes)
    for offset, data in planned.weights:
        memory.array_at(weights, offset, str(data.dtype), data.shape)[...] = data
    blocks = {ARENA: memory.allocate(planned.plan.arena_bytes), CONSTANT: weights}
    given = [memory.allocate_array(str(each.dtype), each.shape) for each in inputs]
    for array, values in zip(given, inputs, strict=True):
        array[...] = values
    arrays = [
        memory.array_at(blocks[each.storage], each.offset, each.dtype, each.shape)
        if each.storage in blocks
        else given[each.offset]
        for each in planned.plan.tensors
    ]
    tensors = [memory.tensor(array) for array in arrays]
    for step in planned.plan.steps:
        kernels[step.task](*(tensors[index] for index in step.arguments))
    return [arrays[index].copy() for index in planned.plan.outputs]


def reference(module: tvm.IRModule, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of a Relax module as TVM's own pipeline and virtual machine compute them."""
    machine = relax.VirtualMachine(tvm.compile(module, target=tvm.target.Target("llvm")), tvm.cpu())
    return [each.numpy() for each in machine["main"](*map(tvm.runtime.tensor, inputs))]


def run_here(program: Program, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of a program whose kernels are compiled for this machine as they are, without schedules."""
    functions = {f"f{i}": task.module["main"].with_attr("global_symbol", f"f{i}") for i, task in enumerate(program.tasks)}
    library = tvm.compile(tvm.IRModule(functions), target=tvm_target(detect_target())).mod
    return run_plan(make_plan(program), [library[name] for name in functions], inputs)


def checked_program(body: Callable[..., Any], *shapes: Shape) -> Program:
    """`network(body, *shapes)`, prepared for AVX2; computes on random inputs what the network does, or AssertionError."""
    model = network(body, *shapes)
    program = programs_of(model, AVX2)
    inputs = [np.random.default_rng(1).standard_normal(shape, dtype=np.float32) for shape in shapes]
    for found, expected in zip(run_here(program, inputs), reference(model, inputs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    return program


def kinds_of(program: Program) -> list[str]:
    """What the layers compute, in order; changes of layout at the ends of the model are not counted."""
    found = [layer.name.rpartition(".")[0] for layer in program.layers]
    return [kind for index, kind in enumerate(found) if kind != "transpose" or 0 < index < len(found) - 1]
