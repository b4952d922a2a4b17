"""The digest of a member: SHA-256 in pieces (docs/bundle-format.md, "Digests")."""

from __future__ import annotations

from hashlib import sha256

from mvcompile.bundle.schema import PIECE_BYTES


def pieces(offset: int, length: int) -> list[tuple[int, int]]:
    """First byte and end of each piece of a member; an empty member has one empty piece."""
    end = offset + length
    return [(begin, min(begin + PIECE_BYTES, end)) for begin in range(offset, max(end, offset + 1), PIECE_BYTES)]


def combine(digests: list[bytes]) -> str:
    """The member's digest (hex) from the raw SHA-256 digests of its pieces."""
    return digests[0].hex() if len(digests) == 1 else sha256(b"".join(digests)).hexdigest()


class MemberHash:
    """The digest of bytes that arrive in buffers of any length."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._current = sha256()
        self._room = PIECE_BYTES

    def update(self, data: memoryview) -> None:
        """Append `data`, a view of bytes."""
        while len(data) > self._room:
            self._current.update(data[: self._room])
            self._done.append(self._current.digest())
            data, self._current, self._room = data[self._room :], sha256(), PIECE_BYTES
        self._current.update(data)
        self._room -= len(data)

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""
        return combine([*self._done, self._current.digest()])
