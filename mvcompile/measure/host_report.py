"""A host profile as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from mvcompile.host_profile import CounterModel, CounterSupport, Effect, HostProfile, LevelFound
from mvcompile.types import UNLIMITED_BYTES_PER_S


def describe(profile: HostProfile) -> str:
    """Tables of everything but the curve, and the notes."""
    noise = profile.noise
    beside = "none" if profile.neighbour_core is None else f"core {profile.neighbour_core}"
    parts = [
        f"{profile.cpu_model}, target {profile.target_key}: probe on core {profile.measured_core}, neighbour: {beside}",
        _table(("level", "reported", "seen", "latency", "read", "write"), [_level(each) for each in profile.levels]),
        f"noise: arithmetic {noise.arithmetic:.1%}, probe alone {noise.cache:.1%} (cache) and {noise.memory:.1%} (memory), "
        f"repeated {noise.floor:.1%}, from first to last {noise.drift:.1%}, stolen {noise.stolen:.1%}",
    ]
    if profile.effects:
        heads = ("neighbour", "resident", "read", "write", "walk", "probe in the cache", "probe in memory")
        parts.append(_table(heads, [_effect(each) for each in profile.effects]))
    parts += _counters(profile.counters)
    parts += [_model(each) for each in profile.counter_models]
    parts.append(f"interference: {profile.verdict}")
    parts += [f"note: {note}" for note in profile.notes]
    return "\n".join(parts) + "\n"


def _level(level: LevelFound) -> tuple[str, ...]:
    return (
        level.name,
        _size(level.reported_bytes),
        _size(level.seen_bytes),
        f"{level.latency_s * 1e9:.1f} ns",
        _rate(level.read_bytes_per_s),
        _rate(level.write_bytes_per_s),
    )


def _effect(effect: Effect) -> tuple[str, ...]:
    done, asked = effect.achieved, effect.dials
    return (
        effect.name,
        _size(done.resident_bytes),
        _rate(done.read_bytes_per_s) + _of(asked.read_bytes_per_s),
        _rate(done.write_bytes_per_s) + _of(asked.write_bytes_per_s),
        _rate(effect.walk_bytes_per_s),
        f"{effect.cache_slowdown:.2f} times +- {effect.cache_spread:.1%}",
        f"{effect.memory_slowdown:.2f} times +- {effect.memory_spread:.1%}",
    )


def _of(asked: float) -> str:
    return f" of {asked / 1e9:.1f}" if 0 < asked < UNLIMITED_BYTES_PER_S else ""


def _counters(counters: CounterSupport) -> list[str]:
    lines = []
    for kind, names, reason in (
        ("hardware counters", counters.perf, counters.perf_reason),
        ("resctrl", counters.resctrl, counters.resctrl_reason),
    ):
        lines.append(f"{kind}: {', '.join(names) or 'none'}" + (f" ({reason})" if reason else ""))
    return lines


def _model(model: CounterModel) -> str:
    levels = ", ".join(f"{name} {share:.0%}" for name, share in zip(model.levels, model.right, strict=True))
    right = sum(model.right) / len(model.right)
    return (
        f"model of {model.kind} counters for {model.bundle} on {model.cores} core: right in {right:.0%} of "
        f"{model.windows} windows that it had not seen ({levels})"
    )


def _size(size: int) -> str:
    if size == 0:
        return "-"
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s > 0 else "-"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = []
    for first, *others in (heads, *rows):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
