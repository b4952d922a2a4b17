"""The loops of a process that loads caches and memory, as LLVM IR that TVM takes in and compiles: no C compiler is needed.

`mvcompile_load(address of the control block)` works on what the block's first line asks for, turn by turn, until that asks for
nothing or for a chain that is not there yet. A turn is, in this order and as far as it is asked for, a slice of

    read    loads a word of every line of a stream, in `UNROLLED` places at once: a core gets more out of memory when it has
            several sequences to prefetch (Zen 3: 18 GB/s of 8, 13 of one)
    write   stores a word of every line of another stream (the processor fetches a line before it is written, and writes it back
            when it leaves the caches: two transfers for every line that is counted here)
    walk    reads and writes a word of every line of the resident set, there and back again: of a set that is a little larger than
            its share of the cache, the turn finds most lines still there, where going round would find none
    chase   follows a chain of dependent loads from one place, or in turn from `CHAINS` places that are equally far apart
    count   does arithmetic in registers, which nothing but the clock and the scheduler can slow down

of at most `SLICE_BYTES`, `CHASE_LOADS` or `COUNT_STEPS`, some 5 to 20 microseconds each. After each turn it publishes counters
and time. A stream with a rate has a slice when the rate's time for it has come; what it could not do within `GRACE_S` it drops,
so that a stalled core is not followed by a burst. While such a stream is late, the walk sits out, but not more than
`MOST_SKIPPED` turns in a row. When nothing is to be done it spins without touching memory.
"""

from __future__ import annotations

import platform

LINE_BYTES = 64
UNROLLED = 8
GRANULE_BYTES = UNROLLED * LINE_BYTES
"""Sizes in the control block are multiples of this."""

SLICE_BYTES = 256 * 1024
CHASE_LOADS = 1024
CHAINS = 8
COUNT_STEPS = 4096
GRACE_S = 0.002
MOST_SKIPPED = 3

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
FLAGS = 7  # COUNTING, PARALLEL
COUNTING, PARALLEL = 1, 2
# The second line is what was done since the epoch was taken, written by the loops.
TAKEN = 8  # the epoch
STARTED_NS = 9  # CLOCK_MONOTONIC
NOW_NS = 10
WALKED_BYTES = 11
READ_BYTES = 12
WRITTEN_BYTES = 13
CHASED_LOADS = 14
COUNTED_STEPS = 15
# The rest belongs to the child: addresses of the buffers, and where the loops are in them.
WALK_BASE = 16
READ_BASE = 17
WRITE_BASE = 18
CHASE_AT = 32  # and the seven words after it
CHAIN_BYTES = 20  # of the chain that is there
COUNT_SUM = 27  # a double
WALKS_SKIPPED = 28
WALK_LINE = 21
WALK_STEP = 22  # 1 or -1
READ_LINE = 23
WRITE_LINE = 24
READ_PAID = 25  # bytes that the rate has been given, whether done or dropped
WRITE_PAID = 26
WORDS = 40

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
        _follow(1),
        _follow(CHAINS),
        _COUNT,
        _CLOCK,
        _WALK,
        _DUE,
        _stream("read", "fetch", READ_RATE, READ_WINDOW, READ_BASE, READ_LINE, READ_PAID, READ_BYTES),
        _stream("write", "store", WRITE_RATE, WRITE_WINDOW, WRITE_BASE, WRITE_LINE, WRITE_PAID, WRITTEN_BYTES),
        _MAIN.replace("SPIN", spin),
    ]
    return "\n".join(parts)


def _each_line(name: str, body: str) -> str:
    """`name(first, lines, apart, on)`: `body` for `lines` lines (a multiple of `UNROLLED`): `UNROLLED` of them `apart` bytes
    apart, the first at address `first`, then as many `on` bytes further on, and so forth."""
    unrolled = []
    for k in range(UNROLLED):
        unrolled.append(f"  %p{k} = inttoptr i64 %at{k} to ptr\n" + body.format(k=k))
        unrolled.append(f"  %at{k + 1} = add i64 %at{k}, %apart")
    return f"""
define internal void @{name}(i64 %first, i64 %lines, i64 %apart, i64 %on) noinline {{
entry:
  br label %head
head:
  %at0 = phi i64 [ %first, %entry ], [ %next, %body ]
  %left = phi i64 [ %lines, %entry ], [ %less, %body ]
  %more = icmp sgt i64 %left, 0
  br i1 %more, label %body, label %done
body:
{chr(10).join(unrolled)}
  %next = add i64 %at0, %on
  %less = sub i64 %left, {UNROLLED}
  br label %head
done:
  ret void
}}"""


