"""Integer forms of buffer indices: sums of loop digits, with what cannot be written so kept as bounded opaque terms.

A loop variable `v` of extent `n` is an *axis*. Schedules that fuse and split loops index buffers with `v // a % b`, which is
one *digit* of the axis in a mixed radix; sums of scaled digits stay exact under `//` and `%` by constants in all cases that
a packed layout (`c // NR`, `c % NR`) or a fused loop produces. The rest (`(4 * i + j) // 7`, clamped or data-dependent
indices) becomes an opaque term whose range, and whose spread over a set of loops, is bounded but not known exactly.
Nothing here knows TVM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

UNBOUNDED = 1 << 60
"""A bound for values that are not known at all; larger than any dimension."""

Digit: TypeAlias = tuple[int, int, int]
"""(axis, low, extent) stands for `(axis // low) % extent`, which takes the values 0 to extent - 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A term that is not linear in digits. Compared by identity: `Algebra` makes each at most once.

    `kind` is `div` or `mod` (of `parts[0]` by `divisor`), `pick` (one of `parts`, continuous: min or max), `either` (one of
    `parts`, chosen by a condition) or `any` (unknown, but the same for the same values of `parts`; of every loop if there are
    none). `lo` and `hi` bound the value, both included.
    """

    kind: str
    parts: tuple[Affine, ...]
    divisor: int
    lo: int
    hi: int


Term: TypeAlias = "Digit | Opaque"


@dataclass(frozen=True, slots=True)
class Affine:
    """`const + sum(coefficient * term)`; never changed once made."""

    terms: dict[Term, int]
    const: int

    @property
    def is_const(self) -> bool:
        return not self.terms

    def range(self) -> tuple[int, int]:
        """Smallest and largest value, both included (bounds where terms are opaque or used twice)."""
        lo = hi = self.const
        for term, factor in self.terms.items():
            low, high = (0, term[2] - 1) if isinstance(term, tuple) else (term.lo, term.hi)
            if factor > 0:
                lo += factor * low
                hi += factor * high
            else:
                lo += factor * high
                hi += factor * low
        return lo, hi


def constant(value: int) -> Affine:
    return Affine({}, value)


def add(a: Affine, b: Affine, sign: int = 1) -> Affine:
    """`a + sign * b`."""
    if not b.terms:
        return Affine(a.terms, a.const + sign * b.const)
    terms = dict(a.terms)
    for term, factor in b.terms.items():
        total = terms.get(term, 0) + sign * factor
        if total:
            terms[term] = total
        else:
            del terms[term]
    return Affine(terms, a.const + sign * b.const)


def scale(a: Affine, factor: int) -> Affine:
    if factor == 1:
        return a
    if factor == 0:
        return constant(0)
    return Affine({term: c * factor for term, c in a.terms.items()}, a.const * factor)


class Algebra:
    """Operations that may make opaque terms. One per analysed function: equal opaque terms are the same object."""

    def __init__(self) -> None:
        self._known: dict[object, Opaque] = {}

    def unknown(self, parts: tuple[Affine, ...] = ()) -> Affine:
        """A value of which no more is known than what it depends on; equal to no other."""
        return Affine({Opaque("any", parts, 0, -UNBOUNDED, UNBOUNDED): 1}, 0)

    def divmod(self, a: Affine, k: int) -> tuple[Affine, Affine]:
        """`a // k` and `a % k`, rounding down, for k > 0."""
        if k == 1:
            return a, constant(0)
        quotient: dict[Term, int] = {}
        rest: dict[Term, int] = {}
        for term, factor in a.terms.items():
            if factor % k:
                rest[term] = factor
            else:
                quotient[term] = factor // k
        whole, const = divmod(a.const, k)
        remainder = Affine(rest, const)
        lo, hi = remainder.range()
        if lo // k == hi // k:
            return Affine(quotient, whole + lo // k), add(remainder, constant(-(lo // k) * k))
        div, mod = self._divmod_rest(remainder, k)
        return add(Affine(quotient, whole), div), mod

    def _divmod_rest(self, a: Affine, k: int) -> tuple[Affine, Affine]:
        split = _split_at_unit(a, k)
        if split is None:
            return self._opaque_divmod(a, k)
        coarse, fine, unit = split
        if unit > 1:
            div, mod = self.divmod(coarse, k // unit)
            return div, add(scale(mod, unit), fine)
        (term,) = coarse.terms
        if isinstance(term, tuple) and not coarse.const and coarse.terms[term] == 1 and term[2] % k == 0:
            axis, low, extent = term
            div = Affine({(axis, low * k, extent // k): 1} if extent > k else {}, 0)
            return div, Affine({(axis, low, k): 1}, 0)
        return self._opaque_divmod(a, k)

    def _opaque_divmod(self, a: Affine, k: int) -> tuple[Affine, Affine]:
        lo, hi = a.range()
        div = self._opaque("div", (a,), k, lo // k, hi // k)
        mod = self._opaque("mod", (a,), k, 0, k - 1)
        return Affine({div: 1}, 0), Affine({mod: 1}, 0)

    def pick(self, parts: tuple[Affine, ...], *, largest: bool) -> Affine:
        """The minimum or maximum of `parts`."""
        ranges = [part.range() for part in parts]
        lo = (max if largest else min)(low for low, _ in ranges)
        hi = (max if largest else min)(high for _, high in ranges)
        for i, part in enumerate(parts):
            others = ranges[:i] + ranges[i + 1 :]
            if all(ranges[i][0] >= high if largest else ranges[i][1] <= low for low, high in others):
                return part
        return Affine({self._opaque("pick", parts, int(largest), lo, hi): 1}, 0)

    def either(self, parts: tuple[Affine, ...]) -> Affine:
        """One of `parts`, by a condition that is not looked at."""
        ranges = [part.range() for part in parts]
        return Affine({self._opaque("either", parts, 0, min(r[0] for r in ranges), max(r[1] for r in ranges)): 1}, 0)

    def digit_as_opaque(self, digit: Digit, axis_extent: int) -> Affine:
        """The digit's value as `div` and `mod` of its whole axis, for an axis whose digits do not nest."""
        axis, low, extent = digit
        whole = Affine({(axis, 1, axis_extent): 1}, 0)
        if low > 1:
            term = self._opaque("div", (whole,), low, 0, (axis_extent - 1) // low)
            whole = Affine({term: 1}, 0)
        if whole.range()[1] < extent:
            return whole
        return Affine({self._opaque("mod", (whole,), extent, 0, extent - 1): 1}, 0)

    def _opaque(self, kind: str, parts: tuple[Affine, ...], divisor: int, lo: int, hi: int) -> Opaque:
        key = (kind, divisor, tuple((frozenset(part.terms.items()), part.const) for part in parts))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Opaque(kind, parts, divisor, lo, hi)
        return found


def _split_at_unit(a: Affine, k: int) -> tuple[Affine, Affine, int] | None:
    """Write `a` as `unit * coarse + fine` with `0 <= fine < unit` and `unit` a divisor of `k`; None if there is none.

    `unit` is 1 (and `fine` 0) only for a single term, which needs no split.
    """
    for unit in sorted({abs(factor) for factor in a.terms.values()}, reverse=True):
        if k % unit or unit == 1:
            continue
        fine_const = a.const % unit
        fine = Affine({t: c for t, c in a.terms.items() if c % unit}, fine_const)
        lo, hi = fine.range()
        if lo < 0 or hi >= unit:
            continue
        coarse = {t: c // unit for t, c in a.terms.items() if not c % unit}
        return Affine(coarse, (a.const - fine_const) // unit), fine, unit
    return (a, constant(0), 1) if len(a.terms) == 1 else None
