"""What one core can do, measured: floating-point operations per second, and bytes read per second from each level of memory.

Both are loops in LLVM IR, which TVM compiles for the CPU that the bundle's kernels were compiled for, so that they may use the
same instructions. The loop of operations has no memory in it: it goes round over independent accumulators, each a vector of the
target's width, `a = a * m + b` (one instruction where the CPU has FMA, else two). There are as many as the target has registers
less four: 12 of 16, 28 of 32. An FMA takes 4 or 5 cycles and a core starts two per cycle, so 10 would do; `m`, `b` and a spare
register keep it free of spills. The values converge to 2, so none is ever subnormal. The reading loop adds a block up in 8
accumulators.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from mvcompile.runtime import memory
from mvcompile.target import tvm_target
from mvcompile.types import HostTarget

ROUNDS = 1 << 16
"""Of the loop of operations: about a fifth of a millisecond."""
READERS = 8
LEVELS = ("L2", "LLC", "memory")


class Machine:
    """One core, the one that the calling thread is pinned to."""

    def __init__(self, target: HostTarget) -> None:
        self._target = target
        lanes = target.vector_bits // 32
        self.accumulators = target.vector_registers - 4
        self.source = _fma_loop(lanes, self.accumulators) + _read_loop(lanes)
        self.module: Any = tvm.compile(
            tvm.IRModule({name: _call(name, self.source) for name in ("fma_loop", "read_loop")}), target=tvm_target(target)
        ).mod
        self._fma, self._read = self.module["fma_loop"], self.module["read_loop"]
        self._flops = 2 * lanes * self.accumulators * ROUNDS
        self._values = memory.allocate_array("float32", (2 + self.accumulators, lanes))
        self._values[0], self._values[1] = 0.5, 1.0
        sizes = (target.l2_bytes // 2, min(8 * target.l2_bytes, target.llc_bytes // 2), 4 * target.llc_bytes)
        self._step = READERS * target.vector_bits // 8
        self._blocks = {
            level: np.ones(size // self._step * self._step, np.uint8) for level, size in zip(LEVELS, sizes, strict=True)
        }

    def flops_per_second(self) -> float:
        """One measurement."""
        address = memory.address(self._values)
        self._values[2:] = np.arange(self._values[2:].size).reshape(self._values[2:].shape)
        begin = time.perf_counter()
        self._fma(address, ROUNDS)
        return self._flops / (time.perf_counter() - begin)

    def bytes_per_second(self, level: str) -> float:
        """One measurement of reading a block that fits `level` and not the level before it."""
        block = self._blocks[level]
        passes = max(1, (1 << 23) // block.size)
        address = memory.address(block)
        self._read(address, block.size)
        begin = time.perf_counter()
        for _ in range(passes):
            self._read(address, block.size)
        return passes * block.size / (time.perf_counter() - begin)

    def level(self, nbytes: float) -> str:
        """The smallest level that holds `nbytes`."""
        capacity = (self._target.l2_bytes, self._target.llc_bytes)
        return next((name for name, size in zip(LEVELS, capacity, strict=False) if nbytes <= size), LEVELS[-1])


def _call(name: str, source: str) -> Any:
    """A function of two words that calls `name` of the LLVM IR `source`."""
    words = [tirx.Var(word, "int64") for word in ("address", "count")]
    loop = tirx.Return(tirx.call_extern("int64", f"bench_{name}", *words))
    body = tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", tvm.ir.StringImm(source), loop)
    return tirx.PrimFunc(words, body).with_attr("global_symbol", name)


def _fma_loop(lanes: int, accumulators: int) -> str:
    """`count` rounds; at `address` are m, b and what the accumulators begin with, a vector each, and end with."""
    vector, every = f"<{lanes} x float>", range(accumulators)
    places = "\n".join(
        f"  %p{i} = getelementptr {vector}, ptr %base, i64 {i + 2}\n  %s{i} = load {vector}, ptr %p{i}" for i in every
    )
    phis = "\n".join(f"  %a{i} = phi {vector} [ %s{i}, %entry ], [ %n{i}, %loop ]" for i in every)
    steps = "\n".join(
        f"  %n{i} = call {vector} @llvm.fmuladd.v{lanes}f32({vector} %a{i}, {vector} %m, {vector} %b)" for i in every
    )
    stores = "\n".join(f"  store {vector} %n{i}, ptr %p{i}" for i in every)
    return f"""
declare {vector} @llvm.fmuladd.v{lanes}f32({vector}, {vector}, {vector})
define i64 @bench_fma_loop(i64 %address, i64 %count) {{
entry:
  %base = inttoptr i64 %address to ptr
  %m = load {vector}, ptr %base
  %b.at = getelementptr {vector}, ptr %base, i64 1
  %b = load {vector}, ptr %b.at
{places}
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
{phis}
{steps}
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %count
  br i1 %more, label %loop, label %done
done:
{stores}
  ret i64 0
}}
"""


def _read_loop(lanes: int) -> str:
    """Reads `count` bytes at `address`, a multiple of 8 vectors; returns what they add up to, as 64-bit lanes, in the first."""
    vector, every = f"<{lanes // 2} x i64>", range(READERS)
    phis = "\n".join(f"  %a{i} = phi {vector} [ zeroinitializer, %entry ], [ %n{i}, %loop ]" for i in every)
    steps = "\n".join(
        f"  %p{i} = getelementptr {vector}, ptr %here, i64 {i}\n  %v{i} = load {vector}, ptr %p{i}, align 8\n"
        f"  %n{i} = add {vector} %a{i}, %v{i}"
        for i in every
    )
    sums = "\n".join(f"  %t{i} = add {vector} %{f't{i - 1}' if i > 1 else 'n0'}, %n{i}" for i in every if i)
    return f"""
define i64 @bench_read_loop(i64 %address, i64 %count) {{
entry:
  %base = inttoptr i64 %address to ptr
  %end = getelementptr i8, ptr %base, i64 %count
  br label %loop
loop:
  %here = phi ptr [ %base, %entry ], [ %next, %loop ]
{phis}
{steps}
  %next = getelementptr {vector}, ptr %here, i64 {READERS}
  %more = icmp ult ptr %next, %end
  br i1 %more, label %loop, label %done
done:
{sums}
  %sum = extractelement {vector} %t{READERS - 1}, i64 0
  ret i64 %sum
}}
"""
