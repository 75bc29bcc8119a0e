"""Cores and memory under hyper-threads, affinity and cgroups of both versions."""

from __future__ import annotations

import pytest

from headrace.machine import probe_machine

GIB = 1 << 30
MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {10 * GIB // 1024} kB\nHugePages_Total: 0\n"


def topology(n_cpus: int, threads_per_core: int = 2) -> dict[str, str]:
    """CPUs 0..n/2-1 are the first threads of their cores, as Linux numbers them."""
    files = {"/proc/meminfo": MEMINFO}
    for cpu in range(n_cpus):
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/core_id"] = f"{cpu % (n_cpus // threads_per_core)}\n"
        files[f"{folder}/physical_package_id"] = "0\n"
    return files


@pytest.mark.parametrize(("cpus", "cores"), [(range(8), 4), ([0, 4], 1), ([0, 1], 2), ([3], 1), ([1, 2, 5, 6], 2)])
def test_hyper_threads_count_once(cpus: list[int], cores: int) -> None:
    assert probe_machine(topology(8).get, cpus).physical_cores == cores


def test_two_packages_have_cores_of_the_same_number() -> None:
    files = topology(4)
    for cpu in (2, 3):
        files[f"/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = "1\n"
    assert probe_machine(files.get, range(4)).physical_cores == 4


@pytest.mark.parametrize(("quota", "cores"), [("max", 4), ("250000", 2), ("50000", 1), ("900000", 4)])
@pytest.mark.parametrize("where", ["/a/b", "/a", ""])
def test_cgroup_v2_quota_of_any_level(quota: str, cores: int, where: str) -> None:
    files = topology(8) | {"/proc/self/cgroup": "0::/a/b\n", f"/sys/fs/cgroup{where}/cpu.max": f"{quota} 100000\n"}
    assert probe_machine(files.get, range(8)).physical_cores == cores


def test_cgroup_v1_quota() -> None:
    files = topology(8) | {
        "/proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n5:memory:/docker/x\n",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert probe_machine(files.get, range(8)).physical_cores == 2
    files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1"
    assert probe_machine(files.get, range(8)).physical_cores == 4


def test_memory_without_a_limit() -> None:
    machine = probe_machine(topology(2).get, [0])
    assert (machine.host_memory_bytes, machine.available_memory_bytes) == (16 * GIB, 10 * GIB)
    assert machine.devices[0].memory_bytes == 16 * GIB


def test_memory_of_cgroup_v2_counts_reclaimable_cache_as_free() -> None:
    files = topology(2) | {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
    }
    machine = probe_machine(files.get, [0])
    assert (machine.host_memory_bytes, machine.available_memory_bytes) == (4 * GIB, 3 * GIB)


def test_memory_of_cgroup_v1() -> None:
    files = topology(2) | {
        "/proc/self/cgroup": "5:memory:/x\n",
        "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(8 * GIB),
        "/sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(7 * GIB),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    machine = probe_machine(files.get, [0])
    assert (machine.host_memory_bytes, machine.available_memory_bytes) == (8 * GIB, GIB)


def test_nothing_can_be_read() -> None:
    machine = probe_machine(dict[str, str]().get, [0, 1, 2])
    assert machine.physical_cores == 3
    assert machine.host_memory_bytes > 0


def test_this_machine() -> None:
    machine = probe_machine()
    assert machine.physical_cores >= 1
    assert 0 < machine.available_memory_bytes <= machine.host_memory_bytes
