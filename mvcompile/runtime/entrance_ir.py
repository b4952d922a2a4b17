"""A second way into a bundle's driver (`driver.py`), for CPython: one native function takes the inputs and returns the outputs.

What a run costs beside its kernels is cache misses: after 10 ms of kernels little of the interpreter is left in the caches, so
every frame, dict and lock of Python that a run touches is read from memory. Through six frames and tvm-ffi's conversion of
arguments a run added 100 us and more; through this function it adds a third of that.

kernels.so exports `__tvm_ffi_` + `ENTRANCE`, a tvm-ffi function of one integer, the address of `WORDS` words of 64 bits, that
returns the address of a function `PyObject *enter(PyObject *self, PyObject *inputs)` (METH_O). It is called with the interpreter
lock held, and reads the words each time:

    RUN       address of the run that `driver.py` describes
    STEPS     number of steps
    TIMES     what the driver takes as `times`, unless there is a
    RING      address of the words of a ring of stamps, or 0: number of runs so far, when the listener is due (ns of
              CLOCK_MONOTONIC), address of the first row, its bytes, number of rows. Each run leaves its stamps in the next
              row and is counted
    LISTENER  address of a callable, which is called without arguments after a run with a ring that ended when it was due
    OPEN      1 if it may be used
    RUNNING   written: 1 for as long as it runs steps
    KEY       a key of pthread_getspecific: only threads that have set it to something may pass
    DICT      address of the type `dict`
    NONE      address of `None`
    COUNT     number of inputs
    INPUTS    address of two words per input: the addresses of its name (a str) and of the one array that may be given for it
    READY     address of two words for each outputs made ahead: the address of an object to return, of which this function owns a
              reference, and what the driver takes as `outputs`
    LEFT      number of those; the last one is taken first, and this word is counted down
    ...       addresses of functions of CPython, all of its stable ABI, and of libc's pthread_getspecific: see `FUNCTIONS`

If `inputs` is a dict of just these arrays, `OPEN` is 1, `RUNNING` is 0, something is left and the thread has the key, it gives up
the interpreter lock, runs the steps, takes the lock back, and returns the object. In all other cases, and if a step failed or the
thread could not be pinned, it returns None, nothing of READY is taken, and whoever calls has to do it another way. What the
listener raises, it raises.

The interpreter lock makes looking at `OPEN` and writing `RUNNING` one act, and whoever has written 0 to `OPEN` and then read 0
from `RUNNING`, holding it, is alone with the program. So this is not for interpreters without such a lock. The type of an object
is read at its second word, where it is in the stable ABI of all interpreters that have one (on 64-bit systems).

The address of the words is kept in the library: one load of it serves one program.
"""

from __future__ import annotations

from mvcompile.runtime.driver import LOOP, LOOP_IR

ENTRANCE = "mvcompile_entrance"

_DATA = (
    "RUN",
    "STEPS",
    "TIMES",
    "RING",
    "LISTENER",
    "OPEN",
    "RUNNING",
    "KEY",
    "DICT",
    "NONE",
    "COUNT",
    "INPUTS",
    "READY",
    "LEFT",
)
FUNCTIONS = (
    "PyDict_Size",
    "PyDict_GetItemWithError",
    "PyErr_Clear",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
    "PyObject_CallNoArgs",
    "Py_IncRef",
    "Py_DecRef",
    "pthread_getspecific",
)
WORDS = len(_DATA) + len(FUNCTIONS)


def word(name: str) -> int:
    """The index of the word `name`: one of those above, or a function."""
    return (_DATA + FUNCTIONS).index(name)


def entrance_ir(triple: str) -> str:
    """A module of LLVM IR for the target `triple`. No pragma can carry it: what TVM imports by one it inlines, so that nothing
    has an address."""
    return f'target triple = "{triple}"\n' + LOOP_IR.replace("define i64", "define internal i64") + _IR


def _at(name: str) -> str:
    """An instruction that makes `%name.at` the address of a word."""
    return f"%{name}.at = getelementptr i64, ptr %words, i64 {word(name)}"


def _load(name: str, kind: str = "ptr") -> str:
    """Instructions that make `%name` what a word holds."""
    return f"{_at(name)}\n  %{name} = load {kind}, ptr %{name}.at"


