"""Altered bundles, each made from a seed, and what becomes of them: `python alterations.py BUNDLE FIRST COUNT STEP`.

Seed n gives the n-th kind of alteration, in turns, with random choices of its own. Two families:

* what happens to files (bits flipped, cut, appended, moved, zeroed; nothing recomputed): must be refused;
* what a faulty writer or a forger makes (the manifest or the data members changed, digests that fit again): must be refused, or
  run right, or be found wrong by the bundle's own test. A bundle with a profile (interference.json) has that changed, too.

Never altered with a digest that fits: the bytes of the two libraries. A forger who writes the library runs any code he likes,
which no test of ours could judge and no machine should run.

Each file is used as `outcomes.py` says. One JSON line for each tells the outcome.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from outcomes import Expected, watch

from mvcompile.bundle.digest import MemberHash
from mvcompile.bundle.interference import INTERFERENCE
from mvcompile.bundle.schema import HEADER_BYTES, KERNELS, PAGE_BYTES, RUNTIME_LIBRARY
from mvcompile.testing.bundles import replace_manifest
from mvcompile.types import align

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

    def profile(self) -> dict[str, Any]:
        """Its interference.json, which it has to have."""
        begin, end = self.members[INTERFERENCE]
        found: dict[str, Any] = json.loads(self.data[begin:end])
        return found


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
    """The bundle with other bytes in a member (they end before the next one), its length and digest as they should be."""
    begin, end = original.members[name]
    content_and_rest = content.ljust(end - begin, b"\0")
    data = original.data[:begin] + content_and_rest + original.data[begin + len(content_and_rest) :]
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


def _by_field(plain: dict[str, Any]) -> dict[str, list[tuple[Any, Any]]]:
    """The places of a JSON value, those together that differ in indices only."""
    fields: dict[str, list[tuple[Any, Any]]] = {}

    def visit(container: Any, path: str) -> None:
        for key in container if isinstance(container, dict) else range(len(container)):
            inner = f"{path}.{key}" if isinstance(container, dict) else f"{path}[]"
            fields.setdefault(inner, []).append((container, key))
            if isinstance(container[key], (dict, list)):
                visit(container[key], inner)

    visit(plain, "")
    return fields


def _with_profile(original: Original, plain: dict[str, Any]) -> bytes:
    """The bundle with another profile if there is room for it, else the original."""
    begin, end = original.members[INTERFERENCE]
    room = min(other for other, _ in original.members.values() if other >= end) - begin
    content = _dumps(plain)
    return _with_member(original, INTERFERENCE, content) if len(content) <= room else original.data


def profile_changed(original: Original, chance: random.Random) -> bytes:
    """A value of the profile of another type, removed, repeated or from another place, its digest recomputed."""
    plain = original.profile()
    fields = list(_by_field(plain).values())  # or nearly all would be of a table of times
    container, key = chance.choice(chance.choice(fields))
    match chance.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        case 2:
            other, other_key = chance.choice(chance.choice(fields))
            container[key] = copy.deepcopy(other[other_key])
        case _:
            container[key] = copy.deepcopy(chance.choice(JUNK))
    return _with_profile(original, plain)


def profile_number(original: Original, chance: random.Random) -> bytes:
    """A number of the profile that is another one of its type, its digest recomputed."""
    plain = original.profile()
    fields = [places for places in _by_field(plain).values() if all(type(c[k]) in (int, float) for c, k in places)]
    container, key = chance.choice(chance.choice(fields))
    value = container[key]
    others = [value + step for step in (-1, 1, 2, 4096)] + [-value, 0 * value, 2 * value, type(value)(2**62)]
    container[key] = chance.choice([*others, 1e308, 1e-300] if isinstance(value, float) else others)
    return _with_profile(original, plain)


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
PROFILED: tuple[Alteration, ...] = (profile_changed, profile_number) * 5


def kind_of(original: Original, seed: int) -> Alteration:
    """The kind of alteration of a seed."""
    kinds = UNSEALED + SEALED + (PROFILED if INTERFERENCE in original.members else ())
    return kinds[seed % len(kinds)]


def alter(original: Original, seed: int) -> bytes:
    """The altered bundle of a seed: never the original's bytes."""
    chance = random.Random(seed)
    while True:
        data = kind_of(original, seed)(original, chance)
        if data != original.data:
            return data


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
        print(json.dumps({"seed": seed, "kind": kind_of(original, seed).__name__, "outcome": kind, "detail": detail}), flush=True)
    altered.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
