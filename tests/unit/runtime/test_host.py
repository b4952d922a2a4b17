from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tvm

from mvcompile.bundle.schema import Manifest
from mvcompile.errors import BundleError, IncompatibleBundleError
from mvcompile.runtime import load
from mvcompile.runtime.features import LINUX_NAMES, cpuinfo_features
from mvcompile.runtime.host import Host, check_host, cpu_model, this_host
from mvcompile.target import detect_target
from mvcompile.testing.bundles import tiny_manifest
from mvcompile.testing.kernels import write_kernel_bundle

OTHER_ARCH = "aarch64" if platform.machine() == "x86_64" else "x86_64"
ZEN = Host(
    "Linux", "x86_64", 64, frozenset({"fpu", "sse2", "pni", "avx", "avx2", "fma", "bmi1", "abm", "sha_ni"}), "0.1.14.post0"
)
ARM = Host("Linux", "aarch64", 64, frozenset({"fp", "asimd", "asimddp", "atomics"}), "0.1.14.post0")


def manifest(arch: str = "x86_64", features: tuple[str, ...] = (), tvm_ffi: str = "0.1.14.post0") -> Manifest:
    found = tiny_manifest()
    return replace(found, target=replace(found.target, arch=arch, features=features), tvm_ffi=tvm_ffi)


@pytest.mark.parametrize(
    ("bundle", "host"),
    [
        (manifest(features=("avx2", "bmi", "fma", "lzcnt", "sha", "sse2", "sse3", "x87")), ZEN),
        (manifest(features=("clzero", "mwaitx", "shstk", "xsaves")), ZEN),  # hidden by many hypervisors, never in our code
        (manifest("amd64"), ZEN),
        (manifest("aarch64", ("dotprod", "fp-armv8", "lse", "neon", "ras")), ARM),
        (manifest("arm64"), ARM),
        (manifest(tvm_ffi="0.1.14"), ZEN),
        (manifest(tvm_ffi="0.1.14.post7"), ZEN),
        (manifest(tvm_ffi="0.1.14"), replace(ZEN, tvm_ffi="0.1.14+local.3")),
    ],
)
def test_bundles_that_fit(bundle: Manifest, host: Host) -> None:
    check_host(bundle, host)


@pytest.mark.parametrize(
    ("bundle", "host", "message"),
    [
        (manifest("aarch64"), ZEN, "compiled for aarch64, this machine is x86_64: compile the model for this host"),
        (
            manifest("riscv64"),
            replace(ZEN, arch="riscv64"),
            "compiled for riscv64, this mvcompile runs bundles for x86_64, aarch64",
        ),
        (manifest(), replace(ZEN, pointer_bits=32), "64-bit code, this Python process is 32-bit: run it with a 64-bit Python"),
        (manifest(), replace(ZEN, system="Darwin"), "runs on Linux only, found Darwin"),
        (
            manifest(features=("avx2", "avx512f")),
            ZEN,
            "a CPU with avx512f, which this CPU lacks: compile the model for this host",
        ),
        (
            manifest(features=("avx512bf16", "avx512vnni")),
            ZEN,
            r"with avx512bf16 \(avx512_bf16 in /proc/cpuinfo\), avx512vnni \(avx512_vnni in /proc/cpuinfo\), which",
        ),
        (
            manifest(features=("avx2", "fast-gather")),
            ZEN,
            "needs the CPU features fast-gather, which this mvcompile does not know",
        ),
        (manifest("aarch64", ("avx2",)), ARM, "features avx2, which this mvcompile does not know"),
        (manifest("aarch64", ("neon", "sve")), ARM, "a CPU with sve, which this CPU lacks"),
        (
            manifest(tvm_ffi="0.1.15.post2"),
            ZEN,
            "ABI of apache-tvm-ffi 0.1.15, version 0.1.14.post0 is installed: install apache-tvm-ffi==0.1.15.post2, or compile",
        ),
        (manifest(tvm_ffi="0.1.14rc1"), ZEN, "apache-tvm-ffi 0.1.14rc1, version 0.1.14.post0"),
    ],
)
def test_bundles_that_do_not_fit(bundle: Manifest, host: Host, message: str) -> None:
    with pytest.raises(IncompatibleBundleError, match=message):
        check_host(bundle, host)


def _arch(manifest: Manifest) -> Manifest:
    return replace(manifest, target=replace(manifest.target, arch=OTHER_ARCH))


def _feature(manifest: Manifest) -> Manifest:
    missing = {name for name, linux in LINUX_NAMES[platform.machine()].items() if linux and linux not in cpuinfo_features()}
    return replace(manifest, target=replace(manifest.target, features=(min(missing),)))


