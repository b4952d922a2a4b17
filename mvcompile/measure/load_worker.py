"""The process that loads caches and memory: `main([CORE, CONTROL_FD, WAKE_FD, PARENT_PID, WALK_BYTES, STREAM_BYTES])`.

What to do comes and what was done goes through the control block (`load_loops`), a shared mapping, so that neither side ever
waits for the other. It says "ready" on standard output, or what went wrong. Asked for nothing, it sleeps until it is woken.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from mvcompile.measure import load_loops as loops

_PR_SET_PDEATHSIG = 1
_SEED = 20220228


def compiled_loops() -> Any:
    """`mvcompile_load` as a function of one integer, compiled in memory."""
    word = tirx.Var("control", "int64")
    call = tirx.Return(tirx.call_extern("int64", f"{loops.LOAD}_loops", word))
    body = tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_import_llvm", tvm.ir.StringImm(loops.loops_ir()), call)
    function = tirx.PrimFunc([word], body).with_attr("global_symbol", loops.LOAD)
    return tvm.compile(tvm.IRModule({loops.LOAD: function}), target=tvm.target.Target("llvm")).mod[loops.LOAD]


class Buffer:
    """Memory of its own pages, large ones where the system has them: sets of a cache are then filled evenly, and a walk does not
    measure address translation. Every page is there from the start."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.words = np.frombuffer(self._map, dtype=np.int64)
        self.words[:] = 1
        self.address = self.words.ctypes.data


def build_chain(buffer: Buffer, size: int) -> list[int]:
    """Makes the lines of the first `size` bytes one cycle in random order: each line's first word is the next one's address.
    Returns the addresses of `load_loops.CHAINS` lines that are equally far apart on it."""
    step = loops.LINE_BYTES // 8
    order = np.random.default_rng(_SEED).permutation(size // loops.LINE_BYTES)
    buffer.words[order * step] = np.roll(order, -1) * loops.LINE_BYTES + buffer.address
    return [buffer.address + loops.LINE_BYTES * int(order[k * len(order) // loops.CHAINS]) for k in range(loops.CHAINS)]


def main(arguments: list[str]) -> None:
    """Never returns: it is killed, by its parent or with it."""
    core, control_fd, wake_fd, parent, walk_bytes, stream_bytes = (int(each) for each in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    try:
        _tie_to(parent)
        os.sched_setaffinity(0, {core})
        run = compiled_loops()
        words = np.frombuffer(mmap.mmap(control_fd, loops.WORDS * 8), dtype=np.int64)
        walked, read, written = Buffer(walk_bytes), Buffer(stream_bytes), Buffer(stream_bytes)
        words[loops.WALK_BASE], words[loops.READ_BASE], words[loops.WRITE_BASE] = walked.address, read.address, written.address
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[-1], flush=True)
        return
    print("ready", flush=True)
    while True:
        if run(words.ctypes.data) == loops.IDLE:
            os.eventfd_read(wake_fd)
            continue
        size = int(words[loops.CHASE_BYTES])
        if size:
            words[loops.CHASE_AT : loops.CHASE_AT + loops.CHAINS] = build_chain(read, size)
        words[loops.CHAIN_BYTES] = size


def _tie_to(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that took effect
        raise RuntimeError("the parent process has ended")


if __name__ == "__main__":
    main(sys.argv[1:])