def _follow(chains: int) -> str:
    """`follow_N(places)`: `CHASE_LOADS` loads, in turn from each of the addresses at `places`, which become the next ones."""
    every = range(chains)
    first = [f"  %w{k} = getelementptr i64, ptr %places, i64 {k}\n  %s{k} = load i64, ptr %w{k}" for k in every]
    phis = [f"  %at{k} = phi i64 [ %s{k}, %entry ], [ %n{k}, %head ]" for k in every]
    loads = [f"  %p{k} = inttoptr i64 %at{k} to ptr\n  %n{k} = load volatile i64, ptr %p{k}" for k in every]
    last = [f"  store i64 %n{k}, ptr %w{k}" for k in every]
    return "\n".join(
        [
            f"define internal void @follow_{chains}(ptr %places) noinline {{\nentry:",
            *first,
            "  br label %head\nhead:",
            *phis,
            "  %i = phi i64 [ 0, %entry ], [ %j, %head ]",
            *loads,
            f"  %j = add i64 %i, {chains}\n  %more = icmp slt i64 %j, {CHASE_LOADS}",
            "  br i1 %more, label %head, label %done\ndone:",
            *last,
            "  ret void\n}",
        ]
    )


_COUNT = f"""
define internal void @count(ptr %sum.at) noinline {{
entry:
  %sum = load double, ptr %sum.at
  br label %head
head:
  %x = phi double [ %sum, %entry ], [ %y, %head ]
  %i = phi i64 [ 0, %entry ], [ %j, %head ]
  %half = fmul double %x, 0.5
  %y = fadd double %half, 1.0
  %j = add i64 %i, 1
  %more = icmp slt i64 %j, {COUNT_STEPS}
  br i1 %more, label %head, label %done
done:
  store double %y, ptr %sum.at
  ret void
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
  %apart = mul i64 %step, {LINE_BYTES}
  %on = mul i64 %step, {GRANULE_BYTES}
  call void @touch(i64 %first, i64 %n, i64 %apart, i64 %on)
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
}}

define internal i1 @behind(ptr %c, i64 %elapsed, i64 %rate, i64 %paid.word) noinline {{
  %paid.at = getelementptr i64, ptr %c, i64 %paid.word
  %paced = call i64 @llvm.smax.i64(i64 %rate, i64 0)
  %due = call i1 @due(i64 %paced, i64 %elapsed, ptr %paid.at)
  ret i1 %due
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
  %bytes = mul i64 %n, {LINE_BYTES}
  %apart = sdiv i64 %bytes, {UNROLLED}
  call void @{each}(i64 %first, i64 %n, i64 %apart, i64 {LINE_BYTES})
  %here = add i64 %line, %n
  %round = icmp sge i64 %here, %all
  %next = select i1 %round, i64 0, i64 %here
  store i64 %next, ptr %line.at
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
        COUNTED_STEPS: 0,
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
  %sum.at = getelementptr i64, ptr %c, i64 {COUNT_SUM}
  %skipped.at = getelementptr i64, ptr %c, i64 {WALKS_SKIPPED}
  %chase.at = getelementptr i64, ptr %c, i64 {CHASE_AT}
  %started.at = getelementptr i64, ptr %c, i64 {STARTED_NS}
  br label %take
take:
  %epoch = load atomic i64, ptr %c acquire, align 8
{_word("resident", RESIDENT_BYTES)}
{_word("reading", READ_RATE)}
{_word("writing", WRITE_RATE)}
{_word("chasing", CHASE_BYTES)}
{_word("flags", FLAGS)}
  %counting = and i64 %flags, {COUNTING}
  %parallel = and i64 %flags, {PARALLEL}
  %many = icmp ne i64 %parallel, 0
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
  %three = or i64 %one, %two
  %any = or i64 %three, %counting
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
  %did.read = call i1 @read(ptr %c, i64 %elapsed)
  %did.write = call i1 @write(ptr %c, i64 %elapsed)
  %walks = icmp ne i64 %resident, 0
  br i1 %walks, label %turn, label %streamed
turn:
  %more.read = call i1 @behind(ptr %c, i64 %elapsed, i64 %reading, i64 {READ_PAID})
  %more.write = call i1 @behind(ptr %c, i64 %elapsed, i64 %writing, i64 {WRITE_PAID})
  %late = or i1 %more.read, %more.write
  %skipped = load i64, ptr %skipped.at
  %patient = icmp slt i64 %skipped, {MOST_SKIPPED}
  %skips = and i1 %late, %patient
  br i1 %skips, label %skip, label %walking
skip:
  %skipped.more = add i64 %skipped, 1
  store i64 %skipped.more, ptr %skipped.at
  br label %streamed
walking:
  store i64 0, ptr %skipped.at
  call void @walk(ptr %c)
  br label %streamed
streamed:
  %chases = icmp ne i64 %chasing, 0
  br i1 %chases, label %chase, label %counts
chase:
  br i1 %many, label %chains, label %chain.one
chains:
  call void @follow_{CHAINS}(ptr %chase.at)
  br label %followed
chain.one:
  call void @follow_1(ptr %chase.at)
  br label %followed
followed:
{_add(CHASED_LOADS, str(CHASE_LOADS), "chased")}
  br label %counts
counts:
  %counts.too = icmp ne i64 %counting, 0
  br i1 %counts.too, label %count, label %check
count:
  call void @count(ptr %sum.at)
{_add(COUNTED_STEPS, str(COUNT_STEPS), "counted")}
  br label %check
check:
  %moved = or i1 %did.read, %did.write
  %searched = or i1 %walks, %chases
  %touched = or i1 %moved, %searched
  %busy = or i1 %touched, %counts.too
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
