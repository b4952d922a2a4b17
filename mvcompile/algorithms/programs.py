"""The algorithms by the names of their search spaces, and the programs of one task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy.typing as npt
import tvm

from mvcompile.algorithms.winograd import Winograd
from mvcompile.types import Argument

Array = npt.NDArray[Any]


class Algorithm(Protocol):
    """Another way to compute some tasks."""

    def program(self, module: tvm.IRModule) -> tuple[tvm.IRModule, int] | None:
        """The task's program by this algorithm and the position of the parameter that it takes in its own form; None if it
        cannot compute this task."""

    @property
    def products(self) -> float:
        """How many of the direct computation's products it needs, as a share, where its tiles divide the result."""

    def transform(self, weight: Array) -> Array:
        """That parameter in its own form."""


ALGORITHMS: Mapping[str, Algorithm] = {f"winograd{tile}": Winograd(tile) for tile in (2, 3, 4)}


def transform(form: str, weight: Array) -> Array:
    """`weight` in the form of algorithm `form`; itself if `form` is empty."""
    return ALGORITHMS[form].transform(weight) if form else weight


class Programs:
    """The programs of one task, made when they are first asked for."""

    def __init__(self, module: tvm.IRModule) -> None:
        self._count = len(module["main"].params)
        self._made: dict[str, tuple[tvm.IRModule, int] | None] = {}
        self._module = module

    def program(self, space: str) -> tvm.IRModule:
        """The unscheduled program that traces of `space` apply to.

        Raises ValueError if it is that of an algorithm that cannot compute this task.
        """
        if space not in ALGORITHMS:
            return self._module
        made = self._alternative(space)
        if made is None:
            raise ValueError(f"algorithm {space} cannot compute this task")
        return made[0]

    def arguments(self, space: str) -> tuple[Argument, ...]:
        """What a kernel of `space` takes."""
        plain = tuple(Argument(position) for position in range(self._count))
        made = self._alternative(space)
        if made is None:
            return plain
        position = made[1]
        return (*plain[:position], Argument(position, space), *plain[position + 1 :])

    def parameter(self, argument: Argument) -> Any:
        """A program's parameter for `argument`: a buffer variable, of which dtype and shape are those of the argument."""
        return self.program(argument.form)["main"].params[argument.position]

    def alternatives(self) -> list[str]:
        """The algorithms that can compute this task."""
        return [name for name in ALGORITHMS if self._alternative(name) is not None]

    def _alternative(self, space: str) -> tuple[tvm.IRModule, int] | None:
        if space not in self._made:
            self._made[space] = ALGORITHMS[space].program(self._module) if space in ALGORITHMS else None
        return self._made[space]
