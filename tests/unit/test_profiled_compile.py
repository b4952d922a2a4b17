"""Compilations that compare candidates beside neighbours: what of that is in the bundle, and what is not measured twice."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mvcompile import ProfileConfig, compile_module, runtime, spaces, variants
from mvcompile.bundle.interference import INTERFERENCE, CoreProfile, Interference, Selection, decode_interference
from mvcompile.bundle.reader import open_bundle
from mvcompile.errors import EnvironmentProblem
from mvcompile.frontend.prepare import prepare
from mvcompile.profile import command, stage
from mvcompile.profile.stage import Profiled
from mvcompile.records import DiskStore
from mvcompile.target import detect_target
from mvcompile.tasks import extract
from mvcompile.testing import programs
from mvcompile.testing.compiling import Watcher, contents, untuned
from mvcompile.types import Dials, Level, Objectives, Record, Status

TARGET = detect_target()
NETWORK = programs.small_network()
CANDIDATES = 4
QUICK = ProfileConfig(budget_s=0)
TWO_CORES = len(os.sched_getaffinity(0)) >= 2


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A work directory with records of a convolution whose first candidate dominates all others alone."""
    prepared = prepare(NETWORK, TARGET)
    records = []
    for task in extract(prepared).tasks:
        candidates = [spaces.default_candidate(task.module, TARGET)]
        if task.kind.startswith("conv2d"):
            candidates = spaces.structured_candidates(task.module, TARGET)[:CANDIDATES]
        for place, candidate in enumerate(candidates):
            objectives = Objectives(1e-3 * (1 + 0.03 * place), 0.0, 1e6)
            record = Record(
                task.key,
                TARGET.key,
                f"{prepared.fingerprint}-warm",
                candidate.trace,
                candidate.space,
                Status.OK,
                objectives,
                0.01,
            )
            records += [record, record]
    with DiskStore(tmp_path / "work") as store:
        store.append(records)
    return tmp_path / "work"


def conv_variants(bundle: Any) -> int:
    return next(len(task.variants) for task in bundle.manifest.tasks if task.kind.startswith("conv2d"))


def interference_of(path: Path) -> Interference:
    with open_bundle(path) as bundle:
        return decode_interference(bundle.member(INTERFERENCE), bundle.manifest)


def invented(path: Any, config: ProfileConfig, count: int | None, report: Any = None) -> Profiled:
    """As if the last candidate of the convolution were twice as fast as the others beside a writer."""
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
    levels = stage.levels_of(config, manifest.target.llc_bytes)
    counts = [len(manifest.tasks[step.task].variants) for step in manifest.plan.steps]

    def seconds(level: int, variant: int, most: int) -> float:
        return 1e-3 * (2.0 if level == 3 and variant < most - 1 else 1.0) * (1 + 0.03 * variant)

    latency = tuple(tuple(tuple(seconds(at, v, n) for v in range(n)) for n in counts) for at in range(len(levels)))
    spread = tuple(tuple(tuple(0.01 for _ in range(n)) for n in counts) for _ in levels)
    selections = tuple(Selection(tuple(n - 1 if at == 3 else 0 for n in counts), 1.0, 0.0, 1.0) for at in range(len(levels)))
    tasks = manifest.tasks
    ones, compared = (1.0,) * len(tasks), tuple(len(task.variants) for task in tasks)
    profile = CoreProfile(1, latency, spread, selections, (0,) * len(levels), 0.0, ones, compared)
    found = Interference(1, "measured: invented", "x", levels, tuple(level.dials for level in levels), (profile,), ())
    return Profiled(found, stage.keep_of(found, manifest, count))


