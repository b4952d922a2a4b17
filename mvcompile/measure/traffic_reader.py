"""From a scheduled TensorIR function to a plain tree of loops, sequences and leaves with their buffer accesses.

The function is read as the schedule left it, with its blocks: the regions that a block declares are the accesses of one
execution of it, and the values bound to its iterators give them in terms of the loops. (Lowering first, which would also
shrink intermediate buffers, costs 3 to 15 ms a function, more than the whole analysis; `traffic_lines` shrinks them itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad, Var
from tvm.ir.prim import expr as prim

from mvcompile.measure.traffic_affine import Affine, Algebra, add, constant, scale
from mvcompile.measure.traffic_nest import Access, Dim, Layout, Nest, Raw, RawLeaf, RawLoop, RawSeq, build_nest, merge_dims


class Unanalysable(Exception):
    """The function has a construct whose memory behaviour cannot be bounded here; the message says which."""


def read_nest(func: tirx.PrimFunc) -> Nest:
    """The loop tree of `func`. Raises `Unanalysable` for statements that are not understood and for symbolic shapes."""
    reader = _Reader()
    for param in func.params:
        if hasattr(param.ty, "shape"):
            reader.buffer(param, is_workspace=False)
    raw = reader.statement(func.body)
    return build_nest(raw, reader.buffers, reader.axes, reader.algebra, reader.notes)


def layout_of(var: Any, *, is_workspace: bool) -> Layout:
    """Shape, strides and item size of a buffer variable. Raises `Unanalysable` for symbolic ones."""
    ty = var.ty
    shape = tuple(_int(size, f"shape of buffer {var.name}") for size in ty.shape)
    strides = tuple(_int(stride, f"strides of buffer {var.name}") for stride in ty.strides or ())
    if not strides:
        running, out = 1, []
        for size in reversed(shape):
            out.append(running)
            running *= size
        strides = tuple(reversed(out))
    dtype = ty.dtype.dtype
    return Layout(var.name, shape, strides, max(1, (dtype.bits * dtype.lanes + 7) // 8), is_workspace)


def _int(value: Any, what: str) -> int:
    if isinstance(value, int):
        return value
    if type(value) is prim.IntImm:
        return int(value.value)
    raise Unanalysable(f"the {what} is symbolic: {value}")


class _Reader:
    """One walk over a function. `env` maps identities of integer variables to their forms."""

    def __init__(self) -> None:
        self.algebra = Algebra()
        self.axes: list[int] = []
        self.buffers: list[Layout] = []
        self.notes: list[str] = []
        self._index_of: dict[int, int] = {}
        self._views: dict[int, Access] = {}
        self._env: dict[int, Affine] = {}
        self._keep: list[Any] = []
        self._whole = False

    def buffer(self, var: Any, *, is_workspace: bool = True) -> int:
        key = hash(var)
        found = self._index_of.get(key)
        if found is None:
            found = self._index_of[key] = len(self.buffers)
            self.buffers.append(layout_of(var, is_workspace=is_workspace))
            self._keep.append(var)
        return found

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # Statements

    def statement(self, stmt: Any) -> Raw:
        handler = _STATEMENTS.get(type(stmt))
        if handler is None:
            raise Unanalysable(f"statement {type(stmt).__name__} is not understood")
        return handler(self, stmt)

    def _for(self, stmt: Any) -> Raw:
        start = self.index(stmt.min)
        extent_form = self.index(stmt.extent)
        extent = extent_form.range()[1]
        if not extent_form.is_const:
            self.note(f"loop {stmt.loop_var.name} has an extent that varies; its bound {extent} is used")
        if extent_form.is_const and extent == 1:
            self._env[hash(stmt.loop_var)] = start
            return self.statement(stmt.body)
        if not 0 <= extent < 1 << 40:
            raise Unanalysable(f"the extent of loop {stmt.loop_var.name} has no bound")
        step = 1 if stmt.step is None else _int(stmt.step, f"step of loop {stmt.loop_var.name}")
        extent = -(-extent // step)
        if not extent:
            return RawLeaf()
        axis = len(self.axes)
        self.axes.append(extent)
        self._env[hash(stmt.loop_var)] = add(Affine({(axis, 1, extent): step}, 0), start)
        self._keep.append(stmt.loop_var)
        return RawLoop(axis, self.statement(stmt.body))

    def _seq(self, stmt: Any) -> Raw:
        return RawSeq([self.statement(part) for part in stmt.seq])

    def _realize(self, stmt: Any) -> Raw:
        block = stmt.block
        for iter_var, value in zip(block.iter_vars, stmt.iter_values, strict=True):
            var = iter_var.var
            self._keep.append(var)
            self._env[hash(var)] = self.index(value)
        for match in block.match_buffers:
            self._views[hash(match.buffer)] = self._region(match.source)
            self._keep.append(match.buffer)
        if not self._whole and _is_plain(block.body) and all(map(_has_fixed_width, (*block.reads, *block.writes))):
            leaf = RawLeaf()
            for region in block.reads:
                self._append(leaf, self._region(region), reads=True)
            for region in block.writes:
                self._append(leaf, self._region(region), writes=True)
            return leaf
        body = self.statement(block.body)
        return body if block.init is None else RawSeq([self.statement(block.init), body])

    def _store(self, stmt: Any) -> Raw:
        leaf = self._reading(stmt.value, *stmt.indices)
        self._append(leaf, self._element(stmt.buffer, stmt.indices), writes=True)
        return leaf

    def _if(self, stmt: Any) -> Raw:
        cases = [case for case in (stmt.then_case, stmt.else_case) if case is not None]
        return RawSeq([self._reading(stmt.condition), *(self.statement(case) for case in cases)])

    def _evaluate(self, stmt: Any) -> Raw:
        return self._reading(stmt.value)

    def _bind(self, stmt: Any) -> Raw:
        self._env[hash(stmt.var)] = self.index(stmt.value)
        self._keep.append(stmt.var)
        return self._reading(stmt.value)

    def _while(self, stmt: Any) -> Raw:
        self.note("a while loop has no known trip count; the buffers in it are counted whole, once")
        outer, self._whole = self._whole, True
        body = RawSeq([self._reading(stmt.condition), self.statement(stmt.body)])
        self._whole = outer
        return body

    def _attr(self, stmt: Any) -> Raw:
        return self.statement(stmt.body)

    def _assert(self, stmt: Any) -> Raw:
        return self._reading(stmt.condition)

    def _nothing(self, stmt: Any) -> Raw:
        return RawLeaf()

    # Accesses

    def _append(self, leaf: RawLeaf, access: Access, *, reads: bool = False, writes: bool = False) -> None:
        for known in leaf.accesses:
            if known.buffer == access.buffer and _same_dims(known.dims, access.dims):
                known.reads |= reads
                known.writes |= writes
                return
        access.reads, access.writes = reads, writes
        leaf.accesses.append(access)

    def _region(self, region: Any) -> Access:
        return self._access(region.source, [(self.index(dim.min), _int(dim.extent, "region")) for dim in region.region])

    def _element(self, var: Any, indices: Iterable[Any]) -> Access:
        return self._access(var, [(self.index(index), 1) for index in indices])

    def _access(self, var: Any, ranges: list[tuple[Affine, int]]) -> Access:
        view = self._views.get(hash(var))
        if view is not None:
            return Access(view.buffer, list(view.dims), False, False)
        number = self.buffer(var)
        layout = self.buffers[number]
        if self._whole or len(ranges) != len(layout.shape):
            ranges = [(constant(0), size) for size in layout.shape]
        dims = [
            Dim(index, min(width, size), size, stride)
            for (index, width), size, stride in zip(ranges, layout.shape, layout.strides, strict=True)
        ]
        return Access(number, dims if layout.is_workspace else merge_dims(dims), False, False)

    def _reading(self, *exprs: Any) -> RawLeaf:
        leaf = RawLeaf()
        for expr in exprs:
            self._loads(expr, leaf)
        return leaf

    def _loads(self, expr: Any, leaf: RawLeaf) -> None:
        kind = type(expr)
        if kind is TensorLoad:
            for index in expr.indices:
                self._loads(index, leaf)
            self._append(leaf, self._element(expr.source, expr.indices), reads=True)
            return
        if kind is Var and hash(expr) in self._index_of:
            self.note(f"the address of buffer {expr.name} is taken; the buffer is counted whole")
            whole = [(constant(0), size) for size in self.buffers[self._index_of[hash(expr)]].shape]
            self._append(leaf, self._access(expr, whole), reads=True, writes=True)
            return
        for name in _children(kind):
            child = getattr(expr, name)
            for part in child if name == "args" else (child,):
                self._loads(part, leaf)

    # Indices

    def index(self, expr: Any) -> Affine:
        kind = type(expr)
        if kind is Var:
            return self._env.get(hash(expr)) or self._unknown(f"an index depends on {expr.name}")
        if kind is prim.IntImm:
            return constant(int(expr.value))
        if kind is int:
            return constant(expr)
        handler = _INDEX.get(kind)
        return handler(self, expr) if handler else self._unknown("an index is not understood")

    def _unknown(self, what: str, parts: tuple[Affine, ...] = ()) -> Affine:
        self.note(f"{what}; it may be anywhere in the dimension")
        return self.algebra.unknown(parts)

    def _loaded(self, expr: Any) -> Affine:
        return self._unknown("an index depends on data", tuple(self.index(index) for index in expr.indices))

    def _divmod(self, expr: Any) -> tuple[Affine, Affine]:
        a, b = self.index(expr.a), self.index(expr.b)
        truncates = type(expr) in (prim.Div, prim.Mod) and a.range()[0] < 0
        if not b.is_const or b.const <= 0 or truncates:
            unknown = self._unknown("an index is a quotient by no constant")
            return unknown, unknown
        return self.algebra.divmod(a, b.const)

    def _mul(self, expr: Any) -> Affine:
        a, b = self.index(expr.a), self.index(expr.b)
        if a.is_const:
            return scale(b, a.const)
        return scale(a, b.const) if b.is_const else self._unknown("an index is a product of variables")

    def _call(self, expr: Any) -> Affine:
        name = getattr(expr.op, "name", "")
        if name.endswith("if_then_else"):
            return self.algebra.either((self.index(expr.args[1]), self.index(expr.args[2])))
        return self.index(expr.args[0]) if name.endswith("likely") else self._unknown(f"an index is a call of {name}")

    def _let(self, expr: Any) -> Affine:
        self._env[hash(expr.var)] = self.index(expr.value)
        self._keep.append(expr.var)
        return self.index(expr.body)


_STATEMENTS: dict[Any, Callable[[_Reader, Any], Raw]] = {
    tirx.For: _Reader._for,
    tirx.SeqStmt: _Reader._seq,
    s_tir.SBlockRealize: _Reader._realize,
    tirx.BufferStore: _Reader._store,
    tirx.IfThenElse: _Reader._if,
    tirx.Evaluate: _Reader._evaluate,
    tirx.Bind: _Reader._bind,
    tirx.While: _Reader._while,
    tirx.AttrStmt: _Reader._attr,
    tirx.AssertStmt: _Reader._assert,
    tirx.AllocBuffer: _Reader._nothing,
    tirx.DeclBuffer: _Reader._nothing,
}

_INDEX: dict[Any, Callable[[_Reader, Any], Affine]] = {
    prim.Add: lambda r, e: add(r.index(e.a), r.index(e.b)),
    prim.Sub: lambda r, e: add(r.index(e.a), r.index(e.b), -1),
    prim.Mul: _Reader._mul,
    prim.FloorDiv: lambda r, e: r._divmod(e)[0],
    prim.FloorMod: lambda r, e: r._divmod(e)[1],
    prim.Div: lambda r, e: r._divmod(e)[0],
    prim.Mod: lambda r, e: r._divmod(e)[1],
    prim.Min: lambda r, e: r.algebra.pick((r.index(e.a), r.index(e.b)), largest=False),
    prim.Max: lambda r, e: r.algebra.pick((r.index(e.a), r.index(e.b)), largest=True),
    prim.Select: lambda r, e: r.algebra.either((r.index(e.true_value), r.index(e.false_value))),
    prim.Cast: lambda r, e: r.index(e.value),
    prim.Let: _Reader._let,
    Call: _Reader._call,
    TensorLoad: _Reader._loaded,
}


def _children(kind: Any) -> tuple[str, ...]:
    if issubclass(kind, prim.BinaryOpExpr | prim.CmpExpr | prim.LogicalExpr):
        return ("a", "b")
    return _OTHER_CHILDREN.get(kind, ())


_OTHER_CHILDREN: dict[Any, tuple[str, ...]] = {
    prim.Not: ("a",),
    prim.Select: ("condition", "true_value", "false_value"),
    prim.Cast: ("value",),
    prim.Let: ("value", "body"),
    prim.Ramp: ("base", "stride"),
    prim.Broadcast: ("value",),
    Call: ("args",),
}


def _has_fixed_width(region: Any) -> bool:
    return all(type(dim.extent) is prim.IntImm for dim in region.region)


def _is_plain(stmt: Any) -> bool:
    """Whether a block's body holds no loop and no block, so that its declared regions are those of one execution."""
    kind = type(stmt)
    if kind in (tirx.BufferStore, tirx.Evaluate, tirx.Bind):
        return True
    if kind is tirx.SeqStmt:
        return all(_is_plain(part) for part in stmt.seq)
    if kind is tirx.IfThenElse:
        return _is_plain(stmt.then_case) and (stmt.else_case is None or _is_plain(stmt.else_case))
    return kind is tirx.AttrStmt and _is_plain(stmt.body)


def _same_dims(a: list[Dim], b: list[Dim]) -> bool:
    return len(a) == len(b) and all(x.width == y.width and x.index == y.index for x, y in zip(a, b, strict=True))
