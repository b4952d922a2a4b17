"""How many distinct lines each node of the loop tree touches, per buffer.

The loops inside a node vary, those outside are fixed. Accesses of one buffer that differ by a constant are united to their
bounding box where that is the smaller bound; others are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from mvcompile.measure.traffic_boxes import LINE_BYTES, Box, Extent, Key, Levels, hull
from mvcompile.measure.traffic_nest import Access, Dim, Layout, Nest, Node, merge_dims


class Footprints:
    """Distinct lines per node and buffer of a nest; everything is computed once and kept.

    Intermediate buffers of at most `register_bytes` are left out: register tiles and scalars, which never leave the core.
    """

    def __init__(self, nest: Nest, register_bytes: int = 0) -> None:
        self.nest = nest
        self.layouts = list(nest.buffers)
        self._boxes: dict[int, list[Box]] = {}
        self._dims: dict[int, list[Dim]] = {}
        self._periods: dict[int, dict[int, float]] = {}
        self._disjoint: dict[int, set[int]] = {}
        self._home: dict[int, int] = {}
        self._lines: dict[tuple[int, int, bool], float] = {}
        self._totals: dict[int, float] = {}
        for buffer, accesses in nest.root.accesses.items():
            home = _home(nest.root, buffer) if nest.buffers[buffer].is_workspace else None
            self._home[buffer] = home or 0
            self._prepare(buffer, accesses, home)
        in_registers = [i for i, layout in enumerate(self.layouts) if layout.is_workspace and layout.nbytes <= register_bytes]
        if in_registers:
            _forget(nest.root, in_registers)

    def lines(self, node: Node, buffer: int, *, written: bool = False) -> float:
        """Distinct lines of `buffer` in one execution of `node`, all its iterations included; `written`: only stores."""
        key = (id(node), buffer, written)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = self._count(node, buffer, written)
        return found

    def total(self, node: Node) -> float:
        """Distinct lines of all buffers in one execution of `node`."""
        found = self._totals.get(id(node))
        if found is None:
            found = self._totals[id(node)] = sum(self.lines(node, buffer) for buffer in node.accesses)
        return found

    def union(self, nodes: Sequence[Node], buffer: int, *, written: bool = False) -> float:
        """Distinct lines of `buffer` in the given children of one sequence together."""
        accesses = [a for node in nodes for a in node.accesses.get(buffer, ()) if a.writes or not written]
        each = [self.lines(node, buffer, written=written) for node in nodes if buffer in node.accesses]
        # Bounds of a whole must not contradict those of its parts: savings are differences of the two.
        return max(max(each, default=0.0), min(sum(each), self._union(accesses, nodes[0].depth, buffer)))

    def reuse_period(self, loop: Node, buffer: int) -> float:
        """Iterations of `loop` after which an access of `buffer` is back where it was, or near it: 1 unless indices wrap."""
        return max(self._periods[id(access)].get(loop.depth, 1.0) for access in loop.accesses[buffer])

    def is_disjoint(self, loop: Node, buffer: int) -> bool:
        """Whether no line of `buffer` is touched in two iterations of `loop`, so that fewer lines than iterations times those
        of one only mean a ragged last tile.
        """
        accesses = loop.accesses[buffer]
        if any(loop.depth not in self._disjoint[id(access)] for access in accesses):
            return False
        return len({self._boxes[id(access)][loop.depth + 1].dims for access in accesses}) == 1

    def workspace_bytes(self) -> int:
        """Bytes of the buffers that the function allocates, each shrunk to the part that is alive at once."""
        return sum(layout.nbytes for i, layout in enumerate(self.layouts) if layout.is_workspace and i in self.nest.root.accesses)

    def _count(self, node: Node, buffer: int, written: bool) -> float:
        accesses = node.accesses[buffer]
        if written:
            writers = [access for access in accesses if access.writes]
            if len(writers) == len(accesses):
                return self.lines(node, buffer)
            accesses = writers
        if node.is_loop:
            inner = self.lines(node.children[0], buffer, written=written)
            if node.depth < self._home[buffer]:
                return inner
            return max(inner, min(node.extent * inner, self._union(accesses, node.depth, buffer)))
        return self.union(node.children, buffer, written=written) if node.children else self._union(accesses, node.depth, buffer)

    def _union(self, accesses: Sequence[Access], depth: int, buffer: int) -> float:
        if not accesses:
            return 0.0
        boxes = [self._boxes[id(access)][depth] for access in accesses]
        if len(boxes) == 1:
            return boxes[0].lines
        layout = self.layouts[buffer]
        groups: dict[tuple[tuple[int, ...], tuple[Key, ...]], list[Box]] = {}
        for access, box in zip(accesses, boxes, strict=True):
            shape = tuple(dim.stride for dim in self._dims[id(access)])
            groups.setdefault((shape, tuple(dim[3] for dim in box.dims)), []).append(box)
        lines = 0.0
        for (strides, _), members in groups.items():
            lines += _unite(members, strides, layout)
        return min(lines, _whole_lines(layout))

    # Preparation: the boxes of every access at every level

    def _prepare(self, buffer: int, accesses: list[Access], home: int | None) -> None:
        dims = [access.dims for access in accesses]
        if home == 0:
            dims = [merge_dims(d) for d in dims]
        levels = [Levels(self.nest, access) for access in accesses]
        extents = [[level.of(dim) for dim in ds] for level, ds in zip(levels, dims, strict=True)]
        if home:
            dims = self._shrink(buffer, dims, extents, home)
        itemsize = self.layouts[buffer].itemsize
        for access, level, ds, rows in zip(accesses, levels, dims, extents, strict=True):
            self._dims[id(access)] = ds
            self._periods[id(access)] = level.periods
            self._disjoint[id(access)] = level.disjoint(ds, rows, home or 0, itemsize)
            self._boxes[id(access)] = level.boxes(ds, rows, home or 0, itemsize)

    def _shrink(self, buffer: int, dims: list[list[Dim]], extents: list[list[list[Extent]]], home: int) -> list[list[Dim]]:
        """Give a workspace the size that is alive in one iteration of the loops around its uses, as TVM's lowering does.

        Its memory is then the same in every iteration of those loops: the levels outside `home` repeat that of `home`.
        """
        layout = self.layouts[buffer]
        shape, first = [], []
        for d, size in enumerate(layout.shape):
            rows = [access[d][home] for access in extents]
            alike = all(row[3] == rows[0][3] for row in rows)
            low = min(row[2] for row in rows) if alike else 0
            high = max(row[2] + row[1] for row in rows) if alike else size - 1
            shape.append(min(size, high - low + 1))
            first.append(low)
        strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
        self.layouts[buffer] = Layout(layout.name, tuple(shape), tuple(strides), layout.itemsize, True)
        for access in extents:
            for d, levels in enumerate(access):
                count, span, low, _ = levels[home]
                levels[: home + 1] = [(min(count, shape[d]), min(span, shape[d] - 1), low - first[d], ())] * (home + 1)
                for p in range(home + 1, len(levels)):
                    count, span, low, key = levels[p]
                    levels[p] = (count, span, low - first[d], key)
        sizes = list(zip(shape, strides, strict=True))
        return [[Dim(dim.index, dim.width, *size) for dim, size in zip(ds, sizes, strict=True)] for ds in dims]


def _forget(node: Node, buffers: Sequence[int]) -> None:
    for buffer in buffers:
        node.accesses.pop(buffer, None)
    for child in node.children:
        _forget(child, buffers)


def _home(root: Node, buffer: int) -> int:
    """Number of loops around the smallest part of the tree that holds all accesses of `buffer`."""
    node = root
    while node.children:
        inside = [child for child in node.children if buffer in child.accesses]
        if len(inside) != 1:
            break
        node = inside[0]
    return node.depth


def _whole_lines(layout: Layout) -> float:
    return float(-(-layout.nbytes // LINE_BYTES))


def _unite(boxes: list[Box], strides: tuple[int, ...], layout: Layout) -> float:
    """Lines of boxes whose bases differ by constants only: of their hull, if that is less than their sum."""
    distinct = list({box.dims: box for box in boxes if box.lines}.values())
    if not distinct:
        return 0.0
    result = distinct[0]
    extra = 0.0
    for box in distinct[1:]:
        both = hull(result, box, strides, layout.itemsize)
        if both.lines <= result.lines + box.lines:
            result = both
        elif box.lines > result.lines:
            extra, result = extra + result.lines, box
        else:
            extra += box.lines
    return extra + result.lines
