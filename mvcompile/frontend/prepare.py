"""`prepare()`: THE order of Relax passes. Extraction, build and verification all go through it (architecture rule 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from mvcompile.errors import ModelError
from mvcompile.frontend.fastmath import vectorisable_functions
from mvcompile.frontend.packing import pack_columns, packed_conv2d, packed_matmul, panel_width
from mvcompile.target import tvm_target
from mvcompile.types import HostTarget, digest_json

PREPARE_VERSION = 3
"""Raised whenever a change here can alter a task's program; part of the fingerprint."""

_CHANNELS_LAST = {
    "relax.nn.conv2d": ["NHWC", "HWIO"],
}


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A module of fused tensor programs and a `main` that only calls them, with the fingerprint of how it was made."""

    module: tvm.IRModule
    fingerprint: str
    passes: tuple[str, ...]


def _numpy_of(expr: relax.Expr) -> np.ndarray | None:
    return expr.value.numpy() if isinstance(expr, tvm.ir.GenericConst) else None


@mutator
class _FoldLayout(PyExprMutator):
    """Folds data movement on constants with numpy: FoldConstant compiles and runs a kernel for each, 0.1 s a weight.

    Drops transposes that move nothing, too: ConvertLayout puts one behind every reduction to a scalar.
    """

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(call)
        if not isinstance(call, relax.Call) or not isinstance(call.op, tvm.ir.Op) or not call.args:
            return call
        if _moves_nothing(call):
            return call.args[0]
        value = _numpy_of(self._bound(call.args[0]))
        if value is None:
            return call
        folded = _fold_movement(call, value)
        return call if folded is None else relax.const(folded, str(folded.dtype))  # the default would narrow 64-bit values

    def _bound(self, expr: relax.Expr) -> relax.Expr:
        bound = self.builder_.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        return expr if bound is None else bound


def _moves_nothing(call: relax.Call) -> bool:
    if call.op.name != "relax.permute_dims" or call.attrs.axes is None:
        return False
    axes = [int(axis) for axis in call.attrs.axes]
    return axes == sorted(axes)


def _fold_movement(call: relax.Call, value: np.ndarray) -> np.ndarray | None:
    name = call.op.name
    if name == "relax.permute_dims":
        axes = None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
        return np.ascontiguousarray(np.transpose(value, axes))
    if name in ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten"):
        return value.reshape([int(extent) for extent in call.ty.shape])
    return None


def _bound_constant(builder: relax.BlockBuilder, expr: relax.Expr) -> np.ndarray | None:
    bound = builder.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
    return None if bound is None else _numpy_of(bound)


def _static_shape(expr: relax.Expr) -> list[int]:
    return [int(extent) for extent in expr.ty.shape]


def _conv2d_legalizer(target: HostTarget, default: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        data, kernel = call.args
        weight, attrs = _bound_constant(builder, kernel), call.attrs
        dtype = str(data.ty.dtype)
        if weight is None or dtype != "float32" or attrs.data_layout != "NHWC":
            return default(builder, call)
        groups, out_channels = int(attrs.groups), weight.shape[-1]
        _, out_h, out_w, _ = _static_shape(call)
        width = panel_width(out_channels // groups, out_h * out_w, target)
        if width is None or weight.shape[2] == 1 < groups:  # depthwise: no reduction over channels, nothing to pack
            return default(builder, call)
        strides, dilation = [int(s) for s in attrs.strides], [int(d) for d in attrs.dilation]
        padding = [int(p) for p in attrs.padding]
        panels = relax.const(pack_columns(weight, width))
        return builder.call_te(
            lambda d, w: packed_conv2d(d, w, strides, padding, dilation, groups), data, panels, primfunc_name_hint="conv2d"
        )

    return legalize


def _matmul_legalizer(target: HostTarget, default: Callable[..., relax.Expr]) -> Callable[..., relax.Expr]:
    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        data, other = call.args
        weight = _bound_constant(builder, other)
        if weight is None or weight.ndim != 2 or str(data.ty.dtype) != "float32" or len(data.ty.shape) < 2:
            return default(builder, call)
        rows = math.prod(_static_shape(data)[:-1])
        width = panel_width(weight.shape[1], rows, target)
        if width is None:
            return default(builder, call)
        return builder.call_te(packed_matmul, data, relax.const(pack_columns(weight, width)), primfunc_name_hint="matmul")

    return legalize


def _passes(target: HostTarget) -> list[tvm.transform.Pass]:
    legalize = tvm.ir.Op.get
    conv2d = _conv2d_legalizer(target, legalize("relax.nn.conv2d").get_attr("FLegalize"))
    matmul = _matmul_legalizer(target, legalize("relax.matmul").get_attr("FLegalize"))
    return [
        transform.DecomposeOpsForInference(),
        transform.ConvertLayout(_CHANNELS_LAST),
        transform.CanonicalizeBindings(),
        _fold_layout_pass(),
        transform.CanonicalizeBindings(),
        transform.FoldConstant(),
        transform.LegalizeOps({"relax.nn.conv2d": conv2d, "relax.matmul": matmul}),
        transform.RewriteDataflowReshape(),
        transform.FoldConstant(),
        transform.AnnotateTIROpPattern(),
        transform.FuseOps(),
        transform.FuseTIR(),
        vectorisable_functions(),
        transform.DeadCodeElimination(),
        transform.CanonicalizeBindings(),
    ]


def _fold_layout_pass() -> tvm.transform.Pass:
    @tvm.transform.module_pass(opt_level=0, name="FoldConstantLayout")
    def fold(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        visitor = _FoldLayout(module)
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function):
                visitor.builder_.update_func(variable, visitor.visit_expr(function))
        return visitor.builder_.get()

    return fold


def prepare(module: tvm.IRModule, target: HostTarget) -> PreparedModel:
    """Channels-last layout, packed weights, fused kernels; constants folded.

    `module["main"]` takes the model's inputs and returns a tuple of outputs, all of static shape; weights are constants.
    Raises ModelError when a call cannot be lowered to a tensor program.
    """
    passes = _passes(target)
    try:
        with tvm_target(target), tvm.transform.PassContext(opt_level=3):
            prepared = tvm.transform.Sequential(passes)(module)
    except Exception as error:  # TVM's passes have no error class of their own
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"the model cannot be lowered to tensor programs: {reason[-1].strip()}") from error
    names = tuple(str(each.info.name) for each in passes)
    described = {"version": PREPARE_VERSION, "passes": names, "tvm": tvm.__version__, "target": asdict(target)}
    return PreparedModel(prepared, digest_json(described), names)
