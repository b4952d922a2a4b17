"""Which variants to run at which level: pure functions of explicit state.

A policy is called with what there is to choose from (`Costs`), what is the case (`Situation`) and what it decided last
(`Decision`), and returns a decision: the same one to leave things as they are. It reads no clock and knows no session, so a
simulator can call it as well as a session that serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from mvcompile.bundle.interference import NONE, CoreProfile, Interference, Selection, Table
from mvcompile.bundle.schema import Manifest
from mvcompile.errors import UsageError

Variants: TypeAlias = tuple[int, ...]
"""One per layer, in the order of the layers."""

_LOOK_S, _LOOK_RUNS = 0.15, 5
"""How long a look takes: as long as a monitor needs to find a level."""
_RARELY_S = 60.0

PROFILE = "run `mvcompile profile` on it"


@dataclass(frozen=True, slots=True)
class Costs:
    """What a policy chooses from: a model on a number of cores.

    `latency_s` are seconds per level, layer and variant; `harm` says per layer and variant what it takes from its neighbours:
    `per_second` as a slowdown of a probe that was measured while it ran, otherwise as bytes per call that were estimated;
    None if nothing is known of the variant. `selections` and `group` are those of the bundle's profile.
    """

    levels: tuple[str, ...]
    latency_s: Table
    selections: tuple[Selection, ...]
    group: tuple[int, ...]
    harm: tuple[tuple[float | None, ...], ...]
    per_second: bool

    def predicted_s(self, level: int, variants: Variants) -> float:
        """Seconds of a run with `variants` at `level`: as it was measured where it was, otherwise the sum of the layers',
        corrected by what the measured selection of the level takes in all against the sum of its layers."""
        known = self.selections[level]
        if variants == known.variants and known.latency_s > 0:
            return known.latency_s
        if known.fastest_alone_s > 0 and not any(variants):
            return known.fastest_alone_s
        reference_s = self._sum_s(level, known.variants)
        correction = known.latency_s / reference_s if known.latency_s > 0 and reference_s > 0 else 1.0
        return self._sum_s(level, variants) * correction

    def harm_of(self, level: int, step: int, variant: int) -> float | None:
        """What one call takes from the neighbours: slowdown times seconds, or bytes."""
        harm = self.harm[step][variant]
        return harm * self.latency_s[level][step][variant] if self.per_second and harm is not None else harm

    def _sum_s(self, level: int, variants: Variants) -> float:
        return sum(row[variant] for row, variant in zip(self.latency_s[level], variants, strict=True))


@dataclass(frozen=True, slots=True)
class Situation:
    """What is the case: `level` (index into `Costs.levels`) as it is estimated at `now_s`, of any clock that only advances;
    `certain` is whether it would be seen, with the variants that run, if the level were `none` again."""

    now_s: float
    level: int
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """What to run, the level that this is the answer to (-1 before the first decision), when the variants were last changed
    (`Situation.now_s`), and why. The policy is asked again when the level is another one, and from `until_s` on; `doubt_s` is
    for its own use."""

    variants: Variants
    level: int = -1
    since_s: float = -math.inf
    reason: str = "as it was"
    until_s: float = math.inf
    doubt_s: float = 0.0


Policy: TypeAlias = Callable[[Costs, Situation, Decision], Decision]
"""Called when the level is another than that of the last decision, or from its `until_s` on."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same variants whatever happens; see `fixed`."""

    selection: Variants | int = 0

    def __call__(self, costs: Costs, situation: Situation, before: Decision) -> Decision:
        if situation.level == before.level and before.variants == self._variants(costs):
            return before
        return _decide(self._variants(costs), situation, before, "the selection is fixed")

    def _variants(self, costs: Costs) -> Variants:
        if isinstance(self.selection, tuple):
            return self.selection
        return tuple(min(self.selection, len(row) - 1) for row in costs.latency_s[0])


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The bundle's selection for the level; see `adaptive`."""

    dwell_s: float = 0.1
    margin: float = 0.005
    recheck_s: float = 2.0

    def __call__(self, costs: Costs, situation: Situation, before: Decision) -> Decision:
        if situation.level == before.level:
            return before if situation.now_s < before.until_s else self._again(costs, situation, before)
        if situation.now_s - before.since_s < self.dwell_s:
            return before
        found = self._answer(costs, situation, before)
        if found.variants == costs.selections[0].variants or not self.recheck_s:
            return found
        return replace(found, until_s=situation.now_s + self.recheck_s, doubt_s=self.recheck_s)

    def _again(self, costs: Costs, situation: Situation, before: Decision) -> Decision:
        """What suits a level may feel so little of any that nobody would see it go. So now and then, ever more seldom, what is
        the fastest alone runs for a moment."""
        level, now_s = situation.level, situation.now_s
        name, alone, wanted = costs.levels[level], costs.selections[0].variants, costs.selections[level].variants
        if before.variants == alone:
            doubt_s = min(2 * before.doubt_s, _RARELY_S)
            return Decision(wanted, level, now_s, f"it is still {name}", now_s + doubt_s, doubt_s)
        if situation.certain:
            return replace(before, until_s=now_s + before.doubt_s)
        moment_s = max(_LOOK_S, _LOOK_RUNS * costs.predicted_s(level, alone))
        return Decision(alone, level, now_s, f"to see whether it is still {name}", now_s + moment_s, before.doubt_s)

    def _answer(self, costs: Costs, situation: Situation, before: Decision) -> Decision:
        wanted, name = costs.selections[situation.level].variants, costs.levels[situation.level]
        if wanted == before.variants:
            return _decide(wanted, situation, before, f"the selection for {name} is the one that runs")
        present_s, wanted_s = (costs.predicted_s(situation.level, variants) for variants in (before.variants, wanted))
        gain = 1 - wanted_s / present_s if present_s > 0 else 1.0
        if gain < self.margin:
            reason = f"the selection for {name} would gain {gain:.1%}, less than {self.margin:.1%}"
            return _decide(before.variants, situation, before, reason)
        return _decide(wanted, situation, before, f"the selection for {name}, a gain of {gain:.1%}")