_IR = f"""
@entrance.words = internal global ptr null

define i32 @__tvm_ffi_{ENTRANCE}(ptr %self, ptr %arguments, i32 %count, ptr %result) {{
  %value = getelementptr {{ i32, i32, i64 }}, ptr %arguments, i64 0, i32 2
  %words = load ptr, ptr %value
  store ptr %words, ptr @entrance.words
  store {{ i32, i32, i64 }} {{ i32 1, i32 0, i64 ptrtoint (ptr @entrance.enter to i64) }}, ptr %result
  ret i32 0
}}

define internal ptr @entrance.enter(ptr %self, ptr %inputs) {{
entry:
  %words = load ptr, ptr @entrance.words
  %type.at = getelementptr ptr, ptr %inputs, i64 1
  %type = load ptr, ptr %type.at
  {_load("DICT")}
  %is.dict = icmp eq ptr %type, %DICT
  br i1 %is.dict, label %size, label %refuse
size:
  {_load("COUNT", "i64")}
  {_load("PyDict_Size")}
  %size.found = call i64 %PyDict_Size(ptr %inputs)
  %as.many = icmp eq i64 %size.found, %COUNT
  {_load("INPUTS")}
  {_load("PyDict_GetItemWithError")}
  br i1 %as.many, label %head, label %refuse
head:
  %i = phi i64 [ 0, %size ], [ %next, %look ]
  %more = icmp slt i64 %i, %COUNT
  br i1 %more, label %look, label %state
look:
  %name.at = getelementptr {{ ptr, ptr }}, ptr %INPUTS, i64 %i
  %name = load ptr, ptr %name.at
  %array.at = getelementptr {{ ptr, ptr }}, ptr %INPUTS, i64 %i, i32 1
  %array = load ptr, ptr %array.at
  %found = call ptr %PyDict_GetItemWithError(ptr %inputs, ptr %name)
  %same = icmp eq ptr %found, %array
  %next = add i64 %i, 1
  br i1 %same, label %head, label %clear
clear:
  {_load("PyErr_Clear")}
  call void %PyErr_Clear()
  br label %refuse
state:
  {_load("OPEN", "i64")}
  {_load("RUNNING", "i64")}
  {_load("LEFT", "i64")}
  %closed = icmp eq i64 %OPEN, 0
  %busy = icmp ne i64 %RUNNING, 0
  %none.left = icmp eq i64 %LEFT, 0
  %barred = or i1 %closed, %busy
  %stopped = or i1 %barred, %none.left
  br i1 %stopped, label %refuse, label %thread
thread:
  {_load("KEY", "i32")}
  {_load("pthread_getspecific")}
  %mark = call ptr %pthread_getspecific(i32 %KEY)
  %known = icmp ne ptr %mark, null
  br i1 %known, label %run, label %refuse
run:
  store i64 1, ptr %RUNNING.at
  {_load("READY")}
  %left = sub i64 %LEFT, 1
  %answer.at = getelementptr {{ ptr, i64 }}, ptr %READY, i64 %left
  %table.at = getelementptr {{ ptr, i64 }}, ptr %READY, i64 %left, i32 1
  %table = load i64, ptr %table.at
  {_load("RUN", "i64")}
  {_load("STEPS", "i64")}
  {_load("TIMES", "i64")}
  {_load("RING")}
  %ringed = icmp ne ptr %RING, null
  br i1 %ringed, label %row, label %go
row:
  %runs = load i64, ptr %RING
  %first.at = getelementptr i64, ptr %RING, i64 2
  %first = load i64, ptr %first.at
  %bytes.at = getelementptr i64, ptr %RING, i64 3
  %bytes = load i64, ptr %bytes.at
  %rows.at = getelementptr i64, ptr %RING, i64 4
  %rows = load i64, ptr %rows.at
  %number = urem i64 %runs, %rows
  %skip = mul i64 %number, %bytes
  %row.word = add i64 %first, %skip
  br label %go
go:
  %times = phi i64 [ %TIMES, %run ], [ %row.word, %row ]
  {_load("PyEval_SaveThread")}
  %state.of.thread = call ptr %PyEval_SaveThread()
  %steps.done = call i64 @{LOOP}(i64 %RUN, i64 %table, i64 %times)
  {_load("PyEval_RestoreThread")}
  call void %PyEval_RestoreThread(ptr %state.of.thread)
  %all = icmp eq i64 %steps.done, %STEPS
  br i1 %all, label %answer, label %failed
answer:
  store i64 %left, ptr %LEFT.at
  %object = load ptr, ptr %answer.at
  br i1 %ringed, label %count, label %leave
count:
  %runs.now = add i64 %runs, 1
  store i64 %runs.now, ptr %RING
  %row.at = inttoptr i64 %times to ptr
  %seconds.at = getelementptr {{ i64, i64 }}, ptr %row.at, i64 %STEPS
  %seconds = load i64, ptr %seconds.at
  %rest.at = getelementptr {{ i64, i64 }}, ptr %row.at, i64 %STEPS, i32 1
  %rest = load i64, ptr %rest.at
  %whole = mul i64 %seconds, 1000000000
  %now = add i64 %whole, %rest
  %due.at = getelementptr i64, ptr %RING, i64 1
  %due = load i64, ptr %due.at
  %is.due = icmp sge i64 %now, %due
  br i1 %is.due, label %listen, label %leave
listen:
  {_load("LISTENER")}
  {_load("PyObject_CallNoArgs")}
  {_load("Py_DecRef")}
  %heard = call ptr %PyObject_CallNoArgs(ptr %LISTENER)
  %raised = icmp eq ptr %heard, null
  %let.go = select i1 %raised, ptr %object, ptr %heard
  call void %Py_DecRef(ptr %let.go)
  br label %leave
leave:
  %failure = phi i1 [ false, %answer ], [ false, %count ], [ %raised, %listen ]
  store i64 0, ptr %RUNNING.at
  %result = select i1 %failure, ptr null, ptr %object
  ret ptr %result
failed:
  store i64 0, ptr %RUNNING.at
  br label %refuse
refuse:
  {_load("Py_IncRef")}
  {_load("NONE")}
  call void %Py_IncRef(ptr %NONE)
  ret ptr %NONE
}}
"""
