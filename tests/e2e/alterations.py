"""Altered bundles, each made from a seed, and what becomes of them: `python alterations.py BUNDLE FIRST COUNT STEP`.

Seed n gives the alteration `KINDS[n % len(KINDS)]` with random choices of its own. Two families:

* what happens to files (bits flipped, cut, appended, moved, zeroed; nothing recomputed): must be refused;
* what a faulty writer or a forger makes (the manifest or the data members changed, digests that fit again): must be refused, or
  run right, or be found wrong by the bundle's own test.

Never altered with a digest that fits: the bytes of the two libraries. A forger who writes the library runs any code he likes,
which no test of ours could judge and no machine should run.

Each file is used in a forked child, so that a crash or a hang ends nothing else: opened, described, loaded, run with every layer
on its first and on its last variant, self-tested on both and on every single-layer switch. One JSON line for each tells the
outcome.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from mvcompile.bundle.digest import MemberHash
from mvcompile.bundle.inspect import describe, to_json
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import HEADER_BYTES, KERNELS, PAGE_BYTES, RUNTIME_LIBRARY, SELFTEST
from mvcompile.errors import BundleError, EnvironmentProblem
from mvcompile.runtime import Session, load, selftest, selftest_switches
from mvcompile.testing.bundles import replace_manifest
from mvcompile.types import align

RTOL, ATOL = 1e-3, 1e-5
LIMIT_S = 60.0
JUNK: list[Any] = [None, True, False, -1, 0, 1, 2, 63, 64, 4096, 2**31, 2**63 - 1, 2**63, 10**40, 0.5, -0.5, 1e-300, 1e308]
JUNK += [float("nan"), float("inf"), "", "x", "float32", "int64", "arena", "input", "constant", "weights.bin", "kernels.so"]
JUNK += ["0" * 64, "\ud800", "é\u202e\x1b[2J", "../../etc/passwd", "a\0b", [], [0], [[]], [1] * 40, {}, {"x": 1}]


class Original:
    """The bundle that is altered: its bytes, manifest and the ranges of its parts."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        self.manifest_end = HEADER_BYTES + int.from_bytes(self.data[16:24], "little")
        self.plain: dict[str, Any] = json.loads(self.data[HEADER_BYTES : self.manifest_end])
        self.members = {m["name"]: (m["offset"], m["offset"] + m["length"]) for m in self.plain["members"]}
        self.text = self.data[HEADER_BYTES : self.manifest_end]
        used = sorted([(0, self.manifest_end), *self.members.values()])
        self.gaps = [(end, begin) for (_, end), (begin, _) in itertools.pairwise(used) if begin > end]


Alteration = Callable[[Original, random.Random], bytes]

# What happens to files


def _flip(data: bytes, begin: int, end: int, chance: random.Random) -> bytes:
    altered = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 16])):
        altered[chance.randrange(begin, end)] ^= 1 << chance.randrange(8)
    return bytes(altered)


def flip_header(original: Original, chance: random.Random) -> bytes:
    return _flip(original.data, 0, HEADER_BYTES, chance)


def flip_manifest(original: Original, chance: random.Random) -> bytes:
    return _flip(original.data, HEADER_BYTES, original.manifest_end, chance)


def flip_member(original: Original, chance: random.Random) -> bytes:
    return _flip(original.data, *chance.choice(list(original.members.values())), chance)


def flip_gap(original: Original, chance: random.Random) -> bytes:
    return _flip(original.data, *chance.choice(original.gaps), chance)


def _edges(original: Original) -> list[int]:
    return [0, 8, 12, HEADER_BYTES, original.manifest_end, *(edge for part in original.members.values() for edge in part)]


def truncate(original: Original, chance: random.Random) -> bytes:
    length = len(original.data)
    cut = chance.choice([chance.randrange(length), chance.choice(_edges(original)), length - 1 - chance.randrange(4096)])
    return original.data[: min(cut, length - 1)]


def append(original: Original, chance: random.Random) -> bytes:
    count = chance.choice([1, chance.randrange(1, 8192), 4096])
    return original.data + chance.choice([bytes(count), chance.randbytes(count), original.data[:count]])


def insert(original: Original, chance: random.Random) -> bytes:
    at, count = chance.randrange(len(original.data)), chance.choice([1, 64, 4096])
    return original.data[:at] + chance.choice([bytes(count), chance.randbytes(count)]) + original.data[at:]


def remove(original: Original, chance: random.Random) -> bytes:
    at, count = chance.randrange(len(original.data)), chance.choice([1, 64, 4096])
    return original.data[:at] + original.data[at + count :]


