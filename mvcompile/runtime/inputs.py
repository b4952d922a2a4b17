"""Check what a caller hands to a run, before it reaches code that trusts its arguments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mvcompile.errors import InputError
from mvcompile.runtime.memory import Array
from mvcompile.types import TensorSpec


class InputCheck:
    """The inputs of one model."""

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._wanted = tuple((spec.name, np.dtype(spec.dtype), spec.shape) for spec in specs)

    def arrays(self, inputs: object) -> list[Array]:
        """The arrays in the model's order, each of the right dtype and shape.

        Raises InputError that names the input, what was found and expected, and the inputs the model has.
        """
        if not isinstance(inputs, Mapping):
            kind = type(inputs).__name__
            raise InputError(f"inputs is a {kind}, expected a mapping from input names to arrays: {self._known()}")
        arrays = []
        for name, dtype, shape in self._wanted:
            array = inputs.get(name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
                raise self._wrong(self._specs[name], inputs)
            arrays.append(array)
        if len(inputs) != len(arrays):
            extra = next(name for name in inputs if name not in self._specs)
            raise InputError(f"there is no input {extra!r}: {self._known()}")
        return arrays

    def _wrong(self, spec: TensorSpec, inputs: Mapping[str, object]) -> InputError:
        if spec.name not in inputs:
            return InputError(f"input {spec.name!r} is missing: {self._known()}")
        found = inputs[spec.name]
        if not isinstance(found, np.ndarray):
            kind = type(found).__name__
            return InputError(f"input {spec.name!r} is a {kind}, expected a numpy array of {_describe(spec)}: use numpy.asarray")
        described = _describe(TensorSpec(spec.name, str(found.dtype), found.shape))
        return InputError(f"input {spec.name!r} is {described}, expected {_describe(spec)}: convert it; {self._known()}")

    def _known(self) -> str:
        if not self._specs:
            return "the model has no inputs"
        return "the model's inputs are " + ", ".join(f"{name!r} ({_describe(spec)})" for name, spec in self._specs.items())


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
