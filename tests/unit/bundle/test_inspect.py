"""What people and programs see of a bundle."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mvcompile.bundle.inspect import describe, to_json
from mvcompile.bundle.reader import Bundle, open_bundle
from mvcompile.bundle.schema import Step
from mvcompile.bundle.writer import write_bundle
from mvcompile.testing.bundles import tiny_manifest, tiny_members, write_tiny
from mvcompile.types import Verification


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(write_tiny(tmp_path / "tiny.mvb"))


def test_the_description_names_model_target_and_coverage(bundle: Bundle) -> None:
    text = describe(bundle)
    for line in [
        rf"bundle +{bundle.path}, 30\.0 KiB, format version 1",
        f"digest +{bundle.digest}",
        "model +tiny",
        r"onnx sha256 +none \(compiled from a Relax module\)",
        "input +x: float32 1x16",
        "output +y: float32 1x16",
        r"target +x86_64-unknown-linux-gnu, x86-64, 2 cores, 128-bit vectors",
        r"tuned on +Example CPU, L1d 32\.0 KiB, L2 1\.0 MiB per core, LLC 16\.0 MiB",
        "tvm-ffi +0.1.14",
        r"built with +apache-tvm 0\.27\.0\.post1, mvcompile 0\.1\.0",
        "layers +3, 2 with a choice of variants; 2 tasks",
        r"coverage +0\.9750 of the front's hypervolume, weighted by time",
        r"tuned +75\.0% of the time is in tuned layers; the rest: relu 25\.0%",
        r"  weights\.bin +2,048",
        "  latency_s in s: measured: weights cold, activation warm",
    ]:
        assert re.search(f"^{line}$", text, re.MULTILINE), line


def test_layers_and_variants_are_tables(bundle: Bundle) -> None:
    text = describe(bundle)
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["1", "dense:1", "dense", "dense", "37.5%", "12", "3", "2"] in rows
    assert ["2", "relu:0", "relu", "elementwise", "25.0%", "0", "-", "1"] in rows
    assert ["dense", "0", "10.00 us", "1.0%", "4.0 KiB", "1.1 KiB", "0.0e+00", "1.0e-05", "structured"] in rows
    assert [
        "dense",
        "1",
        "12.00 us (1.20x)",
        "2.0%",
        "2.0 KiB (0.50x)",
        "1.1 KiB (1.00x)",
        "0.0e+00",
        "1.0e-05",
        "structured",
    ] in rows
    assert ["relu", "0", "not measured", "-", "-", "-", "0.0e+00", "1.0e-05", "default"] in rows


def test_errors_of_variants_are_absolute(tmp_path: Path) -> None:
    """Where a sum cancels out, a right kernel has a relative error of 20 %."""
    manifest = tiny_manifest()
    dense, *others = manifest.tasks
    check = Verification(max_abs_error=4e-6, max_rel_error=0.2, rtol=1e-5, atol=3e-5)
    task = replace(dense, variants=(replace(dense.variants[0], verification=check), *dense.variants[1:]))
    write_bundle(tmp_path / "cancelled.mvb", replace(manifest, tasks=(task, *others)), tiny_members())
    with open_bundle(tmp_path / "cancelled.mvb") as bundle:
        text = describe(bundle)
    assert re.search(r"^  dense +0 .* 4\.0e-06 +3\.0e-05  structured$", text, re.MULTILINE)


def test_what_a_terminal_would_obey_is_escaped(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    steps = (Step("größe\x1b[2J\n", 0, (0, 1, 2)), *manifest.plan.steps[1:])
    odd = replace(manifest, model=replace(manifest.model, name="a\rb"), plan=replace(manifest.plan, steps=steps))
    write_bundle(tmp_path / "odd.mvb", odd, tiny_members())
    with open_bundle(tmp_path / "odd.mvb") as bundle:
        text = describe(bundle)
    assert "größe\\x1b[2J\\n" in text
    assert "a\\rb" in text


def test_a_bundle_without_layers_can_be_described(tmp_path: Path) -> None:
    manifest = tiny_manifest()
    plan = replace(manifest.plan, arena_bytes=0, tensors=manifest.plan.tensors[:1], steps=(), outputs=(0,))
    write_bundle(tmp_path / "none.mvb", replace(manifest, tasks=(), plan=plan), tiny_members())
    with open_bundle(tmp_path / "none.mvb") as bundle:
        assert re.search("^layers +0, 0 with a choice of variants; 0 tasks$", describe(bundle), re.MULTILINE)


def test_json_is_the_manifest_and_where_it_came_from(bundle: Bundle) -> None:
    plain = json.loads(json.dumps(to_json(bundle)))
    assert (plain["path"], plain["digest"], plain["file_bytes"]) == (str(bundle.path), bundle.digest, 30720)
    assert plain["manifest"]["tasks"][0]["variants"][1]["objectives"]["latency_s"] == 1.2e-5
    assert [member["name"] for member in plain["manifest"]["members"]] == sorted(tiny_members())
