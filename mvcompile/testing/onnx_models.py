"""Small ONNX models for tests, and running an imported one in TVM's virtual machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import tvm
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from tvm import relax

from mvcompile.frontend.onnx_import import OnnxModel, from_proto, to_relax
from mvcompile.frontend.reference import random_inputs, reference_outputs

Array = NDArray[Any]
Typed = tuple[str, Sequence[int | str | None] | None]
"""dtype and shape of a tensor; None stands for an unknown extent, or an unknown shape."""


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Typed],
    outputs: Sequence[str] | Mapping[str, Typed],
    weights: Mapping[str, Array] | None = None,
    *,
    opset: int = 17,
    ir_version: int = 8,
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model of `nodes`; outputs without a type get none."""
    infos = [value_info(name, *typed) for name, typed in inputs.items()]
    if isinstance(outputs, Mapping):
        results = [value_info(name, *typed) for name, typed in outputs.items()]
    else:
        results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "test", infos, results, tensors)
    imports = [helper.make_opsetid(domain, version) for domain, version in {"": opset, **(domains or {})}.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def value_info(name: str, dtype: str, shape: Sequence[int | str | None] | None) -> onnx.ValueInfoProto:
    """The type of a tensor."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def load(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]] | None = None) -> OnnxModel:
    """`load_model` for a model in memory, which is left alone."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return from_proto(copy, shapes, name="test", sha256="0" * 64)


def run(model: OnnxModel, inputs: Mapping[str, Array]) -> list[Array]:
    """Outputs of the imported model in order, computed by plain TVM on one thread."""
    executable = tvm.compile(to_relax(model), target=tvm.target.Target({"kind": "llvm", "num-cores": 1}))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    arguments = [tvm.runtime.tensor(np.asarray(inputs[spec.name], spec.dtype, order="C")) for spec in model.inputs]
    return [output.numpy() for output in machine["main"](*arguments)]


def assert_matches_reference(
    model: onnx.ModelProto, inputs: Mapping[str, Array] | None = None, *, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """The imported model computes what ONNX Runtime computes, with the same dtypes and shapes."""
    loaded = load(model)
    values = dict(inputs or random_inputs(loaded.inputs, seed=1))
    expected = reference_outputs(model, values, optimize=False)
    for spec, found in zip(loaded.outputs, run(loaded, values), strict=True):
        want = expected[spec.name]
        assert (found.dtype, found.shape) == (want.dtype, want.shape) == (np.dtype(spec.dtype), spec.shape)
        np.testing.assert_allclose(found, want, rtol=rtol, atol=atol, err_msg=spec.name)
