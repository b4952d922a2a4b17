"""The model of a variant's latency with a share of memory and cache: limits that are known, monotony, and that a fit finds what
was put in."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvcompile.bundle.interference import Interference, Table
from mvcompile.bundle.schema import Manifest
from mvcompile.errors import UsageError
from mvcompile.share_model import (
    Demand,
    Parameters,
    Shares,
    demand_of,
    demands_of,
    fit,
    latency,
    memory_bytes,
    parameters_of,
    run,
    share_of_core,
    shares_at,
)
from mvcompile.testing.bundles import tiny_manifest
from mvcompile.testing.profiles import LEVELS, interference_of
from mvcompile.types import UNLIMITED_BYTES_PER_S, Dials, Objectives

MB = 1_000_000
HOST = Parameters(bytes_per_s=20e9, llc_bytes=32 * MB, model_bytes=10**18, alpha=0.5)
STREAMS = Demand(1e-3, 10 * MB, 10 * MB, 0.0)  # weights that pass once: half of its time is the memory's
REUSES = Demand(1e-3, 50 * MB, 0.0, 16 * MB)  # lives on what it finds in the cache again

shares = st.builds(Shares, st.floats(0.01, 1), st.floats(0.01, 1))
demands = st.builds(Demand, st.floats(1e-6, 1e-1), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e8))
hosts = st.builds(Parameters, st.floats(1e9, 1e11), st.integers(1 << 20, 1 << 28), st.integers(0, 1 << 32), st.floats(0, 1))


def test_a_smaller_share_of_bandwidth_shows_as_far_as_it_is_not_hidden() -> None:
    """Ten million bytes at 20 GB/s are 0.5 ms: of those that come on top, the part alpha shows."""
    half = Shares(bandwidth=0.5)
    assert latency(STREAMS, half, HOST) == pytest.approx(1e-3 + 0.5 * 0.5e-3)
    assert latency(STREAMS, half, replace(HOST, alpha=1.0)) == pytest.approx(1.5e-3)
    assert latency(STREAMS, half, replace(HOST, alpha=0.0)) == pytest.approx(1e-3)


def test_no_call_is_faster_than_its_bytes() -> None:
    assert latency(STREAMS, Shares(bandwidth=1 / 8), replace(HOST, alpha=0.0)) == pytest.approx(4e-3)


def test_the_part_of_a_footprint_that_does_not_fit_becomes_traffic() -> None:
    assert memory_bytes(REUSES, 1.0, HOST) == 0
    assert memory_bytes(REUSES, 0.5, HOST) == 0
    assert memory_bytes(REUSES, 0.25, HOST) == pytest.approx(25 * MB)
    assert latency(REUSES, Shares(cache=0.25), HOST) == pytest.approx(1e-3 + 0.5 * 1.25e-3)


def test_a_model_that_fits_its_share_of_the_cache_needs_no_memory() -> None:
    small = replace(HOST, model_bytes=16 * MB)
    assert latency(STREAMS, Shares(0.125, 0.5), small) == STREAMS.latency_s
    assert latency(STREAMS, Shares(0.125, 0.25), small) > STREAMS.latency_s


def test_bytes_that_take_longer_than_the_call_are_estimated_too_high() -> None:
    fast = replace(STREAMS, latency_s=0.1e-3)
    assert latency(fast, Shares(), HOST) == pytest.approx(0.1e-3)
    assert latency(fast, Shares(bandwidth=0.5), replace(HOST, alpha=1.0)) == pytest.approx(0.2e-3)


@given(demands, shares, shares, hosts)
def test_less_of_anything_is_never_faster(demand: Demand, one: Shares, other: Shares, host: Parameters) -> None:
    both = Shares(min(one.bandwidth, other.bandwidth), min(one.cache, other.cache))
    worst = latency(demand, both, host)
    for each in (one, other, Shares()):
        assert worst >= latency(demand, each, host) * (1 - 1e-12)
    assert latency(demand, Shares(), host) == pytest.approx(demand.latency_s)


def test_a_run_is_the_sum_of_its_calls() -> None:
    assert run([STREAMS, STREAMS], Shares(0.5), HOST) == pytest.approx(2 * latency(STREAMS, Shares(0.5), HOST))


def test_cores_share_what_memory_gives() -> None:
    assert share_of_core(100e9, 2, 25e9) == 1.0
    assert share_of_core(100e9, 16, 25e9) == 0.25
    with pytest.raises(UsageError, match="numbers above 0"):
        share_of_core(0.0, 2, 1.0)


@pytest.mark.parametrize("value", [0.0, 1.5, math.nan])
def test_shares_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(UsageError, match="share of bandwidth"):
        Shares(bandwidth=value)


@pytest.mark.parametrize(
    ("dials", "expected"),
    [
        (Dials(), Shares()),
        (Dials(resident_bytes=8 * MB), Shares(1.0, 0.75)),
        (Dials(resident_bytes=32 * MB), Shares(1.0, 1 / 64)),
        (Dials(read_bytes_per_s=UNLIMITED_BYTES_PER_S), Shares(0.5, 1.0)),
        (Dials(write_bytes_per_s=2e9), Shares(0.8, 1.0)),
    ],
)
def test_what_a_level_leaves(dials: Dials, expected: Shares) -> None:
    assert shares_at(dials, HOST) == expected


def model_of(alpha: float) -> tuple[Manifest, Interference]:
    """A bundle with a profile that is the model's own, and a little more."""
    manifest = tiny_manifest()
    dense, relu = manifest.tasks
    variants = tuple(
        replace(one, objectives=Objectives(1e-5, 2048.0, 40_000.0 * (i + 1))) for i, one in enumerate(dense.variants)
    )
    target = replace(manifest.target, llc_bytes=1024)
    manifest = replace(manifest, tasks=(replace(dense, variants=variants), relu), target=target)
    made = interference_of(manifest)
    taken = (Dials(), Dials(512), Dials(0, 2e10), Dials(0, 0, 5e9))
    made = replace(made, achieved=taken, levels=tuple(replace(each, dials=min_dials(each.dials)) for each in LEVELS))
    host = replace(parameters_of(manifest, made), alpha=alpha)
    demands = demands_of(manifest, made.profiles[0])
    alone = made.profiles[0].latency_s[0]
    table: Table = (
        alone,
        *(
            tuple(
                tuple(
                    seconds if one is None else 1.001 * latency(one, shares_at(level.dials, host), host)
                    for one, seconds in zip(row, rows, strict=True)
                )
                for row, rows in zip(demands, alone, strict=True)
            )
            for level in made.levels[1:]
        ),
    )
    return manifest, replace(made, profiles=(replace(made.profiles[0], latency_s=table),))


