"""What a bundle holds, as text for people and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mvcompile.bundle.codec import plain_of, to_plain
from mvcompile.bundle.interference import INTERFERENCE, Interference, interference_of
from mvcompile.bundle.reader import Bundle
from mvcompile.bundle.schema import Manifest, Task, Variant
from mvcompile.types import TensorSpec

MOST_UNTUNED = 4


def to_json(bundle: Bundle) -> dict[str, Any]:
    """The manifest as JSON values, with the file's path, digest and length in bytes, and what is known beside neighbours."""
    found = interference_of(bundle)
    return {
        "path": str(bundle.path),
        "digest": bundle.digest,
        "file_bytes": _file_bytes(bundle.manifest),
        "manifest": to_plain(bundle.manifest),
        "interference": None if found is None else plain_of(found, INTERFERENCE),
    }


def describe(bundle: Bundle) -> str:
    """The bundle for people: model, target, coverage, sizes, layers, and what the variants of each task trade.

    Characters that a terminal would obey are escaped: names come from a model file that someone else made.
    """
    manifest = bundle.manifest
    sections = [
        _facts(bundle),
        ["Members", *_table([("member", "bytes"), *((one.name, f"{one.length:,}") for one in manifest.members)], right={1})],
        ["Objectives (all minimised)", *(f"  {one.name} in {one.unit}: {_clean(one.source)}" for one in manifest.objectives)],
        ["Layers", *_table(_layer_rows(manifest), right={0, 4, 5, 6, 7})],
        [
            "Variants (factors: relative to variant 0; max error: absolute; allowed: where the result is 0, more elsewhere)",
            *_table(_variant_rows(manifest), right={1, 2, 3, 4, 5, 6, 7}),
        ],
    ]
    found = interference_of(bundle)
    if found is not None:
        sections.append([f"Beside neighbours ({_clean(found.source)})", *_table(_level_rows(found), right={1, 2, 3, 4, 5})])
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _facts(bundle: Bundle) -> list[str]:
    manifest, target = bundle.manifest, bundle.manifest.target
    choices = sum(len(manifest.tasks[step.task].variants) > 1 for step in manifest.plan.steps)
    caches = f"L1d {_size(target.l1d_bytes)}, L2 {_size(target.l2_bytes)} per core, LLC {_size(target.llc_bytes)}"
    facts = [
        ("bundle", f"{bundle.path}, {_size(_file_bytes(manifest))}, format version {manifest.format_version}"),
        ("digest", bundle.digest),
        ("model", manifest.model.name),
        ("onnx sha256", manifest.model.onnx_sha256 or "none (compiled from a Relax module)"),
        *(("input", _spec(spec)) for spec in manifest.model.inputs),
        *(("output", _spec(spec)) for spec in manifest.model.outputs),
        ("target", f"{target.triple}, {target.cpu}, {target.num_cores} cores, {target.vector_bits}-bit vectors"),
        ("tuned on", f"{target.cpu_model}, {caches}"),
        ("needs", " ".join(target.features) or "no instruction-set extension"),
        ("tvm-ffi", manifest.tvm_ffi),
        ("built with", ", ".join(f"{name} {version}" for name, version in sorted(manifest.toolchain.items()))),
        ("fingerprint", manifest.fingerprint),
        ("arena", _size(manifest.plan.arena_bytes)),
        ("layers", f"{len(manifest.plan.steps)}, {choices} with a choice of variants; {len(manifest.tasks)} tasks"),
        ("coverage", f"{manifest.coverage.hypervolume_ratio:.4f} of the front's hypervolume, weighted by time"),
        ("tuned", f"{manifest.coverage.tuned_share:.1%} of the time is in tuned layers{_untuned(manifest)}"),
    ]
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {_clean(value)}" for name, value in facts]


def _untuned(manifest: Manifest) -> str:
    """The tasks outside tuned kernels that take most of the time."""
    left = sorted((task for task in manifest.tasks if not task.tuned), key=lambda task: -task.time_share)
    named = ", ".join(f"{task.name} {task.time_share:.1%}" for task in left[:MOST_UNTUNED] if task.time_share > 0)
    return f"; the rest: {named}" if named else ""


def _layer_rows(manifest: Manifest) -> Iterable[Sequence[str]]:
    calls = [0] * len(manifest.tasks)
    for step in manifest.plan.steps:
        calls[step.task] += 1
    yield ("#", "layer", "task", "kind", "share", "measured", "front", "variants")
    for index, step in enumerate(manifest.plan.steps):
        task = manifest.tasks[step.task]
        share = f"{task.time_share / calls[step.task]:.1%}"
        front = str(len(task.front)) if task.measured else "-"
        yield (str(index), step.layer, task.name, task.kind, share, str(task.measured), front, str(len(task.variants)))


def _variant_rows(manifest: Manifest) -> Iterable[Sequence[str]]:
    yield ("task", "variant", "latency", "spread", "footprint", "traffic", "max error", "allowed", "space")
    for task in manifest.tasks:
        for index, variant in enumerate(task.variants):
            # Not the relative error: where a sum cancels out to almost nothing it is large, whatever the kernel.
            check = variant.verification
            error, allowed = f"{check.max_abs_error:.1e}", f"{check.atol:.1e}"
            yield (task.name, str(index), *_trade(variant, task), error, allowed, variant.space)


def _level_rows(found: Interference) -> Iterable[Sequence[str]]:
    yield ("level", "cores", "fastest alone", "selection", "spread", "switched", "same as")
    for profile in found.profiles:
        for level, selection, group in zip(found.levels, profile.selections, profile.group, strict=True):
            switched = str(sum(variant != 0 for variant in selection.variants))
            times = (_time(selection.fastest_alone_s), _time(selection.latency_s), f"{selection.spread:.1%}")
            same = "" if found.levels[group] == level else found.levels[group].name
            yield (level.name, str(profile.cores), *times, switched, same)


def _trade(variant: Variant, task: Task) -> tuple[str, str, str, str]:
    """Latency, spread, footprint and traffic; those of variant 0 in units, of the others as factors of it too."""
    base, own = task.variants[0].objectives, variant.objectives
    if base is None or own is None:
        return ("not measured", "-", "-", "-")
    spread = "-" if variant.latency_spread is None else f"{variant.latency_spread:.1%}"
    if variant is task.variants[0]:
        return (_time(own.latency_s), spread, _size(own.footprint_bytes), _size(own.traffic_bytes))
    return (
        f"{_time(own.latency_s)} {_factor(own.latency_s, base.latency_s)}",
        spread,
        f"{_size(own.footprint_bytes)} {_factor(own.footprint_bytes, base.footprint_bytes)}",
        f"{_size(own.traffic_bytes)} {_factor(own.traffic_bytes, base.traffic_bytes)}",
    )


def _table(rows: Iterable[Sequence[str]], right: set[int]) -> list[str]:
    """Rows of equal length as lines with aligned columns; the columns in `right` are aligned to the right."""
    cells = [[_clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        aligned = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  " + "  ".join(aligned).rstrip())
    return lines


def _file_bytes(manifest: Manifest) -> int:
    return max(member.offset + member.length for member in manifest.members)


def _spec(spec: TensorSpec) -> str:
    return f"{spec.name}: {spec.dtype} {'x'.join(map(str, spec.shape)) or 'scalar'}"


def _factor(value: float, base: float) -> str:
    return f"({value / base:.2f}x)" if base else "(-)"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.2f} us"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _clean(text: str) -> str:
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
