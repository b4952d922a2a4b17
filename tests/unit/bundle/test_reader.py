"""Opening a bundle: what it gives, and every file that is refused."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

import mvcompile
from mvcompile.bundle.codec import encode_manifest
from mvcompile.bundle.reader import Bundle, open_bundle
from mvcompile.bundle.schema import HEADER_BYTES, KERNELS, MAGIC, PIECE_BYTES, RUNTIME_LIBRARY, SELFTEST, WEIGHTS
from mvcompile.bundle.writer import write_bundle
from mvcompile.errors import BundleError, IncompatibleBundleError, UsageError
from mvcompile.testing.bundles import put, replace_manifest, reseal, tiny_manifest, tiny_members, write_tiny


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.mvb")


def refused(path: Path, data: bytes, message: str, kind: type[Exception] = BundleError) -> None:
    path.write_bytes(data)
    with pytest.raises(kind, match=message) as caught:
        open_bundle(path)
    assert type(caught.value) is kind
    assert str(path) in str(caught.value)


def test_a_bundle_gives_back_what_was_written(tiny: Path) -> None:
    with open_bundle(str(tiny)) as bundle:
        assert bundle.path == tiny
        assert replace(bundle.manifest, members=()) == tiny_manifest()
        assert bundle.digest == sha256(encode_manifest(bundle.manifest)).hexdigest()
        assert {name: bytes(bundle.member(name)) for name in tiny_members()} == tiny_members()


def test_member_memory_is_private_and_writable(tiny: Path) -> None:
    """Arrays over it can be handed to consumers that refuse read-only memory, and the file stays as it is."""
    before = tiny.read_bytes()
    with open_bundle(tiny) as bundle:
        view = bundle.member(WEIGHTS)
        assert not view.readonly
        view[0] ^= 0xFF
        assert bundle.member(WEIGHTS)[0] == view[0]
        del view
    assert tiny.read_bytes() == before
    open_bundle(tiny).close()


def test_members_start_at_pages(tiny: Path) -> None:
    with open_bundle(tiny) as bundle:
        assert [member.offset % 4096 for member in bundle.manifest.members] == [0] * 6


def test_views_outlive_the_bundle_but_it_gives_no_new_ones(tiny: Path) -> None:
    bundle = open_bundle(tiny)
    view = bundle.member(SELFTEST)
    bundle.close()
    bundle.close()
    assert bytes(view) == tiny_members()[SELFTEST]
    del view
    bundle.close()
    with pytest.raises(UsageError, match=f"{tiny} was closed"):
        bundle.member(SELFTEST)


def test_an_unknown_member_is_refused_with_the_known_ones(tiny: Path) -> None:
    with open_bundle(tiny) as bundle, pytest.raises(BundleError, match=r"has no member 'x', its members are kernels\.so, "):
        bundle.member("x")


def test_an_open_bundle_keeps_its_bytes_when_its_file_is_replaced(tiny: Path) -> None:
    with open_bundle(tiny) as bundle:
        write_bundle(tiny, tiny_manifest(), {**tiny_members(), WEIGHTS: bytes(2048)})
        assert bytes(bundle.member(WEIGHTS)) == tiny_members()[WEIGHTS]


def test_paths_that_hold_no_file_are_usage_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    cases = [
        ("none.mvb", "No such file"),
        (".", "not a regular file"),
        ("pipe", "not a regular file"),
        ("loop", "Too many levels"),
    ]
    for name, message in [*cases, ("nul\0", "null")]:
        with pytest.raises(UsageError, match=message):
            open_bundle(tmp_path / name)


def _header(data: bytes, offset: int, form: str, value: int) -> bytes:
    return data[:offset] + struct.pack(form, value) + data[offset + struct.calcsize(form) :]


HEADERS: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", lambda data: b"", "the file is empty"),
    ("one byte", lambda data: data[:1], "the file starts with 89, a bundle with 89 4d 56 42 0d 0a 1a 0a: it is no bundle"),
    ("short magic", lambda data: data[:7], "it is truncated or was transferred as text"),
    ("line ends translated", lambda data: data.replace(b"\r\n", b"\n"), "it is truncated or was transferred as text"),
    ("another format", lambda data: b"PK\3\4" + data[4:], "the file starts with 50 4b 03 04 0d 0a 1a 0a, .* it is no bundle"),
    ("magic only", lambda data: data[:8], "the file ends after 8 bytes, inside the header of 64 bytes"),
    ("no manifest length", lambda data: data[:16], "the file ends after 16 bytes, inside the header"),
    ("one byte short", lambda data: data[:63], "the file ends after 63 bytes, inside the header"),
    ("header only", lambda data: data[:64], "the file has 64 bytes, its header says 30720: it is truncated"),
    ("cut", lambda data: data[:-1], "the file has 30719 bytes, its header says 30720: it is truncated"),
    ("appended", lambda data: data + b"\0", "the file has 30721 bytes, its header says 30720: something was appended"),
    ("version 0", lambda data: _header(data, 8, "<I", 0), "format version 0, expected 1 to 1: it is damaged"),
    ("header length", lambda data: _header(data, 12, "<I", 65), "its own length as 65 bytes, expected 64"),
    ("manifest too long", lambda data: _header(data, 16, "<Q", 30657), "a manifest of 30657 bytes, only 30656 follow it"),
    ("manifest huge", lambda data: _header(data, 16, "<Q", 2**64 - 1), "a manifest of 18446744073709551615 bytes, only"),
    ("manifest shorter", lambda data: _header(data, 16, "<Q", 100), "the manifest's SHA-256 is [0-9a-f]{64}, the header says"),
    ("manifest empty", lambda data: _header(data, 16, "<Q", 0), "the manifest's SHA-256 is"),
    ("manifest digest", lambda data: _header(data, 24, "<Q", 0), "the manifest's SHA-256 is .* copy it again or compile"),
    ("file length", lambda data: _header(data, 56, "<Q", 2**64 - 1), "its header says 18446744073709551615: it is truncated"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in HEADERS], ids=[case[0] for case in HEADERS])
def test_wrong_headers_are_refused(tiny: Path, change: Callable[[bytes], bytes], message: str) -> None:
    refused(tiny, change(tiny.read_bytes()), message)


NEWER: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("whole file", lambda data: _header(data, 8, "<I", 2)),
    ("nothing else known", lambda data: MAGIC + struct.pack("<I", 2)),
    ("other header", lambda data: MAGIC + struct.pack("<I", 2) + b"\xff" * 200),
]


@pytest.mark.parametrize("change", [case[1] for case in NEWER], ids=[case[0] for case in NEWER])
def test_a_newer_format_is_named_before_anything_else_is_judged(tiny: Path, change: Callable[[bytes], bytes]) -> None:
    message = "has format version 2, this mvcompile reads versions up to 1: update mvcompile here, or compile the model with this"
    refused(tiny, change(tiny.read_bytes()), message, IncompatibleBundleError)


def test_a_manifest_of_another_version_than_its_header_is_refused(tiny: Path) -> None:
    refused(
        tiny,
        reseal(tiny.read_bytes(), put("format_version", 2)),
        r"manifest\.format_version is 2, expected 1, as the header says",
    )


def test_a_manifest_that_is_no_json_is_refused(tiny: Path) -> None:
    refused(tiny, replace_manifest(tiny.read_bytes(), b"\xff" * 10), "manifest is not JSON in UTF-8")


def test_a_member_inside_the_manifest_is_refused(tiny: Path) -> None:
    refused(
        tiny,
        reseal(tiny.read_bytes(), put("members[0].offset", 4096)),
        r"members\[0\]\.offset is 4096, expected at least \d+, where",
    )


def _bundle_regions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and end of the manifest, of every member and of every gap."""
    data = path.read_bytes()
    end = HEADER_BYTES + int.from_bytes(data[16:24], "little")
    yield "manifest", HEADER_BYTES, end
    with open_bundle(path) as bundle:
        members = bundle.manifest.members
    for member in members:
        yield f"gap before {member.name}", end, member.offset
        end = member.offset + member.length
        yield member.name, member.offset, end
    assert end == len(data)


