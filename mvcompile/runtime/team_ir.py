"""How a parallel loop of a kernel is shared among the cores of a session: code that a bundle's kernels.so carries.

TVM's own pool gives every thread one part and waits for all of them. If something else runs on one of the cores, the part of
that core's thread is late, and so is every loop: a network of 7 ms took 75 ms. Here a loop is cut into several parts for each
thread. Each thread takes its own ones first (the same rows in every layer, so that they are found in its cache), then what the
others have not begun. Nobody waits for a thread that has not begun; and one that was stopped in the middle of a part is moved to
the first core, whose thread has nothing else to do, and goes home when the part is done.

The first thread of a team is the one that runs the steps. The others call `WORK` and stay in it.

kernels.so exports `__tvm_ffi_` + `TEAM`, a function of one integer, the address of a team or 0: the kernels' parallel loops are
shared by that team from then on, or run as they are in the thread that runs the steps. `WORK` is a function of two integers, the
address of the team and the number of the thread, that returns after `LEAVE`, a function of one integer, the address of the team,
was called. During a run neither `TEAM` nor `LEAVE` may be called.

A team is an array of lines of 8 words of 64 bits, `LINE` bytes each, at a multiple of that. The first three lines are

    0  FUNCTION  of the present loop: what TVM calls FTVMParallelLambda, called with the number of a part
       DATA      what it is called with
       PARTS     number of parts of the loop
       FAILED    what a part has returned, if it was not 0
       THREADS   number of threads
       SHARES    number of parts that a loop has
       IDLE      ns for which a thread looks for work before it sleeps
       STOP      1 when the threads shall leave
    1  EPOCH     number of loops so far; those who sleep wait for it (futex)
       SLEEPING  number of those who sleep
    2  DONE      parts of the present loop that are done; the first thread waits for it (futex)
       WAITING   1 if it sleeps meanwhile
       BYTES     of a CPU mask

and then there is one for each thread:

       TICKET    its parts that nobody has begun: number of the first one, and (upper 32 bits) of the first that is not its own
       BUSY      1 while it is in a part
       MOVED     1 if it was moved to the first core
       THREAD    its number in the system
       MASK      address of the CPU mask (`cpu_set_t`) of its core

A thread takes a part by adding one to a ticket. Then the loop cannot end before the part is done, so what the first line says is
of this loop, even if the ticket had been looked at in another one.
"""

from __future__ import annotations

TEAM = "mvcompile_team"
WORK = "mvcompile_work"
LEAVE = "mvcompile_leave"

LINE = 64
HEAD_LINES = 3
_WORDS = {
    **{name: index for index, name in enumerate(("FUNCTION", "DATA", "PARTS", "FAILED", "THREADS", "SHARES", "IDLE", "STOP"))},
    **{name: 8 + index for index, name in enumerate(("EPOCH", "SLEEPING"))},
    **{name: 16 + index for index, name in enumerate(("DONE", "WAITING", "BYTES"))},
    **{name: index for index, name in enumerate(("TICKET", "BUSY", "MOVED", "THREAD", "MASK"))},
}

_PATIENCE_NS = 20_000
"""For how long the first thread waits for a part beyond twice the time that its own ones took: a thread that was not stopped has
nearly always done it by then, one that was stopped comes back after milliseconds."""

_FUTEX = {"x86_64": 202, "aarch64": 98}  # the system call's number
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE
_PAUSE = {"x86_64": "pause", "aarch64": "yield"}


def word(name: str) -> int:
    """The index of the word `name` in a team; of a thread's words, in its line."""
    return _WORDS[name]


def team_ir(triple: str) -> str:
    """A module of LLVM IR for the target `triple`."""
    machine = triple.split("-")[0]
    ir = _IR.replace("$FUTEX", str(_FUTEX[machine])).replace("$PAUSE", _PAUSE[machine])
    return f'target triple = "{triple}"\n{ir}'


def _at(name: str, base: str = "team") -> str:
    """An instruction that makes `%name.at` the address of a word."""
    return f"%{name}.at = getelementptr i64, ptr %{base}, i64 {word(name)}"


def _load(name: str, kind: str = "i64", base: str = "team") -> str:
    """Instructions that make `%name` what a word holds."""
    return f"{_at(name, base)}\n  %{name} = load {kind}, ptr %{name}.at"


