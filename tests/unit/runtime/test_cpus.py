from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from mvcompile.runtime import cpus

V2 = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 24 0:27 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:5 - cgroup cgroup rw,cpu,cpuacct\n"
    "32 24 0:28 / /sys/fs/cgroup/memory rw shared:6 - cgroup cgroup rw,memory\n"
)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2.format(root="/")}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "proc/self/mountinfo": V2.format(root="/"),
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            None,
        ),
        (  # the tightest level counts
            {
                "proc/self/cgroup": "0::/a/b\n",
                "proc/self/mountinfo": V2.format(root="/"),
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            1.5,
        ),
        (  # a container without a cgroup namespace: the path is the host's, the mount starts at the container
            {
                "proc/self/cgroup": "0::/docker/abc/inner\n",
                "proc/self/mountinfo": V2.format(root="/docker/abc"),
                "sys/fs/cgroup/cpu.max": "max 100000\n",
                "sys/fs/cgroup/inner/cpu.max": "50000 100000\n",
            },
            0.5,
        ),
        (  # a path outside the mount: what is mounted is all there is
            {
                "proc/self/cgroup": "0::/../other\n",
                "proc/self/mountinfo": V2.format(root="/docker/abc"),
                "sys/fs/cgroup/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/a\n",
                "proc/self/mountinfo": V1.format(root="/"),
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/m/cpu.max": "1 100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "proc/self/mountinfo": V2.format(root="/") + "short line\n",
                "sys/fs/cgroup/cpu.max": "nonsense\n",
            },
            None,
        ),
    ],
)
def test_quota(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert cpus.quota(tree(tmp_path, files)) == quota


def test_siblings(tmp_path: Path) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    tree(tmp_path, {topology.format(1): "1,5-7\n", topology.format(2): "x\n"})
    assert cpus.siblings(1, tmp_path) == {1, 5, 6, 7}
    assert cpus.siblings(2, tmp_path) == {2}
    assert cpus.siblings(3, tmp_path) == {3}


def test_cache_sharers_are_those_of_the_last_level(tmp_path: Path) -> None:
    cache = "sys/devices/system/cpu/cpu1/cache/index{}/{}"
    lists = {cache.format(0, "level"): "1\n", cache.format(0, "shared_cpu_list"): "1\n"}
    lists |= {cache.format(1, "level"): "3\n", cache.format(1, "shared_cpu_list"): "0-2\n"}
    tree(tmp_path, {**lists, cache.format(2, "level"): "4\n", cache.format(2, "shared_cpu_list"): "x\n"})
    assert cpus.cache_sharers(1, tmp_path) == {0, 1, 2}
    assert cpus.cache_sharers(0, tmp_path) >= {0}


def test_of_this_machine() -> None:
    assert cpus.affinity() == os.sched_getaffinity(0)
    assert all(core in cpus.siblings(core) for core in cpus.affinity())
    quota = cpus.quota()
    assert quota is None or quota > 0


def test_mask_of_one_core() -> None:
    bits = np.unpackbits(np.frombuffer(cpus.mask_of(9), np.uint8), bitorder=sys.byteorder)
    assert np.flatnonzero(bits).tolist() == [9]
    assert bits.size % 64 == 0
    assert bits.size >= os.sysconf("SC_NPROCESSORS_CONF")


def test_the_neighbour_shares_the_cache_and_not_the_core(tmp_path: Path) -> None:
    for core, (sibling, cache) in enumerate([("0,1", "0-3"), ("0,1", "0-3"), ("2,3", "0-3"), ("2,3", "0-3"), ("4", "4")]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}"
        for name, text in (
            ("topology/thread_siblings_list", sibling),
            ("cache/index0/level", "1"),
            ("cache/index0/shared_cpu_list", str(core)),
            ("cache/index1/level", "3"),
            ("cache/index1/shared_cpu_list", cache),
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "\n")
    assert cpus.neighbour_of(0, [0, 1, 2, 3, 4], tmp_path) == 3
    assert cpus.neighbour_of(0, [0, 1, 4], tmp_path) == 4
    assert cpus.neighbour_of(0, [0, 1], tmp_path) == 1
    assert cpus.neighbour_of(0, [0], tmp_path) is None
