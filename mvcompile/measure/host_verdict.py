"""Whether interference can be measured on a host, and what a person should know of it: judgements on what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from mvcompile.host_profile import MEASURABLE, NO_EFFECT, NOISY, TOO_FEW_CORES, Effect, LevelFound, Noise

STEADY = 0.05
"""Arithmetic in registers spreads by less on a machine whose cores are its own."""
STOLEN = 0.05
CLEAR = 2.0
"""An effect is one if it is this many times its own spread and the noise floor."""
SMALLER = 0.6
"""A last-level cache that is seen at less than this share of its reported size is worth a note."""


def verdict_of(noise: Noise, effects: Sequence[Effect], neighbour: bool) -> str:
    """Whether interference can be measured here, one of `host_profile.VERDICTS`."""
    if not neighbour:
        return TOO_FEW_CORES
    if noise.arithmetic > STEADY or noise.stolen > STOLEN:
        return NOISY
    if any(is_clear(effect, noise) for effect in effects):
        return MEASURABLE
    largest = max((max(each.cache_slowdown, each.memory_slowdown) for each in effects), default=1.0)
    return NOISY if largest - 1 > STEADY else NO_EFFECT


def is_clear(effect: Effect, noise: Noise) -> bool:
    """Whether the effect on either pattern stands out from its spread and from the noise floor."""
    pairs = ((effect.cache_slowdown, effect.cache_spread), (effect.memory_slowdown, effect.memory_spread))
    return any(slowdown - 1 > CLEAR * max(spread, noise.floor) for slowdown, spread in pairs)


_ANYWAY = (
    "`compile --no-profile`, `run`, `inspect` and `validate` work as ever: selections then come from static estimates, and can "
    "be measured later, or on another machine of this kind, with `mvcompile profile`"
)


def notes_of(verdict: str, noise: Noise, levels: Sequence[LevelFound], apart: bool) -> tuple[str, ...]:
    """What a person should know: what does not work and what still does, and what is odd. `apart`: the neighbour's core does not
    share the last-level cache of the measured one."""
    notes = []
    if verdict == TOO_FEW_CORES:
        notes.append(f"this process may use one core, and a neighbour needs one of its own: widen the affinity mask; {_ANYWAY}")
    if verdict == NOISY:
        notes.append(
            f"this machine is too noisy to measure interference (arithmetic in registers spreads by {noise.arithmetic:.1%}, the "
            f"probe alone by {max(noise.cache, noise.memory):.1%}, {noise.stolen:.1%} of the time is stolen): stop what else "
            f"runs, or use a machine of your own; {_ANYWAY}"
        )
    if verdict == NO_EFFECT:
        notes.append(
            f"one neighbour has no effect on the probe beyond this machine's noise ({noise.floor:.1%}): variants would all look "
            f"alike; {_ANYWAY}"
        )
    if verdict == MEASURABLE and noise.floor > STEADY:
        notes.append(f"the probe alone varies by {noise.floor:.1%}: effects below {CLEAR * noise.floor:.0%} mean nothing here")
    if apart:
        notes.append("no allowed core shares the measured core's last-level cache: a neighbour's resident set has no effect")
    last = levels[-2]
    if last.seen_bytes == 0:
        notes.append(f"the last-level cache of {_mib(last.reported_bytes)} cannot be told from memory")
    elif last.seen_bytes < SMALLER * last.reported_bytes:
        notes.append(
            f"the last-level cache looks like {_mib(last.seen_bytes)}, not like the {_mib(last.reported_bytes)} that the system "
            "reports: other tenants of this host use it, or this machine may use part of it only; a resident set stays resident "
            "up to that size"
        )
    return tuple(notes)


def _mib(size: int) -> str:
    return f"{size / 2**20:g} MiB"
