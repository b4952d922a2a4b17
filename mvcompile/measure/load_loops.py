"""The loops of a process that loads caches and memory, as LLVM IR that TVM takes in and compiles: no C compiler is needed.

`mvcompile_load(address of the control block)` works on what the block's first line asks for, slice by slice, until that asks for
nothing or for a chain that is not there yet. A slice is, in this order and as far as it is asked for

    walk    reads and writes a word of every line of the resident set, there and back again: of a set that is a little larger than
            its share of the cache, the turn finds most lines still there, where going round would find none
    read    loads a word of every line of a stream, as far as the rate allows
    write   stores a word of every line of another stream (the processor fetches a line before it is written, and writes it back
            when it leaves the caches: two transfers for every line that is counted here)
    chase   follows a chain of dependent loads

of at most `SLICE_BYTES` or `CHASE_LOADS` each, some 5 to 20 microseconds. After each slice it publishes counters and time. A
stream with a rate is given a slice when the rate's time for it has come; what it could not do within `GRACE_S` it lets drop, so
that a stalled core is not followed by a burst. When no slice is due it spins without touching memory.
"""

from __future__ import annotations

import platform

LINE_BYTES = 64
UNROLLED = 8
GRANULE_BYTES = UNROLLED * LINE_BYTES
"""Sizes in the control block are multiples of this."""

SLICE_BYTES = 256 * 1024
CHASE_LOADS = 1024
GRACE_S = 0.002

LOAD = "mvcompile_load"
IDLE, CHAIN_WANTED = 0, 1
"""What `mvcompile_load` returns."""

# Words of the control block, 64 bits each. Its first line is what is asked for, written by the parent, the epoch last: the words
# of one line become visible together or in order.
EPOCH = 0
RESIDENT_BYTES = 1
READ_RATE = 2  # bytes/s, 0: none, below 0: as fast as it can
READ_WINDOW = 3  # bytes of the buffer that the stream goes round in
WRITE_RATE = 4
WRITE_WINDOW = 5
CHASE_BYTES = 6
# The second line is what was done since the epoch was taken, written by the loops.
TAKEN = 8  # the epoch
STARTED_NS = 9  # CLOCK_MONOTONIC
NOW_NS = 10
WALKED_BYTES = 11
READ_BYTES = 12
WRITTEN_BYTES = 13
CHASED_LOADS = 14
# The rest belongs to the child: addresses of the buffers, and where the loops are in them.
WALK_BASE = 16
READ_BASE = 17
WRITE_BASE = 18
CHASE_AT = 19
CHAIN_BYTES = 20  # of the chain that is there
WALK_LINE = 21
WALK_STEP = 22  # 1 or -1
READ_LINE = 23
WRITE_LINE = 24
READ_PAID = 25  # bytes that the rate has been given, whether done or dropped
WRITE_PAID = 26
WORDS = 32

_PAUSES = {"x86_64": "pause", "aarch64": "yield"}


def loops_ir() -> str:
    """The module's text for this machine."""
    pause = _PAUSES.get(platform.machine())
    spin = f'call void asm sideeffect "{pause}", ""()' if pause else ""
    parts = [
        "declare i32 @clock_gettime(i32, ptr)",
        _each_line(
            "touch", "  %v{k} = load volatile i64, ptr %p{k}\n  %w{k} = add i64 %v{k}, 1\n  store volatile i64 %w{k}, ptr %p{k}"
        ),
        _each_line("fetch", "  %v{k} = load volatile i64, ptr %p{k}"),
        _each_line("store", "  store volatile i64 %first, ptr %p{k}"),
        _FOLLOW,
        _CLOCK,
        _WALK,
        _DUE,
        _stream("read", "fetch", READ_RATE, READ_WINDOW, READ_BASE, READ_LINE, READ_PAID, READ_BYTES),
        _stream("write", "store", WRITE_RATE, WRITE_WINDOW, WRITE_BASE, WRITE_LINE, WRITE_PAID, WRITTEN_BYTES),
        _MAIN.replace("SPIN", spin),
    ]
    return "\n".join(parts)


def _each_line(name: str, body: str) -> str:
    """`name(first, lines, step)`: `body` for `lines` lines (a multiple of `UNROLLED`) from `first` on, `step` bytes apart."""
    unrolled = []
    for k in range(UNROLLED):
        unrolled.append(f"  %p{k} = inttoptr i64 %at{k} to ptr\n" + body.format(k=k))
        unrolled.append(f"  %at{k + 1} = add i64 %at{k}, %step")
    return f"""
define internal void @{name}(i64 %first, i64 %lines, i64 %step) noinline {{
entry:
  br label %head
head:
  %at0 = phi i64 [ %first, %entry ], [ %at{UNROLLED}, %body ]
  %left = phi i64 [ %lines, %entry ], [ %less, %body ]
  %more = icmp sgt i64 %left, 0
  br i1 %more, label %body, label %done
body:
{chr(10).join(unrolled)}
  %less = sub i64 %left, {UNROLLED}
  br label %head
done:
  ret void
}}"""


