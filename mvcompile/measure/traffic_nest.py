"""A function as a plain tree of loops, sequences and leaves with their buffer accesses; nothing here knows TVM."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from mvcompile.measure.traffic_affine import Affine, Algebra, Digit, Term, add, scale


@dataclass(slots=True)
class Layout:
    """A buffer: shape and strides in elements, `itemsize` in bytes. `is_workspace` if the function allocates it."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    is_workspace: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(slots=True)
class Dim:
    """One dimension of an access: the indices `index` to `index + width - 1` of a dimension of `size` elements."""

    index: Affine
    width: int
    size: int
    stride: int


@dataclass(slots=True)
class Access:
    """The region of a buffer that one execution of a leaf reads or writes. `loops` encloses it, outermost first."""

    buffer: int
    dims: list[Dim]
    reads: bool
    writes: bool
    loops: tuple[Digit, ...] = ()


@dataclass(slots=True)
class Node:
    """A leaf (no children, `extent` 1), a loop (one child) or a sequence (several children, `extent` 1).

    `depth` counts the loops around the node, itself excluded; `accesses` are all below it, by buffer.
    """

    extent: int
    depth: int
    children: list[Node]
    accesses: dict[int, list[Access]]

    @property
    def is_loop(self) -> bool:
        return len(self.children) == 1


@dataclass(slots=True)
class Nest:
    """What `read_nest` returns. `notes` says where the tree is a bound and not exact."""

    root: Node
    buffers: list[Layout]
    axes: list[int]
    algebra: Algebra
    notes: list[str]


@dataclass(slots=True)
class RawLoop:
    axis: int
    body: Raw


@dataclass(slots=True)
class RawSeq:
    parts: list[Raw]


@dataclass(slots=True)
class RawLeaf:
    accesses: list[Access] = field(default_factory=list)


Raw = RawLoop | RawSeq | RawLeaf


def build_nest(raw: Raw, buffers: list[Layout], axes: list[int], algebra: Algebra, notes: list[str]) -> Nest:
    """The tree of what a reader saw, each loop split into the digits that indices use. `axes` are the loops' extents."""
    root = _build(raw, _digits_of_axes(raw, axes), ())
    return Nest(root or Node(1, 0, [], {}), buffers, axes, algebra, notes)


def merge_dims(dims: list[Dim]) -> list[Dim]:
    """Join neighbouring dimensions that split one index with `//` and `%`: a fused loop over both walks straight on."""
    out: list[Dim] = []
    for dim in reversed(dims):
        joined = _join(dim, out[-1]) if out else None
        if joined is None:
            out.append(dim)
        else:
            out[-1] = joined
    return out[::-1]


def _join(outer: Dim, inner: Dim) -> Dim | None:
    if outer.width != 1 or inner.width != 1 or outer.index.const or len(outer.index.terms) != 1:
        return None
    ((high, factor),) = outer.index.terms.items()
    if factor != 1 or outer.stride != inner.stride * inner.size:
        return None
    for low, unit in inner.index.terms.items():
        whole = _whole_of(high, low, inner.size, unit)
        if whole is not None:
            rest = Affine({t: c for t, c in inner.index.terms.items() if t != low}, inner.index.const)
            return Dim(add(scale(whole, unit), rest), 1, outer.size * inner.size, inner.stride)
    return None


def _whole_of(high: Term, low: Term, size: int, unit: int) -> Affine | None:
    """The form that `high` and `low` are the quotient and remainder of, if together they index `size` fully."""
    if isinstance(high, tuple) and isinstance(low, tuple):
        if high[0] == low[0] and low[1] * low[2] == high[1] and unit * low[2] == size:
            return Affine({(low[0], low[1], low[2] * high[2]): 1}, 0)
        return None
    if isinstance(high, tuple) or isinstance(low, tuple) or (high.kind, low.kind) != ("div", "mod"):
        return None
    same = high.parts[0] == low.parts[0] and high.divisor == low.divisor
    return high.parts[0] if same and unit * low.divisor == size else None


def _digits_of_axes(raw: Raw, axes: list[int]) -> list[list[Digit]]:
    """The digits that each axis is split into, outermost first; the axis itself where its uses do not nest."""
    cuts: list[set[int]] = [{1, extent} for extent in axes]

    def visit_form(form: Affine) -> None:
        for term in form.terms:
            if isinstance(term, tuple):
                cuts[term[0]].update((term[1], term[1] * term[2]))
            else:
                for part in term.parts:
                    visit_form(part)

    def visit(node: Raw) -> None:
        if isinstance(node, RawLoop):
            visit(node.body)
        elif isinstance(node, RawSeq):
            for part in node.parts:
                visit(part)
        else:
            for access in node.accesses:
                for dim in access.dims:
                    visit_form(dim.index)

    visit(raw)
    out = []
    for axis, points in enumerate(cuts):
        chain = sorted(points)
        if any(b % a for a, b in pairwise(chain)):
            chain = [1, axes[axis]]
        out.append([(axis, a, b // a) for a, b in reversed(list(pairwise(chain)))])
    return out


def _build(raw: Raw, digits: list[list[Digit]], loops: tuple[Digit, ...]) -> Node | None:
    """The final tree; None for parts that touch no buffer."""
    if isinstance(raw, RawLeaf):
        return _leaf(raw, loops)
    if isinstance(raw, RawSeq):
        parts = [node for node in (_build(part, digits, loops) for part in raw.parts) if node]
        flat = [node for part in parts for node in (part.children if len(part.children) > 1 else [part])]
        if len(flat) <= 1:
            return flat[0] if flat else None
        return Node(1, len(loops), flat, _gather(flat))
    split = digits[raw.axis]
    body = _build(raw.body, digits, (*loops, *split))
    for position in range(len(split) - 1, -1, -1):
        if body is not None:
            body = Node(split[position][2], len(loops) + position, [body], body.accesses)
    return body


def _leaf(raw: RawLeaf, loops: tuple[Digit, ...]) -> Node | None:
    accesses: dict[int, list[Access]] = {}
    for access in raw.accesses:
        access.loops = loops
        accesses.setdefault(access.buffer, []).append(access)
    return Node(1, len(loops), [], accesses) if accesses else None


def _gather(nodes: list[Node]) -> dict[int, list[Access]]:
    out: dict[int, list[Access]] = {}
    for node in nodes:
        for buffer, accesses in node.accesses.items():
            out.setdefault(buffer, []).extend(accesses)
    return out
