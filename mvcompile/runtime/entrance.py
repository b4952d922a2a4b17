"""The quick way into a run: a native function of the bundle that takes the inputs and returns the outputs (`entrance_ir.py`).

It serves runs on the session's own input buffers, in a thread that has run before, while nobody else wants the program. For
everything else it returns None, and the run goes the long way.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from mvcompile.runtime import memory
from mvcompile.runtime.entrance_ir import FUNCTIONS, WORDS, word
from mvcompile.runtime.memory import Array
from mvcompile.runtime.native import Kernel
from mvcompile.runtime.outputs import OutputPool
from mvcompile.runtime.stamps import StampRing
from mvcompile.types import TensorSpec

Enter = Callable[[object], "dict[str, Array] | None"]
"""Returns the outputs of a run on the inputs, or None if it did not run."""

_AHEAD, _AHEAD_BYTES = 64, 2**18
_LEAST_AHEAD = 4
"""Larger outputs than there is room for so many of gain nothing: what their copies cost is far more."""

_OPEN, _RUNNING, _LEFT, _TIMES, _RING, _LISTENER = map(word, ("OPEN", "RUNNING", "LEFT", "TIMES", "RING", "LISTENER"))
_METH_O = 8  # of CPython's methodobject.h
_SHORTEST_S, _LONGEST_S = 50e-6, 1e-3


class _MethodDef(ctypes.Structure):
    """`PyMethodDef` of CPython's stable ABI."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def no_entrance(inputs: object) -> None:
    """An `Enter` that lets nobody in."""


def is_supported() -> bool:
    """Whether this interpreter is one that `entrance_ir.py` describes: CPython with its lock, as it is released."""
    return (
        sys.implementation.name == "cpython"
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
        and not hasattr(sys, "getobjects")  # a build that traces references has other objects
        and struct.calcsize("P") == 8
        and _KEY is not None
        and len(_FUNCTIONS) == len(FUNCTIONS)
    )


def mark_thread() -> None:
    """Let the calling thread pass from now on: TVM's parallel loops run on one thread when it calls them."""
    if _KEY is not None:
        ctypes.CDLL(None).pthread_setspecific(_KEY, ctypes.c_void_p(1))


def open_entrance(
    make: Kernel | None, run: int, steps: int, inputs: Mapping[str, Array], outputs: Sequence[TensorSpec]
) -> Entrance | None:
    """The entrance that `make` (the bundle's function `ENTRANCE`) makes for the run at address `run`; None if the bundle has
    none, this interpreter cannot use it, or it would not pay."""
    pool = OutputPool(outputs, _AHEAD, _AHEAD_BYTES)
    if make is None or not is_supported() or pool.ahead < _LEAST_AHEAD:
        return None
    return Entrance(make, run, steps, inputs, pool)


class Entrance:
    """At first it is shut. Only one thread at a time may call `open`, `shut` and `clear`, the one that is alone with the program
    or about to be; `enter` may be called by any."""

    def __init__(self, make: Kernel, run: int, steps: int, inputs: Mapping[str, Array], pool: OutputPool) -> None:
        self.wanted = False
        """Set by a run that could have come this way: it is worth opening."""
        self._ring: StampRing | None = None
        self._pool = pool
        self._ready = np.zeros((pool.ahead, 2), np.uint64)
        self._words = np.zeros(WORDS, np.uint64)
        accepted = np.array([(id(name), id(array)) for name, array in inputs.items()], np.uint64)
        values = {
            "RUN": run,
            "STEPS": steps,
            "KEY": 0 if _KEY is None else _KEY.value,
            "DICT": id(dict),
            "NONE": id(None),
            "COUNT": len(inputs),
            "INPUTS": memory.address(accepted),
            "READY": memory.address(self._ready),
            **_FUNCTIONS,
        }
        for name, value in values.items():
            self._words[word(name)] = value
        address = cast(int, make(memory.address(self._words)))
        definition = _MethodDef(b"enter", address, _METH_O, None)
        # The last one keeps all that the function reads, and its library, as long as anybody has the function.
        held = (make, definition, self._words, self._ready, accepted, tuple(inputs.items()), pool)
        self.enter: Enter = _new_function(definition, held)

    def open(self) -> None:
        """Let runs in."""
        self.wanted = False
        if not self._words[_LEFT]:
            self._fill()
        self._words[_OPEN] = 1

    def shut(self) -> bool:
        """Let no run in any more, and wait for the one that is inside. Returns whether it was open."""
        was_open = bool(self._words[_OPEN])
        self._words[_OPEN] = 0
        pause_s = _SHORTEST_S
        while self._words[_RUNNING]:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
        return was_open

    def record(self, ring: StampRing | None) -> None:
        """Let every run leave its stamps in `ring` from now on, or none. To be called when it is shut."""
        self._words[_RING], self._words[_LISTENER] = (0, 0) if ring is None else (memory.address(ring.words), id(ring.listener))
        self._ring = ring  # which keeps both

    def stamp(self, times: int) -> None:
        """Let runs leave their stamps at this address: for benchmarks."""
        self._words[_TIMES] = times

    def clear(self) -> None:
        """Let go of the outputs that were made ahead. To be called when it is shut."""
        left = int(self._words[_LEFT])
        self._words[_LEFT] = 0
        for address in self._ready[:left, 0].tolist():
            ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(address))

    def _fill(self) -> None:
        for row in self._ready:
            outputs = self._pool.take()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(outputs.arrays))
            row[:] = id(outputs.arrays), outputs.table
        self._words[_LEFT] = self._pool.ahead


def _new_function(definition: _MethodDef, held: tuple[Any, ...]) -> Any:
    """A function of Python that holds `held` (as its `self`, which may hold the definition too)."""
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return prototype(("PyCFunction_NewEx", ctypes.pythonapi))(ctypes.byref(definition), held, None)


def _function_addresses() -> dict[str, int]:
    """Those of `FUNCTIONS` that this process has: an interpreter may be linked in such a way that nobody can find them."""
    found = {name: getattr(ctypes.pythonapi, name, None) for name in FUNCTIONS}
    return {name: ctypes.cast(one, ctypes.c_void_p).value or 0 for name, one in found.items() if one is not None}


def _new_key() -> ctypes.c_uint | None:
    """A key for `pthread_getspecific` (`unsigned int` on Linux), None where there is none to be had."""
    key = ctypes.c_uint()
    try:
        return key if ctypes.CDLL(None).pthread_key_create(ctypes.byref(key), None) == 0 else None
    except AttributeError:
        return None


_KEY = _new_key()
_FUNCTIONS = _function_addresses()
