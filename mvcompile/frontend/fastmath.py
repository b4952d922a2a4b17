"""The pass that makes elementwise functions of tensor programs vectorisable: see `mvcompile.vectormath`."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call
from tvm_ffi import structural_map

from mvcompile.vectormath import FUNCTIONS, operator

_REPLACED = {f"tirx.{name}": operator(name) for name in FUNCTIONS}


def _replace(call: Any) -> Any:
    replacement = _REPLACED.get(str(getattr(call.op, "name", "")))
    if replacement is None or str(call.ty.dtype) != "float32":
        return call
    return tirx.call_intrin("float32", replacement, *call.args)


def vectorisable_functions() -> tvm.transform.Pass:
    """Replaces `exp`, `tanh`, `erf` and `sigmoid` of float32 in every tensor program. Other dtypes keep the C library's."""

    @tvm.transform.module_pass(opt_level=0, name="VectorisableFunctions")
    def replace(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        changed = {
            variable: function.with_body(structural_map(function.body, (Call, _replace)))
            for variable, function in module.functions_items()
            if isinstance(function, tirx.PrimFunc)
        }
        module = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
        for variable, function in changed.items():
            module.update_func(variable, function)
        return module

    return replace
