from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.target import codegen

from mvcompile import target as module
from mvcompile.errors import EnvironmentProblem
from mvcompile.runtime.features import LINUX_NAMES, NEVER_EMITTED
from mvcompile.target import X86_FEATURES, detect_target, tvm_target
from mvcompile.testing.networks import AVX2, AVX512, NEON, SSE
from mvcompile.types import HostTarget

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: A CPU: of two cores
flags\t\t: fpu sse sse2 ssse3 pni sse4_1 sse4_2 avx f16c fma movbe popcnt abm bmi1 avx2 bmi2{more}

processor\t: 1
model name\t: A CPU: of two cores
flags\t\t: fpu
"""
AVX512_FLAGS = " avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16"


class Host:
    """A pretended machine: what the files of /proc and /sys say, and what CPU LLVM finds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self._folder = monkeypatch, folder
        monkeypatch.setattr(module, "Path", self._path)
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def _path(self, text: str) -> Path:
        return self._folder / text.removeprefix("/")

    def cpu(self, name: str, cpuinfo: str) -> None:
        self._monkeypatch.setattr(codegen, "llvm_get_system_cpu", lambda: name)
        self._write("proc/cpuinfo", cpuinfo)

    def cache(self, index: int, level: str, kind: str, size: str) -> None:
        folder = f"sys/devices/system/cpu/cpu0/cache/index{index}"
        for name, text in (("level", level), ("type", kind), ("size", size)):
            self._write(f"{folder}/{name}", text + "\n")

    def _write(self, path: str, text: str) -> None:
        file = self._folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    return Host(monkeypatch, tmp_path)


def test_features_are_those_that_the_kernel_and_llvm_agree_on(host: Host) -> None:
    host.cpu("haswell", CPUINFO.format(more=AVX512_FLAGS))
    found = detect_target()
    assert found.features == AVX2.features  # this haswell claims AVX-512, which LLVM knows it cannot have
    assert (found.vector_bits, found.vector_registers) == (256, 16)
    assert found.cpu_model == "A CPU: of two cores"
    assert found.cpu == "haswell"


def test_avx512_has_twice_the_registers_of_twice_the_width(host: Host) -> None:
    host.cpu("sapphirerapids", CPUINFO.format(more=AVX512_FLAGS))
    found = detect_target()
    assert set(AVX512.features) | {"avx512vnni", "avx512bf16"} == set(found.features)
    assert (found.vector_bits, found.vector_registers) == (512, 32)


def test_a_feature_that_the_system_hides_is_not_used(host: Host) -> None:
    host.cpu("sapphirerapids", CPUINFO.format(more="").replace(" avx2", ""))
    found = detect_target()
    assert "avx2" not in found.features
    assert "avx512f" not in found.features
    assert (found.vector_bits, found.vector_registers) == (128, 16)


def test_caches_are_read_per_level_and_instruction_caches_are_not_counted(host: Host) -> None:
    host.cpu("haswell", CPUINFO.format(more=""))
    host.cache(0, "1", "Data", "48K")
    host.cache(1, "1", "Instruction", "32K")
    host.cache(2, "2", "Unified", "2048K")
    host.cache(3, "3", "Unified", "105M")
    found = detect_target()
    assert (found.l1d_bytes, found.l2_bytes, found.llc_bytes) == (48 << 10, 2 << 20, 105 << 20)


def test_unknown_caches_have_usual_sizes_and_the_last_known_level_is_the_last(host: Host) -> None:
    host.cpu("haswell", CPUINFO.format(more=""))
    found = detect_target()
    assert (found.l1d_bytes, found.l2_bytes, found.llc_bytes) == (32 << 10, 512 << 10, 512 << 10)
    host.cache(0, "2", "Unified", "1024K")
    host.cache(1, "three", "Unified", "1M")
    host.cache(2, "3", "Unified", "many")
    found = detect_target()
    assert (found.l2_bytes, found.llc_bytes) == (1 << 20, 1 << 20)


def test_a_machine_without_cpuinfo_is_told_what_is_missing(host: Host) -> None:
    with pytest.raises(EnvironmentProblem, match="/proc/cpuinfo"):
        detect_target()


def test_aarch64_states_neon_and_nothing_else(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.cpu("neoverse-v2", "processor: 0\nFeatures: fp asimd sve\n")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    found = detect_target()
    assert (found.arch, found.cpu, found.features) == ("aarch64", "generic", ("neon",))
    assert (found.vector_bits, found.vector_registers) == (128, 32)


def test_other_architectures_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(EnvironmentProblem, match="'riscv64'"):
        detect_target()


def test_this_host_is_described() -> None:
    found = detect_target()
    assert found.num_cores >= 1
    assert 0 < found.l1d_bytes <= found.l2_bytes <= found.llc_bytes
    assert found.features == tuple(sorted(found.features))


@pytest.mark.parametrize("name", ["znver4", "znver5", "bdver4", "alderlake", "sapphirerapids", "skylake-avx512", "graniterapids"])
@pytest.mark.parametrize("features", [AVX2, AVX512, SSE], ids=["avx2", "avx512", "sse"])
def test_generated_code_needs_nothing_that_the_features_do_not_say(name: str, features: HostTarget) -> None:
    used = _llvm_features(tvm_target(replace(features, cpu=name)))
    baseline = _llvm_features(tvm.target.Target({"kind": "llvm", "mtriple": AVX2.triple, "mcpu": "x86-64"}))
    for_special_instructions_only = {"adx", "aes", "crc32", "cx16", "pclmul", "prfchw", "rdrnd", "rdseed", "sahf", "sha"}
    for_special_instructions_only |= {"sha512", "sm3", "sm4", "cmpccxadd", "vaes", "vpclmulqdq"}
    names = LINUX_NAMES["x86_64"]
    emitted = {each for each in used - baseline if names.get(each, NEVER_EMITTED) != NEVER_EMITTED}
    assert emitted - set(features.features) <= for_special_instructions_only


def _llvm_features(target: tvm.target.Target) -> set[str]:
    return {str(each) for each in codegen.llvm_get_cpu_features(target)}


@pytest.mark.parametrize("host_target", [AVX2, AVX512, NEON, SSE], ids=["avx2", "avx512", "neon", "sse"])
def test_the_compiler_is_told_triple_features_and_cores(host_target: HostTarget) -> None:
    attributes: dict[str, Any] = dict(tvm_target(host_target).attrs)
    assert str(attributes["mtriple"]) == host_target.triple
    assert int(attributes["num-cores"]) == host_target.num_cores
    stated = {str(each) for each in attributes["mattr"]}
    assert {f"+{each}" for each in host_target.features} <= stated
    if host_target.arch == "x86_64":
        assert {f"-{each}" for each in set(X86_FEATURES) - set(host_target.features)} <= stated


def test_every_named_feature_is_one_that_the_runtime_can_look_for() -> None:
    assert set(X86_FEATURES) <= set(LINUX_NAMES["x86_64"])
    assert all(module._CPUINFO_NAMES.get(each, each) == LINUX_NAMES["x86_64"][each] for each in X86_FEATURES)
