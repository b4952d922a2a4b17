"""The pass that makes elementwise functions of tensor programs vectorisable: see `mvcompile.vectormath`."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Call
from tvm_ffi import structural_map

from mvcompile.vectormath import FUNCTIONS, QUARTER_POWER, operator

_MOST_QUARTERS = 11
"""Larger powers would be products of many factors, with an error from each."""
_REPLACED = {f"tirx.{name}": operator(name) for name in FUNCTIONS}


def _replace(call: Any) -> Any:
    name = str(getattr(call.op, "name", ""))
    if str(call.ty.dtype) != "float32":
        return call
    if name == "tirx.pow":
        return _power(call)
    return tirx.call_intrin("float32", _REPLACED[name], *call.args) if name in _REPLACED else call


def _power(call: Any) -> Any:
    base, exponent = call.args
    quarters = 4.0 * float(exponent.value) if isinstance(exponent, tirx.FloatImm) else 0.0
    if not quarters.is_integer() or quarters % 4 == 0 or abs(quarters) > _MOST_QUARTERS:
        return call
    return tirx.call_intrin("float32", QUARTER_POWER, base, tirx.IntImm("int32", int(quarters)))


def vectorisable_functions() -> tvm.transform.Pass:
    """Replaces `exp`, `tanh`, `erf`, `sigmoid` and powers of quarters of float32 in every tensor program.

    Other dtypes, and other powers, keep the C library's."""

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
