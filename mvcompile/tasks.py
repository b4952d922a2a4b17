"""A prepared module as tasks (distinct kernels) and layers (their calls, in order)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, topi
from tvm.s_tir import SBlock
from tvm.s_tir.analysis import estimate_tir_flops
from tvm_ffi import structural_hash, structural_walk

from mvcompile.bundle.schema import Parameter
from mvcompile.errors import ModelError
from mvcompile.frontend.packing import unused_flops
from mvcompile.frontend.prepare import PreparedModel
from mvcompile.frontend.weights import values_of
from mvcompile.types import DTYPE_BYTES, Argument, digest_json


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One distinct tensor program: `module["main"]`, unscheduled.

    The last `num_outputs` parameters are written. `flops` per call; `calls` in the model; `constants` are the positions of
    parameters that are weights in every call (cold when the model does not fit the last-level cache). Kernels take `arguments`,
    which `parameters` describe: the parameters of the program, unless some take a weight in another form.
    """

    name: str
    key: str
    kind: str
    module: tvm.IRModule
    parameters: tuple[Parameter, ...]
    num_outputs: int
    flops: float
    calls: int
    constants: frozenset[int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor of the model. `source` is `input` (with the input's index), `constant` (with its data) or `computed`.

    `root` is the index of the value whose storage this one is a view of (its own index when it is no view)."""

    source: str
    dtype: str
    shape: tuple[int, ...]
    root: int
    index: int = 0
    data: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One call of a task (index) on values (indices), in the kernel's parameter order."""

    name: str
    task: int
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The model as data: what a plan is made from."""

    tasks: tuple[Task, ...]
    layers: tuple[Layer, ...]
    values: tuple[Value, ...]
    outputs: tuple[int, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all constants, each counted once."""
        return sum(value.data.nbytes for value in self.values if value.data is not None)


def extract(prepared: PreparedModel) -> Program:
    """Tasks, layers and values of `prepared.module["main"]`.

    Raises ModelError that lists every call that is not a tensor program.
    """
    reader = _Reader(prepared.module)
    return reader.program()


class _Reader:
    """Walks main's bindings once, in order."""

    def __init__(self, module: tvm.IRModule) -> None:
        self._module = module
        self._values: list[Value] = []
        self._bound: dict[Any, Any] = {}
        self._constants: dict[int, int] = {}
        self._task_of: dict[str, int] = {}
        self._tasks: list[Task] = []
        self._layers: list[Layer] = []
        self._unhandled: list[str] = []

    def program(self) -> Program:
        main = self._module["main"]
        for index, parameter in enumerate(main.params):
            self._bound[parameter] = self._add("input", parameter.ty, index=index)
        for block in main.body.blocks:
            for binding in block.bindings:
                self._bound[binding.var] = self._evaluate(binding)
        if self._unhandled:
            listed = "\n  ".join(self._unhandled)
            raise ModelError(f"{len(self._unhandled)} operation(s) cannot be lowered to static tensor programs:\n  {listed}")
        outputs = self._lookup(main.body.body)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return Program(self._finished_tasks(), tuple(self._layers), tuple(self._values), outputs)

    def _add(self, source: str, kind: Any, root: int | None = None, index: int = 0, data: np.ndarray | None = None) -> int:
        here = len(self._values)
        shape = tuple(int(extent) for extent in kind.shape)
        root = here if root is None else self._values[root].root
        self._values.append(Value(source, str(kind.dtype), shape, root, index, data))
        return here

    def _lookup(self, expr: Any) -> Any:
        if isinstance(expr, tvm.ir.GenericConst):
            key = hash(expr.value)
            if key not in self._constants:
                self._constants[key] = self._add("constant", expr.ty, data=values_of(expr))
            return self._constants[key]
        if isinstance(expr, relax.Tuple):
            return tuple(self._lookup(field) for field in expr.fields)
        return self._bound[expr]

    def _evaluate(self, binding: Any) -> Any:
        value = binding.value
        if isinstance(value, relax.TupleGetItem):
            return self._lookup(value.tuple_value)[int(value.index)]
        if isinstance(value, (relax.Var, relax.Tuple, tvm.ir.GenericConst)):
            return self._lookup(value)
        name = _operation(value)
        if name == "call_tir" and _is_static(value.ty):
            return self._call(value)
        if name == "reshape" and _is_static(value.ty):
            return self._view(value)
        self._unhandled.append(f"{name} -> {binding.var.name}: {value.ty}")
        return self._stand_in(value.ty)

    def _stand_in(self, kind: Any) -> Any:
        """What stands for an unhandled result, so that the reading goes on and all problems are listed at once."""
        if isinstance(kind, relax.TupleType):
            return tuple(self._stand_in(field) for field in kind.fields)
        self._values.append(Value("computed", "float32", (), len(self._values)))
        return len(self._values) - 1

    def _view(self, call: relax.Call) -> int:
        source = self._lookup(call.args[0])
        origin = self._values[source]
        if origin.source == "input":
            return self._copy(call, source)
        return self._add(origin.source, call.ty, root=source)

    def _copy(self, call: relax.Call, source: int) -> int:
        """A reshaped input is copied: the memory of an input is the caller's, and is bound with the input's own shape."""
        origin, result = self._values[source], self._add("computed", call.ty)
        data = te.placeholder(origin.shape, origin.dtype, name="data")
        function = te.create_prim_func([data, topi.reshape(data, self._values[result].shape)])
        task = self._task(function, "reshape", 1)
        self._layers.append(Layer(f"reshape.{len(self._layers)}", task, (source, result)))
        return result

    def _call(self, call: relax.Call) -> Any:
        arguments = self._lookup(call.args[1])
        arguments = arguments if isinstance(arguments, tuple) else (arguments,)
        kinds = list(call.ty.fields) if isinstance(call.ty, relax.TupleType) else [call.ty]
        results = tuple(self._add("computed", kind) for kind in kinds)
        variable = call.args[0]
        task = self._task(self._module[variable], str(variable.name_hint), len(results))
        self._layers.append(Layer(f"{self._tasks[task].kind}.{len(self._layers)}", task, (*arguments, *results)))
        return results if len(results) > 1 else results[0]

    def _task(self, function: Any, name: str, outputs: int) -> int:
        function = function.with_attr("global_symbol", "main")
        key = _key(function)
        if key not in self._task_of:
            self._task_of[key] = len(self._tasks)
            module = tvm.IRModule({"main": function})
            parameters = tuple(
                Parameter(str(each.dtype), tuple(int(extent) for extent in each.shape)) for each in function.params
            )
            arguments = tuple(Argument(position) for position in range(len(parameters)))
            flops = _flops(module)
            self._tasks.append(Task(name, key, _kind(name), module, parameters, outputs, flops, 0, frozenset(), arguments))
        return self._task_of[key]

    def _finished_tasks(self) -> tuple[Task, ...]:
        calls = Counter(layer.task for layer in self._layers)
        constants: dict[int, frozenset[int]] = {}
        for layer in self._layers:
            here = frozenset(i for i, value in enumerate(layer.arguments) if self._values[value].source == "constant")
            constants[layer.task] = constants.get(layer.task, here) & here
        return tuple(replace(task, calls=calls[index], constants=constants[index]) for index, task in enumerate(self._tasks))


def _operation(value: Any) -> str:
    """`call_tir`, `shape_of`, ...: what a binding computes, for the list of what cannot be handled."""
    if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
        return str(value.op.name).removeprefix("relax.")
    return type(value.op if isinstance(value, relax.Call) else value).__name__


def _is_static(kind: Any) -> bool:
    """Whether a result is a tensor of static shape and a dtype that a plan can hold, or a tuple of such tensors."""
    if isinstance(kind, relax.TupleType):
        return all(_is_static(field) for field in kind.fields)
    if not isinstance(kind, relax.TensorType) or kind.shape is None or str(kind.dtype) not in DTYPE_BYTES:
        return False
    return all(isinstance(extent, tvm.tirx.IntImm) for extent in kind.shape)


def _key(function: Any) -> str:
    """Identity of a program across processes: its structure, and the names of its blocks, since traces refer to those.

    Names of functions, variables and buffers do not count.
    """
    blocks: list[str] = []
    structural_walk(function.body, (SBlock, lambda block: blocks.append(str(block.name_hint))), order="pre")
    return digest_json([structural_hash(function, map_free_vars=True) & (2**64 - 1), blocks])[:16]


def _flops(module: tvm.IRModule) -> float:
    """Floating-point operations of one call, without those on columns that only fill up weight panels; 0 where TVM cannot count
    them (loops of unknown length)."""
    try:
        return float(estimate_tir_flops(module)) - unused_flops(module)
    except Exception:  # TVM raises several types here, and the count only weighs tasks against each other
        return 0.0


def _kind(name: str) -> str:
    """`fused_conv2d3_add1_relu1` -> `conv2d_add_relu`: the operators, without the importer's running numbers."""
    return re.sub(r"([123]d)?\d*(?=_|$)", lambda match: match.group(1) or "", name.removeprefix("fused_"))
