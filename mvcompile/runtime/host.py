"""Whether this host can run a bundle. Nothing of the bundle is loaded before it has passed."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import tvm_ffi

from mvcompile.bundle.schema import Manifest
from mvcompile.errors import IncompatibleBundleError
from mvcompile.runtime.features import LINUX_NAMES, NEVER_EMITTED, cpuinfo_features

_ALIASES = {"amd64": "x86_64", "x86-64": "x86_64", "arm64": "aarch64"}
_NOT_IN_RELEASE = re.compile(r"([.\-_]?post\d*)?(\+.*)?$")  # PEP 440: post-release and local segment
_RECOMPILE = "compile the model for this host"


@dataclass(frozen=True, slots=True)
class Host:
    """What of a host decides whether a bundle runs. `features` are in the spelling of /proc/cpuinfo; `tvm_ffi` is the version of
    apache-tvm-ffi that is imported."""

    system: str
    arch: str
    pointer_bits: int
    features: frozenset[str]
    tvm_ffi: str


def this_host() -> Host:
    """The host this process runs on."""
    bits = 64 if sys.maxsize > 2**32 else 32
    return Host(platform.system(), platform.machine(), bits, cpuinfo_features(), tvm_ffi.__version__)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """This host's name for its CPU, as `mvcompile.target` has it in bundles and profiles."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    named = next((value.strip() for name, _, value in pairs if name.strip() == "model name"), "")
    return named or platform.processor() or platform.machine()


def check_host(manifest: Manifest, host: Host) -> None:
    """Raises IncompatibleBundleError that names what the bundle expects, what the host has and the remedy."""
    _check_arch(manifest.target.arch, host)
    if host.system != "Linux":
        raise IncompatibleBundleError(f"the bundle's code runs on Linux only, found {host.system}: run it on Linux")
    _check_features(manifest.target.features, host)
    _check_tvm_ffi(manifest.tvm_ffi, host)


def _check_arch(arch: str, host: Host) -> None:
    expected, found = _arch(arch), _arch(host.arch)
    if expected != found:
        raise IncompatibleBundleError(f"the bundle was compiled for {expected}, this machine is {found}: {_RECOMPILE}")
    if expected not in LINUX_NAMES:
        known = ", ".join(LINUX_NAMES)
        raise IncompatibleBundleError(
            f"the bundle was compiled for {expected}, this mvcompile runs bundles for {known}: {_RECOMPILE}"
        )
    if host.pointer_bits != 64:
        raise IncompatibleBundleError(
            f"the bundle holds 64-bit code, this Python process is {host.pointer_bits}-bit: run it with a 64-bit Python"
        )


def _arch(name: str) -> str:
    return _ALIASES.get(name.lower(), name)


def _check_features(features: tuple[str, ...], host: Host) -> None:
    names = LINUX_NAMES[_arch(host.arch)]
    unknown = [feature for feature in features if feature not in names]
    if unknown:
        raise IncompatibleBundleError(
            f"the bundle needs the CPU features {', '.join(unknown)}, which this mvcompile does not know and cannot look for: "
            f"update mvcompile, or {_RECOMPILE}"
        )
    missing = [feature for feature in features if names[feature] != NEVER_EMITTED and names[feature] not in host.features]
    if missing:
        lacking = ", ".join(f"{one} ({names[one]} in /proc/cpuinfo)" if one != names[one] else one for one in missing)
        raise IncompatibleBundleError(f"the bundle was compiled for a CPU with {lacking}, which this CPU lacks: {_RECOMPILE}")


def _check_tvm_ffi(version: str, host: Host) -> None:
    expected, found = _release(version), _release(host.tvm_ffi)
    if expected != found:
        raise IncompatibleBundleError(
            f"the bundle was built for the ABI of apache-tvm-ffi {expected}, version {host.tvm_ffi} is installed: "
            f"install apache-tvm-ffi=={version}, or {_RECOMPILE} with the installed version"
        )


def _release(version: str) -> str:
    return _NOT_IN_RELEASE.sub("", version)
