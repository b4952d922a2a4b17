"""The reuse of a loop tree as a static stack-distance histogram: which line transfers a cache of which size saves.

Every execution of a leaf is charged for its lines; each loop and each sequence then gives back what a later visit finds still
cached, provided that the cache holds the window of other lines touched in between (its stack distance). As the savings are
independent of the capacity and only their thresholds are compared with it, one walk answers for every cache size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mvcompile.measure.traffic_boxes import LINE_BYTES
from mvcompile.measure.traffic_lines import Footprints
from mvcompile.measure.traffic_nest import Node

_SAME = 0.95
"""A buffer counts as swept whole by one iteration if that touches this share of what all iterations touch."""


@dataclass(frozen=True, slots=True)
class ReuseCurve:
    """Transfers (64-byte lines) below a cache as a function of its capacity.

    `windows` are ascending capacities in bytes; `moved[i]` are the lines moved if the cache holds the first `i` windows.
    """

    windows: tuple[float, ...]
    moved: tuple[float, ...]

    def bytes_below(self, capacity: float) -> float:
        """Bytes fetched and written back per call by a fully associative LRU cache of `capacity` bytes, cold at the start
        and flushed at the end.
        """
        return self.moved[bisect_right(self.windows, capacity)] * LINE_BYTES

    @property
    def compulsory_bytes(self) -> float:
        """What a cache of any size moves: each line once, and each written line back once."""
        return self.moved[-1] * LINE_BYTES

    def working_set_bytes(self, slack: float) -> float:
        """The smallest window with which at most `1 + slack` times the compulsory bytes are moved; 0 if none is needed."""
        limit = self.moved[-1] * (1 + slack)
        held = next(i for i, lines in enumerate(self.moved) if lines <= limit)
        return self.windows[held - 1] if held else 0.0


def reuse_curve(footprints: Footprints, smallest_cache: int = 0) -> ReuseCurve:
    """The curve of a whole nest, fetches and write-backs together, for capacities from `smallest_cache` bytes on."""
    walk = _Walk(footprints, smallest_cache // LINE_BYTES)
    root = footprints.nest.root
    walk.visit(root, 1)
    terms = sorted(walk.savings)
    saved = accumulate((lines for _, lines in terms), initial=0.0)
    # Rounding must not leave less than the compulsory lines.
    least = sum(footprints.lines(root, b) + footprints.lines(root, b, written=True) for b in root.accesses)
    moved = [max(walk.charged - lines, least) for lines in saved]
    moved[-1] = least
    return ReuseCurve(tuple(window * LINE_BYTES for window, _ in terms), tuple(moved))


@dataclass(frozen=True, slots=True)
class _Approach:
    """What lies between a boundary of a node and its first (or last) visit to a buffer.

    `passed` are the nodes before the `sweeper`, executed whole; the sweeper goes through the buffer, and its other lines are
    touched in step with that.
    """

    passed: list[Node]
    sweeper: Node


class _Walk:
    def __init__(self, footprints: Footprints, smallest_cache_lines: int) -> None:
        self._f = footprints
        self._smallest = smallest_cache_lines
        self.charged = 0.0
        self.savings: list[tuple[float, float]] = []

    def visit(self, node: Node, times: float) -> None:
        """Charge and credit `node`, which is executed `times` times."""
        if not node.children or self._f.total(node) <= self._smallest:
            for buffer in node.accesses:
                self.charged += times * (self._f.lines(node, buffer) + self._f.lines(node, buffer, written=True))
            return
        for child in node.children:
            self.visit(child, times * node.extent)
        if node.is_loop:
            if node.extent > 1:
                self._credit_loop(node, times)
        else:
            self._credit_sequence(node, times)

    def _credit_loop(self, loop: Node, times: float) -> None:
        """Reuse between consecutive iterations."""
        body, repeats = loop.children[0], loop.extent - 1
        fresh = {b: (self._f.lines(loop, b) - self._f.lines(body, b)) / repeats for b in loop.accesses}
        for buffer in loop.accesses:
            kept = self._f.lines(body, buffer) - fresh[buffer]
            written = self._f.lines(body, buffer, written=True)
            rewritten = written - (self._f.lines(loop, buffer, written=True) - written) / repeats
            if kept <= 0 and rewritten <= 0:
                continue
            window = self._carried_window(loop, buffer, fresh)
            if kept > 0:
                self.savings.append((window, times * repeats * kept))
            if rewritten > 0:
                self.savings.append((max(window, self._inner_gap(body, buffer)), times * repeats * rewritten))

    def _carried_window(self, loop: Node, buffer: int, fresh: dict[int, float]) -> float:
        body = loop.children[0]
        period = self._f.reuse_period(loop, buffer)
        if period > 1:
            return sum(self._lines_of_iterations(loop, other, fresh[other], period) for other in fresh)
        if self._f.is_disjoint(loop, buffer):
            return 0.0
        tail, head = self._approach(body, buffer, -1), self._approach(body, buffer, 0)
        most = {other: self._f.lines(body, other) + max(0.0, fresh[other]) for other in fresh}
        window = self._window(buffer, tail, head, [], most) + self._f.lines(body, buffer)
        return window + self._swept_again(head.sweeper, buffer, fresh)

    def _lines_of_iterations(self, loop: Node, buffer: int, fresh: float, count: float) -> float:
        """Lines of `buffer` in `count` consecutive iterations of `loop`, and one more for the unaligned start."""
        once = self._f.lines(loop.children[0], buffer)
        step = once if self._f.reuse_period(loop, buffer) > 1 else max(0.0, fresh)
        return min(self._f.lines(loop, buffer), once + (count * step if step else 0.0))

    def _swept_again(self, node: Node, buffer: int, fresh: dict[int, float]) -> float:
        """Lines that the window of `buffer`, carried by a loop around `node`, meets in both of its iterations.

        The window is one iteration long but starts and ends in the middle of one. A buffer that moves in step with `buffer` has
        as many lines in it as in any iteration; one that is gone through again at every step is met whole before and after.
        """
        rest = {other for other, lines in fresh.items() if lines > 0 and other != buffer}
        again = 0.0
        while rest and node.children:
            part = next(child for child in node.children if buffer in child.accesses)
            if node.is_loop and not self._swept_whole(node, part, buffer):
                whole = {other for other in rest & part.accesses.keys() if self._swept_whole(node, part, other)}
                again += sum(min(fresh[other], self._f.lines(node, other)) for other in whole)
                rest -= whole
            node = part
        return again

    def _credit_sequence(self, seq: Node, times: float) -> None:
        """Reuse between the parts of one execution."""
        for buffer in seq.accesses:
            users = [i for i, part in enumerate(seq.children) if buffer in part.accesses]
            windows = [self._gap(seq, buffer, a, b) for a, b in pairwise(users)]
            for written in (False, True):
                self._credit_users(seq, buffer, users, windows, written, times)

    def _credit_users(
        self, seq: Node, buffer: int, users: Sequence[int], windows: Sequence[float], written: bool, times: float
    ) -> None:
        seen: list[Node] = []
        before, window = 0.0, 0.0
        for position, user in enumerate(users):
            part = seq.children[user]
            if seen:
                window = max(window, windows[position - 1]) if written else windows[position - 1]
            lines = self._f.lines(part, buffer, written=written)
            if not lines:
                continue
            seen.append(part)
            now = self._f.union(seen, buffer, written=written) if before else lines
            if before + lines > now:
                self.savings.append((window, times * (before + lines - now)))
            before = now
            if written:
                window = 0.0

    def _gap(self, seq: Node, buffer: int, a: int, b: int) -> float:
        """Lines between the use of a line of `buffer` in part `a` and in part `b` of a sequence, that line's buffer included."""
        first, second = seq.children[a], seq.children[b]
        tail, head = self._approach(first, buffer, -1), self._approach(second, buffer, 0)
        most = {other: self._f.lines(seq, other) for other in seq.accesses}
        own = self._f.union((first, second), buffer)
        return own + self._window(buffer, tail, head, seq.children[a + 1 : b], most)

    def _window(self, buffer: int, tail: _Approach, head: _Approach, between: Sequence[Node], most: dict[int, float]) -> float:
        """Lines of other buffers from the end of one sweep of `buffer` to the start of the next, at most `most` of each.

        Half-way through the tail's sweep lies half-way through the head's, so the larger of the two counts.
        """
        sweep = max((tail.sweeper, head.sweeper), key=lambda node: self._f.total(node) - self._f.lines(node, buffer))
        nodes = [*tail.passed, *between, *head.passed, sweep]
        lines = 0.0
        for other, limit in most.items():
            if other != buffer:
                lines += min(limit, sum(self._f.lines(node, other) for node in nodes if other in node.accesses))
        return lines

    def _inner_gap(self, node: Node, buffer: int) -> float:
        """The largest window between uses of `buffer` within one execution of `node`."""
        while node.is_loop:
            node = node.children[0]
        users = [i for i, part in enumerate(node.children) if buffer in part.accesses]
        return max((self._gap(node, buffer, a, b) for a, b in pairwise(users)), default=0.0)

    def _approach(self, node: Node, buffer: int, end: int) -> _Approach:
        """From the start (`end` 0) or the end (`end` -1) of `node` to the sweep of `buffer` that is nearest to it."""
        passed: list[Node] = []
        while node.children:
            users = [i for i, part in enumerate(node.children) if buffer in part.accesses]
            nearest = users[end]
            if not self._swept_whole(node, node.children[nearest], buffer):
                break
            passed += node.children[:nearest] if end == 0 else node.children[nearest + 1 :]
            node = node.children[nearest]
        return _Approach(passed, node)

    def _swept_whole(self, node: Node, part: Node, buffer: int) -> bool:
        return self._f.lines(part, buffer) >= _SAME * self._f.lines(node, buffer)