@dataclass(frozen=True, slots=True)
class Kind:
    """The least pressure within an allowance; see `kind`."""

    allowance: float = 0.05
    dwell_s: float = 0.1

    def __call__(self, costs: Costs, situation: Situation, before: Decision) -> Decision:
        if situation.level == before.level or situation.now_s - before.since_s < self.dwell_s:
            return before
        name = costs.levels[situation.level]
        wanted = kindest(costs, situation.level, self.allowance)
        return _decide(wanted, situation, before, f"the least pressure at {name} within {self.allowance:.0%} of its fastest")


def fixed(selection: Sequence[int] | int = 0) -> Fixed:
    """Always `selection`: one variant per layer, or one number for all (layers with fewer variants take their last one)."""
    return Fixed(selection if isinstance(selection, int) else tuple(selection))


def adaptive(*, dwell_s: float = 0.1, margin: float = 0.005, recheck_s: float = 2.0) -> Adaptive:
    """The bundle's selection for the level that is estimated.

    After a change the variants stay for `dwell_s` at least, whatever the estimate does; and they stay as they are if the
    selection for the new level is predicted to save less than `margin` of the latency there. If the monitor could not see with
    these variants that the level is over, the fastest alone run for 0.15 s (or five runs) after `recheck_s`, and again after
    twice the time and so on, at most a minute; 0 for never.

    Raises UsageError for a negative number.
    """
    return Adaptive(_not_negative("dwell_s", dwell_s), _not_negative("margin", margin), _not_negative("recheck_s", recheck_s))


def kind(allowance: float = 0.05, *, dwell_s: float = 0.1) -> Kind:
    """The variants that take the least from neighbours while a run takes at most 1 + `allowance` times as long as the fastest
    selection for the level that is estimated. For work that can wait beside work that cannot. `dwell_s` as in `adaptive`.

    Raises UsageError for a negative number.
    """
    return Kind(_not_negative("allowance", allowance), _not_negative("dwell_s", dwell_s))


def policy_named(policy: str | Policy) -> Policy:
    """The policy that is meant: itself, or `fixed()`, `adaptive()` or `kind()` by that name. Raises UsageError."""
    if isinstance(policy, str) and policy in _NAMES:
        return _NAMES[policy]
    if callable(policy):
        return policy
    raise UsageError(
        f"policy is {policy!r}, expected {', '.join(map(repr, _NAMES))} or a function of Costs, Situation and the last Decision"
    )


