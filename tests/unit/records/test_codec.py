from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvcompile.records.codec import decode, dumps, encode, loads
from mvcompile.records.lines import read_lines, record_line
from mvcompile.testing.records import failed_record, measured_record
from mvcompile.types import Objectives, Record, Status, Verification

numbers = st.floats(allow_nan=False, allow_infinity=False)
measurements = st.builds(Objectives, numbers, numbers, numbers)
verifications = st.builds(Verification, numbers, numbers, numbers, numbers)


@st.composite
def any_record(draw: st.DrawFn) -> Record:
    status = draw(st.sampled_from(Status))
    measured = status is Status.OK
    return Record(
        task_key=draw(st.text()),
        target_key=draw(st.text()),
        fingerprint=draw(st.text()),
        trace=draw(st.text()),
        space=draw(st.text()),
        status=status,
        objectives=draw(measurements) if measured else None,
        latency_spread=draw(st.none() | numbers),
        verification=draw(st.none() | verifications),
        message=draw(st.text()),
    )


@given(any_record())
def test_a_record_comes_back_equal(record: Record) -> None:
    (line,) = read_lines(b"header\n" + record_line(encode(record)))
    assert line.reason == ""
    assert decode(line.value) == record


def test_a_record_is_one_line_of_ascii() -> None:
    text = dumps(encode(failed_record("a\nb\u2028\x85ü")))
    assert text.isascii()
    assert text.decode().splitlines() == [text.decode()]


def altered(**changes: Any) -> dict[str, object]:
    return {**encode(measured_record()), **changes}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "expected an object"),
        (altered(extra=1), "extra"),
        ({name: value for name, value in altered().items() if name != "trace"}, "trace"),
        (altered(version=2), "version 2"),
        (altered(version=True), "version True"),
        (altered(task_key=None), "task_key is NoneType"),
        (altered(status="good"), "good"),
        (altered(status="timeout"), "if and only if"),
        (altered(objectives=None), "if and only if"),
        (altered(objectives={"latency_s": 1.0}), "footprint_bytes"),
        (altered(latency_spread="0.1"), "latency_spread is str"),
        (altered(latency_spread=True), "latency_spread is bool"),
        (altered(latency_spread=10**400), "latency_spread is too large"),
        (altered(verification={"max_abs_error": 0, "max_rel_error": 0, "rtol": 0, "atol": None}), "atol is NoneType"),
    ],
)
def test_what_is_no_record_is_refused(value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(value)


@pytest.mark.parametrize("text", [b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1,"a":2}', b"[" * 100_000, b"{", b"\xff", b""])
def test_what_is_no_strict_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads(text)
