"""Bundles of every format version that was ever released are read; a newer one is refused by name."""

from __future__ import annotations

import struct
from hashlib import sha256
from pathlib import Path

import pytest

from mvcompile.bundle.check import check_traces
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import FORMAT_VERSION, MAGIC, SELFTEST, TRACES, WEIGHTS
from mvcompile.bundle.writer import write_bundle
from mvcompile.errors import IncompatibleBundleError
from mvcompile.types import Objectives

V1 = Path(__file__).parent / "bundle-v1.mvb"


def test_version_1_is_read() -> None:
    with open_bundle(V1) as bundle:
        manifest = bundle.manifest
        assert bundle.digest == "a02baafbd0b4fe597004f4a902c1ba92236999b0a7c53ac7c65ac65029ef4092"
        assert manifest.format_version == 1
        assert (manifest.model.name, manifest.model.inputs[0].shape) == ("tiny", (1, 16))
        assert [step.layer for step in manifest.plan.steps] == ["dense:0", "dense:1", "relu:0"]
        assert manifest.tasks[0].variants[1].objectives == Objectives(1.2e-5, 2048.0, 1088.0)
        assert manifest.tasks[1].variants[0].objectives is None
        assert struct.unpack("<32f", bundle.member(SELFTEST))[15:17] == (7.0, 0.0)
        assert struct.unpack_from("<18f", bundle.member(WEIGHTS)) == (1.0, *[0.0] * 16, 1.0)
        check_traces(manifest, bundle.member(TRACES))


def test_version_1_is_still_written_the_same_way(tmp_path: Path) -> None:
    """If this fails, the bytes changed for the same content: that is a new format version, unless it restores the old bytes."""
    assert FORMAT_VERSION == 1
    with open_bundle(V1) as bundle:
        write_bundle(
            tmp_path / "again.mvb", bundle.manifest, {one.name: bundle.member(one.name) for one in bundle.manifest.members}
        )
    assert (tmp_path / "again.mvb").read_bytes() == V1.read_bytes()


def test_the_digests_can_be_computed_without_this_package() -> None:
    data = V1.read_bytes()
    magic, version, header_length, length, digest, file_length = struct.unpack_from("<8sIIQ32sQ", data)
    assert (magic, version, header_length, file_length) == (b"\x89MVB\r\n\x1a\n", 1, 64, len(data))
    assert sha256(data[64 : 64 + length]).digest() == digest
    with open_bundle(V1, verify=False) as bundle:
        for member in bundle.manifest.members:
            assert sha256(data[member.offset : member.offset + member.length]).hexdigest() == member.sha256


@pytest.mark.parametrize("version", [2, 3, 2**32 - 1])
def test_a_newer_version_is_refused_by_name(tmp_path: Path, version: int) -> None:
    path = tmp_path / "newer.mvb"
    path.write_bytes(MAGIC + struct.pack("<I", version) + b"whatever that version has here")
    message = (
        rf"newer\.mvb: the bundle has format version {version}, this mvcompile reads versions up to 1: update mvcompile here, or"
    )
    with pytest.raises(IncompatibleBundleError, match=message):
        open_bundle(path)