def _opens_with_flip(path: Path, position: int, bit: int, verify: bool = True) -> bool:
    with path.open("r+b") as file:
        file.seek(position)
        value = file.read(1)[0]
        file.seek(position)
        file.write(bytes([value ^ 1 << bit]))
        file.flush()
        try:
            open_bundle(path, verify=verify).close()
            return True
        except BundleError:
            return False
        finally:
            file.seek(position)
            file.write(bytes([value]))


def test_every_flipped_bit_of_the_header_is_found(tiny: Path) -> None:
    assert not any(_opens_with_flip(tiny, bit // 8, bit % 8) for bit in range(HEADER_BYTES * 8))


def test_a_flipped_bit_anywhere_is_found(tiny: Path) -> None:
    for name, begin, end in _bundle_regions(tiny):
        for position in {begin, end - 1, *range(begin, end, 97)}:
            assert not _opens_with_flip(tiny, position, position % 8), f"byte {position} in {name}"
    open_bundle(tiny).close()


def test_without_verify_members_are_not_read(tiny: Path) -> None:
    """A flipped bit in a member or a gap passes, one in the manifest does not."""
    passes = {name for name, begin, _ in _bundle_regions(tiny) if _opens_with_flip(tiny, begin, 0, verify=False)}
    assert passes == {name for name, _, _ in _bundle_regions(tiny)} - {"manifest"}


def test_every_truncation_is_refused(tiny: Path) -> None:
    for length in [*range(29999, 0, -251), *range(70), 0]:
        os.truncate(tiny, length)
        with pytest.raises(BundleError):
            open_bundle(tiny)


def test_swapped_members_are_refused(tiny: Path) -> None:
    data = bytearray(tiny.read_bytes())
    with open_bundle(tiny) as bundle:
        spans = {one.name: slice(one.offset, one.offset + one.length) for one in bundle.manifest.members}
    data[spans[KERNELS]], data[spans[RUNTIME_LIBRARY]] = data[spans[RUNTIME_LIBRARY]], data[spans[KERNELS]]
    refused(tiny, bytes(data), rf"the SHA-256 of member {KERNELS} is [0-9a-f]+, the manifest says [0-9a-f]+: the file is damaged")


def test_members_swapped_in_the_manifest_too_are_refused_when_a_tensor_would_not_fit(tiny: Path) -> None:
    data = reseal(tiny.read_bytes(), lambda plain: _swap_names(plain["members"], SELFTEST, WEIGHTS))
    refused(
        tiny,
        data,
        r"manifest\.plan\.tensors\[1\]\.offset is offset 0 and length 1024, expected an end within the 128 bytes of weights",
    )


def _swap_names(members: list[dict[str, object]], one: str, other: str) -> None:
    for member in members:
        member["name"] = {one: other, other: one}.get(str(member["name"]), member["name"])


@pytest.mark.parametrize("length", [PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 1])
def test_long_members_are_hashed_in_pieces(tmp_path: Path, length: int) -> None:
    path = tmp_path / "long.mvb"
    data = bytes(length - 1) + b"!"
    written = write_bundle(path, tiny_manifest(), {**tiny_members(), WEIGHTS: data})
    weights = next(member for member in written.members if member.name == WEIGHTS)
    pieces = [sha256(data[begin : begin + 4 * 2**20]).digest() for begin in range(0, length, 4 * 2**20)]
    assert weights.sha256 == (pieces[0].hex() if len(pieces) == 1 else sha256(b"".join(pieces)).hexdigest())
    open_bundle(path).close()
    for position in (0, PIECE_BYTES - 1, length - 1):
        assert not _opens_with_flip(path, weights.offset + position, 0)


def test_a_gap_longer_than_a_page_is_read_to_its_end(tiny: Path) -> None:
    data = tiny.read_bytes()
    with open_bundle(tiny) as bundle:
        last = bundle.manifest.members[-1]
    moved = data[: last.offset] + bytes(4 * PIECE_BYTES) + data[last.offset :]
    far = reseal(moved, put("members[5].offset", last.offset + 4 * PIECE_BYTES))
    tiny.write_bytes(far)
    open_bundle(tiny).close()
    assert not _opens_with_flip(tiny, last.offset + 4 * PIECE_BYTES - 1, 3)


def test_reading_needs_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import mvcompile.bundle.reader, mvcompile.bundle.writer, mvcompile.bundle.inspect\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(roots - set(sys.stdlib_module_names)))"
    )
    root = str(Path(mvcompile.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": root})
    assert done.stdout.strip() == "['mvcompile']"


def test_bundle_is_what_open_bundle_returns(tiny: Path) -> None:
    with open_bundle(tiny) as bundle:
        assert isinstance(bundle, Bundle)
