"""Reading an ONNX file and its external data, with an error for everything that can be wrong with them."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, external_data_helper

from mvcompile.errors import ModelError, UsageError

OLDEST_OPSET = 7
"""Operator sets before 7 broadcast by attributes (`axis`, `broadcast`), and no importer reads those any more."""

SMALL_WEIGHT = 1024
"""Initializers up to this many elements may be shapes, axes or bounds, which checks and inference read; larger ones are data."""


def read(path: str | os.PathLike[str]) -> tuple[onnx.ModelProto, str]:
    """The model in `path` with its weights in memory, and the SHA-256 (hex) of the file.

    With external data the digest covers each data file as well: it is that of the digests of all files, the model first, then the
    others by name. Raises `UsageError` if a file cannot be read, `ModelError` if it is no valid ONNX model.
    """
    file = Path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the model {file}: {error.strerror or error}") from error
    try:
        model = onnx.load_model_from_string(content)
    except DecodeError as error:
        raise ModelError(f"{file} is not an ONNX model: {error}") from error
    if not model.HasField("graph") or not model.ir_version:
        raise ModelError(f"{file} is not an ONNX model: it has no graph or no IR version")
    digests = [hashlib.sha256(content).hexdigest()]
    del content  # as large as the model
    for location in sorted({_location(tensor) for tensor in _external_tensors(model)}):
        digests.append(_digest(_resolve(file, location)))
    for tensor in _external_tensors(model):
        _load(tensor, _resolve(file, _location(tensor)))
    check(model, str(file))
    return model, digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def check(model: onnx.ModelProto, name: str) -> None:
    """Raise `ModelError` unless `model` is valid ONNX of an operator set that can be imported. Large weights are not copied."""
    opset = default_opset(model)
    if opset is None:
        raise ModelError(f"{name} does not say which version of the ONNX operators it uses (opset_import has no default domain)")
    if not OLDEST_OPSET <= opset <= onnx.defs.onnx_opset_version():
        raise ModelError(
            f"{name} uses operator set {opset}; supported are {OLDEST_OPSET} to {onnx.defs.onnx_opset_version()}: "
            "convert it with onnx.version_converter, or export it again"
        )
    if model.graph.sparse_initializer:
        raise ModelError(f"{name} has sparse initializers, which are not supported: store them dense")
    try:
        for tensor in model.graph.initializer:
            onnx.checker.check_tensor(tensor)
        onnx.checker.check_model(skeleton(model))
    except onnx.checker.ValidationError as error:
        raise ModelError(f"{name} is not a valid ONNX model: {str(error).strip()}") from error


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which large initializers are inputs: it has the same structure and shapes, and costs next to nothing to copy.

    Annotations of inner tensors are dropped.
    """
    graph = model.graph
    copy = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    copy.graph.name = graph.name
    copy.graph.node.extend(graph.node)
    copy.graph.input.extend(graph.input)
    copy.graph.output.extend(graph.output)
    known = {info.name for info in graph.input}
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= SMALL_WEIGHT:
            copy.graph.initializer.append(tensor)
        elif tensor.name not in known:
            copy.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return copy


def default_opset(model: onnx.ModelProto) -> int | None:
    """The version of the standard operators that `model` was written for."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), None)


def _external_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    yield from (tensor for tensor in _tensors(model.graph) if tensor.data_location == TensorProto.EXTERNAL)


def _tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """All tensors of a graph: initializers, attributes, and those of its subgraphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    for node in graph.node:
        for attribute in node.attribute:
            yield from attribute.tensors
            if attribute.HasField("t"):
                yield attribute.t
            for subgraph in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
                yield from _tensors(subgraph)


def _location(tensor: TensorProto) -> str:
    for entry in tensor.external_data:
        if entry.key == "location":
            return str(entry.value)
    raise ModelError(f"tensor {tensor.name!r} is stored outside the model, but the model does not say in which file")


def _resolve(model: Path, location: str) -> Path:
    """The data file `location`, which has to lie in the model's own directory or below it, links followed."""
    directory = model.resolve().parent
    relative = PurePosixPath(location)
    path = (directory / relative).resolve()
    if relative.is_absolute() or ".." in relative.parts or not path.is_relative_to(directory):
        raise ModelError(f"{model} keeps weights in {location!r}, which is outside its directory; such files are not read")
    if not path.is_file():
        raise ModelError(f"{model} keeps weights in {location!r}, but there is no file {path}: put it beside the model")
    return path


def _digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            sha.update(block)
    return sha.hexdigest()


def _load(tensor: TensorProto, path: Path) -> None:
    """Read one tensor's bytes; `offset` and `length` have to lie within the file."""
    try:
        entry = external_data_helper.ExternalDataInfo(tensor)
        offset, size = entry.offset or 0, path.stat().st_size
        length = size - offset if entry.length is None else entry.length
    except ValueError as error:
        raise ModelError(f"tensor {tensor.name!r} has an external data entry that is no number: {error}") from error
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(
            f"tensor {tensor.name!r} is bytes {offset} to {offset + length} of {path.name}, which has only {size}: "
            "the file is truncated or belongs to another model"
        )
    with path.open("rb") as file:
        file.seek(offset)
        tensor.raw_data = file.read(length)
    tensor.data_location = TensorProto.DEFAULT
    del tensor.external_data[:]
