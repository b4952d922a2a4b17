"""Writing a bundle: the same bytes from every kind of source, and an old file that survives every failure."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mvcompile
from mvcompile.bundle.digest import MemberHash, combine, pieces
from mvcompile.bundle.reader import open_bundle
from mvcompile.bundle.schema import PIECE_BYTES, TRACES, WEIGHTS
from mvcompile.bundle.writer import write_bundle
from mvcompile.errors import BundleError, EnvironmentProblem, UsageError
from mvcompile.testing.bundles import tiny_manifest, tiny_members, write_tiny


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    members = tiny_members()
    one, two = tmp_path / "one.mvb", tmp_path / "two.mvb"
    write_bundle(one, tiny_manifest(), members)
    returned = write_bundle(str(two), tiny_manifest(), dict(reversed(members.items())))
    assert one.read_bytes() == two.read_bytes()
    write_bundle(one, returned, members)  # `members` of a manifest is what comes out, not what goes in
    assert one.read_bytes() == two.read_bytes()
    with open_bundle(two) as bundle:
        assert bundle.manifest == returned


class _Twice:
    """An iterable that is no sequence and says no length."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(self.data)[:1000]
        yield memoryview(self.data)[1000:]


def test_every_kind_of_source_gives_the_same_file(tmp_path: Path) -> None:
    data = tiny_members()[WEIGHTS]
    floats = np.frombuffer(data, np.float32)
    (tmp_path / "weights").write_bytes(data)
    sources: list[Any] = [
        bytearray(data),
        memoryview(data).cast("f", (32, 16)),
        floats.reshape(32, 4, 4),
        tmp_path / "weights",
        [data[:100], bytearray(), memoryview(data[100:])],
        [floats[:7], floats[7:]],
        (data[i : i + 1] for i in range(len(data))),
        _Twice(data),
    ]
    expected = write_tiny(tmp_path / "expected.mvb").read_bytes()
    for source in sources:
        write_bundle(tmp_path / "got.mvb", tiny_manifest(), {**tiny_members(), WEIGHTS: source})
        assert (tmp_path / "got.mvb").read_bytes() == expected


@pytest.mark.parametrize("name", [TRACES, "zero.bin"], ids=["in the middle", "at the end"])
def test_a_member_may_be_empty(tmp_path: Path, name: str) -> None:
    write_bundle(tmp_path / "empty.mvb", tiny_manifest(), {**tiny_members(), name: b""})
    with open_bundle(tmp_path / "empty.mvb") as bundle:
        assert len(bundle.member(name)) == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3 * PIECE_BYTES // 2), max_size=4))
def test_a_digest_does_not_depend_on_how_the_bytes_arrive(lengths: list[int]) -> None:
    data = bytes(sum(lengths))
    piecewise, at_once = MemberHash(), MemberHash()
    begin = 0
    for length in lengths:
        piecewise.update(memoryview(data)[begin : begin + length])
        begin += length
    at_once.update(memoryview(data))
    assert piecewise.hexdigest() == at_once.hexdigest()
    assert sum(end - begin for begin, end in pieces(7, len(data))) == len(data)
    assert combine([b"\1" * 32]) == "01" * 32


WRONG_SOURCES = [
    (7, r"member weights\.bin is a int, expected contiguous bytes, a pathlib\.Path or an iterable"),
    ("weights.bin", r"member weights\.bin is a str, expected contiguous bytes"),
    (["text"], r"member weights\.bin holds a str, expected contiguous bytes"),
    (np.zeros((4, 4), np.float32).T[:, :2], r"member weights\.bin holds a ndarray, expected contiguous bytes"),
    (Path("/no/such/file"), r"member weights\.bin cannot be read from /no/such/file: No such file"),
]


@pytest.mark.parametrize(("source", "message"), WRONG_SOURCES, ids=[type(source).__name__ for source, _ in WRONG_SOURCES])
def test_wrong_sources_are_refused(tmp_path: Path, source: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        write_bundle(tmp_path / "new.mvb", tiny_manifest(), {**tiny_members(), WEIGHTS: source})
    assert files(tmp_path) == []


def test_a_source_that_fails_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    def buffers() -> Iterator[bytes]:
        yield b"x"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UsageError, match=r"member weights\.bin cannot be read"):
        write_bundle(tmp_path / "new.mvb", tiny_manifest(), {**tiny_members(), WEIGHTS: buffers()})


