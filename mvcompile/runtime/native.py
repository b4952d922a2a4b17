"""Load the shared libraries that a bundle carries, straight from its mapped bytes.

Two facts about TVM shape this module. (1) libtvm_runtime.so registers global functions when it is loaded, and a second copy in
the same process aborts it. So there is one copy: the one already there, else the one of an installed TVM if its bytes are the
bundle's (then a later `import tvm` finds it loaded), else the bundle's. (2) dlopen takes two files of one name for one library,
so every load needs a name of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import cast

import tvm_ffi

from mvcompile.errors import EnvironmentProblem, IncompatibleBundleError

Kernel = Callable[..., object]
"""A compiled function, called with one tensor per parameter."""

_SPIN_COUNT = (b"TVM_THREAD_POOL_SPIN_COUNT", b"5000")
"""How often an idle thread of TVM's pool looks for work before it sleeps; one look takes about 0.8 us. TVM's own 300,000 keep a
core busy for a quarter of a second after every run, on a machine that is shared. One that sleeps starts 40 to 100 us later."""

_CONFIGURE_POOL = "runtime.config_threadpool"
_ONE_CORE_PER_THREAD = -2  # AffinityMode kSpecifyOneCorePerThread of TVM's threading_backend.h
_LOAD_LIBRARY = "ffi.Module.load_from_file.so"

_UNUSUAL_DESCRIPTORS = range(512, 960)
"""Few processes have so many files open, and most may have 1024."""

_loading = threading.Lock()
_serial = itertools.count(1)


class Library:
    """The functions of one kernels.so. It is unloaded when the last of its functions is gone."""

    def __init__(self, image: memoryview) -> None:
        """Raises IncompatibleBundleError if the system's loader refuses the library."""
        load = tvm_ffi.get_global_func(_LOAD_LIBRARY)
        with _as_file(image, "kernels.so") as path:
            try:
                # Not tvm_ffi.load_module: that wants a path that ends in .so, and never unloads.
                self._module = load(path, "so")
            except RuntimeError as error:
                raise _unloadable("kernels.so", error) from error

    def function(self, symbol: str) -> Kernel | None:
        """The function `symbol`, None if the library has no such function."""
        if not self._module.implements_function(symbol):
            return None
        return cast(Kernel, self._module.get_function(symbol))


def ensure_tvm_runtime(image: memoryview) -> None:
    """Make sure that exactly one copy of TVM's runtime is in this process; `image` is used if there is none yet.

    Raises IncompatibleBundleError if the system's loader refuses the library.
    """
    with _loading:
        ctypes.CDLL(None).setenv(*_SPIN_COUNT, 0)  # 0: a value that is there stays; TVM reads it when its first pool starts
        if tvm_ffi.get_global_func(_CONFIGURE_POOL, allow_missing=True) is not None:
            return
        installed = _installed_runtime(image)
        if installed is not None:
            _load_globally(str(installed))
            return
        with _as_file(image, "libtvm_runtime.so") as path:
            _load_globally(path)
        sys.meta_path.insert(0, _ImportGuard())


def configure_thread_pool(cores: Sequence[int]) -> None:
    """Make kernels that the calling thread calls run on one thread per core of `cores`, the calling thread being the first.

    TVM keeps one pool per thread that calls kernels; it goes when that thread ends. The pool pins its other threads to
    `cores[1:]`, and lets the calling thread run on all of `cores`.
    """
    configure = tvm_ffi.get_global_func(_CONFIGURE_POOL)
    configure(_ONE_CORE_PER_THREAD, len(cores), [str(core) for core in cores])


def _load_globally(path: str) -> None:
    try:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _unloadable("libtvm_runtime.so", error) from error


def _unloadable(name: str, error: Exception) -> IncompatibleBundleError:
    reason = str(error).strip().splitlines()[-1]
    return IncompatibleBundleError(f"this system cannot load the bundle's {name}: {reason}; compile the model for this host")


def _installed_runtime(image: memoryview) -> Path | None:
    """The libtvm_runtime.so of an installed TVM if it has the bytes of `image`. TVM is looked for, not imported."""
    try:
        spec = importlib.util.find_spec("tvm")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, "lib", "libtvm_runtime.so")
        try:
            if path.stat().st_size == len(image) and _sha256(path.read_bytes()) == _sha256(image):
                return path
        except OSError:
            continue
    return None


def _sha256(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


class _ImportGuard:
    """Refuses `import tvm` once a bundle's own copy of TVM's runtime is loaded: the second copy would abort the process."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "tvm":
            raise ImportError(
                "tvm cannot be imported any more: this process has loaded a bundle's copy of TVM's runtime, and a second copy "
                "would abort it; import tvm before the first mvcompile.runtime.load",
                name=name,
            )
        return None


@contextmanager
def _as_file(image: memoryview, name: str) -> Iterator[str]:
    """A path from which the loader can map `image`, gone when the block is left (a loaded library stays)."""
    number = next(_serial)
    descriptor = _memory_file(image, name, number)
    if descriptor is not None:
        try:
            # The same descriptor may come back while an older library is still loaded: the name must differ all the same.
            yield f"/proc/self/fd/{_spelling(number)}{descriptor}"
        finally:
            os.close(descriptor)
        return
    with ExitStack() as stack:
        try:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mvcompile-")), name)
            path.write_bytes(image)
        except OSError as error:
            raise EnvironmentProblem(
                f"no room for a temporary copy of the bundle's {name}: {error}; set TMPDIR to a folder with space"
            ) from error
        yield str(path)


def _memory_file(image: memoryview, name: str, number: int) -> int | None:
    """A descriptor of an anonymous file that holds `image`; None where there is no such thing, or code in it may not run.

    It is an unusual one, another for each `number`. When TVM reports an error it opens every loaded library by the path that it
    was loaded from: with a descriptor that is given to other files it would read, wait for or crash on whatever that is by then.
    """
    create = getattr(os, "memfd_create", None)  # Pythons built against an old glibc have none
    if create is None or not Path("/proc/self/fd").is_dir():
        return None
    try:
        descriptor = cast(int, create(name, os.MFD_CLOEXEC))
    except OSError:
        return None
    if not os.fstat(descriptor).st_mode & 0o100:  # sysctl vm.memfd_noexec=1
        os.close(descriptor)
        return None
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(image)
        unusual = _UNUSUAL_DESCRIPTORS[number % len(_UNUSUAL_DESCRIPTORS)]
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, unusual)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _spelling(number: int) -> str:
    """A relative path to the same folder, different for every number: its binary digits, as `./` and `.//`."""
    return "".join("./" if digit == "0" else ".//" for digit in f"{number:b}")