def test_variants_are_kept_by_what_they_do_beside_neighbours(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, the first candidate dominates all others and would be the only variant."""
    monkeypatch.setattr(variants, "profile", invented)
    monkeypatch.setattr(variants, "why_not", lambda allowed, config: None)
    config = untuned(work, profile=QUICK)
    watcher = Watcher()
    two = type(config)(type(config.tuning)(budget_s=0, variants=2), work_dir=str(work), profile=QUICK)
    result = compile_module(NETWORK, tmp_path / "a.mvb", two, reporter=watcher)
    assert watcher.stages == ["prepare", "tune", "build", "profile", "verify"]
    assert conv_variants(result) == 2
    found = interference_of(tmp_path / "a.mvb")
    conv = next(i for i, task in enumerate(result.manifest.tasks) if task.kind.startswith("conv2d"))
    step = next(i for i, each in enumerate(result.manifest.plan.steps) if each.task == conv)
    assert found.profiles[0].latency_s[3][step] == pytest.approx((2e-3, 1e-3 * (1 + 0.03 * (CANDIDATES - 1))))
    assert [each.variants[step] for each in found.profiles[0].selections] == [0, 0, 0, 1]
    assert found.profiles[0].regret[conv] == 1.0
    assert found.profiles[0].compared[conv] == CANDIDATES
    assert contents(tmp_path) == {"work", "a.mvb"}
    assert not list(work.glob("*.mvb"))


def test_a_resumed_compilation_does_not_measure_again(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any) -> Profiled:
        calls.append(arguments)
        return invented(*arguments)

    monkeypatch.setattr(variants, "profile", counted)
    monkeypatch.setattr(variants, "why_not", lambda allowed, config: None)
    for name in ("a.mvb", "b.mvb"):
        compile_module(NETWORK, tmp_path / name, untuned(work, profile=QUICK, name="n"))
    assert len(calls) == 1
    assert (tmp_path / "a.mvb").read_bytes() == (tmp_path / "b.mvb").read_bytes()
    compile_module(NETWORK, tmp_path / "a.mvb", untuned(work, profile=ProfileConfig(budget_s=0, seed=1)))
    assert len(calls) == 2


@pytest.mark.parametrize("profile", [None, QUICK], ids=["not asked for", "one core"])
def test_without_a_profile_the_front_decides(
    work: Path, tmp_path: Path, profile: ProfileConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "why_not", lambda allowed, config: stage.why_not([0], config))
    watcher = Watcher()
    result = compile_module(NETWORK, tmp_path / "a.mvb", untuned(work, profile=profile), reporter=watcher)
    assert conv_variants(result) == 1
    assert INTERFERENCE not in {member.name for member in result.manifest.members}
    assert ["1 core" in note for note in watcher.notes] == ([] if profile is None else [True])


def test_a_real_profile_beside_a_real_neighbour(work: Path, tmp_path: Path) -> None:
    watcher = Watcher()
    compile_module(NETWORK, tmp_path / "a.mvb", untuned(work, profile=QUICK), reporter=watcher)
    if not TWO_CORES:
        assert "core" in watcher.notes[-1]
        return
    found = interference_of(tmp_path / "a.mvb")
    assert [level.name for level in found.levels] == ["none", "llc", "read", "write"]
    assert found.achieved[0].read_bytes_per_s == 0
    assert found.achieved[2].read_bytes_per_s > 0
    assert found.achieved[3].write_bytes_per_s > 0
    assert all(value > 0 for level in found.profiles[0].latency_s for row in level for value in row)
    with runtime.load(tmp_path / "a.mvb", share_cores=True) as session:
        for selection in found.profiles[0].selections:
            session.select_all(selection.variants)
            assert runtime.selftest(session).passed


def test_a_bundle_is_profiled_again_in_place(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "profile", invented)
    bundle = tmp_path / "a.mvb"
    compile_module(NETWORK, bundle, untuned(work, profile=None))
    manifest, found = command.profile_bundle(bundle, bundle, QUICK)
    assert interference_of(bundle) == found
    with open_bundle(bundle) as opened:
        assert opened.manifest == manifest
    other, _ = command.profile_bundle(
        bundle, tmp_path / "b.mvb", replace(QUICK, levels=(Level("a", Dials(1)), *found.levels[1:]))
    )
    assert [level.name for level in interference_of(tmp_path / "b.mvb").levels] == ["none", "a", "llc", "read", "write"]
    assert {member.name for member in other.members} == {member.name for member in manifest.members}
    assert interference_of(bundle) == found


def test_too_few_cores_are_named() -> None:
    assert "1 core" in str(stage.why_not([3], QUICK))
    assert "2 cores is asked" not in str(stage.why_not([0, 1], QUICK))
    assert "3 cores" in str(stage.why_not([0, 1], ProfileConfig(cores=(3,))))
    assert stage.why_not([0, 1], QUICK) is None


def test_profiling_on_one_core_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with pytest.raises(EnvironmentProblem, match=r"1 core.*a neighbour needs one of its own"):
        stage.profile(tmp_path / "none.mvb", QUICK, None)
