"""Data movement after the layout is chosen: what can be done to a constant is, and what is left is one copy at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mvcompile.frontend.weights import values_of

_VIEWS = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")
_TO_CHANNELS_FIRST = [0, 3, 1, 2]
_TO_CHANNELS_LAST = [0, 2, 3, 1]
_EXCHANGE_GROUPS = [0, 2, 1, 3, 4]


def fold_movement() -> Any:
    """The pass over all Relax functions of a module."""

    @tvm.transform.module_pass(opt_level=0, name="FoldMovement")
    def fold(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        visitor = _FoldMovement(module)
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function):
                visitor.builder_.update_func(variable, visitor.visit_expr(function))
        return visitor.builder_.get()

    return fold


@mutator
class _FoldMovement(PyExprMutator):
    """Moves constants with numpy (FoldConstant compiles and runs a kernel for each, 0.1 s a weight), drops what moves nothing
    (ConvertLayout puts a transpose behind every reduction to a scalar), and rewrites:

    - an image in rows of a matrix: the matrix's rows are put in the order in which the image lies in memory;
    - an exchange of channels between groups: the last axes of an image change places, instead of all of its axes, three times.
    """

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op) or not call.args:
            return call
        name = call.op.name
        if name == "relax.permute_dims" or name in _VIEWS:
            return self._moved(call)
        return self._of_image(call) if name == "relax.matmul" else call

    def _bound(self, expr: relax.Expr) -> relax.Expr:
        bound = self.builder_.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        return expr if bound is None else bound

    def _constant(self, expr: relax.Expr) -> NDArray[Any] | None:
        bound = self._bound(expr)
        return values_of(bound) if isinstance(bound, tvm.ir.GenericConst) else None

    def _argument(self, expr: relax.Expr, name: str) -> relax.Expr | None:
        """What `expr` is made from, if it is made by this operator."""
        bound = self._bound(expr)
        return bound.args[0] if isinstance(bound, relax.Call) and bound.op == tvm.ir.Op.get(name) else None

    def _transposed(self, expr: relax.Expr | None, axes: Sequence[int]) -> relax.Expr | None:
        """What `expr` is the transpose of, by these axes."""
        bound = None if expr is None else self._bound(expr)
        argument = None if bound is None else self._argument(bound, "relax.permute_dims")
        return None if argument is None or _axes(bound) != list(axes) else argument

    def _moved(self, call: relax.Call) -> relax.Expr:
        value = self._constant(call.args[0])
        if call.op.name != "relax.permute_dims":
            if value is not None:
                return _const(value.reshape(_shape(call)))
            return call.args[0] if _shape(call) == _shape(call.args[0]) else call
        axes = _axes(call)
        if value is not None:
            return _const(np.ascontiguousarray(np.transpose(value, axes)))
        if axes == sorted(axes):
            return call.args[0]
        before = self._argument(call.args[0], "relax.permute_dims")
        if before is not None and [_axes(self._bound(call.args[0]))[axis] for axis in axes] == sorted(axes):
            return before
        shuffled = self._shuffled(call) if axes == _TO_CHANNELS_LAST else None
        return call if shuffled is None else shuffled

    def _shuffled(self, call: relax.Call) -> relax.Expr | None:
        """Channels-last of (n, groups, c, h, w) -> (n, c, groups, h, w) of a channels-last image."""
        exchanged = self._argument(call.args[0], "relax.reshape")
        groups = self._transposed(exchanged, _EXCHANGE_GROUPS)
        source = None if groups is None else self._argument(groups, "relax.reshape")
        image = self._transposed(source, _TO_CHANNELS_FIRST)
        if image is None or groups is None:
            return None
        (batch, height, width, channels), (grouped_batch, *extents) = _shape(image), _shape(groups)
        if grouped_batch != batch or extents[2:] != [height, width] or _shape(call) != [batch, height, width, channels]:
            return None
        split = self.builder_.emit(relax.op.reshape(image, (batch, height, width, *extents[:2])))
        moved = self.builder_.emit(relax.op.permute_dims(split, [0, 1, 2, 4, 3]))
        return relax.op.reshape(moved, (batch, height, width, channels))

    def _of_image(self, call: relax.Call) -> relax.Expr:
        """A product of (n, c * h * w) and a constant, whose left side is a channels-last image, transposed for it."""
        rows = self._argument(call.args[0], "relax.reshape")
        image = self._transposed(rows, _TO_CHANNELS_FIRST)
        if image is None:
            return call
        batch, height, width, channels = _shape(image)
        weight = self._constant(call.args[1])
        if weight is None or weight.ndim != 2 or _shape(call.args[0]) != [batch, channels * height * width]:
            return call
        moved = weight.reshape(channels, height, width, -1).transpose(1, 2, 0, 3).reshape(weight.shape)
        flat = self.builder_.emit(relax.op.reshape(image, _shape(call.args[0])))
        return relax.Call(call.op, [flat, _const(np.ascontiguousarray(moved))], call.attrs)


def _axes(call: relax.Call) -> list[int]:
    axes = call.attrs.axes
    rank = len(call.args[0].ty.shape)
    return list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]


def _shape(expr: relax.Expr) -> list[int]:
    return [int(extent) for extent in expr.ty.shape]


def _const(value: NDArray[Any]) -> Any:
    return relax.const(value, str(value.dtype))  # the default would narrow 64-bit values
