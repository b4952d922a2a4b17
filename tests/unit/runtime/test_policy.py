from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from mvcompile.bundle.interference import Selection
from mvcompile.errors import UsageError
from mvcompile.runtime.policy import Adaptive, Costs, Decision, Policy, Situation, adaptive, costs_of, fixed, kind, kindest
from mvcompile.testing.bundles import tiny_manifest
from mvcompile.testing.profiles import interference_of, profile_of_times, random_times

LEVELS = ("none", "llc", "read", "write")


def costs(seed: int = 0, layers: int = 6, variants: int = 3, per_second: bool = False) -> Costs:
    profile = profile_of_times(random_times(seed, layers, len(LEVELS), variants))
    random = np.random.default_rng(seed)
    harm = tuple(tuple(random.uniform(1, 10, variants).tolist()) for _ in range(layers))
    return Costs(LEVELS, profile.latency_s, profile.selections, profile.group, harm, per_second)


def first(found: Costs) -> Decision:
    return Decision((0,) * len(found.harm))


def decide(policy: Policy, found: Costs, levels: list[tuple[float, int]]) -> list[Decision]:
    decisions = [first(found)]
    for now_s, level in levels:
        decisions.append(policy(found, Situation(now_s, level), decisions[-1]))
    return decisions[1:]


def test_fixed_runs_the_same_whatever_the_level() -> None:
    found = costs()
    chosen = (2, 0, 1, 0, 0, 2)
    decisions = decide(fixed(list(chosen)), found, [(0.0, 0), (1.0, 3), (2.0, 3)])
    assert [one.variants for one in decisions] == [chosen] * 3
    assert decisions[2] is decisions[1]
    assert decide(fixed(7), found, [(0.0, 0)])[0].variants == (2,) * 6


def test_adaptive_runs_the_selection_of_the_level() -> None:
    found = costs()
    decisions = decide(adaptive(), found, [(0.0, 0), (1.0, 3), (2.0, 3), (3.0, 1)])
    assert [one.variants for one in decisions] == [found.selections[level].variants for level in (0, 3, 3, 1)]
    assert decisions[2] is decisions[1]
    assert (decisions[3].level, decisions[3].since_s) == (1, 3.0)
    assert "the selection for llc, a gain of" in decisions[3].reason


def test_adaptive_stays_for_its_dwell_whatever_the_estimate_does() -> None:
    found = costs()
    times = [(0.0, 0), (1.0, 3), (1.05, 0), (1.19, 0), (1.21, 0)]
    levels = [one.level for one in decide(adaptive(dwell_s=0.2), found, times)]
    assert levels == [0, 3, 3, 3, 0]


def test_adaptive_looks_now_and_then_whether_a_level_that_nobody_would_see_go_is_still_there() -> None:
    found = costs()
    alone, there = found.selections[0].variants, found.selections[3].variants
    policy, times = adaptive(recheck_s=2.0), {}
    before, now_s = first(found), 0.0
    while now_s < 200:
        decision = policy(found, Situation(now_s, 3, certain=False), before)
        if decision.variants != before.variants:
            times[round(now_s, 2)] = decision.variants
        before, now_s = decision, now_s + 0.05
    looks = [now_s for now_s, variants in times.items() if variants == alone and now_s > 0]
    assert np.diff(looks) == pytest.approx([4.15, 8.15, 16.15, 32.15, 60.15, 60.15], abs=0.3)
    assert list(times.values()) == [there, *[alone, there] * len(looks)]
    looking = Decision(alone, 3, 100.0, "", 100.15, 2.0)
    assert policy(found, Situation(100.12, 0), looking) == Decision(
        alone, 0, 100.0, "the selection for none is the one that runs"
    )
    seen = Decision(there, 3, 1.0, "", 3.0, 2.0)
    assert policy(found, Situation(2.9, 3, certain=False), seen) is seen
    assert policy(found, Situation(3.1, 3, certain=True), seen) == replace(seen, until_s=5.1)
    assert adaptive(recheck_s=0)(found, Situation(0.0, 3, certain=False), first(found)).until_s == math.inf


def test_adaptive_does_not_switch_for_less_than_its_margin() -> None:
    table = (((1.0, 1.2), (1.0, 1.0)), ((2.0, 1.99), (1.0, 1.0)))
    selections = (Selection((0, 0), 0.0, 0.0, 0.0), Selection((1, 0), 0.0, 0.0, 0.0))
    found = Costs(("none", "llc"), table, selections, (0, 1), (((1.0, 1.0),) * 2), per_second=False)
    assert [one.variants for one in decide(adaptive(margin=0.005), found, [(0.0, 0), (1.0, 1)])] == [(0, 0), (0, 0)]
    kept = decide(adaptive(margin=0.005), found, [(0.0, 0), (1.0, 1)])[1]
    assert (kept.level, kept.reason) == (1, "the selection for llc would gain 0.3%, less than 0.5%")
    assert [one.variants for one in decide(adaptive(margin=0.0), found, [(0.0, 0), (1.0, 1)])] == [(0, 0), (1, 0)]