_FOLLOW = f"""
define internal i64 @follow(i64 %first) noinline {{
entry:
  br label %head
head:
  %at = phi i64 [ %first, %entry ], [ %next, %head ]
  %i = phi i64 [ 0, %entry ], [ %j, %head ]
  %p = inttoptr i64 %at to ptr
  %next = load volatile i64, ptr %p
  %j = add i64 %i, 1
  %more = icmp slt i64 %j, {CHASE_LOADS}
  br i1 %more, label %head, label %done
done:
  ret i64 %next
}}"""

_CLOCK = """
define internal i64 @clock() noinline {
  %t = alloca { i64, i64 }, align 8
  %status = call i32 @clock_gettime(i32 1, ptr %t)
  %s = load i64, ptr %t
  %ns.at = getelementptr i64, ptr %t, i64 1
  %ns = load i64, ptr %ns.at
  %whole = mul i64 %s, 1000000000
  %now = add i64 %whole, %ns
  ret i64 %now
}"""


def _word(name: str, index: int) -> str:
    """`%name.at`, the address of a word of the control block, and `%name`, its value."""
    return f"  %{name}.at = getelementptr i64, ptr %c, i64 {index}\n  %{name} = load i64, ptr %{name}.at"


def _add(index: int, value: str, name: str) -> str:
    """Adds `value` to a word of the control block."""
    return f"{_word(name, index)}\n  %{name}.sum = add i64 %{name}, {value}\n  store i64 %{name}.sum, ptr %{name}.at"


_SLICE_LINES = SLICE_BYTES // LINE_BYTES

_WALK = f"""
define internal void @walk(ptr %c) noinline {{
{_word("resident", RESIDENT_BYTES)}
{_word("base", WALK_BASE)}
{_word("line", WALK_LINE)}
{_word("step", WALK_STEP)}
  %all = sdiv i64 %resident, {LINE_BYTES}
  %up = icmp sgt i64 %step, 0
  %ahead = sub i64 %all, %line
  %left = select i1 %up, i64 %ahead, i64 %line
  %n = call i64 @llvm.smin.i64(i64 %left, i64 {_SLICE_LINES})
  %previous = sub i64 %line, 1
  %from = select i1 %up, i64 %line, i64 %previous
  %offset = mul i64 %from, {LINE_BYTES}
  %first = add i64 %base, %offset
  %stride = mul i64 %step, {LINE_BYTES}
  call void @touch(i64 %first, i64 %n, i64 %stride)
  %moved = mul i64 %n, %step
  %here = add i64 %line, %moved
  store i64 %here, ptr %line.at
  %top = icmp eq i64 %here, %all
  %bottom = icmp eq i64 %here, 0
  %down = select i1 %top, i64 -1, i64 %step
  %turned = select i1 %bottom, i64 1, i64 %down
  store i64 %turned, ptr %step.at
  %bytes = mul i64 %n, {LINE_BYTES}
{_add(WALKED_BYTES, "%bytes", "walked")}
  ret void
}}
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)"""

_DUE = f"""
define internal i1 @due(i64 %rate, i64 %elapsed, ptr %paid.at) noinline {{
entry:
  %none = icmp eq i64 %rate, 0
  br i1 %none, label %no, label %some
some:
  %free = icmp slt i64 %rate, 0
  br i1 %free, label %yes, label %paced
paced:
  %t = sitofp i64 %elapsed to double
  %r = sitofp i64 %rate to double
  %product = fmul double %t, %r
  %allowed.f = fdiv double %product, 1.0e+9
  %allowed = fptosi double %allowed.f to i64
  %grace = sdiv i64 %rate, {round(1 / GRACE_S)}
  %window = add i64 %grace, {SLICE_BYTES}
  %oldest = sub i64 %allowed, %window
  %paid = load i64, ptr %paid.at
  %kept = call i64 @llvm.smax.i64(i64 %paid, i64 %oldest)
  store i64 %kept, ptr %paid.at
  %open = sub i64 %allowed, %kept
  %ready = icmp sge i64 %open, {SLICE_BYTES}
  ret i1 %ready
yes:
  ret i1 true
no:
  ret i1 false
}}"""


