"""One writer per directory, across processes and within one."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from mvcompile.errors import StoreError

_held: dict[Path, int] = {}  # lock files of this process, with its id: a fork inherits the table but not the locks


class WriterLock:
    """Held from construction to `release`, or to the end of the process however it ends. Raises `StoreError` if someone else
    holds it.

    A POSIX record lock, not flock(2): a forked worker that outlives a killed writer must not go on holding it. Such locks do not
    exclude their own process and are dropped when it closes any descriptor of the file, hence the table beside them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.parent.resolve() / path.name
        if _held.get(self._path) == os.getpid():
            raise StoreError(f"{path.parent} is already open in this process (pid {os.getpid()}): close the other store first")
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
        except BaseException:
            os.close(self._descriptor)
            raise
        _held[self._path] = os.getpid()

    def release(self) -> None:
        """May be called twice. The file stays: removing it could take it from under another process that is about to lock it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.pop(self._path, None)

    def _lock(self) -> None:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreError(
                f"{self._path.parent} is in use by another process (pid {holder}): wait for it, stop it, or use another directory"
            ) from error
        except OSError as error:
            raise StoreError(f"{self._path} cannot be locked ({error}): use a directory on a local disk") from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)
