"""The lines of a record file. Each is JSON by itself; a record's line carries the CRC-32 of the record's bytes.

{"format":"mvcompile-records","version":1}
{"crc32":"5d0b2f7a","record":{...}}
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from mvcompile.records.codec import dumps, loads

FORMAT = "mvcompile-records"
_HEAD, _MIDDLE, _TAIL = b'{"crc32":"', b'","record":', b"}"
_START = len(_HEAD) + 8 + len(_MIDDLE)


@dataclass(frozen=True, slots=True)
class Line:
    """A record's line: its number in the file, from 1, and the record's JSON value, or the reason why there is none."""

    number: int
    value: object = None
    reason: str = ""


def header_line(version: int) -> bytes:
    return dumps({"format": FORMAT, "version": version}) + b"\n"


def record_line(value: object) -> bytes:
    body = dumps(value)
    return _HEAD + b"%08x" % zlib.crc32(body) + _MIDDLE + body + _TAIL + b"\n"


def read_version(data: bytes) -> int:
    """Format version in the first line of a file. Raises `ValueError` if that is no header."""
    end = data.find(b"\n")
    header = loads(data[:end]) if end >= 0 else None
    if not isinstance(header, dict) or header.keys() != {"format", "version"} or header["format"] != FORMAT:
        raise ValueError("its first line is not the header of a record file")
    version = header["version"]
    if type(version) is not int or version < 0:
        raise ValueError(f"its header has version {version!r}")
    return version


def complete_bytes(data: bytes) -> int:
    """Length up to and with the last line end: what follows was not completely written."""
    return data.rfind(b"\n") + 1


def read_lines(data: bytes) -> Iterator[Line]:
    """The records' lines of a file's complete bytes, good and bad."""
    for number, line in enumerate(data.split(b"\n")[1:-1], start=2):
        try:
            yield Line(number, value=_unwrap(line))
        except ValueError as error:
            yield Line(number, reason=str(error))


def _unwrap(line: bytes) -> object:
    body = line[_START : -len(_TAIL)]
    # The exact bytes, not any JSON that means the same: a checksum is of bytes.
    if line != _HEAD + b"%08x" % zlib.crc32(body) + _MIDDLE + body + _TAIL:
        raise ValueError("its checksum is missing or differs")
    return loads(body)
