"""`prepare()`: THE order of Relax passes. Extraction, build and verification all go through it (architecture rule 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import transform

from mvcompile.errors import ModelError
from mvcompile.frontend.affine import fold_constant_factors
from mvcompile.frontend.fastmath import vectorisable_functions
from mvcompile.frontend.movement import fold_movement
from mvcompile.frontend.packing import pack_columns, packed_conv2d, packed_matmul, panel_width
from mvcompile.frontend.weights import values_of
from mvcompile.target import tvm_target
from mvcompile.types import HostTarget, digest_json

PREPARE_VERSION = 5
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
    return values_of(expr) if isinstance(expr, tvm.ir.GenericConst) else None


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
        if weight.shape[2] == 1 < groups:  # depthwise: no reduction over channels, nothing to pack
            return default(builder, call)
        strides, dilation = [int(s) for s in attrs.strides], [int(d) for d in attrs.dilation]
        padding = [int(p) for p in attrs.padding]
        panels = relax.const(pack_columns(weight, width, groups))
        return builder.call_te(
            lambda d, w: packed_conv2d(d, w, strides, padding, dilation, groups, out_channels),
            data,
            panels,
            primfunc_name_hint="conv2d",
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
        panels = relax.const(pack_columns(weight, width))
        return builder.call_te(lambda d, w: packed_matmul(d, w, weight.shape[1]), data, panels, primfunc_name_hint="matmul")

    return legalize


def _passes(target: HostTarget) -> list[tvm.transform.Pass]:
    legalize = tvm.ir.Op.get
    conv2d = _conv2d_legalizer(target, legalize("relax.nn.conv2d").get_attr("FLegalize"))
    matmul = _matmul_legalizer(target, legalize("relax.matmul").get_attr("FLegalize"))
    return [
        transform.DecomposeOpsForInference(),
        transform.CanonicalizeBindings(),
        fold_movement(),
        fold_constant_factors(),
        transform.CanonicalizeBindings(),
        transform.ConvertLayout(_CHANNELS_LAST),
        transform.CanonicalizeBindings(),
        fold_movement(),
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
