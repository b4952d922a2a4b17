"""Which variant each layer runs with: from what callers write to steps and variants."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping, Sequence

from mvcompile.errors import UsageError
from mvcompile.runtime.integers import integer

Choice = tuple[int, int]
"""Index of a step, index of a variant of it."""


class LayerTable:
    """The layers of a model in the order they run, and how many variants each has."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.layers = tuple(counts)
        self._steps = {layer: step for step, layer in enumerate(counts)}
        self._counts = tuple(counts.values())

    def choice(self, layer: str, variant: int) -> Choice:
        """Raises UsageError for a layer or variant that there is not."""
        step = self._steps.get(layer) if isinstance(layer, str) else None
        if step is None:
            like = difflib.get_close_matches(str(layer), self.layers, n=3)
            hint = (
                f"did you mean {' or '.join(map(repr, like))}?"
                if like
                else f"the first of {len(self.layers)} is {self.layers[:1]}"
            )
            raise UsageError(f"there is no layer {layer!r}: {hint} (session.layers)")
        number = integer(variant)
        count = self._counts[step]
        if number is None or not 0 <= number < count:
            raise UsageError(f"layer {layer!r} has no variant {variant!r}: it has {count}, 0 to {count - 1} (session.variants)")
        return step, number

    def choices(self, selection: Mapping[str, int]) -> list[Choice]:
        """What a mapping from layers to variants selects. Raises UsageError if any part of it is wrong."""
        return [self.choice(layer, variant) for layer, variant in selection.items()]

    def variants(self, selection: Sequence[int] | int) -> tuple[int, ...]:
        """The variant of each layer with one variant per layer, or one for all (see `Session.select_all`).

        Raises UsageError if any part of it is wrong.
        """
        number = integer(selection)
        if number is not None:
            return self._for_all(number)
        if isinstance(selection, (str, bytes)) or not hasattr(selection, "__len__") or not hasattr(selection, "__iter__"):
            expected = "a mapping from layers to variants, one variant per layer, or one for all layers"
            raise UsageError(f"selection is {selection!r}, expected {expected}")
        variants: tuple[int, ...] = tuple(selection)
        if len(variants) != len(self.layers):
            raise UsageError(
                f"selection has {len(variants)} variants, the model has {len(self.layers)} layers: give one for each"
            )
        # Of 41 layers: 4 us with these loops in C, 30 us one by one.
        if set(map(type, variants)) == {int} and min(variants) >= 0 and all(map(operator.lt, variants, self._counts)):
            return variants
        return tuple(self.choice(layer, variant)[1] for layer, variant in zip(self.layers, variants, strict=True))

    def _for_all(self, number: int) -> tuple[int, ...]:
        most = max(self._counts, default=1)
        if not 0 <= number < most:
            raise UsageError(f"no layer has a variant {number}: the most any has is {most}, 0 to {most - 1} (session.variants)")
        return tuple(min(number, count - 1) for count in self._counts)