def test_an_unsound_manifest_is_not_written(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.mvb")
    before = path.read_bytes()
    manifest = tiny_manifest()
    with pytest.raises(BundleError, match=r"manifest\.plan\.arena_bytes is 999999"):
        write_bundle(path, replace(manifest, plan=replace(manifest.plan, arena_bytes=999_999)), tiny_members())
    with pytest.raises(BundleError, match=r"expected also weights\.bin"):
        write_bundle(path, manifest, {name: data for name, data in tiny_members().items() if name != WEIGHTS})
    assert path.read_bytes() == before
    assert files(tmp_path) == ["tiny.mvb"]


def test_folders_that_cannot_be_written_are_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in [
        ("none/a.mvb", "there is no folder"),
        ("file/a.mvb", "there is no folder"),
        (".", "not a regular file"),
    ]:
        with pytest.raises(UsageError, match=message):
            write_bundle(tmp_path / path, tiny_manifest(), tiny_members())


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.mvb").symlink_to("real.mvb")
    write_tiny(tmp_path / "link.mvb")
    assert (tmp_path / "link.mvb").is_symlink()
    open_bundle(tmp_path / "real.mvb").close()


def test_a_new_file_has_the_permissions_of_any_other(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    assert write_tiny(tmp_path / "tiny.mvb").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (
            errno.ENOSPC,
            EnvironmentProblem,
            r"tiny\.mvb cannot be written: .*; it needs at least 30720 bytes free in .*: free some, or name",
        ),
        (errno.EIO, EnvironmentProblem, r"tiny\.mvb cannot be written: .*; check the disk"),
        (errno.EACCES, UsageError, r"tiny\.mvb cannot be written: .*; get write access to"),
    ],
)
def test_an_error_of_the_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], message: str
) -> None:
    path = write_tiny(tmp_path / "tiny.mvb")
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind, match=message):
        write_bundle(path, tiny_manifest(), {**tiny_members(), WEIGHTS: [bytes(1000), bytes(1048)]})
    assert path.read_bytes() == before
    assert files(tmp_path) == ["tiny.mvb"]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    prelude = "import os, resource, signal, sys\nfrom mvcompile.testing.bundles import *\nfrom mvcompile.bundle.schema import *\n"
    root = str(Path(mvcompile.__file__).parents[1])
    command = [sys.executable, "-c", prelude + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": root})


def test_a_real_limit_is_reported_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.mvb")
    before = path.read_bytes()
    done = run(
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "write_bundle(sys.argv[1], tiny_manifest(), {**tiny_members(), WEIGHTS: bytes(10**6)})",
        str(path),
    )
    assert "EnvironmentProblem" in done.stderr
    assert "it needs at least 1028672 bytes free" in done.stderr
    assert path.read_bytes() == before
    assert files(tmp_path) == ["tiny.mvb"]


def test_a_kill_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.mvb")
    before = path.read_bytes()
    done = run(
        "def buffers():\n"
        "    yield bytes(100_000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_bundle(sys.argv[1], tiny_manifest(), {**tiny_members(), WEIGHTS: buffers()})",
        str(path),
    )
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    write_tiny(path)
    open_bundle(path).close()


def test_an_interrupt_removes_the_temporary_file(tmp_path: Path) -> None:
    def buffers() -> Iterator[bytes]:
        yield b"x"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path / "new.mvb", tiny_manifest(), {**tiny_members(), WEIGHTS: buffers()})
    assert files(tmp_path) == []


def test_large_members_are_streamed(tmp_path: Path) -> None:
    length = 10 * PIECE_BYTES
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(length)
    tracemalloc.start()
    try:
        write_bundle(tmp_path / "large.mvb", tiny_manifest(), {**tiny_members(), WEIGHTS: tmp_path / "weights"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * PIECE_BYTES
    assert io.DEFAULT_BUFFER_SIZE < PIECE_BYTES
    with open_bundle(tmp_path / "large.mvb") as bundle:
        assert len(bundle.member(WEIGHTS)) == length
