"""What this process may use of the machine: physical cores and memory, with affinity and cgroup limits applied."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator

from headrace.types import DeviceInfo, MachineInfo

Read = Callable[[str], str | None]
"""Text of a file, or None if it can't be read."""

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def read_file(path: str) -> str | None:
    """A file of /proc or /sys; None where it does not exist (other systems, older kernels, a closed sandbox)."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def probe_machine(read: Read = read_file, cpus: Iterable[int] | None = None) -> MachineInfo:
    """Cores and memory that this process may use. `read` and `cpus` (the affinity set) are for tests."""
    total, available = _memory(read)
    return MachineInfo(
        devices=(DeviceInfo(kind="cpu", arch=platform.machine(), index=0, memory_bytes=total),),
        host_memory_bytes=total,
        available_memory_bytes=available,
        physical_cores=_cores(read, set(_allowed_cpus() if cpus is None else cpus)),
    )


def _allowed_cpus() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _cores(read: Read, cpus: set[int]) -> int:
    """Distinct cores among the allowed CPUs (hyper-threads count once), at most the cgroup's CPU quota."""
    cores = set()
    for cpu in cpus:
        topology = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        core, package = read(f"{topology}/core_id"), read(f"{topology}/physical_package_id")
        cores.add((package, core) if core is not None else cpu)
    quota = min(_quotas(read), default=float("inf"))
    return max(1, int(min(len(cores), quota)))


def _quotas(read: Read) -> Iterator[float]:
    """CPU quotas, in CPUs, of every cgroup around this process."""
    for folder in _cgroups(read, ""):
        words = (read(f"{folder}/cpu.max") or "max").split()
        if words[0] != "max" and len(words) == 2:
            yield int(words[0]) / int(words[1])
    for folder in _cgroups(read, "cpu"):
        quota, period = read(f"{folder}/cpu.cfs_quota_us"), read(f"{folder}/cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            yield int(quota) / int(period)


def _memory(read: Read) -> tuple[int, int]:
    """(total, available) bytes: the machine's, or what the tightest cgroup leaves."""
    lines = (line.split() for line in (read("/proc/meminfo") or "").splitlines())
    meminfo = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2 and words[1].isdigit()}
    total = meminfo.get("MemTotal") or _sysconf_memory()
    available = meminfo.get("MemAvailable", total)
    for limit, used in _memory_limits(read):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def _memory_limits(read: Read) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that can't be reclaimed) of every cgroup around this process that has a limit."""
    files = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    for controller, (limit_name, used_name) in files.items():
        for folder in _cgroups(read, controller):
            limit = (read(f"{folder}/{limit_name}") or "max").strip()
            if limit.isdigit() and int(limit) < _UNLIMITED:
                used = int(read(f"{folder}/{used_name}") or 0)
                yield int(limit), max(0, used - _file_cache(read(f"{folder}/memory.stat") or ""))


def _file_cache(stat: str) -> int:
    """Page cache that the kernel drops before it refuses memory; model files that were read end up there."""
    values = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _cgroups(read: Read, controller: str) -> Iterator[str]:
    """Folders of this process's cgroup and all its parents; controller "" is the v2 hierarchy.

    In a container the path of /proc/self/cgroup may lie outside what is mounted: those folders read as missing, and
    the mount's root, which always comes last, is the container's own cgroup.
    """
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        root = f"/sys/fs/cgroup/{controller}".rstrip("/")
        parts = [part for part in path.split("/") if part]
        for n in range(len(parts), -1, -1):
            yield "/".join([root, *parts[:n]])


def _sysconf_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
