"""Check what a caller hands to a run, before it reaches code that trusts its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mvcompile.errors import InputError
from mvcompile.runtime.memory import Array
from mvcompile.types import TensorSpec


class ArrayCheck:
    """The inputs of one model, or its outputs: `kind` is "input" or "output", and `argument` what the caller knows them by."""

    def __init__(self, kind: str, argument: str, specs: Sequence[TensorSpec]) -> None:
        self._kind = kind
        self._argument = argument
        self._specs = {spec.name: spec for spec in specs}
        self._wanted = tuple((spec.name, np.dtype(spec.dtype), spec.shape) for spec in specs)

    def arrays(self, given: object) -> list[Array]:
        """The arrays in the model's order, each of the right dtype and shape.

        Raises InputError that names the array, what was found and expected, and those that the model has.
        """
        if not isinstance(given, Mapping):
            found = type(given).__name__
            raise InputError(
                f"{self._argument} is a {found}, expected a mapping from {self._kind} names to arrays: {self._known()}"
            )
        arrays = []
        for name, dtype, shape in self._wanted:
            array = given.get(name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
                raise self._wrong(self._specs[name], given)
            arrays.append(array)
        if len(given) != len(self._specs):
            extra = next(name for name in given if name not in self._specs)
            raise InputError(f"there is no {self._kind} {extra!r}: {self._known()}")
        return arrays

    def writable(self, given: object) -> dict[str, Array]:
        """The same for arrays to be written to, which have to be C-contiguous too; by name, each once."""
        arrays = {name: array for (name, _, _), array in zip(self._wanted, self.arrays(given), strict=True)}
        for name, array in arrays.items():
            if not (array.flags.c_contiguous and array.flags.writeable):
                fault = "read-only" if array.flags.c_contiguous else "not C-contiguous"
                raise InputError(f"{self._kind} {name!r} is {fault}: give an array such as numpy.empty makes")
        return arrays

    def _wrong(self, spec: TensorSpec, given: Mapping[str, object]) -> InputError:
        this = f"{self._kind} {spec.name!r}"
        if spec.name not in given:
            return InputError(f"{this} is missing: {self._known()}")
        found = given[spec.name]
        if not isinstance(found, np.ndarray):
            kind = type(found).__name__
            return InputError(f"{this} is a {kind}, expected a numpy array of {_describe(spec)}: use numpy.asarray")
        described = _describe(TensorSpec(spec.name, str(found.dtype), found.shape))
        return InputError(f"{this} is {described}, expected {_describe(spec)}: convert it; {self._known()}")

    def _known(self) -> str:
        if not self._specs:
            return f"the model has no {self._kind}s"
        known = ", ".join(f"{name!r} ({_describe(spec)})" for name, spec in self._specs.items())
        return f"the model's {self._kind}s are {known}"


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
