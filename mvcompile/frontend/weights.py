"""Large weights, held once: beside the protos of a model while it is an ONNX model, and in its constants after that.

A protobuf message owns its bytes. Every copy of a model and every list that a tensor is put into copies them, and what is cleared
in a message is given back only with the whole message. So large weights are taken out when a model has been read, and tensors
without data stand for them in all its protos; ONNX Runtime and the Relax module read the arrays in place.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

Array = NDArray[Any]

LARGE_WEIGHT = 1 << 16
"""Floats from this many elements on are large; other types may be indices or shapes, whose values are looked at."""

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_LOCATION = "in memory: "


class Weights:
    """The large weights of a model and of what is made of it. They live as long as this object, or longer where they are read."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def take(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """`model` with placeholders for its large weights, as they are now; `model` is altered and should be dropped."""
        large = [tensor for tensor in model.graph.initializer if is_large(tensor) and not is_placeholder(tensor)]
        if not large:
            return model
        for tensor in large:
            array = _aligned(numpy_helper.to_array(tensor))
            place = f"{_LOCATION}{len(self._arrays)}"
            self._arrays[place] = array
            _empty(tensor, place)
        light = onnx.ModelProto()
        light.CopyFrom(model)
        return light

    def array(self, tensor: TensorProto) -> Array:
        """The values of `tensor`: without a copy, and at a multiple of 64 bytes, if it is a placeholder."""
        return self._arrays[_place(tensor)] if is_placeholder(tensor) else numpy_helper.to_array(tensor)

    def whole(self, tensor: TensorProto) -> TensorProto:
        """`tensor` with its values in it."""
        return numpy_helper.from_array(self.array(tensor), tensor.name) if is_placeholder(tensor) else tensor


def is_large(tensor: TensorProto) -> bool:
    """Whether a tensor is held outside the protos, once it has been taken."""
    inside = tensor.data_location == TensorProto.DEFAULT
    return (inside or is_placeholder(tensor)) and tensor.data_type in _FLOATS and math.prod(tensor.dims) >= LARGE_WEIGHT


def is_placeholder(tensor: TensorProto) -> bool:
    """Whether a tensor has no values of its own, but stands for an array that some `Weights` hold."""
    return bool(tensor.data_location == TensorProto.EXTERNAL and _place(tensor).startswith(_LOCATION))


def values_of(constant: Any) -> Array:
    """The values of a Relax constant, in place: to be read only. They keep the memory, not the module."""
    return np.from_dlpack(constant.value)


def trim() -> None:
    """Give freed memory back to the system: ONNX Runtime copies weights one by one, and the allocator keeps them all."""
    with suppress(OSError, AttributeError):  # of a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _place(tensor: TensorProto) -> str:
    return next((str(entry.value) for entry in tensor.external_data if entry.key == "location"), "")


def _empty(tensor: TensorProto, place: str) -> None:
    for field in ("raw_data", "float_data", "double_data", "int32_data"):
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)


def _aligned(values: Array) -> Array:
    """A copy in pages of its own, which go back to the system with it: an allocator would keep some, between others."""
    try:
        pages = mmap.mmap(-1, values.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {values.nbytes} bytes of weights") from error
    array = np.frombuffer(pages, values.dtype).reshape(values.shape)
    array[...] = values
    return array