def kindest(costs: Costs, level: int, allowance: float) -> Variants:
    """The variants that `kind` runs at `level`.

    Starts from the level's selection and spends the seconds that the allowance grants where they save the most harm each: the
    greedy solution of a multiple-choice knapsack over each layer's convex front of seconds and harm (Sinha and Zoltners, 1979),
    which is optimal but for what is left over of the budget.
    """
    start = costs.selections[level].variants
    budget_s = allowance * costs._sum_s(level, start)
    chosen = list(start)
    moves = sorted(move for step in range(len(start)) for move in _moves(costs, level, step, start[step]))
    behind: set[int] = set()  # layers of which a move did not fit: those after it start from it
    for _, step, _, extra_s, variant in moves:
        if step not in behind and extra_s <= budget_s:
            budget_s -= extra_s
            chosen[step] = variant
        else:
            behind.add(step)
    return tuple(chosen)


def _moves(costs: Costs, level: int, step: int, start: int) -> Iterator[tuple[float, int, int, float, int]]:
    """The moves of a layer along its convex front from variant `start`: (minus harm saved per second, layer, number of the move,
    seconds more than the move before, variant). Ratios fall from move to move, so that sorting keeps their order."""
    seconds = costs.latency_s[level][step]
    harms = [costs.harm_of(level, step, variant) for variant in range(len(seconds))]
    here, number = start, 0
    while (harm := harms[here]) is not None:
        best: tuple[float, float, int] | None = None
        for variant, other in enumerate(harms):
            if other is None or other >= harm:
                continue
            extra_s = seconds[variant] - seconds[here]
            # What costs no time comes first, the least harmful of that foremost.
            ratio = (other - harm) / extra_s if extra_s > 0 else -math.inf
            if best is None or (ratio, other, variant) < best:
                best = (ratio, other, variant)
        if best is None:
            return
        ratio, _, variant = best
        yield ratio, step, number, seconds[variant] - seconds[here], variant
        here, number = variant, number + 1


def costs_of(manifest: Manifest, interference: Interference | None, cores: int) -> Costs:
    """What a policy chooses from, for the bundle on `cores` cores; without `interference` there is the level `none` alone.

    Raises UsageError if the bundle was not profiled on that many cores.
    """
    tasks = [manifest.tasks[step.task] for step in manifest.plan.steps]
    if interference is None:
        alone = tuple(
            tuple(0.0 if one.objectives is None else one.objectives.latency_s for one in task.variants) for task in tasks
        )
        selection = Selection((0,) * len(tasks), 0.0, 0.0, 0.0)
        return Costs((NONE,), (alone,), (selection,), (0,), _static_harm(manifest), per_second=False)
    profile = profile_of(interference, cores)
    measured = bool(interference.pressure)
    harm = tuple(interference.pressure[step.task] for step in manifest.plan.steps) if measured else _static_harm(manifest)
    names = tuple(level.name for level in interference.levels)
    return Costs(names, profile.latency_s, profile.selections, profile.group, harm, per_second=measured)


def profile_of(interference: Interference, cores: int) -> CoreProfile:
    """The profile for `cores` cores. Raises UsageError."""
    for profile in interference.profiles:
        if profile.cores == cores:
            return profile
    there = ", ".join(str(profile.cores) for profile in interference.profiles) or "none"
    raise UsageError(
        f"the bundle has no profile for {cores} core{'s' if cores != 1 else ''} (there are: {there}): "
        f"{PROFILE} with that many cores, or use as many as it has a profile for"
    )


_NAMES: dict[str, Policy] = {"fixed": Fixed(), "adaptive": Adaptive(), "kind": Kind()}


def _static_harm(manifest: Manifest) -> tuple[tuple[float | None, ...], ...]:
    """Bytes that a call moves through what is shared, and bytes of the last-level cache that it takes from others meanwhile."""
    return tuple(
        tuple(
            None if one.objectives is None else one.objectives.traffic_bytes + one.objectives.footprint_bytes
            for one in manifest.tasks[step.task].variants
        )
        for step in manifest.plan.steps
    )


def _decide(variants: Variants, situation: Situation, before: Decision, reason: str) -> Decision:
    if variants == before.variants:
        return Decision(variants, situation.level, before.since_s, reason)
    return Decision(variants, situation.level, situation.now_s, reason)


def _not_negative(name: str, value: float) -> float:
    if not value >= 0:
        raise UsageError(f"{name} is {value!r}, expected a number of at least 0")
    return float(value)
