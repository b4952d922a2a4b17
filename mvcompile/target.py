"""The machine code is generated for: what this host is, and how TVM spells it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import tvm
from tvm.target import codegen

import mvcompile.vectormath  # noqa: F401  # whoever generates code gets programs that call these operators
from mvcompile.errors import EnvironmentProblem
from mvcompile.types import HostTarget

X86_FEATURES = (
    "avx",
    "avx2",
    "avx512bf16",
    "avx512bw",
    "avx512cd",
    "avx512dq",
    "avx512f",
    "avx512vl",
    "avx512vnni",
    "bmi",
    "bmi2",
    "f16c",
    "fma",
    "lzcnt",
    "movbe",
    "popcnt",
    "sse3",
    "sse4.1",
    "sse4.2",
    "ssse3",
)
"""Extensions LLVM may emit for generated kernels, in its spelling; each is stated as present or absent, never left to `mcpu`."""
X86_UNUSED = (
    "amx-tile",
    "avx512bitalg",
    "avx512fp16",
    "avx512ifma",
    "avx512vbmi",
    "avx512vbmi2",
    "avx512vp2intersect",
    "avx512vpopcntdq",
    "avxifma",
    "avxneconvert",
    "avxvnni",
    "avxvnniint16",
    "avxvnniint8",
    "fma4",
    "gfni",
    "sse4a",
    "tbm",
    "xop",
)
"""Further extensions that `mcpu` would let LLVM emit; no kernel gains from them. Without them, `features` is all a host needs."""

_CPUINFO_NAMES = {
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "avx512bf16": "avx512_bf16",
    "avx512vnni": "avx512_vnni",
}


def detect_target() -> HostTarget:
    """This host. Raises EnvironmentProblem on an architecture that is not supported."""
    arch = platform.machine()
    if arch not in ("x86_64", "aarch64"):
        raise EnvironmentProblem(f"architecture {arch!r} is not supported; mvcompile generates code for x86_64 and aarch64")
    features = _x86_features() if arch == "x86_64" else ("neon",)
    bits, registers = _vectors(features)
    caches = _cache_sizes()
    return HostTarget(
        triple=f"{arch}-unknown-linux-gnu",
        arch=arch,
        # On aarch64 nothing but NEON is stated, so nothing else (SVE, LSE) may come with the CPU's name.
        cpu=str(codegen.llvm_get_system_cpu()) if arch == "x86_64" else "generic",
        features=features,
        num_cores=os.cpu_count() or 1,
        l1d_bytes=caches.get(1, 32 * 1024),
        l2_bytes=caches.get(2, 512 * 1024),
        llc_bytes=caches.get(3, caches.get(2, 512 * 1024)),
        vector_bits=bits,
        vector_registers=registers,
        cpu_model=_cpu_model(),
    )


UNSWITCHED_COST = 500
"""How much code LLVM may write a second time to take a condition out of a loop; its default is 50. The last tile of rows has
fewer than the others, and asks for each of them in every step of the reduction unless there are two loops: with 13 rows of two
512-bit vectors (and 11 in the last tile) that takes half the time. Builds take 2 to 9 % longer."""


def tvm_target(target: HostTarget) -> tvm.target.Target:
    """The TVM target that code for `target` is generated with."""
    absent = {*X86_FEATURES, *X86_UNUSED} - set(target.features) if target.arch == "x86_64" else set()
    attributes = [f"+{name}" for name in target.features] + [f"-{name}" for name in sorted(absent)]
    return tvm.target.Target(
        {
            "kind": "llvm",
            "mtriple": target.triple,
            "mcpu": target.cpu,
            "mattr": attributes,
            "num-cores": target.num_cores,
            "cl-opt": [f"-unswitch-threshold:int={UNSWITCHED_COST}"],
        }
    )


def _x86_features() -> tuple[str, ...]:
    flags = set(_cpuinfo("flags").split())
    known = codegen.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()}))
    return tuple(name for name in X86_FEATURES if _CPUINFO_NAMES.get(name, name) in flags and name in known)


def _vectors(features: tuple[str, ...]) -> tuple[int, int]:
    """Width in bits and number of the vector registers that the feature set gives."""
    if "avx512f" in features:
        return 512, 32
    if "neon" in features:
        return 128, 32
    return (256 if "avx2" in features else 128), 16


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot read /proc/cpuinfo ({error.strerror}); mvcompile needs Linux with /proc mounted"
        ) from error
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cache_sizes() -> dict[int, int]:
    """Bytes per cache level (data or unified) of CPU 0; levels the kernel does not describe are missing."""
    sizes: dict[int, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level = (index / "type").read_text().strip(), int((index / "level").read_text())
            text = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and text[-1:] in ("K", "M"):
            sizes[level] = int(text[:-1]) * (1024 if text[-1] == "K" else 1024 * 1024)
    return sizes
