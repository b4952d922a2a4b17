"""A Relax module from any TVM frontend: its inputs and outputs, and what it answers when TVM itself builds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax

from mvcompile.errors import ModelError
from mvcompile.types import DTYPE_BYTES, TensorSpec

Array = NDArray[Any]


def interface(module: tvm.IRModule) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs, under their parameters' names, and outputs, named output_0, output_1, ..., of `module["main"]`.

    Raises ModelError if there is no such Relax function, if it takes or returns anything but tensors of static shape, or if two
    inputs have one name.
    """
    functions = {str(variable.name_hint): function for variable, function in module.functions_items()}
    main = functions.get("main")
    if not isinstance(main, relax.Function):
        raise ModelError(f"the module has no Relax function main (it has: {', '.join(sorted(functions)) or 'none'})")
    result = main.ret_ty
    kinds = list(result.fields) if isinstance(result, relax.TupleType) else [result]
    inputs = tuple(_spec(str(each.name), each.ty) for each in main.params)
    outputs = tuple(_spec(f"output_{index}", kind) for index, kind in enumerate(kinds))
    names = [spec.name for spec in inputs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ModelError(f"main has several inputs named {', '.join(map(repr, twice))}; give each a name of its own")
    if not outputs:
        raise ModelError("main returns an empty tuple; a model needs at least one output")
    return inputs, outputs


def module_outputs(module: tvm.IRModule, inputs: Mapping[str, Array]) -> tuple[Array, ...]:
    """What `module["main"]` returns, built with TVM's default pipeline and none of our passes. Raises ModelError if it fails."""
    try:
        machine = relax.VirtualMachine(tvm.compile(module, target=tvm.target.Target("llvm")), tvm.cpu())
        result = machine["main"](*(tvm.runtime.tensor(value) for value in inputs.values()))
    except Exception as error:  # TVM raises several types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(f"TVM cannot build and run the module for reference: {lines[-1] if lines else error!r}") from error
    tensors = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return tuple(np.asarray(tensor.numpy()) for tensor in tensors)


def _spec(name: str, kind: Any) -> TensorSpec:
    if not isinstance(kind, relax.TensorType) or kind.shape is None:
        raise ModelError(f"{name} of main is {kind}, expected a tensor of static shape")
    if not all(isinstance(extent, tvm.tirx.IntImm) for extent in kind.shape):
        raise ModelError(f"{name} of main has the shape {kind.shape}, expected a static one: bind its symbolic dimensions")
    if str(kind.dtype) not in DTYPE_BYTES:
        raise ModelError(f"{name} of main has dtype {kind.dtype}; supported are {', '.join(DTYPE_BYTES)}")
    return TensorSpec(name, str(kind.dtype), tuple(int(extent) for extent in kind.shape))