def _tvm_ffi(manifest: Manifest) -> Manifest:
    return replace(manifest, tvm_ffi="99.0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_arch, f"compiled for {OTHER_ARCH}, this machine is {platform.machine()}"),
        (_feature, "which this CPU lacks"),
        (_tvm_ffi, "ABI of apache-tvm-ffi 99.0"),
    ],
)
def test_a_refused_bundle_loads_no_code_and_leases_no_core(
    change: Callable[[Manifest], Manifest], message: str, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "refused.mvb"
    write_kernel_bundle(path, change=change, kernels=b"\x7fELF that must not be touched")
    with monkeypatch.context() as patch:
        patch.setattr("mvcompile.runtime.session.ensure_tvm_runtime", None)
        patch.setattr("mvcompile.runtime.session.Library", None)
        with pytest.raises(IncompatibleBundleError, match=message) as caught:
            load(path)
        assert str(path) in str(caught.value)
    load(bundle, cores=sorted(os.sched_getaffinity(0))).close()


def test_a_newer_format_is_refused(tmp_path: Path, bundle: Path) -> None:
    path = tmp_path / "newer.mvb"
    data = bytearray(bundle.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(IncompatibleBundleError, match="format version 2"):
        load(path)


def test_damage_is_found_unless_verification_is_left_out(tmp_path: Path, bundle: Path) -> None:
    path = tmp_path / "damaged.mvb"
    data = bytearray(bundle.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match="SHA-256"):
        load(path)
    load(path, verify=False).close()


def test_a_library_that_does_not_load_or_lacks_a_kernel(tmp_path: Path) -> None:
    path = tmp_path / "bad.mvb"
    write_kernel_bundle(path, kernels=b"no library")
    with pytest.raises(IncompatibleBundleError, match=r"cannot load the bundle's kernels.so: .*compile the model for this host"):
        load(path)

    def renamed(manifest: Manifest) -> Manifest:
        dense, merge = manifest.tasks
        first, second = dense.variants
        return replace(manifest, tasks=(replace(dense, variants=(first, replace(second, symbol="dense_v9"))), merge))

    write_kernel_bundle(path, change=renamed)
    with pytest.raises(BundleError, match=r"kernels.so has no function 'dense_v9'"):
        load(path)


def test_this_host_is_one_that_bundles_run_on() -> None:
    host = this_host()
    assert (host.system, host.pointer_bits) == ("Linux", 64)
    assert ("sse2" if host.arch == "x86_64" else "asimd") in host.features


def test_features_of_unequal_cores_are_those_of_all(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd sve\nprocessor\t: 1\nFeatures\t: fp asimd\nHardware\t: x\n")
    assert cpuinfo_features(cpuinfo) == {"fp", "asimd"}
    assert cpuinfo_features(tmp_path / "none") == frozenset()


CPUS = {
    "x86_64": "x86-64 haswell skylake-avx512 icelake-server sapphirerapids znver2 znver4 znver5 alderlake",
    "aarch64": "cortex-a76 neoverse-n1 neoverse-n2 neoverse-v1 neoverse-v2",
}
TUNING = (
    "fast",
    "slow",
    "false-deps",
    "prefer",
    "fuse",
    "no-",
    "zcz",
    "zcm",
    "use-",
    "disable",
    "avoid",
    "enable",
    "tuning",
    "alternate",
)


@pytest.mark.parametrize("arch", CPUS)
def test_every_feature_that_llvm_names_for_common_cpus_is_known(arch: str) -> None:
    """What LLVM reports is filtered by what it calls tuning, and by names of architecture versions and CPUs."""
    features = tvm.get_global_func("target.llvm_get_cpu_features")
    triple = f"{arch}-linux-gnu"
    reported: set[str] = set()
    for cpu in CPUS[arch].split():
        target = tvm.target.Target({"kind": "llvm", "mtriple": triple, "mcpu": cpu, "num-cores": 1})
        reported |= {str(name) for name in features(target)}
    other = {
        *("allow-light-256-bit", "branch-hint", "branchfusion", "idivq-to-divl", "macrofusion", "sbb-dep-breaking", "vzeroupper"),
        *("addr-lsl-slow-14", "aggressive-fma", "alu-lsl-fast", "arith-bcc-fusion", "arith-cbz-fusion", "cmp-bcc-fusion"),
        *(
            "ldp-aligned-only",
            "max-interleave-factor-4",
            "predictable-select-expensive",
            "store-pair-suppress",
            "stp-aligned-only",
        ),
    }
    unknown = {
        name
        for name in reported - set(LINUX_NAMES[arch]) - other
        if not name.startswith(TUNING)
        and not (name[0] == "v" and name[1].isdigit())
        and not name.startswith(("neoverse", "a7", "faster"))
    }
    assert unknown == set()


def test_the_cpu_has_the_name_that_bundles_give_it(tmp_path: Path) -> None:
    assert cpu_model() == detect_target().cpu_model
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 1\nmodel name\t: A CPU: of two cores\nmodel name\t: other\n")
    assert cpu_model(cpuinfo) == "A CPU: of two cores"
    assert cpu_model(tmp_path / "none") in (platform.processor(), platform.machine())