def zero(original: Original, chance: random.Random) -> bytes:
    begin, end = chance.choice(list(original.members.values()))
    at = chance.randrange(begin, end)
    count = min(chance.choice([1, 64, 512, 4096, 65536]), len(original.data) - at)
    return original.data[:at] + bytes(count) + original.data[at + count :]


def exchange(original: Original, chance: random.Random) -> bytes:
    """Pages of two members in each other's place."""
    (one, end), (other, _) = chance.sample(list(original.members.values()), 2)
    count = min(chance.choice([PAGE_BYTES, 16 * PAGE_BYTES]), end - one, len(original.data) - other, abs(other - one))
    altered = bytearray(original.data)
    altered[one : one + count] = original.data[other : other + count]
    altered[other : other + count] = original.data[one : one + count]
    return bytes(altered)


# What a faulty writer makes


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def _place(plain: dict[str, Any], chance: random.Random) -> tuple[Any, Any]:
    """A random place of the manifest, every part of it as likely as any other, however many places it has."""
    part = chance.choice(list(plain))
    inside = list(_places(plain[part])) if isinstance(plain[part], (dict, list)) else []
    return chance.choice([*inside, (plain, part)] if inside else [(plain, part)])


def _dumps(plain: object) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _resealed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Like `reseal`, but where the manifest becomes too long for its place the offsets in it follow the members."""
    length = int.from_bytes(data[16:24], "little")
    plain = json.loads(data[HEADER_BYTES : HEADER_BYTES + length])
    change(plain)
    shift = align(HEADER_BYTES + len(_dumps(plain)) + 64, PAGE_BYTES) - align(HEADER_BYTES + length, PAGE_BYTES)
    if shift > 0 and len(_dumps(plain)) + HEADER_BYTES > align(HEADER_BYTES + length, PAGE_BYTES):
        for member in plain["members"] if isinstance(plain.get("members"), list) else []:
            if isinstance(member, dict) and type(member.get("offset")) is int:
                member["offset"] += shift
    return replace_manifest(data, _dumps(plain))


def wrong_type(original: Original, chance: random.Random) -> bytes:
    def change(plain: dict[str, Any]) -> None:
        container, key = _place(plain, chance)
        container[key] = copy.deepcopy(chance.choice(JUNK))

    return _resealed(original.data, change)


def out_of_range(original: Original, chance: random.Random) -> bytes:
    def change(plain: dict[str, Any]) -> None:
        numbers = []
        while not numbers:
            container, key = _place(plain, chance)
            numbers = [(c, k) for c, k in [(container, key), *_places([container[key]])] if type(c[k]) in (int, float)]
        container, key = chance.choice(numbers)
        container[key] = chance.choice(
            [container[key] + step for step in (-4096, -64, -1, 1, 64, 4096)] + [-1, 2**63 - 1, 2**64, 1e308, -container[key]]
        )

    return _resealed(original.data, change)


def removed(original: Original, chance: random.Random) -> bytes:
    def change(plain: dict[str, Any]) -> None:
        container, key = _place(plain, chance)
        del container[key]

    return _resealed(original.data, change)


def repeated(original: Original, chance: random.Random) -> bytes:
    """An element of a list twice, or a field of an object twice, with the same or another value."""
    plain = copy.deepcopy(original.plain)
    container, key = _place(plain, chance)
    if isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
        return replace_manifest(original.data, _dumps(plain))
    value = container.pop(key)
    container["@"] = value
    other = chance.choice([value, 0, None, []])
    name = _dumps(key)
    text = _dumps(plain).replace(b'"@":' + _dumps(value), name + b":" + _dumps(value) + b"," + name + b":" + _dumps(other), 1)
    return replace_manifest(original.data, text)


def moved(original: Original, chance: random.Random) -> bytes:
    """A value from one place at another, or a list in another order."""

    def change(plain: dict[str, Any]) -> None:
        container, key = _place(plain, chance)
        if isinstance(container[key], list) and len(container[key]) > 1 and chance.random() < 0.7:
            chance.shuffle(container[key])
            return
        other, other_key = _place(plain, chance)
        container[key] = copy.deepcopy(other[other_key])

    return _resealed(original.data, change)


def plan_changed(original: Original, chance: random.Random) -> bytes:
    """Another tensor, offset, task or order in the plan: the alterations that come closest to another sound model."""

    def change(plain: dict[str, Any]) -> None:
        plan = plain["plan"]
        tensor, step = chance.choice(plan["tensors"]), chance.choice(plan["steps"])
        other = chance.choice(plan["tensors"])
        match chance.randrange(7):
            case 0:
                tensor["offset"] += 64 * chance.choice([-16, -1, 1, 16, 256])
            case 1:
                tensor["offset"] = other["offset"]
            case 2:
                tensor["storage"] = other["storage"]
            case 3:
                tensor["shape"] = chance.choice([other["shape"], tensor["shape"][::-1], [*tensor["shape"], 1]])
            case 4:
                step["arguments"][chance.randrange(len(step["arguments"]))] = chance.randrange(len(plan["tensors"]))
            case 5:
                step["task"] = chance.randrange(len(plain["tasks"]))
            case _:
                chance.shuffle(plan["steps"])

    return _resealed(original.data, change)


def symbols_changed(original: Original, chance: random.Random) -> bytes:
    """A variant that names the function of another one, or a function that is no kernel."""

    def change(plain: dict[str, Any]) -> None:
        variants = [variant for task in plain["tasks"] for variant in task["variants"]]
        one, other = chance.sample(variants, 2)
        foreign = ["mvcompile_run", "main", "__tvm_ffi_main", "nothing", "_init"]
        if chance.random() < 0.5:
            one["symbol"], other["symbol"] = other["symbol"], one["symbol"]
        else:
            one["symbol"] = chance.choice(foreign)

    return _resealed(original.data, change)


def members_swapped(original: Original, chance: random.Random) -> bytes:
    """Two members under each other's name."""

    def change(plain: dict[str, Any]) -> None:
        one, other = chance.sample(plain["members"], 2)
        one["name"], other["name"] = other["name"], one["name"]

    return _resealed(original.data, change)


