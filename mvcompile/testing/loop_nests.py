"""Small schedules of known structure, for tests of what is derived from loop nests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import te, tirx, topi
from tvm.s_tir import Schedule


def scheduled(args: list[Any]) -> Schedule:
    """A schedule of the function that computes the last of the tensor expressions `args` from the others."""
    return Schedule(te.create_prim_func(args))


def function(sch: Schedule) -> tirx.PrimFunc:
    return sch.mod["main"]


def matmul(m: int, n: int, k: int, order: str, tiles: Mapping[str, int] | None = None) -> Schedule:
    """C[i, j] += A[i, k] * B[k, j]; `order` lists the loops, capital letters being the inner loops of `tiles`."""
    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    r = te.reduce_axis((0, k), name="k")
    sch = scheduled([a, b, te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="C")])
    loops = dict(zip("ijk", sch.get_loops(sch.get_sblock("C")), strict=True))
    for name, tile in (tiles or {}).items():
        loops[name], loops[name.upper()] = sch.split(loops[name], [None, tile])
    sch.reorder(*(loops[name] for name in order))
    return sch


def _conv(size: int, channels: int, outputs: int, kernel: int, stride: int, panel: int) -> list[Any]:
    pad = kernel // 2
    out = (size + 2 * pad - kernel) // stride + 1
    a = te.placeholder((1, size, size, channels), name="A")
    w = te.placeholder((outputs // panel, kernel, kernel, channels, panel), name="W")
    p = a
    if pad:

        def padded(n: Any, y: Any, x: Any, c: Any) -> Any:
            inside = te.all(y >= pad, y < size + pad, x >= pad, x < size + pad)
            return te.if_then_else(inside, a[n, y - pad, x - pad, c], 0.0)

        p = te.compute((1, size + 2 * pad, size + 2 * pad, channels), padded, name="P")
    ry, rx, rc = (te.reduce_axis((0, e), name=s) for s, e in (("ry", kernel), ("rx", kernel), ("rc", channels)))

    def convolved(n: Any, y: Any, x: Any, c: Any) -> Any:
        data = p[n, y * stride + ry, x * stride + rx, rc]
        return te.sum(data * w[c // panel, ry, rx, rc, c % panel], axis=[ry, rx, rc])

    return [a, w, te.compute((1, out, out, outputs), convolved, name="C")]


def packed_conv(
    size: int,
    channels: int,
    outputs: int,
    kernel: int,
    stride: int,
    rows: int,
    columns: int,
    order: str,
    panel: int | None = None,
) -> Schedule:
    """A padded NHWC convolution on weight panels `[CO/panel, K, K, CI, panel]` with a register tile of `rows` x `columns`.

    `order` is that of the loops over tiles: `c` output channels, `y` and `x` pixels.
    """
    sch = scheduled(_conv(size, channels, outputs, kernel, stride, panel or columns))
    main = sch.get_sblock("C")
    tile = sch.cache_write(main, 0, "global")
    n, y, x, c, ry, rx, rc = sch.get_loops(main)
    x, inner_x = sch.split(x, [None, rows])
    c, inner_c = sch.split(c, [None, columns])
    outer = [{"c": c, "y": y, "x": x}[name] for name in order]
    sch.reorder(n, *outer, ry, rx, rc, inner_x, inner_c)
    sch.reverse_compute_at(tile, outer[-1])
    sch.vectorize(inner_c)
    sch.unroll(inner_x)
    start = sch.decompose_reduction(main, ry)
    for block in (start, tile):
        sch.vectorize(sch.get_loops(block)[-1])
    return sch


def strip_conv(size: int, channels: int, outputs: int, strip: int, columns: int) -> Schedule:
    """The same convolution and a relu, with the padded input made strip by strip, each strip used by all channel tiles."""
    args = _conv(size, channels, outputs, 3, 1, columns)
    args[-1:] = [topi.nn.relu(args[-1])]
    sch = scheduled(args)
    last, main = sch.get_sblock("compute"), sch.get_sblock("C")
    _, y, x, c = sch.get_loops(last)
    y, inner_y = sch.split(y, [None, strip])
    c, inner_c = sch.split(c, [None, columns])
    sch.reorder(y, c, inner_y, x, inner_c)
    sch.compute_at(main, x)
    sch.compute_at(sch.get_sblock("P"), y)
    *_, tile, ry, rx, rc = sch.get_loops(main)
    sch.reorder(ry, rx, rc, tile)
    sch.vectorize(tile)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(main, ry))[-1])
    return sch


def flat_conv(size: int, channels: int, outputs: int, kernel: int, rows: int, columns: int, *, staged: bool = False) -> Schedule:
    """An unpadded convolution whose tiles of `rows` pixels run across image rows: one fused pixel loop, `//` and `%`.

    `staged`: each tile is accumulated in a buffer of its own, and copied by a loop over the image rows that it meets.
    """
    out = size - kernel + 1
    a, w = te.placeholder((1, size, size, channels), name="A"), te.placeholder((kernel, kernel, channels, outputs), name="W")
    ry, rx, rc = (te.reduce_axis((0, e), name=s) for s, e in (("ry", kernel), ("rx", kernel), ("rc", channels)))

    def convolved(n: Any, y: Any, x: Any, c: Any) -> Any:
        return te.sum(a[n, y + ry, x + rx, rc] * w[ry, rx, rc, c], axis=[ry, rx, rc])

    sch = scheduled([a, w, te.compute((1, out, out, outputs), convolved, name="C")])
    main = sch.get_sblock("C")
    tile = sch.cache_write(main, 0, "global") if staged else None
    _, y, x, c, ry, rx, rc = sch.get_loops(main)
    pixels, inner_p = sch.split(sch.fuse(y, x), [None, rows])
    c, inner_c = sch.split(c, [None, columns])
    sch.reorder(c, pixels, ry, rx, rc, inner_p, inner_c)
    if tile is not None:
        sch.reverse_compute_at(tile, pixels)
    sch.vectorize(inner_c)
    sch.vectorize(sch.get_loops(sch.decompose_reduction(main, ry))[-1])
    return sch


def winograd(size: int, channels: int, outputs: int) -> Schedule:
    """The dataflow of F(2x2, 3x3): gather 4x4 tiles to 16 planes, 16 products, gather back. Coefficients are left out."""
    side = size // 2
    a, u = te.placeholder((size + 2, size + 2, channels), name="A"), te.placeholder((16, channels, outputs), name="U")

    def to_planes(plane: Any, tile: Any, c: Any) -> Any:
        y, x = tile // side * 2, tile % side * 2
        return sum((a[y + i, x + j, c] for i in range(4) for j in range(4)), start=te.const(0.0)) * te.const(1.0) + plane * 0.0

    v = te.compute((16, side * side, channels), to_planes, name="V")
    r = te.reduce_axis((0, channels), name="r")
    m = te.compute((16, side * side, outputs), lambda p, t, o: te.sum(v[p, t, r] * u[p, r, o], axis=r), name="M")

    def from_planes(y: Any, x: Any, o: Any) -> Any:
        return sum((m[p, y // 2 * side + x // 2, o] for p in range(16)), start=te.const(0.0))

    sch = scheduled([a, u, te.compute((size, size, outputs), from_planes, name="Y")])
    plane, tile, c = sch.get_loops(sch.get_sblock("V"))
    sch.reorder(tile, plane, c)
    sch.vectorize(c)
    main = sch.get_sblock("M")
    plane, tile, o, r = sch.get_loops(main)
    sch.reorder(plane, tile, r, o)
    sch.vectorize(o)
    sch.decompose_reduction(main, r)
    sch.vectorize(sch.get_loops(sch.get_sblock("Y"))[-1])
    return sch


def gather(rows: int, width: int, picked: int) -> tirx.PrimFunc:
    """Rows of a table, chosen by an input."""
    table, index = te.placeholder((rows, width), name="T"), te.placeholder((picked,), "int32", name="I")
    return te.create_prim_func([table, index, te.compute((picked, width), lambda i, j: table[index[i], j], name="G")])


def with_symbolic_rows() -> tirx.PrimFunc:
    """A function whose shape is not known, which no analysis here accepts."""
    rows = tvm.tirx.Var("n", "int32")
    a = te.placeholder((rows, 16), name="A")
    return te.create_prim_func([a, te.compute((rows, 16), lambda i, j: a[i, j] + 1.0, name="B")])