def test_whole_runs_that_were_measured_count_more_than_sums_of_layers() -> None:
    table = (((1.0, 1.2), (1.0, 1.0)), ((2.0, 1.0), (1.0, 1.0)))
    measured = (Selection((0, 0), 2.0, 0.0, 2.0), Selection((1, 0), 2.9, 0.0, 2.8))
    found = Costs(("none", "llc"), table, measured, (0, 1), (((1.0, 1.0),) * 2), per_second=False)
    assert found.predicted_s(1, (1, 0)) == 2.9
    assert found.predicted_s(1, (0, 0)) == 2.8
    assert found.predicted_s(0, (1, 0)) == pytest.approx(2.2)
    assert found.predicted_s(1, (1, 1)) == pytest.approx(2.9)
    # The table promises a gain of a third, the whole run says that it is a loss.
    assert decide(adaptive(), found, [(0.0, 0), (1.0, 1)])[1].variants == (0, 0)


@pytest.mark.parametrize("per_second", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_kind_takes_little_and_keeps_to_its_allowance(seed: int, per_second: bool) -> None:
    found = costs(seed, per_second=per_second)
    for level, allowance in itertools.product(range(4), (0.0, 0.05, 0.2, 10.0)):
        chosen = kindest(found, level, allowance)
        fastest = found.selections[level].variants
        limit = (1 + allowance) * seconds(found, level, fastest)
        assert seconds(found, level, chosen) <= limit * (1 + 1e-9)
        best = min(
            harm(found, level, variants)
            for variants in itertools.product(range(3), repeat=6)
            if seconds(found, level, variants) <= limit
        )
        most = max(found.harm_of(level, step, variant) or 0 for step in range(6) for variant in range(3))
        assert best - 1e-9 <= harm(found, level, chosen) <= best + most  # a knapsack's greedy solution is off by one item at most
        if allowance == 10.0:
            assert harm(found, level, chosen) == pytest.approx(best)


def seconds(found: Costs, level: int, variants: tuple[int, ...]) -> float:
    return sum(found.latency_s[level][step][variant] for step, variant in enumerate(variants))


def harm(found: Costs, level: int, variants: tuple[int, ...]) -> float:
    return sum(found.harm_of(level, step, variant) or 0.0 for step, variant in enumerate(variants))


def test_kind_buys_where_a_second_saves_most() -> None:
    table = (((1.0, 1.02), (1.0, 1.05), (1.0, 0.99)),)
    selections = (Selection((0, 0, 0), 0.0, 0.0, 0.0),)
    found = Costs(("none",), table, selections, (0,), ((9.0, 8.0), (9.0, 1.0), (9.0, 8.5)), per_second=False)
    assert kindest(found, 0, 0.0) == (0, 0, 1)  # costs nothing, and gives a hundredth to spend
    assert kindest(found, 0, 0.02) == (0, 1, 1)  # 8 for 0.05, not 1 for 0.02
    assert kindest(found, 0, 0.03) == (1, 1, 1)


def test_kind_leaves_variants_alone_of_which_nothing_is_known() -> None:
    found = replace(costs(1), harm=((1.0, None, 5.0),) * 3 + ((None, 1.0, 1.0),) * 3)
    assert kindest(replace(found, selections=(replace(found.selections[0], variants=(0,) * 6),)), 0, 10.0) == (0,) * 6
    assert kindest(replace(found, selections=(replace(found.selections[0], variants=(2,) * 6),)), 0, 10.0) == (0, 0, 0, 2, 2, 2)


def test_kind_decides_once_per_level() -> None:
    found = next(one for one in map(costs, range(50)) if kindest(one, 0, 0.1) != kindest(one, 2, 0.1))
    decisions = decide(kind(0.1), found, [(0.0, 0), (0.5, 0), (1.0, 2), (1.05, 0), (1.2, 0)])
    assert [one.level for one in decisions] == [0, 0, 2, 2, 0]
    assert decisions[1] is decisions[0]
    assert decisions[2].variants == kindest(found, 2, 0.1)
    assert decisions[2].reason == "the least pressure at read within 10% of its fastest"


def test_what_a_policy_chooses_from() -> None:
    manifest = tiny_manifest()
    found = costs_of(manifest, interference_of(manifest, cores=(1, 2)), 2)
    assert found.levels == LEVELS
    assert [len(rows) for rows in found.latency_s] == [3] * 4
    assert found.harm == ((5184.0, 3136.0), (5184.0, 3136.0), (None,))
    assert not found.per_second
    measured = costs_of(manifest, interference_of(manifest, pressure=((0.3, 0.1), (0.0,))), 1)
    assert measured.harm == ((0.3, 0.1), (0.3, 0.1), (0.0,))
    assert measured.harm_of(1, 0, 0) == pytest.approx(0.3 * 1.5e-5)


def test_a_bundle_without_profile_has_one_level() -> None:
    found = costs_of(tiny_manifest(), None, 1)
    assert (found.levels, found.selections[0].variants) == (("none",), (0, 0, 0))
    assert found.latency_s == (((1e-5, 1.2e-5), (1e-5, 1.2e-5), (0.0,)),)


def test_a_number_of_cores_without_profile_is_named() -> None:
    manifest = tiny_manifest()
    message = r"no profile for 3 cores \(there are: 1, 2\): run `mvcompile profile`"
    with pytest.raises(UsageError, match=message):
        costs_of(manifest, interference_of(manifest, cores=(1, 2)), 3)


def test_wrong_parameters() -> None:
    for value in (-0.1, math.nan):
        with pytest.raises(UsageError, match=r"margin is .*, expected a number of at least 0"):
            adaptive(margin=value)
        with pytest.raises(UsageError, match=r"allowance is"):
            kind(value)
    assert adaptive() == Adaptive()
