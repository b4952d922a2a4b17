"""CPU features: LLVM's names against the names Linux prints in /proc/cpuinfo.

Linux lists a feature only when the kernel has also enabled the registers it needs, so a listed feature may be used.
Sources: LLVM's `X86.td` and `AArch64Features.td`, Linux's `arch/x86/include/asm/cpufeatures.h` and
`Documentation/arch/arm64/elf_hwcaps.rst`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NEVER_EMITTED = ""
"""Stands for features whose instructions no code generator emits for tensor code (system instructions, hints, intrinsics only):
code built with them runs on every CPU of the architecture, and hypervisors often hide them."""


def _same(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


def _never_emitted(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), NEVER_EMITTED)


_X86_64: Mapping[str, str] = {
    **_same(
        "adx aes avx avx2 avx512bw avx512cd avx512dq avx512f avx512ifma avx512vbmi avx512vl bmi2 cmov cmpccxadd cx16 cx8 f16c"
    ),
    **_same("fma fma4 fxsr gfni mmx movbe popcnt rdseed sha512 sm3 sm4 sse sse2 sse4a ssse3 tbm vaes vpclmulqdq xop"),
    **_never_emitted("cldemote clflushopt clwb clzero enqcmd ermsb evex512 fsgsbase fsrm hreset invpcid kl movdir64b movdiri"),
    **_never_emitted("mwaitx pconfig pku prefetchi ptwrite rdpid rdpru rtm serialize sgx shstk tsxldtrk uintr usermsr waitpkg"),
    **_never_emitted("wbnoinvd widekl xsave xsavec xsaveopt xsaves"),
    "64bit": "lm",
    "64bit-mode": "lm",
    "amx-bf16": "amx_bf16",
    "amx-complex": "amx_complex",
    "amx-fp16": "amx_fp16",
    "amx-int8": "amx_int8",
    "amx-tile": "amx_tile",
    "avx512bf16": "avx512_bf16",
    "avx512bitalg": "avx512_bitalg",
    "avx512fp16": "avx512_fp16",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512vp2intersect": "avx512_vp2intersect",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avxifma": "avx_ifma",
    "avxneconvert": "avx_ne_convert",
    "avxvnni": "avx_vnni",
    "avxvnniint16": "avx_vnni_int16",
    "avxvnniint8": "avx_vnni_int8",
    "bmi": "bmi1",
    "crc32": "sse4_2",
    "lzcnt": "abm",
    "nopl": "lm",  # every 64-bit CPU has it; Linux lists it on some only
    "pclmul": "pclmulqdq",
    "prfchw": "3dnowprefetch",
    "rdrnd": "rdrand",
    "sahf": "lahf_lm",
    "sha": "sha_ni",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "x87": "fpu",
}

_AARCH64: Mapping[str, str] = {
    **_same("aes bf16 flagm i8mm sha2 sha3 sm4 sve sve2"),
    **_never_emitted(
        "CONTEXTIDREL2 am amvs bti ccdp ccidx ccpp dit ecv el2vmsa el3 ete fgt fpac lor mpam mte nv pan pan-rwv pauth"
    ),
    **_never_emitted("perfmon predres rand ras sb sel2 spe specrestrict ssbs tlb-rmi tracev8.4 trbe uaops vh"),
    "altnzcv": "flagm2",
    "complxnum": "fcma",
    "crc": "crc32",
    "dotprod": "asimddp",
    "fp-armv8": "fp",
    "fp16fml": "asimdfhm",
    "fptoint": "frint",
    "fullfp16": "asimdhp",
    "jsconv": "jscvt",
    "lse": "atomics",
    "lse2": "uscat",
    "neon": "asimd",
    "rcpc": "lrcpc",
    "rcpc-immo": "ilrcpc",
    "rdm": "asimdrdm",
    "sve-aes": "sveaes",
    "sve-bitperm": "svebitperm",
    "sve-sha3": "svesha3",
    "sve-sm4": "svesm4",
    "sve2-aes": "sveaes",
    "sve2-bitperm": "svebitperm",
    "sve2-sha3": "svesha3",
    "sve2-sm4": "svesm4",
}

LINUX_NAMES: Mapping[str, Mapping[str, str]] = {"x86_64": _X86_64, "aarch64": _AARCH64}
"""Per architecture: LLVM's name of a feature -> its name in /proc/cpuinfo, or `NEVER_EMITTED`. Names that LLVM uses only to tune
for a CPU (`fast-gather`, `slow-shld`, ...) are no features and not in here."""

_CPUINFO_LINES = ("flags", "Features")  # x86-64, AArch64


def cpuinfo_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The features of every CPU of this machine, in Linux's spelling; those of all cores where they differ. Empty if there is no
    such file."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    # CPUs of one kind print the same line; a set keeps a 256-core machine from being parsed 256 times.
    lines = {value for name, _, value in (line.partition(":") for line in text.splitlines()) if name.strip() in _CPUINFO_LINES}
    return frozenset.intersection(*(frozenset(line.split()) for line in lines)) if lines else frozenset()
