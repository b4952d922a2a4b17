"""What a bundle says of its variants beside neighbours: the optional member `interference.json` (docs/bundle-format.md).

It is a member of its own, not a part of the manifest: it is measured again on another host without touching the rest, and a
reader that knows nothing of it runs the bundle all the same. Standard library only, because the runtime decodes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mvcompile.bundle.codec import decode, encode, fault, mismatch, version_of
from mvcompile.bundle.reader import Bundle
from mvcompile.bundle.schema import Manifest
from mvcompile.errors import IncompatibleBundleError
from mvcompile.types import Dials, Level

INTERFERENCE = "interference.json"
INTERFERENCE_VERSION = 1
NONE = "none"
"""The level at which nothing else runs; always the first."""

Table = tuple[tuple[tuple[float, ...], ...], ...]
"""Per level, per step, per variant of the step's task."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The variants of a level, and what they were measured to be worth.

    `variants`: one number per step. `latency_s` (and `spread`, interquartile range over median) is a whole run's with them,
    `fastest_alone_s` a whole run's with variant 0 everywhere, both at this level, in alternation. 0 when nothing was measured.
    """

    variants: tuple[int, ...]
    latency_s: float
    spread: float
    fastest_alone_s: float


@dataclass(frozen=True, slots=True)
class CoreProfile:
    """The model on `cores` cores. `latency_s` are medians of each step in the running network, seconds, `spread` their
    interquartile ranges over the medians; `selections` has one entry per level; `drift` is how much slower `none` was at the end
    of the measurement than at its start (0.02: 2 %; the absolute value); `group` numbers the levels: those with one number do not
    differ in their effect on this model by more than its noise, and no monitor needs to tell them apart. `regret` has for each
    task the worst over levels of the best variant's latency over that of the best of all `compared` candidates that were measured
    at these levels (1.0: nothing lost).
    """

    cores: int
    latency_s: Table
    spread: Table
    selections: tuple[Selection, ...]
    group: tuple[int, ...]
    drift: float
    regret: tuple[float, ...]
    compared: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interference:
    """The whole member. `source` starts with `measured: ` or `estimated: ` and says how; `achieved` is what the neighbour really
    took at each level; `pressure` has one number per task and variant: how much slower a probe on another core became (0.1: 10 %)
    while the variant ran, drawn towards what its footprint lets expect by how uncertain it was; null for a variant that was not
    measured, and nothing at all when none was."""

    version: int
    source: str
    cpu_model: str
    levels: tuple[Level, ...]
    achieved: tuple[Dials, ...]
    profiles: tuple[CoreProfile, ...]
    pressure: tuple[tuple[float | None, ...], ...]


def encode_interference(found: Interference) -> bytes:
    """The member's bytes. Raises BundleError, naming the JSON path, for a value of the wrong type."""
    return encode(found, INTERFERENCE)


def decode_interference(data: bytes | memoryview, manifest: Manifest) -> Interference:
    """The member of the bundle that `manifest` describes.

    Raises BundleError that names the JSON path, the value found and what was expected; IncompatibleBundleError for a version
    that is newer than this package.
    """
    version = version_of(bytes(data), INTERFERENCE)
    if version > INTERFERENCE_VERSION:
        raise IncompatibleBundleError(
            f"{INTERFERENCE} has version {version}, this mvcompile reads versions up to {INTERFERENCE_VERSION}: "
            "upgrade mvcompile, or profile the bundle again with this one (`mvcompile profile`)"
        )
    found = decode(bytes(data), Interference, INTERFERENCE)
    check_interference(found, manifest)
    return found


def interference_of(bundle: Bundle) -> Interference | None:
    """The member of an open bundle, None if it has none. Raises as `decode_interference`."""
    if all(member.name != INTERFERENCE for member in bundle.manifest.members):
        return None
    return decode_interference(bundle.member(INTERFERENCE), bundle.manifest)


def check_interference(found: Interference, manifest: Manifest) -> None:
    """Check that `found` fits `manifest`. Raises BundleError."""
    if found.version != INTERFERENCE_VERSION:
        raise fault(f"{INTERFERENCE}.version", found.version, f"1 to {INTERFERENCE_VERSION}")
    if not found.source.startswith(("measured: ", "estimated: ")):
        raise fault(f"{INTERFERENCE}.source", found.source, "'measured: ...' or 'estimated: ...'")
    names = [level.name for level in found.levels]
    if not names or names[0] != NONE or len(set(names)) != len(names) or "" in names:
        raise fault(f"{INTERFERENCE}.levels", names, f"names of levels, no two alike, the first of which is {NONE!r}")
    _require_length(found.achieved, len(names), "achieved")
    counts = [len(manifest.tasks[step.task].variants) for step in manifest.plan.steps]
    for index, profile in enumerate(found.profiles):
        _check_profile(profile, len(names), counts, f"profiles[{index}]")
        for name in ("regret", "compared"):
            _require_length(getattr(profile, name), len(manifest.tasks), f"profiles[{index}].{name}")
    cores = [profile.cores for profile in found.profiles]
    if len(set(cores)) != len(cores):
        raise fault(f"{INTERFERENCE}.profiles", cores, "profiles of different numbers of cores")
    if found.pressure:
        _check_rows(found.pressure, [len(task.variants) for task in manifest.tasks], "pressure")


def _check_profile(profile: CoreProfile, levels: int, counts: list[int], path: str) -> None:
    if profile.cores < 1:
        raise fault(f"{INTERFERENCE}.{path}.cores", profile.cores, "at least 1")
    for name in ("latency_s", "spread"):
        table: Table = getattr(profile, name)
        _require_length(table, levels, f"{path}.{name}")
        for level, rows in enumerate(table):
            _check_rows(rows, counts, f"{path}.{name}[{level}]")
    _require_length(profile.selections, levels, f"{path}.selections")
    _require_length(profile.group, levels, f"{path}.group")
    for level, number in enumerate(profile.group):
        if number >= levels:
            raise fault(f"{INTERFERENCE}.{path}.group[{level}]", number, f"0 to {levels - 1}, the number of a level")
    for level, selection in enumerate(profile.selections):
        where = f"{path}.selections[{level}].variants"
        _require_length(selection.variants, len(counts), where)
        for step, (variant, count) in enumerate(zip(selection.variants, counts, strict=True)):
            if variant >= count:
                raise fault(f"{INTERFERENCE}.{where}[{step}]", variant, f"0 to {count - 1}, the variants of this step")


def _check_rows(rows: tuple[tuple[float | None, ...], ...], counts: list[int], path: str) -> None:
    _require_length(rows, len(counts), path)
    for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
        _require_length(row, count, f"{path}[{index}]")


def _require_length(found: tuple[object, ...], count: int, path: str) -> None:
    if len(found) != count:
        raise mismatch(f"{INTERFERENCE}.{path}", f"{len(found)} entries", f"{count}")
