"""What a model should answer: ONNX Runtime on the same model, on random inputs that are valid for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from mvcompile.errors import ModelError
from mvcompile.frontend.onnx_file import skeleton
from mvcompile.frontend.shapes import free_inputs, static_shape
from mvcompile.frontend.weights import Weights, trim
from mvcompile.types import TensorSpec

Array = NDArray[Any]

FOLLOWED = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand", "Concat")
"""Operators that hand on the integers they are given; what reads behind them limits the values in front of them."""


def reference_outputs(
    model: onnx.ModelProto | str | os.PathLike[str],
    inputs: Mapping[str, Array],
    *,
    weights: Weights | None = None,
    threads: int = 1,
    optimize: bool = True,
) -> dict[str, Array]:
    """Outputs of `model` by name, computed by ONNX Runtime on `threads` cores.

    `inputs` must have every input of the model; `weights` has what its placeholders stand for, if there are any.
    `optimize=False` switches ONNX Runtime's graph rewriting off. Raises `ModelError` if it refuses the model or the inputs.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    # A session that runs once gains nothing from weights in another order, of which it would hold both, and from memory to reuse.
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.enable_cpu_mem_arena = False
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        content, large = _light(model, weights or Weights()) if isinstance(model, onnx.ModelProto) else (os.fspath(model), {})
        options.add_external_initializers(list(large), list(large.values()))  # read in place: `large` lives until the end
        outputs = _run(content, options, inputs)
    except Exception as error:  # its exception classes have no public base
        raise ModelError(f"ONNX Runtime {onnxruntime.__version__} cannot run the model: {error}") from error
    if large:
        trim()
    return outputs


def _run(content: bytes | str, options: onnxruntime.SessionOptions, inputs: Mapping[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    wanted = {info.name for info in session.get_inputs()}
    names = list(dict.fromkeys(info.name for info in session.get_outputs()))
    values = session.run(names, {name: value for name, value in inputs.items() if name in wanted})
    return dict(zip(names, values, strict=True))


def _light(model: onnx.ModelProto, held: Weights) -> tuple[bytes, dict[str, Any]]:
    """The serialised model without its large weights, and those by name: they need not be copied, nor stay below 2 GiB."""
    light = skeleton(model)
    light.ir_version = max(light.ir_version, 4)  # up to 3, an initializer has to be an input as well
    kept = {tensor.name for tensor in light.graph.initializer}
    weights = {}
    for tensor in model.graph.initializer:
        if tensor.name not in kept:
            placeholder = light.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            placeholder.data_location = onnx.TensorProto.EXTERNAL
            placeholder.external_data.add(key="location", value="in memory")
            weights[tensor.name] = onnxruntime.OrtValue.ortvalue_from_numpy(held.array(tensor))
    inputs = [info for info in light.graph.input if info.name not in weights]
    del light.graph.input[:]
    light.graph.input.extend(inputs)
    return light.SerializeToString(), weights


def random_inputs(specs: Iterable[TensorSpec], seed: int, limits: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Inputs by name: standard normal floats, both booleans, integers in [0, `limits[name]`), which is 2 if not given."""
    generator = np.random.default_rng(seed)
    values: dict[str, Array] = {}
    for spec in specs:
        if spec.dtype.startswith("float"):
            values[spec.name] = np.asarray(generator.standard_normal(spec.shape), dtype=spec.dtype)
        elif spec.dtype == "bool":
            values[spec.name] = np.asarray(generator.integers(0, 2, spec.shape), dtype=bool)
        else:
            limit = min((limits or {}).get(spec.name, 2), int(np.iinfo(spec.dtype).max) + 1)
            values[spec.name] = np.asarray(generator.integers(0, limit, spec.shape), dtype=spec.dtype)
    return values


def integer_limits(model: onnx.ModelProto) -> dict[str, int]:
    """For every integer input that ends up as the indices of a Gather, the extent it indexes (token ids: the vocabulary).

    An input that is also used for anything else is limited by the same extent or by 2, whichever is smaller.
    """
    shapes = _shapes(model)
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in model.graph.node:
        for position, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, position))
    limits = {}
    for info in free_inputs(model.graph):
        extents = list(_extents(info.name, readers, shapes))
        if extents:
            limits[info.name] = min(extents)
    return limits


def with_logits(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with the input of every last Softmax as a further output (behind the others).

    After a softmax a comparison says little: one class takes most of the sum and hides what the others do. Outputs that a Softmax
    or LogSoftmax computes, directly or behind operators that only rearrange, are looked through. Returns a copy without the
    weights being copied twice; the model itself if there is nothing to add.
    """
    producers = {output: node for node in model.graph.node for output in node.output}
    names = {info.name for info in model.graph.output}
    added = []
    for info in model.graph.output:
        node = producers.get(info.name)
        while node is not None and node.op_type in FOLLOWED and node.op_type != "Concat":
            node = producers.get(node.input[0])
        if node is not None and node.op_type in ("Softmax", "LogSoftmax") and node.input[0] not in names:
            names.add(node.input[0])
            added.append(node.input[0])
    if not added:
        return model
    infos = _infos(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.extend(infos[name] for name in added)
    return copy


def _extents(
    name: str, readers: Mapping[str, Sequence[tuple[onnx.NodeProto, int]]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[int]:
    """Upper bounds that the readers of `name` put on its values."""
    for node, position in readers.get(name, ()):
        if node.op_type in ("Gather", "GatherElements") and position == 1 and node.input[0] in shapes:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            yield shapes[node.input[0]][axis]
        elif node.op_type in FOLLOWED:
            yield from _extents(node.output[0], readers, shapes)
        else:
            yield 2


def _infos(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    inferred = onnx.shape_inference.infer_shapes(skeleton(model), data_prop=True).graph
    return {info.name: info for info in [*inferred.value_info, *inferred.input, *inferred.output]}


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for name, info in _infos(model).items():
        shape = static_shape(info)
        if shape is not None:
            shapes[name] = shape
    return shapes
