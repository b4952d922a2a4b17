"""The region that an access touches at each level of its loops, and its 64-byte lines.

A dimension of a region is a count of distinct indices in a span. Rows that touch become one run, and rows closer than a line
share lines: the closed form of Ferrante, Sarkar and Thrash (LCPC 1991), without its inclusion-exclusion terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, inf, prod

from mvcompile.measure.traffic_affine import Affine, Opaque
from mvcompile.measure.traffic_nest import Access, Dim, Nest

LINE_BYTES = 64

Key = tuple[tuple[object, int], ...]
Extent = tuple[int, int, int, Key]
"""A dimension of a box: distinct indices, span (last minus first), first index, and the loops that fix its base."""


@dataclass(frozen=True, slots=True)
class Box:
    """A region with its number of lines. `grain` divides (bytes) all that the fixed loops may add to the region's address."""

    dims: tuple[Extent, ...]
    grain: int
    lines: float


class Levels:
    """The extents of one access's dimensions at each level of its loops."""

    def __init__(self, nest: Nest, access: Access) -> None:
        self._nest = nest
        self._loops = access.loops
        self._depth = len(access.loops)
        self._of_opaque: dict[int, list[Extent]] = {}
        self._of_axis: dict[int, list[tuple[int, int]]] = {}
        for position, (axis, low, _) in enumerate(access.loops):
            self._of_axis.setdefault(axis, []).append((position, low))
        self._used: set[int] = set()
        self.periods: dict[int, float] = {}

    def of(self, dim: Dim) -> list[Extent]:
        """Extents of `dim` at levels 0 (all loops vary) to the number of loops (none does)."""
        out = self._form(dim.index)
        if dim.width > 1:
            wide = dim.width - 1
            out = [(min(count * dim.width, span + wide + 1), span + wide, low, key) for count, span, low, key in out]
        return out

    def boxes(self, dims: list[Dim], extents: list[list[Extent]], first: int, itemsize: int) -> list[Box]:
        """The access's box at every level; those outside `first` are that of `first`."""
        grains = self._grains(dims, first, itemsize)
        box = _box(dims, [row[self._depth] for row in extents], grains[-1], itemsize)
        point, visits, out = box.lines, 1, [box]
        for p in range(self._depth - 1, first - 1, -1):
            if p in self._used:
                visits *= self._loops[p][2]
                box = _box(dims, [row[p] for row in extents], grains[p - first], itemsize)
                # Not more lines than visits: the bounds of dimensions that move together multiply to more.
                box = Box(box.dims, box.grain, min(box.lines, visits * point))
            out.append(box)
        return [box] * first + out[::-1]

    def disjoint(self, dims: list[Dim], extents: list[list[Extent]], first: int, itemsize: int) -> set[int]:
        """Positions of the loops that move the access by more than its width, and by whole lines."""
        out = set()
        for dim, row in zip(dims, extents, strict=True):
            for position, step in self._steps(dim.index).items():
                if position >= first and abs(step) > row[position + 1][1] and not step * dim.stride * itemsize % LINE_BYTES:
                    out.add(position)
        return out - self.periods.keys()

    def _grains(self, dims: list[Dim], first: int, itemsize: int) -> list[int]:
        """Per level from `first`: common divisor (bytes, at most a line) of what the loops outside may add to an address."""
        by_loop = [LINE_BYTES] * self._depth
        for dim in dims:
            unit = dim.stride * itemsize
            for position, step in self._steps(dim.index).items():
                by_loop[position] = gcd(by_loop[position], step * unit)
        return list(accumulate(by_loop[first:], gcd, initial=LINE_BYTES))

    def _steps(self, form: Affine) -> dict[int, int]:
        """What one iteration of each loop adds to the linear terms of `form`."""
        steps: dict[int, int] = {}
        for term, factor in form.terms.items():
            if isinstance(term, Opaque):
                continue
            axis, low, extent = term
            for position, place in self._of_axis.get(axis, ()):
                if low <= place < low * extent:
                    steps[position] = steps.get(position, 0) + factor * (place // low)
        return steps

    def _form(self, form: Affine) -> list[Extent]:
        form = self._unsplit(form)
        steps = self._steps(form)
        self._used.update(steps)
        opaque = [(term, factor, self._opaque(term)) for term, factor in form.terms.items() if isinstance(term, Opaque)]
        out: list[Extent] = [(1, 0, 0, ())] * (self._depth + 1)
        count, span, low = 1, 0, form.const
        outer = sorted(steps.items())
        for p in range(self._depth, -1, -1):
            step = steps.get(p) if p < self._depth else None
            if step:
                trips = self._loops[p][2]
                span += abs(step) * (trips - 1)
                count = min(count * trips, span + 1)
                low += min(0, step * (trips - 1))
                outer.pop()
            out[p] = (count, span, low, tuple(outer))
        for term, factor, levels in opaque:
            out = [_plus(a, b, factor, term) for a, b in zip(out, levels, strict=True)]
        return out

    def _wrap(self, periods: dict[int, float]) -> None:
        for position, period in periods.items():
            self.periods[position] = max(period, self.periods.get(position, 1.0))

    def _unsplit(self, form: Affine) -> Affine:
        """`form` with the digits that are no loops of their own (their axis was not split) as opaque terms."""
        for term in form.terms:
            if isinstance(term, tuple) and not self._is_looped(term):
                whole = self._nest.algebra.digit_as_opaque(term, self._nest.axes[term[0]])
                rest = {t: c for t, c in form.terms.items() if t != term}
                (new,) = whole.terms
                rest[new] = rest.get(new, 0) + form.terms[term]
                return self._unsplit(Affine(rest, form.const))
        return form

    def _is_looped(self, digit: tuple[int, int, int]) -> bool:
        axis, low, extent = digit
        return prod(loop[2] for loop in self._loops if loop[0] == axis and low <= loop[1] < low * extent) == extent

    def _opaque(self, term: Opaque) -> list[Extent]:
        found = self._of_opaque.get(id(term))
        if found is None:
            found = self._of_opaque[id(term)] = self._opaque_extents(term)
        return found

    def _opaque_extents(self, term: Opaque) -> list[Extent]:
        if term.kind == "any":
            return self._unknown(term)
        parts = [self._form(part) for part in term.parts]
        for part in term.parts:
            steps = self._steps(self._unsplit(part))
            if term.kind in ("div", "mod"):
                self._wrap({position: term.divisor / abs(step) for position, step in steps.items()})
            elif term.kind == "either":
                self._wrap(dict.fromkeys(steps, inf))
        return [_opaque_extent(term, [part[p] for part in parts]) for p in range(self._depth + 1)]

    def _unknown(self, term: Opaque) -> list[Extent]:
        """At most one index for each combination of the loops that the value depends on, anywhere in the dimension."""
        loops = self._positions(Affine({term: 1}, 0))
        self._used |= loops
        self._wrap(dict.fromkeys(loops, inf))
        counts = [prod(self._loops[q][2] for q in loops if q >= p) for p in range(self._depth + 1)]
        span = term.hi - term.lo
        return [(count, span, term.lo, ()) if count > 1 else (1, 0, 0, ((term, 0),)) for count in counts]

    def _positions(self, form: Affine) -> set[int]:
        """The loops that `form` depends on."""
        form = self._unsplit(form)
        out = set(self._steps(form))
        for term in form.terms:
            if isinstance(term, Opaque):
                known = [self._positions(part) for part in term.parts]
                out |= set().union(*known) if known else set(range(self._depth))
        return out


def _opaque_extent(term: Opaque, parts: list[Extent]) -> Extent:
    """Bounds of `div`, `mod` and choices from those of their parts; first index 0 where it cannot be known."""
    known = all(not part[3] for part in parts)
    key: Key = () if known else ((term, 0),)
    if term.kind == "either":
        return (term.hi - term.lo + 1, term.hi - term.lo, term.lo, ()) if any(part[1] for part in parts) else (1, 0, 0, key)
    if term.kind == "pick":
        best = max if term.divisor else min
        span = max(part[1] for part in parts)
        if known:
            low, high = best(part[2] for part in parts), best(part[2] + part[1] for part in parts)
            span = min(span, high - low)
        else:
            low = 0
        return min(span + 1, sum(part[0] for part in parts)), span, low, key
    count, span, low, _ = parts[0]
    k = term.divisor
    if term.kind == "div":
        width = (low + span) // k - low // k if known else -(-span // k)
        return min(count, width + 1), width, low // k if known else 0, key
    if span == 0:
        return 1, 0, low % k if known else 0, key
    if known and low // k == (low + span) // k:
        return count, span, low % k, key
    return min(count, k), k - 1, 0, ()


def _plus(a: Extent, b: Extent, factor: int, term: Opaque) -> Extent:
    count, span, low, key = a
    more, wide, first, other = b
    span += abs(factor) * wide
    low += factor * first if factor > 0 else factor * (first + wide)
    return min(count * more, span + 1), span, low, (*key, (term, factor)) if other else key


# Counting lines


def _box(dims: Sequence[Dim], extents: Sequence[Extent], grain: int, itemsize: int) -> Box:
    clipped = []
    for dim, (count, span, low, key) in zip(dims, extents, strict=True):
        if key:
            span = min(span, dim.size - 1)
            if any(isinstance(base, Opaque) for base, _ in key):
                grain = gcd(grain, dim.stride * itemsize)
        else:
            # Guards keep accesses inside the buffer (padding reads A[y - 1] only where it exists).
            high = min(low + span, dim.size - 1)
            low = max(low, 0)
            if high < low:
                return Box(tuple(extents), grain, 0.0)
            span = high - low
        clipped.append((min(count, span + 1), span, low, key))
    return Box(tuple(clipped), grain, _lines(clipped, [dim.stride for dim in dims], grain, itemsize))


def _lines(extents: Sequence[Extent], strides: Sequence[int], grain: int, itemsize: int) -> float:
    """Distinct lines of a box; the mean over the starts that loops outside may give it, which are `grain` bytes apart."""
    grains = []
    start = 0
    for extent, stride in zip(extents, strides, strict=True):
        grains.append(grain)
        start += extent[2] * stride * itemsize
        if extent[1]:
            grain = gcd(grain, stride * itemsize)
    lines, run = 1.0, itemsize
    for (count, span, _, _), stride, unit in zip(reversed(extents), reversed(strides), reversed(grains), strict=True):
        if not span:
            continue
        run += span * stride * itemsize
        # Hermite's identity: the mean of floor((last byte + i * unit) / line) over the starts of a line.
        dense = 1 + (start % unit + run - 1) // unit * unit / LINE_BYTES
        lines = min(count * lines, dense)
    return lines


def hull(a: Box, b: Box, strides: tuple[int, ...], itemsize: int) -> Box:
    dims: list[Extent] = []
    grain = gcd(a.grain, b.grain)
    for x, y in zip(a.dims, b.dims, strict=True):
        low = min(x[2], y[2])
        span = max(x[2] + x[1], y[2] + y[1]) - low
        inside = (span == x[1] and x[2] == low) or (span == y[1] and y[2] == low)
        count = max(x[0], y[0]) if inside else min(span + 1, x[0] + y[0])
        dims.append((count, span, low, x[3]))
    return Box(tuple(dims), grain, max(a.lines, b.lines, _lines(dims, strides, grain, itemsize)))
