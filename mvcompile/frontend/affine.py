"""Products and sums with constants, before the layout is chosen: in the form that layouts pass through, and as few as possible.

An exporter writes a normalisation as up to four operations with vectors `(channels, 1, 1)`. The layout pass leaves alone what has
fewer axes than the image, and puts transposes around it, so constants get all axes here. Then chains are computed ahead, in
float64: `(x * a + b) * c` is `x * (a * c) + b * c`, and a factor of a convolution's result is one of its weights.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mvcompile.frontend.weights import values_of

_BINARY = frozenset(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum"))
_COMMUTATIVE = ("relax.add", "relax.multiply")
_IMAGE_AXES = 4


def fold_constant_factors() -> Any:
    """The pass over all Relax functions of a module."""

    @tvm.transform.module_pass(opt_level=0, name="FoldConstantFactors")
    def fold(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        visitor = _FoldFactors(module)
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function):
                visitor.uses = _count_uses(function)
                visitor.builder_.update_func(variable, visitor.visit_expr(function))
        return visitor.builder_.get()

    return fold


def _count_uses(function: Any) -> Counter[Any]:
    """How often each variable is read; what is returned counts too."""
    uses: Counter[Any] = Counter()

    def visit(expr: Any) -> None:
        children = expr.args if isinstance(expr, relax.Call) else expr.fields if isinstance(expr, relax.Tuple) else ()
        uses.update(child for child in children if isinstance(child, relax.Var))
        if isinstance(expr, relax.TupleGetItem):
            uses[expr.tuple_value] += 1
        if isinstance(expr, relax.SeqExpr):
            uses[expr.body] += isinstance(expr.body, relax.Var)
            aliases = (binding.value for block in expr.blocks for binding in block.bindings)
            uses.update(value for value in aliases if isinstance(value, relax.Var))

    relax.analysis.post_order_visit(function, visit)
    return uses


@mutator
class _FoldFactors(PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.uses: Counter[Any] = Counter()
        self.read_once: set[Any] = set()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        before = list(call.args)
        call = self.visit_expr_post_order(call)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op):
            return call
        self.read_once.update(new for old, new in zip(before, call.args, strict=True) if self.uses[old] == 1)
        if call.op.name not in _BINARY or not str(call.ty.dtype).startswith("float"):
            return call
        call = self._with_all_axes(call)
        operand, value = self._with_constant(call)
        if value is None:
            return call
        folded = self._scaled(operand, value) if call.op.name == "relax.multiply" else self._shifted(operand, value)
        return call if folded is None else folded

    def _constant(self, expr: relax.Expr) -> NDArray[Any] | None:
        bound = self.builder_.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        return values_of(bound) if isinstance(bound, tvm.ir.GenericConst) else None

    def _with_all_axes(self, call: relax.Call) -> relax.Call:
        axes = len(call.ty.shape)
        if axes != _IMAGE_AXES:
            return call
        arguments = list(call.args)
        for index, argument in enumerate(arguments):
            value = self._constant(argument)
            if value is not None and 0 < value.ndim < axes:
                arguments[index] = _const(value.reshape((1,) * (axes - value.ndim) + value.shape))
        return self.builder_.normalize(relax.Call(call.op, arguments, call.attrs))

    def _with_constant(self, call: relax.Call) -> tuple[Any, NDArray[Any] | None]:
        """The operand and the constant of a product or sum, if the result has the operand's shape."""
        if call.op.name not in _COMMUTATIVE:
            return None, None
        for operand, other in (call.args, reversed(call.args)):
            value = self._constant(other)
            if value is not None and self._constant(operand) is None and _shape(operand) == _shape(call):
                return operand, value
        return None, None

    def _made_by(self, expr: relax.Expr) -> relax.Call | None:
        """The call that made `expr`, if nothing else reads it."""
        call = self.builder_.lookup_binding(expr) if isinstance(expr, relax.Var) and expr in self.read_once else None
        return call if isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.Op) else None

    def _scaled(self, expr: relax.Expr, factor: NDArray[Any]) -> relax.Call | None:
        """`expr * factor` without a product more than `expr` has; None if there is no such form."""
        call = self._made_by(expr)
        if call is None:
            return None
        if call.op.name == "relax.nn.conv2d":
            return self._scaled_convolution(call, factor)
        operand, value = self._with_constant(call)
        product = None if value is None else _product(value, factor)
        if product is None:
            return None
        if call.op.name == "relax.multiply":
            return relax.op.multiply(operand, _const(product))
        scaled = self._scaled(operand, factor)
        if scaled is None:
            scaled = relax.op.multiply(operand, _const(factor))
        return relax.op.add(self.builder_.emit(scaled), _const(product))

    def _scaled_convolution(self, call: relax.Call, factor: NDArray[Any]) -> relax.Call | None:
        weight = self._constant(call.args[1])
        channels = _shape(call)[1]
        if weight is None or call.attrs.data_layout != "NCHW" or factor.shape not in ((), (1, 1, 1, 1), (1, channels, 1, 1)):
            return None
        product = _product(weight, factor.reshape(-1, 1, 1, 1))
        if product is None:
            return None
        return relax.Call(call.op, [call.args[0], _const(product)], call.attrs)

    def _shifted(self, expr: relax.Expr, shift: NDArray[Any]) -> relax.Call | None:
        """`(x + c) + shift` as one sum."""
        call = self._made_by(expr)
        operand, value = (None, None) if call is None or call.op.name != "relax.add" else self._with_constant(call)
        if value is None:
            return None
        with np.errstate(over="ignore"):
            total = (value.astype(np.float64) + shift).astype(value.dtype)
        return relax.op.add(operand, _const(total)) if np.isfinite(total).all() else None


def _product(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any] | None:
    """In float64; None where the constants' own dtype cannot hold it, though it may hold what they are multiplied with."""
    exact = left.astype(np.float64) * right
    with np.errstate(over="ignore"):
        rounded: NDArray[Any] = exact.astype(left.dtype)
    lost = ~np.isfinite(rounded) | ((np.abs(rounded) < np.finfo(rounded.dtype).tiny) & (exact != 0))
    return None if lost.any() else rounded


def _const(value: NDArray[Any]) -> Any:
    return relax.const(value, str(value.dtype))


def _shape(expr: relax.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in expr.ty.shape)