def _stream(name: str, each: str, rate: int, window: int, base: int, line: int, paid: int, done: int) -> str:
    """`name(control, elapsed)`: a slice of a stream if it is due; returns whether it was."""
    return f"""
define internal i1 @{name}(ptr %c, i64 %elapsed) noinline {{
entry:
{_word("rate", rate)}
  %paid.at = getelementptr i64, ptr %c, i64 {paid}
  %due = call i1 @due(i64 %rate, i64 %elapsed, ptr %paid.at)
  br i1 %due, label %go, label %done
go:
{_word("window", window)}
{_word("base", base)}
{_word("line", line)}
  %all = sdiv i64 %window, {LINE_BYTES}
  %left = sub i64 %all, %line
  %n = call i64 @llvm.smin.i64(i64 %left, i64 {_SLICE_LINES})
  %offset = mul i64 %line, {LINE_BYTES}
  %first = add i64 %base, %offset
  call void @{each}(i64 %first, i64 %n, i64 {LINE_BYTES})
  %here = add i64 %line, %n
  %round = icmp sge i64 %here, %all
  %next = select i1 %round, i64 0, i64 %here
  store i64 %next, ptr %line.at
  %bytes = mul i64 %n, {LINE_BYTES}
{_add(paid, "%bytes", "owed")}
{_add(done, "%bytes", "total")}
  br label %done
done:
  ret i1 %due
}}"""


_RESET = "\n".join(
    f"  %reset{index} = getelementptr i64, ptr %c, i64 {index}\n  store i64 {value}, ptr %reset{index}"
    for index, value in {
        WALKED_BYTES: 0,
        READ_BYTES: 0,
        WRITTEN_BYTES: 0,
        CHASED_LOADS: 0,
        WALK_LINE: 0,
        WALK_STEP: 1,
        READ_LINE: 0,
        WRITE_LINE: 0,
        READ_PAID: 0,
        WRITE_PAID: 0,
    }.items()
)

_MAIN = f"""
define i64 @{LOAD}_loops(i64 %control.word) {{
entry:
  %c = inttoptr i64 %control.word to ptr
  %now.at = getelementptr i64, ptr %c, i64 {NOW_NS}
  %taken.at = getelementptr i64, ptr %c, i64 {TAKEN}
  %chain.at = getelementptr i64, ptr %c, i64 {CHAIN_BYTES}
  %chased.at = getelementptr i64, ptr %c, i64 {CHASED_LOADS}
  %chase.at = getelementptr i64, ptr %c, i64 {CHASE_AT}
  %started.at = getelementptr i64, ptr %c, i64 {STARTED_NS}
  br label %take
take:
  %epoch = load atomic i64, ptr %c acquire, align 8
{_word("resident", RESIDENT_BYTES)}
{_word("reading", READ_RATE)}
{_word("writing", WRITE_RATE)}
{_word("chasing", CHASE_BYTES)}
  %chain = load i64, ptr %chain.at
  %built = icmp eq i64 %chain, %chasing
  %unchained = icmp eq i64 %chasing, 0
  %complete = or i1 %built, %unchained
  br i1 %complete, label %begin, label %wanted
wanted:
  ret i64 {CHAIN_WANTED}
begin:
{_RESET}
  %start = call i64 @clock()
  store i64 %start, ptr %started.at
  store i64 %start, ptr %now.at
  store atomic i64 %epoch, ptr %taken.at release, align 8
  %one = or i64 %resident, %reading
  %two = or i64 %writing, %chasing
  %any = or i64 %one, %two
  %idle = icmp eq i64 %any, 0
  br i1 %idle, label %rest, label %slice
rest:
  ret i64 {IDLE}
slice:
  %now = phi i64 [ %start, %begin ], [ %later, %ended ]
  %asked = load atomic i64, ptr %c acquire, align 8
  %same = icmp eq i64 %asked, %epoch
  br i1 %same, label %work, label %take
work:
  %elapsed = sub i64 %now, %start
  %walks = icmp ne i64 %resident, 0
  br i1 %walks, label %walking, label %streams
walking:
  call void @walk(ptr %c)
  br label %streams
streams:
  %did.read = call i1 @read(ptr %c, i64 %elapsed)
  %did.write = call i1 @write(ptr %c, i64 %elapsed)
  %chases = icmp ne i64 %chasing, 0
  br i1 %chases, label %chase, label %check
chase:
  %from = load i64, ptr %chase.at
  %to = call i64 @follow(i64 %from)
  store i64 %to, ptr %chase.at
  %chased = load i64, ptr %chased.at
  %more = add i64 %chased, {CHASE_LOADS}
  store i64 %more, ptr %chased.at
  br label %ended
check:
  %streamed = or i1 %did.read, %did.write
  %busy = or i1 %streamed, %walks
  br i1 %busy, label %ended, label %spin
spin:
  SPIN
  br label %ended
ended:
  %later = call i64 @clock()
  store atomic i64 %later, ptr %now.at release, align 8
  br label %slice
}}
"""
