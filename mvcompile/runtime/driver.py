"""One call that makes a whole run, as code that a bundle's kernels.so may carry beside its kernels.

Without it, steps are called one by one from Python. That works, but each call costs 0.3 us in a warm loop and more than 1 us
after a kernel that has emptied the caches, and each call gives up the interpreter lock and has to get it back: beside a Python
thread that computes, up to 5 ms per step (`sys.getswitchinterval`). With it, a run is one call and 12 ns per step, and the lock
is free meanwhile. It also pins the thread and copies the outputs, because what Python does after the kernels, it does in caches
that have long forgotten it: a copy of 4 KB by numpy costs 40 us there, this one 1 us.

kernels.so exports it as `__tvm_ffi_` + `DRIVER`, a tvm-ffi function of three integers

    run       address of the run: `RUN_WORDS` words of 64 bits,
                0  address of the steps, each of three words: the handle of a tvm-ffi function, the address of its arguments
                   (`TVMFFIAny`, 16 bytes each) and their number. A function's handle may be replaced at any time: it is read
                   when the step's turn comes
                1  number of steps
                2  address of the sources, two words for each output: address and bytes
                3  number of outputs
                4  address of a CPU mask (`cpu_set_t`) to which the thread is pinned for as long as the steps take, or 0
                5  bytes of the mask
    outputs   address of a word for each output, where to copy it to after the last step; or 0
    times     0, or the address of 16-byte `timespec`s (CLOCK_MONOTONIC): the first is written before the first step, number
              i + 1 after step i

that returns the number of steps; or the index of a step whose function failed, and then does nothing but unpin the thread any
more; or -1 if the thread could not be pinned, and then it has done nothing.

The symbol's name changes whenever the meaning of these does. What a runtime does not know it does not call: bundles with the
driver of before run from Python.
"""

from __future__ import annotations

DRIVER = "mvcompile_run_pinned"

RUN_WORDS = 6

LOOP = "mvcompile_steps"
"""The function in `LOOP_IR`: the driver, but a plain C function."""

LOOP_IR = f"""
%Step = type {{ ptr, ptr, i64 }}
%Source = type {{ ptr, i64 }}
%Run = type {{ ptr, i64, ptr, i64, ptr, i64 }}

declare i32 @TVMFFIFunctionCall(ptr, ptr, i32, ptr)
declare i32 @clock_gettime(i32, ptr)
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
declare i32 @memcmp(ptr, ptr, i64)
declare ptr @memmove(ptr, ptr, i64)

define i64 @{LOOP}(i64 %run.word, i64 %outputs.word, i64 %times.word) {{
entry:
  %run = inttoptr i64 %run.word to ptr
  %outputs = inttoptr i64 %outputs.word to ptr
  %times = inttoptr i64 %times.word to ptr
  %steps = load ptr, ptr %run
  %end.at = getelementptr %Run, ptr %run, i64 0, i32 1
  %end = load i64, ptr %end.at
  %sources.at = getelementptr %Run, ptr %run, i64 0, i32 2
  %sources = load ptr, ptr %sources.at
  %copies.at = getelementptr %Run, ptr %run, i64 0, i32 3
  %copies = load i64, ptr %copies.at
  %mask.at = getelementptr %Run, ptr %run, i64 0, i32 4
  %mask = load ptr, ptr %mask.at
  %bytes.at = getelementptr %Run, ptr %run, i64 0, i32 5
  %bytes = load i64, ptr %bytes.at
  %result = alloca {{ i64, i64 }}, align 8
  %before = alloca i8, i64 %bytes, align 8
  %timed = icmp ne ptr %times, null
  %pins = icmp ne ptr %mask, null
  br i1 %pins, label %look, label %ready
look:
  %seen = call i32 @sched_getaffinity(i32 0, i64 %bytes, ptr %before)
  %known = icmp eq i32 %seen, 0
  br i1 %known, label %compare, label %refused
compare:
  %difference = call i32 @memcmp(ptr %before, ptr %mask, i64 %bytes)
  %pinned = icmp eq i32 %difference, 0
  br i1 %pinned, label %ready, label %pin
pin:
  %set = call i32 @sched_setaffinity(i32 0, i64 %bytes, ptr %mask)
  %moved = icmp eq i32 %set, 0
  br i1 %moved, label %ready, label %refused
refused:
  ret i64 -1
ready:
  %unpins = phi i1 [ false, %entry ], [ false, %compare ], [ true, %pin ]
  br i1 %timed, label %start, label %head
start:
  call i32 @clock_gettime(i32 1, ptr %times)
  br label %head
head:
  %i = phi i64 [ 0, %ready ], [ 0, %start ], [ %next, %called ], [ %next, %stamp ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %step, label %copy
step:
  %here = getelementptr %Step, ptr %steps, i64 %i
  %function = load atomic ptr, ptr %here monotonic, align 8
  %arguments.at = getelementptr %Step, ptr %here, i64 0, i32 1
  %arguments = load ptr, ptr %arguments.at
  %count.at = getelementptr %Step, ptr %here, i64 0, i32 2
  %count64 = load i64, ptr %count.at
  %count = trunc i64 %count64 to i32
  store {{ i64, i64 }} zeroinitializer, ptr %result
  %status = call i32 @TVMFFIFunctionCall(ptr %function, ptr %arguments, i32 %count, ptr %result)
  %next = add i64 %i, 1
  %ok = icmp eq i32 %status, 0
  br i1 %ok, label %called, label %done
called:
  br i1 %timed, label %stamp, label %head
stamp:
  %after = getelementptr {{ i64, i64 }}, ptr %times, i64 %next
  call i32 @clock_gettime(i32 1, ptr %after)
  br label %head
copy:
  %wanted = icmp ne ptr %outputs, null
  br i1 %wanted, label %output, label %done
output:
  %k = phi i64 [ 0, %copy ], [ %following, %move ]
  %left = icmp slt i64 %k, %copies
  br i1 %left, label %move, label %done
move:
  %to.at = getelementptr ptr, ptr %outputs, i64 %k
  %to = load ptr, ptr %to.at
  %source = getelementptr %Source, ptr %sources, i64 %k
  %from = load ptr, ptr %source
  %length.at = getelementptr %Source, ptr %source, i64 0, i32 1
  %length = load i64, ptr %length.at
  call ptr @memmove(ptr %to, ptr %from, i64 %length)
  %following = add i64 %k, 1
  br label %output
done:
  br i1 %unpins, label %unpin, label %return
unpin:
  call i32 @sched_setaffinity(i32 0, i64 %bytes, ptr %before)
  br label %return
return:
  ret i64 %i
}}
"""
"""LLVM IR that is the same for every CPU: TVM takes it as the value of the pragma `pragma_import_llvm`."""