_IR = f"""
%Environment = type {{ ptr, i32 }}
%Line = type [{LINE // 8} x i64]
%Time = type {{ i64, i64 }}

@team.now = internal global ptr null
@__TVMBackendParallelLaunch = weak global ptr null

declare i64 @syscall(i64, ...)
declare i32 @sched_setaffinity(i32, i64, ptr)
declare i32 @clock_gettime(i32, ptr)

define i32 @__tvm_ffi_{TEAM}(ptr %self, ptr %arguments, i32 %count, ptr %result) {{
  %value = getelementptr {{ i32, i32, i64 }}, ptr %arguments, i64 0, i32 2
  %team = load ptr, ptr %value
  store ptr %team, ptr @team.now
  store ptr @team.launch, ptr @__TVMBackendParallelLaunch
  ret i32 0
}}

define i32 @__tvm_ffi_{WORK}(ptr %self, ptr %arguments, i32 %count, ptr %result) {{
entry:
  %time = alloca %Time
  %value = getelementptr {{ i32, i32, i64 }}, ptr %arguments, i64 0, i32 2
  %team = load ptr, ptr %value
  %number = getelementptr {{ i32, i32, i64 }}, ptr %arguments, i64 1, i32 2
  %me = load i64, ptr %number
  {_at("EPOCH")}
  {_at("STOP")}
  {_at("SLEEPING")}
  br label %idle
idle:
  %seen = phi i64 [ 0, %entry ], [ %epoch, %work ]
  %since = call i64 @team.clock(ptr %time)
  {_load("IDLE")}
  %until = add i64 %since, %IDLE
  br label %look
look:
  %looks = phi i64 [ 0, %idle ], [ %looks.now, %pause ], [ 0, %late ], [ 0, %sleep ]
  %epoch = load atomic i64, ptr %EPOCH.at acquire, align 8
  %changed = icmp ne i64 %epoch, %seen
  br i1 %changed, label %begin, label %pause
pause:
  call void asm sideeffect "$PAUSE", ""()
  %looks.now = add i64 %looks, 1
  %many = icmp ugt i64 %looks.now, 64
  br i1 %many, label %late, label %look
late:
  %now = call i64 @team.clock(ptr %time)
  %over = icmp sgt i64 %now, %until
  br i1 %over, label %sleep, label %look
sleep:
  %sleeping = atomicrmw add ptr %SLEEPING.at, i64 1 seq_cst, align 8
  %seen.word = trunc i64 %seen to i32
  %slept = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %EPOCH.at, i32 {_WAIT}, i32 %seen.word, ptr null, ptr null, i32 0)
  %awake = atomicrmw sub ptr %SLEEPING.at, i64 1 seq_cst, align 8
  br label %look
begin:
  %stop = load atomic i64, ptr %STOP.at monotonic, align 8
  %stops = icmp ne i64 %stop, 0
  br i1 %stops, label %leave, label %work
work:
  call void @team.home(ptr %team, i64 %me)
  %parts = call i64 @team.take(ptr %team, i64 %me)
  call void @team.home(ptr %team, i64 %me)
  br label %idle
leave:
  ret i32 0
}}

define i32 @__tvm_ffi_{LEAVE}(ptr %self, ptr %arguments, i32 %count, ptr %result) {{
  %value = getelementptr {{ i32, i32, i64 }}, ptr %arguments, i64 0, i32 2
  %team = load ptr, ptr %value
  {_at("STOP")}
  store atomic i64 1, ptr %STOP.at seq_cst, align 8
  call void @team.announce(ptr %team)
  ret i32 0
}}

; Another loop has begun, or the end.
define internal void @team.announce(ptr %team) {{
entry:
  {_at("EPOCH")}
  %epoch = atomicrmw add ptr %EPOCH.at, i64 1 seq_cst, align 8
  {_at("SLEEPING")}
  %sleeping = load atomic i64, ptr %SLEEPING.at seq_cst, align 8
  %sleepers = icmp ne i64 %sleeping, 0
  br i1 %sleepers, label %wake, label %leave
wake:
  %woken = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %EPOCH.at, i32 {_WAKE}, i32 2147483647, ptr null, ptr null, i32 0)
  br label %leave
leave:
  ret void
}}

; All parts that nobody has begun, one after the other; returns how many that were.
define internal i64 @team.take(ptr %team, i64 %me) {{
entry:
  %environment = alloca %Environment
  %handle.at = getelementptr %Environment, ptr %environment, i64 0, i32 0
  store ptr null, ptr %handle.at
  %tasks.at = getelementptr %Environment, ptr %environment, i64 0, i32 1
  {_load("THREADS")}
  %my.line = call ptr @team.line(ptr %team, i64 %me)
  {_at("BUSY", "my.line")}
  {_at("FUNCTION")}
  {_at("DATA")}
  {_at("PARTS")}
  {_at("FAILED")}
  {_at("DONE")}
  {_at("WAITING")}
  br label %member
member:
  %offset = phi i64 [ 0, %entry ], [ %following, %next ]
  %taken = phi i64 [ 0, %entry ], [ %taken.here, %next ]
  %sum = add i64 %me, %offset
  %whose = urem i64 %sum, %THREADS
  %line = call ptr @team.line(ptr %team, i64 %whose)
  {_at("TICKET", "line")}
  br label %look
look:
  %taken.here = phi i64 [ %taken, %member ], [ %taken.now, %count ], [ %taken.now, %last ], [ %taken.now, %wake ]
  %shown = load atomic i64, ptr %TICKET.at acquire, align 8
  %shown.part = and i64 %shown, 4294967295
  %shown.end = lshr i64 %shown, 32
  %some = icmp ult i64 %shown.part, %shown.end
  br i1 %some, label %try, label %next
try:
  %ticket = atomicrmw add ptr %TICKET.at, i64 1 acq_rel, align 8
  %part = and i64 %ticket, 4294967295
  %end = lshr i64 %ticket, 32
  %mine = icmp ult i64 %part, %end
  br i1 %mine, label %call, label %next
call:
  store atomic i64 1, ptr %BUSY.at monotonic, align 8
  %FUNCTION = load ptr, ptr %FUNCTION.at
  %DATA = load ptr, ptr %DATA.at
  %PARTS = load i64, ptr %PARTS.at
  %tasks = trunc i64 %PARTS to i32
  store i32 %tasks, ptr %tasks.at
  %number = trunc i64 %part to i32
  %status = call i32 %FUNCTION(i32 %number, ptr %environment, ptr %DATA)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %fail, label %count
fail:
  %status.word = sext i32 %status to i64
  store atomic i64 %status.word, ptr %FAILED.at monotonic, align 8
  br label %count
count:
  store atomic i64 0, ptr %BUSY.at monotonic, align 8
  %before = atomicrmw add ptr %DONE.at, i64 1 seq_cst, align 8
  %taken.now = add i64 %taken.here, 1
  %done.now = add i64 %before, 1
  %all = icmp eq i64 %done.now, %PARTS
  br i1 %all, label %last, label %look
last:
  %waiting = load atomic i64, ptr %WAITING.at seq_cst, align 8
  %awaited = icmp ne i64 %waiting, 0
  br i1 %awaited, label %wake, label %look
wake:
  %woken = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %DONE.at, i32 {_WAKE}, i32 1, ptr null, ptr null, i32 0)
  br label %look
next:
  %following = add i64 %offset, 1
  %more = icmp ult i64 %following, %THREADS
  br i1 %more, label %member, label %leave
leave:
  ret i64 %taken.here
}}

; FTVMBackendParallelLaunch: what kernels call for a parallel loop.
define internal i32 @team.launch(ptr %function, ptr %data, i32 %tasks) {{
entry:
  %time = alloca %Time
  %environment = alloca %Environment
  %team = load ptr, ptr @team.now
  %alone = icmp eq ptr %team, null
  br i1 %alone, label %serial, label %share
serial:
  %handle.at = getelementptr %Environment, ptr %environment, i64 0, i32 0
  store ptr null, ptr %handle.at
  %tasks.at = getelementptr %Environment, ptr %environment, i64 0, i32 1
  store i32 1, ptr %tasks.at
  %status = call i32 %function(i32 0, ptr %environment, ptr %data)
  ret i32 %status
share:
  {_at("FUNCTION")}
  store ptr %function, ptr %FUNCTION.at
  {_at("DATA")}
  store ptr %data, ptr %DATA.at
  {_load("SHARES")}
  {_at("PARTS")}
  store i64 %SHARES, ptr %PARTS.at
  {_at("FAILED")}
  store atomic i64 0, ptr %FAILED.at monotonic, align 8
  {_at("DONE")}
  store atomic i64 0, ptr %DONE.at monotonic, align 8
  {_load("THREADS")}
  br label %deal
deal:
  %thread = phi i64 [ 0, %share ], [ %thread.next, %deal ]
  %thread.next = add i64 %thread, 1
  %first.product = mul i64 %thread, %SHARES
  %first = udiv i64 %first.product, %THREADS
  %end.product = mul i64 %thread.next, %SHARES
  %end = udiv i64 %end.product, %THREADS
  %end.high = shl i64 %end, 32
  %ticket = or i64 %end.high, %first
  %line = call ptr @team.line(ptr %team, i64 %thread)
  {_at("TICKET", "line")}
  store atomic i64 %ticket, ptr %TICKET.at release, align 8
  %dealt = icmp eq i64 %thread.next, %THREADS
  br i1 %dealt, label %work, label %deal
work:
  call void @team.announce(ptr %team)
  %began = call i64 @team.clock(ptr %time)
  %taken = call i64 @team.take(ptr %team, i64 0)
  br label %ask
ask:
  %done = load atomic i64, ptr %DONE.at acquire, align 8
  %all = icmp eq i64 %done, %SHARES
  br i1 %all, label %end.of.loop, label %missing
missing:
  %ended = call i64 @team.clock(ptr %time)
  %spent = sub i64 %ended, %began
  %none = icmp eq i64 %taken, 0
  %divisor = select i1 %none, i64 1, i64 %taken
  %each = udiv i64 %spent, %divisor
  %twice = shl i64 %each, 1
  %patience = add i64 %twice, {_PATIENCE_NS}
  %until = add i64 %ended, %patience
  br label %look
look:
  %looks = phi i64 [ 0, %missing ], [ %looks.now, %pause ], [ 0, %late ]
  %done.by = load atomic i64, ptr %DONE.at acquire, align 8
  %all.by = icmp eq i64 %done.by, %SHARES
  br i1 %all.by, label %end.of.loop, label %pause
pause:
  call void asm sideeffect "$PAUSE", ""()
  %looks.now = add i64 %looks, 1
  %many = icmp ugt i64 %looks.now, 64
  br i1 %many, label %late, label %look
late:
  %now = call i64 @team.clock(ptr %time)
  %over = icmp sgt i64 %now, %until
  br i1 %over, label %stuck, label %look
stuck:
  call void @team.fetch(ptr %team)
  {_at("WAITING")}
  store atomic i64 1, ptr %WAITING.at seq_cst, align 8
  br label %sleep
sleep:
  %done.then = load atomic i64, ptr %DONE.at seq_cst, align 8
  %all.then = icmp eq i64 %done.then, %SHARES
  br i1 %all.then, label %awake, label %wait
wait:
  %done.word = trunc i64 %done.then to i32
  %slept = call i64 (i64, ...) @syscall(i64 $FUTEX, ptr %DONE.at, i32 {_WAIT}, i32 %done.word, ptr null, ptr null, i32 0)
  br label %sleep
awake:
  store atomic i64 0, ptr %WAITING.at monotonic, align 8
  br label %end.of.loop
end.of.loop:
  %failed = load atomic i64, ptr %FAILED.at monotonic, align 8
  %failure = trunc i64 %failed to i32
  ret i32 %failure
}}

; Move all that are in a part to the first core, whose thread is about to sleep.
define internal void @team.fetch(ptr %team) {{
entry:
  {_load("THREADS")}
  {_load("BYTES")}
  %first.line = call ptr @team.line(ptr %team, i64 0)
  {_load("MASK", "ptr", "first.line")}
  br label %member
member:
  %thread = phi i64 [ 1, %entry ], [ %thread.next, %next ]
  %line = call ptr @team.line(ptr %team, i64 %thread)
  {_at("BUSY", "line")}
  %BUSY = load atomic i64, ptr %BUSY.at monotonic, align 8
  {_at("MOVED", "line")}
  %MOVED = load atomic i64, ptr %MOVED.at monotonic, align 8
  %stays = icmp eq i64 %MOVED, 0
  %busy = icmp ne i64 %BUSY, 0
  %moves = and i1 %stays, %busy
  br i1 %moves, label %move, label %next
move:
  {_load("THREAD", "i64", "line")}
  %task = trunc i64 %THREAD to i32
  %moved = call i32 @sched_setaffinity(i32 %task, i64 %BYTES, ptr %MASK)
  ; After it: if the thread has gone on meanwhile, it sees this at its next loop at the latest.
  store atomic i64 1, ptr %MOVED.at seq_cst, align 8
  br label %next
next:
  %thread.next = add i64 %thread, 1
  %more = icmp ult i64 %thread.next, %THREADS
  br i1 %more, label %member, label %leave
leave:
  ret void
}}

; Back to the core of this thread if it was moved.
define internal void @team.home(ptr %team, i64 %me) {{
entry:
  %line = call ptr @team.line(ptr %team, i64 %me)
  {_at("MOVED", "line")}
  %MOVED = load atomic i64, ptr %MOVED.at seq_cst, align 8
  %away = icmp ne i64 %MOVED, 0
  br i1 %away, label %move, label %leave
move:
  store atomic i64 0, ptr %MOVED.at seq_cst, align 8
  {_load("BYTES")}
  {_load("MASK", "ptr", "line")}
  %moved = call i32 @sched_setaffinity(i32 0, i64 %BYTES, ptr %MASK)
  br label %leave
leave:
  ret void
}}

define internal ptr @team.line(ptr %team, i64 %thread) alwaysinline {{
  %line.number = add i64 %thread, {HEAD_LINES}
  %line = getelementptr %Line, ptr %team, i64 %line.number
  ret ptr %line
}}

define internal i64 @team.clock(ptr %time) {{
  %status = call i32 @clock_gettime(i32 1, ptr %time)
  %seconds.at = getelementptr %Time, ptr %time, i64 0, i32 0
  %seconds = load i64, ptr %seconds.at
  %rest.at = getelementptr %Time, ptr %time, i64 0, i32 1
  %rest = load i64, ptr %rest.at
  %whole = mul i64 %seconds, 1000000000
  %now = add i64 %whole, %rest
  ret i64 %now
}}
"""