def _with_member(original: Original, name: str, content: bytes) -> bytes:
    """The bundle with other bytes in a member (not longer than before), its length and digest as they should be."""
    begin, end = original.members[name]
    data = original.data[:begin] + content.ljust(end - begin, b"\0") + original.data[end:]
    digest = MemberHash()
    digest.update(memoryview(content))

    def change(plain: dict[str, Any]) -> None:
        (member,) = [member for member in plain["members"] if member["name"] == name]
        member["length"], member["sha256"] = len(content), digest.hexdigest()

    return _resealed(data, change)


def data_changed(original: Original, chance: random.Random) -> bytes:
    """Bits flipped, blocks zeroed or the end cut off in a member that is no code, its digest recomputed."""
    name = chance.choice([name for name in original.members if name not in (KERNELS, RUNTIME_LIBRARY)])
    begin, end = original.members[name]
    content = bytearray(original.data[begin:end])
    at = chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            content[at] ^= 1 << chance.randrange(8)
        case 1:
            content[at : at + 4096] = bytes(len(content[at : at + 4096]))
        case 2:
            content[at : at + 64] = chance.randbytes(len(content[at : at + 64]))
        case _:
            del content[at:]
    return _with_member(original, name, bytes(content))


def library_replaced(original: Original, chance: random.Random) -> bytes:
    """No library at all in the place of one, its digest recomputed."""
    name = chance.choice([KERNELS, RUNTIME_LIBRARY])
    begin, end = original.members[name]
    content = chance.choice(
        [b"", b"\x7fELF", bytes(4096), chance.randbytes(4096), b"#!/bin/sh\n", original.data[begin : begin + 64]]
    )
    return _with_member(original, name, content[: end - begin])


def header_changed(original: Original, chance: random.Random) -> bytes:
    """One number of the header: version, header length, manifest length, file length."""
    offset, size = chance.choice([(8, 4), (12, 4), (16, 8), (56, 8)])
    value = int.from_bytes(original.data[offset : offset + size], "little")
    other = chance.choice([0, 1, 2, value + 1, value - 1, value * 2, value + PAGE_BYTES, 2 ** (8 * size) - 1, align(value + 1)])
    data = bytearray(original.data)
    data[offset : offset + size] = (other % 2 ** (8 * size)).to_bytes(size, "little")
    if offset == 16:  # with a digest of what the length now covers
        data[24:56] = sha256(data[HEADER_BYTES : HEADER_BYTES + other]).digest()
    return bytes(data)


UNSEALED: tuple[Alteration, ...] = (
    flip_header, flip_manifest, flip_member, flip_member, flip_gap, truncate, append, insert, remove, zero, exchange,
)  # fmt: skip
SEALED: tuple[Alteration, ...] = (
    wrong_type, wrong_type, out_of_range, out_of_range, removed, repeated, moved, plan_changed, plan_changed, symbols_changed,
    members_swapped, data_changed, library_replaced, header_changed,
)  # fmt: skip
KINDS = UNSEALED + SEALED