def min_dials(dials: Dials) -> Dials:
    return replace(dials, resident_bytes=min(dials.resident_bytes, 512))


@pytest.mark.parametrize("alpha", [0.3, 0.9])
def test_a_fit_finds_the_exposed_part(alpha: float) -> None:
    manifest, made = model_of(alpha)
    found = fit(manifest, made)
    assert found.parameters.alpha == pytest.approx(alpha, abs=0.02)
    assert found.parameters.bytes_per_s == 2e10
    assert found.error < 0.01 < found.without
    assert found.times > 0


def test_a_profile_that_says_nothing_of_memory_is_refused() -> None:
    manifest, made = model_of(0.5)
    with pytest.raises(UsageError, match="nothing to fit"):
        fit(replace(manifest, target=replace(manifest.target, llc_bytes=1 << 30)), replace(made, levels=made.levels[:1] * 4))
    with pytest.raises(UsageError, match="default levels"):
        fit(manifest, replace(made, achieved=(Dials(),) * 4))
    with pytest.raises(UsageError, match="--cores 2"):
        fit(manifest, made, cores=2)


def test_a_variant_without_objectives_asks_for_nothing_that_is_known() -> None:
    task = tiny_manifest().tasks[0]
    assert demand_of(task, replace(task.variants[0], objectives=None), 1e-3) is None
