"""The benchmark of pressure: it runs on a tiny bundle, and says what it should of made-up figures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mvcompile.bundle.interference import INTERFERENCE, encode_interference
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.writer import Source, write_bundle
from mvcompile.testing.kernels import write_kernel_bundle
from mvcompile.testing.profiles import interference_of

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "bench"
TWO_CORES = len(os.sched_getaffinity(0)) >= 2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a profile that knows that the second variant of dense takes nothing from others, and is 4 % slower."""
    folder = tmp_path_factory.mktemp("bundles")
    write_kernel_bundle(folder / "plain.mvb")
    with open_bundle(folder / "plain.mvb") as opened:
        members: dict[str, Source] = {each.name: opened.member(each.name) for each in opened.manifest.members}
        found = interference_of(opened.manifest, factors=((1.0, 1.04),) * 4, pressure=((0.2, 0.0), (0.1,)))
        members[INTERFERENCE] = encode_interference(found)
        write_bundle(folder / "tiny.mvb", opened.manifest, members)
    return folder / "tiny.mvb"


@pytest.fixture
def pressure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("pressure")


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_every_kept_variant_is_measured(bundle: Path, tmp_path: Path) -> None:
    done = run("pressure.py", bundle, "--all", "--seconds", 1.5, "--json", tmp_path / "p.json")
    if not TWO_CORES:
        assert "core of its own" in done.stderr
        return
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 of 3 variants" in done.stdout
    result = json.loads((tmp_path / "p.json").read_text())
    assert [row["variant"] for row in result["variants"]] == [0, 1]  # merge has no objectives
    assert result["families"]["all"]["variants"] == 2


@pytest.mark.parametrize("neighbour", ["itself", "probe"])
def test_kindness_beside_a_neighbour(bundle: Path, tmp_path: Path, neighbour: str) -> None:
    other = bundle if neighbour == "itself" else neighbour
    done = run("pressure.py", "--kind", bundle, other, "--rounds", 3, "--block", 0.1, "--json", tmp_path / "k.json")
    if not TWO_CORES:
        assert "core of its own" in done.stderr
        return
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads((tmp_path / "k.json").read_text())
    assert (result["switched_at_none"], result["layers"], result["measured"]) == (2, 3, True)
    assert result["batch"]["rest"]["median_s"] == 0
    assert all(result["batch"][mode]["median_s"] > 0 for mode in ("fixed", "kind"))
    assert all(len(result["neighbour"][mode]["seconds"]) == 3 for mode in ("rest", "fixed", "kind"))
    assert all(second > 0 for mode in result["neighbour"].values() for second in mode["seconds"])
    assert result["verdict"] in done.stdout


@pytest.mark.parametrize(
    ("theirs", "verdict", "ratio"),
    [
        ({"rest": [1.0] * 6, "fixed": [1.3, 1.31, 1.3, 1.29, 1.3, 1.3], "kind": [1.1] * 6}, "kinder", 1.1 / 1.3),
        ({"rest": [1.0] * 6, "fixed": [1.1] * 6, "kind": [1.3, 1.31, 1.3, 1.29, 1.3, 1.3]}, "less kind", 1.3 / 1.1),
        ({"rest": [1.0] * 6, "fixed": [1.3, 0.9, 1.1, 1.0, 1.2, 1.1], "kind": [1.1] * 6}, "within noise", 1.0),
    ],
)
def test_a_gain_within_noise_is_called_none(theirs: dict[str, list[float]], verdict: str, ratio: float, pressure: Any) -> None:
    own = {"rest": [0.0] * 6, "fixed": [2.0] * 6, "kind": [2.1] * 6}
    found = pressure.kindness(theirs, own)
    assert found["verdict"] == verdict
    assert found["neighbour_kind_over_fixed"] == pytest.approx(ratio, rel=0.02)
    assert found["batch_kind_over_fixed"] == pytest.approx(1.05)


def test_ranks_share_places_and_constants_have_no_correlation(pressure: Any) -> None:
    assert pressure.ranks([3.0, 1.0, 3.0, 9.0]).tolist() == [1.5, 0.0, 1.5, 3.0]
    assert pressure.spearman([1, 2, 3, 4], [1, 8, 27, 64]) == pytest.approx(1.0)
    assert pressure.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert pressure.spearman([1, 2, 3], [5, 5, 5]) is None


def row(family: str, footprint: float, felt: float, error: float = 0.01) -> dict[str, Any]:
    return {
        "family": family,
        "pressure": felt,
        "error": error,
        "traffic_bytes": 1e6,
        "traffic_bytes_per_s": -footprint,
        "footprint_bytes": footprint,
    }


def test_families_are_judged_apart_and_together(pressure: Any) -> None:
    rows = [row("conv2d", i * 1e6, 0.02 * i) for i in range(8)] + [row("matmul", 1e6, 0.0)]
    found = pressure.families(rows)
    assert list(found) == ["conv2d", "all"]
    conv = found["conv2d"]
    assert (conv["footprint_bytes"], conv["traffic_bytes_per_s"], conv["traffic_bytes"]) == (
        pytest.approx(1.0),
        pytest.approx(-1.0),
        None,
    )
    assert conv["footprint_bytes_slope"] == pytest.approx(2e-8)
    assert conv["footprint_bytes_slope"] > 5 * conv["footprint_bytes_slope_error"]
    assert conv["reliability"] > 0.9
    assert found["all"]["variants"] == 9
    noise = pressure.judge([row("conv2d", i * 1e6, 0.01 * (-1) ** i, 0.05) for i in range(8)])
    assert noise["ceiling"] == 0.0


def test_shares_are_predicted_and_called_a_model(bundle: Path, tmp_path: Path) -> None:
    done = run("shares.py", bundle, "--json", tmp_path / "s.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "MODEL, not measured" in done.stdout
    found = json.loads((tmp_path / "s.json").read_text())["tiny"]
    assert [each["level"] for each in found["levels"]] == ["none", "llc", "read", "write"]
    assert {each["share"] for each in found["runs"]} == {1.0, 0.5, 0.25, 0.125}
    for each in found["runs"]:
        assert each["model"] <= each["alone"] + 1e-12
        assert each["alone"] >= found["runs"][0]["alone"] * (1 - 1e-9)


def test_a_bundle_without_a_profile_has_no_shares(bundle: Path) -> None:
    done = run("shares.py", bundle.with_name("plain.mvb"))
    assert done.returncode != 0
    assert "mvcompile profile" in done.stderr


def test_a_batch_tenant_without_a_profile_says_so(bundle: Path) -> None:
    done = run("pressure.py", "--kind", bundle.with_name("plain.mvb"), bundle)
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "core of its own" in done.stderr or "mvcompile profile" in done.stderr