def alter(original: Original, seed: int) -> bytes:
    """The altered bundle of a seed: never the original's bytes."""
    chance = random.Random(seed)
    while True:
        data = KINDS[seed % len(KINDS)](original, chance)
        if data != original.data:
            return data


# What becomes of them


class Expected:
    """Inputs and outputs of the original bundle's self-test, in the model's order. Nothing of its code is loaded: a forked child
    inherits what its parent has loaded."""

    def __init__(self, path: Path) -> None:
        with open_bundle(path) as bundle:
            test, model = bundle.manifest.selftest, bundle.manifest.model
            block = np.frombuffer(bytes(bundle.member(SELFTEST)), np.uint8)

        def arrays(offsets: tuple[int, ...], specs: Any) -> list[Any]:
            return [block[o : o + s.nbytes].view(s.dtype).reshape(s.shape) for o, s in zip(offsets, specs, strict=True)]

        self.inputs, self.outputs = arrays(test.input_offsets, model.inputs), arrays(test.output_offsets, model.outputs)


def _close(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        a.shape == b.shape and bool((np.abs(a - b) <= ATOL + RTOL * np.abs(b)).all())
        for a, b in zip(found, expected, strict=True)
    )


def use(path: Path, expected: Expected, core: int) -> tuple[str, str]:
    """What happens when the bundle is used: `refused`, `right`, `caught` (its own test finds it wrong) or `silent` (it does
    not). Any other error than one of a bundle or of the host is for the caller."""
    try:
        with open_bundle(path) as bundle:
            describe(bundle)
            json.dumps(to_json(bundle))
        with load(path, cores=[core]) as session:
            return _run(session, expected)
    except (BundleError, EnvironmentProblem) as error:
        return "refused", f"{type(error).__name__}: {error}"


def _run(session: Session, expected: Expected) -> tuple[str, str]:
    inputs = {spec.name: array for spec, array in zip(session.inputs, expected.inputs, strict=False)}
    wrong = []
    last = [len(variants) - 1 for variants in session.variants.values()]
    for choice, selection in (("first", 0), ("last", last)):
        session.select_all(selection)
        right = _close(list(session.run(inputs).values()), expected.outputs)
        passed = selftest(session).passed
        if not right:
            wrong.append((choice, passed))
    switches = [switch for switch in selftest_switches(session) if not switch.result.passed]
    if any(passed for _, passed in wrong):
        return "silent", f"wrong on its {wrong[0][0]} variants, and its self-test passes"
    if wrong:
        return "caught", f"wrong on its {wrong[0][0]} variants, and its self-test says so"
    return "right", f"{len(switches)} switches fail its self-test" if switches else ""


def watch(path: Path, expected: Expected, core: int) -> tuple[str, str]:
    """The outcome of `use` in a forked child, or `crash`, `hang` or `exception`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            outcome = use(path, expected, core)
        except BaseException:
            outcome = "exception", traceback.format_exc()[-2000:]
        with suppress(OSError):
            os.write(writing, json.dumps(outcome).encode()[:60000])
        os._exit(0)
    os.close(writing)
    answer, deadline = b"", time.monotonic() + LIMIT_S
    while select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(reading, 65536)
        if not chunk:
            break
        answer += chunk
    else:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.waitpid(child, 0)
        return "hang", f"killed after {LIMIT_S:.0f} s"
    os.close(reading)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return "crash", signal.Signals(os.WTERMSIG(status)).name
    kind, detail = json.loads(answer)
    return kind, detail


def main(arguments: list[str]) -> None:
    """Tries the seeds FIRST, FIRST + STEP, ... below COUNT."""
    path, (first, count, step) = Path(arguments[0]), map(int, arguments[1:4])
    sys.modules["tvm"] = None  # type: ignore[assignment]  # or an installed TVM's runtime would be taken for the bundle's
    cores = sorted(os.sched_getaffinity(0))
    core = cores[first % len(cores)]
    original, expected, altered = Original(path), Expected(path), path.with_name(f"altered-{first}.mvb")
    for seed in range(first, count, step):
        altered.write_bytes(alter(original, seed))
        kind, detail = watch(altered, expected, core)
        print(
            json.dumps({"seed": seed, "kind": KINDS[seed % len(KINDS)].__name__, "outcome": kind, "detail": detail}), flush=True
        )
    altered.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
