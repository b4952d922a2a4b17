"""The loop over a plan's steps, as code that a bundle's kernels.so may carry beside its kernels.

Without it, steps are called one by one from Python. That works, but each call costs 0.3 us in a warm loop and more than 1 us
after a kernel that has emptied the caches, and each call gives up the interpreter lock and has to get it back: beside a Python
thread that computes, up to 5 ms per step (`sys.getswitchinterval`). With it, a run is one call and 12 ns per step, and the lock
is free meanwhile.

kernels.so exports it as `__tvm_ffi_` + `DRIVER`, a tvm-ffi function of

    steps   address of the steps, each of three 64-bit words: the handle of a tvm-ffi function, the address of its arguments
            (`TVMFFIAny`, 16 bytes each) and their number. A function's handle may be replaced at any time: it is read when the
            step's turn comes.
    begin   the first step to run
    end     the step after the last
    times   None, or the address of 16-byte `timespec`s (CLOCK_MONOTONIC): the one at `begin` is written before the first step,
            the one at i + 1 after step i

that returns `end`, or the index of a step whose function failed; the steps after that are not run.
"""

from __future__ import annotations

DRIVER = "mvcompile_run"

LOOP = "mvcompile_steps"
"""The function in `LOOP_IR`: like the driver, but a plain C function."""

LOOP_IR = f"""
%Step = type {{ ptr, ptr, i64 }}

declare i32 @TVMFFIFunctionCall(ptr, ptr, i32, ptr)
declare i32 @clock_gettime(i32, ptr)

define i64 @{LOOP}(ptr %steps, i64 %begin, i64 %end, ptr %times) {{
entry:
  %result = alloca {{ i64, i64 }}, align 8
  %timed = icmp ne ptr %times, null
  br i1 %timed, label %start, label %head
start:
  %first = getelementptr {{ i64, i64 }}, ptr %times, i64 %begin
  call i32 @clock_gettime(i32 1, ptr %first)
  br label %head
head:
  %i = phi i64 [ %begin, %entry ], [ %begin, %start ], [ %next, %called ], [ %next, %stamp ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %step, label %done
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
done:
  ret i64 %i
}}
"""
"""LLVM IR that is the same for every CPU: TVM takes it as the value of the pragma `pragma_import_llvm`."""
