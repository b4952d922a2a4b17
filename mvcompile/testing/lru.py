"""What a fully associative LRU cache moves when a TensorIR function runs: the reference for the static traffic model.

The function is lowered by TVM's own passes (so intermediate buffers have their real sizes), written out as a Python program
that reports every access, and run. For small functions: about a million accesses a second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad, Var
from tvm.ir.prim import expr as prim

LINE_BYTES = 64

_LOWER = tvm.transform.Sequential(
    [
        s_tir.transform.LowerInitBlock(),
        s_tir.transform.PlanAndUpdateBufferAllocationLocation(),
        s_tir.transform.ConvertBlocksToOpaque(),
        s_tir.transform.CompactBufferAllocation(),
        s_tir.transform.LowerMatchBuffer(),
        s_tir.transform.LowerOpaqueBlock(),
    ]
)

_OPERATORS = {
    prim.Add: "+",
    prim.Sub: "-",
    prim.Mul: "*",
    prim.Div: "+",  # of values, whose size does not matter; indices use FloorDiv
    prim.FloorDiv: "//",
    prim.FloorMod: "%",
    prim.LT: "<",
    prim.LE: "<=",
    prim.GT: ">",
    prim.GE: ">=",
    prim.EQ: "==",
    prim.NE: "!=",
    prim.And: "and",
    prim.Or: "or",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """Accesses in order: twice the line's number, plus one for a store. `workspace_bytes` are the allocated buffers."""

    accesses: Sequence[int]
    workspace_bytes: int

    @property
    def lines(self) -> int:
        """Distinct lines touched."""
        return len({access >> 1 for access in self.accesses})

    def bytes_moved(self, capacity_lines: int) -> int:
        """Bytes fetched and written back by a cache of that many lines, cold at the start and flushed at the end."""
        cache: OrderedDict[int, int] = OrderedDict()
        moved = 0
        for access in self.accesses:
            line, store = access >> 1, access & 1
            if line in cache:
                cache.move_to_end(line)
                cache[line] |= store
                continue
            moved += 1
            if len(cache) >= capacity_lines:
                moved += cache.popitem(last=False)[1]
            cache[line] = store
        return (moved + sum(cache.values())) * LINE_BYTES


def trace(func: tirx.PrimFunc) -> Trace:
    """Every access of one call of `func`, which may be scheduled; loads in branches that are not taken are not made.

    Of vectorised loops the first and last lane are run, and the last dropped if it touches the lines of the first: with unit
    strides these are all, and hits that repeat hits change no cache.
    """
    program = _Program(_LOWER(tvm.IRModule({"main": func}))["main"])
    accesses: list[int] = []

    def load(address: int) -> int:
        accesses.append(address // LINE_BYTES * 2)
        return 0

    def store(address: int) -> None:
        accesses.append(address // LINE_BYTES * 2 + 1)

    def lane(number: int, body: Callable[[int], None], previous: int) -> int:
        start = len(accesses)
        body(number)
        if accesses[previous:start] == accesses[start:]:
            del accesses[start:]
        return start

    names = {"load": load, "store": store, "lane": lane, "here": lambda: len(accesses)}
    exec(compile("\n".join(program.lines), "<trace>", "exec"), names)
    return Trace(accesses, program.workspace_bytes)


class _Program:
    """A lowered function as lines of Python."""

    def __init__(self, func: Any) -> None:
        self.lines: list[str] = []
        self.workspace_bytes = 0
        self._names: dict[int, str] = {}
        self._places: dict[int, tuple[int, list[int]]] = {}
        self._end = 0
        for param in func.params:
            self._place(param)
        self._statement(func.body, 0)

    def _place(self, buffer: Any) -> int:
        """Gives the buffer addresses of its own, aligned to lines; returns its size in bytes."""
        size, strides = buffer.ty.dtype.dtype.itemsize, []
        for extent in reversed(buffer.ty.shape):
            strides.append(size)
            size *= int(extent)
        self._places[hash(buffer)] = (self._end, strides[::-1])
        self._end += -(-size // LINE_BYTES) * LINE_BYTES
        return int(size)

    def _name(self, var: Any) -> str:
        return self._names.setdefault(hash(var), f"v{len(self._names)}")

    def _address(self, buffer: Any, indices: Any) -> str:
        start, strides = self._places[hash(buffer)]
        return " + ".join([str(start), *(f"{self._value(i)} * {stride}" for i, stride in zip(indices, strides, strict=True))])

    def _value(self, expr: Any) -> str:
        kind = type(expr)
        if kind is prim.IntImm:
            return str(int(expr.value))
        if kind is prim.FloatImm:
            return "0"
        if kind is Var:
            return self._name(expr)
        if kind in _OPERATORS:
            return f"({self._value(expr.a)} {_OPERATORS[kind]} {self._value(expr.b)})"
        if kind in (prim.Min, prim.Max):
            return f"{kind.__name__.lower()}({self._value(expr.a)}, {self._value(expr.b)})"
        if kind is prim.Cast:
            return self._value(expr.value)
        if kind is prim.Select:
            return f"({self._value(expr.true_value)} if {self._value(expr.condition)} else {self._value(expr.false_value)})"
        if kind is TensorLoad:
            return f"load({self._address(expr.source, expr.indices)})"
        if kind is Call and expr.op.name.endswith("if_then_else"):
            condition, yes, no = expr.args
            return f"({self._value(yes)} if {self._value(condition)} else {self._value(no)})"
        if kind is Call:
            return "(" + " + ".join(self._value(arg) for arg in expr.args) + ")"
        raise TypeError(f"the simulator does not know {kind.__name__}")

    def _statement(self, stmt: Any, depth: int) -> None:
        kind, pad = type(stmt), " " * depth
        if kind is tirx.SeqStmt:
            for part in stmt.seq:
                self._statement(part, depth)
        elif kind is tirx.For:
            name, start, extent = self._name(stmt.loop_var), self._value(stmt.min), self._value(stmt.extent)
            if stmt.kind == tirx.ForKind.VECTORIZED:
                self.lines.append(f"{pad}def lanes({name}):")
                self._statement(stmt.body, depth + 1)
                self.lines.append(f"{pad}lane({start} + {extent} - 1, lanes, lane({start}, lanes, here()))")
            else:
                self.lines.append(f"{pad}for {name} in range({start}, {start} + {extent}):")
                self._statement(stmt.body, depth + 1)
        elif kind is tirx.BufferStore:
            self.lines.append(pad + self._value(stmt.value))
            self.lines.append(f"{pad}store({self._address(stmt.buffer, stmt.indices)})")
        elif kind is tirx.IfThenElse:
            self.lines.append(f"{pad}if {self._value(stmt.condition)}:")
            self._statement(stmt.then_case, depth + 1)
            if stmt.else_case is not None:
                self.lines.append(f"{pad}else:")
                self._statement(stmt.else_case, depth + 1)
        elif kind is tirx.AllocBuffer:
            self.workspace_bytes += self._place(stmt.buffer)
        else:
            raise TypeError(f"the simulator does not know {kind.__name__}")
