"""Counts the CPU cores that this process may use: the affinity mask, the CPU quotas of its control groups,
hyper-threads, and the kinds of cores of hybrid processors.

A quota bounds CPU time, not the number of CPUs: `docker --cpus 2` and systemd's `CPUQuota=200%` leave all CPUs visible,
and threads beyond the quota are stopped together, in the middle of a step, until the next period begins. Formats:
https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max), https://docs.kernel.org/scheduler/sched-bwc.html
(cpu.cfs_quota_us, cpu.cfs_period_us), proc_pid_mountinfo(5) and cgroups(7). Kinds of cores: sysfs-devices-system-cpu
and the CPU lists of the performance counters, one for each kind of core (perf-intel-hybrid(1)).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = [
    "allowed_cpus",
    "count_cores",
    "cpu_quota",
    "describe_quota",
    "describe_threads",
    "listed_cpus",
    "parse_cpu_list",
    "physical_cores",
    "slow_cpus",
    "threads_within",
    "usable_cores",
    "usable_cpus",
]

ROOT = Path("/")

_SLOW = 0.75
"""Of the greatest capacity or clock. Cores of one kind differ by less: the best of a chip may clock a tenth higher."""

_V2_MOUNTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
_V1_MOUNTS = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpuacct,cpu")
"""Where they are by convention, for a system that does not list its mounts."""


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy of control groups. top: the group that is seen at `folder`, "/" or that of a container."""

    folder: Path
    top: PurePosixPath
    is_v2: bool


def allowed_cpus() -> set[int]:
    """Return the CPUs, hyper-threads singly, that the affinity mask of this process has (cpusets narrow it, too)."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def parse_cpu_list(text: str) -> list[int]:
    """Return the numbers in a list like `0-3,8,10-11`, ascending. Raises ValueError for what is none."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return sorted(numbers)


def listed_cpus(path: Path) -> list[int]:
    """Return the numbers in a list that the system keeps in a file; none of one that is missing or malformed."""
    try:
        return parse_cpu_list(_text(path))
    except ValueError:
        return []


def count_cores(cpus: Collection[int], root: Path = ROOT) -> int:
    """Count the cores that CPUs belong to: hyper-threads count once, those of which nothing is known singly."""
    folder = root / "sys/devices/system/cpu"
    return len({_text(folder / f"cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu) for cpu in cpus})


def physical_cores() -> int:
    """Count the cores this process may run on, of all kinds, hyper-threads once. Where the system does not say what
    belongs together, that is the affinity mask's size.

    Quotas of control groups do not count: `usable_cores` is what to start threads by.
    """
    return max(count_cores(allowed_cpus()), 1)


def slow_cpus(allowed: Collection[int], root: Path = ROOT) -> frozenset[int]:
    """Return those of the CPUs `allowed` that are efficiency cores; none where all of them are of one kind.

    Intel's processors list them. Of others the capacity tells (Arm), or the highest clock (Zen 4c and 5c beside Zen 4
    and 5): less than three quarters of the greatest. A file that is missing or malformed tells nothing.
    """
    listed = set(listed_cpus(root / "sys/devices/cpu_atom/cpus")) & set(allowed)
    slow = (
        listed
        or _below_the_best(allowed, root, "cpu_capacity")
        or _below_the_best(allowed, root, "cpufreq/cpuinfo_max_freq")
    )
    return frozenset() if slow >= set(allowed) else frozenset(slow)


def _below_the_best(allowed: Collection[int], root: Path, name: str) -> set[int]:
    found = {cpu: _text(root / f"sys/devices/system/cpu/cpu{cpu}/{name}").strip() for cpu in allowed}
    if not all(text.isdecimal() for text in found.values()):
        return set()
    return {cpu for cpu, text in found.items() if int(text) < _SLOW * max(map(int, found.values()))}


def usable_cores(root: Path = ROOT) -> int:
    """Return how many threads that compute have a core each: physical cores or the CPU quota, whichever is smaller.

    A quota of 2.5 CPUs makes 2 (rounded down, since a thread too many stops all of them), one below 1 makes 1.
    """
    return threads_within(physical_cores(), cpu_quota(root))


def usable_cpus(root: Path = ROOT) -> int:
    """Return `usable_cores` with hyper-threads counted singly."""
    return threads_within(len(allowed_cpus()), cpu_quota(root))


def describe_quota(root: Path = ROOT) -> str | None:
    """Return the CPU quota in one line for the log, where it allows less than the cores there are; None elsewhere."""
    quota, cores = cpu_quota(root), physical_cores()
    if threads_within(cores, quota) == cores:
        return None
    return (
        f"the control group's CPU quota of {quota:g} of {cores} cores decides: {threads_within(cores, quota)} worker "
        "threads; --cpu_infer sets another number"
    )


def describe_threads(num_threads: int, root: Path = ROOT) -> str | None:
    """Return what decides where `num_threads` worker threads run, in less than 68 columns: the CPU quota, else the
    affinity mask, else the kinds of cores. None on a machine of one kind of core, all of which the process may use.
    """
    quota, cores, allowed = cpu_quota(root), physical_cores(), allowed_cpus()
    if threads_within(cores, quota) < cores:
        return f"{num_threads}, by the control group's CPU quota of {quota:g} of {cores} cores"
    num_cpus = os.cpu_count() or 1
    if len(allowed) < num_cpus:
        return f"{num_threads}, by the affinity of this process to {len(allowed)} of {num_cpus} CPUs"
    num_slow = count_cores(slow_cpus(allowed, root), root)
    return f"{num_threads}, on {cores - num_slow} performance and {num_slow} efficiency cores" if num_slow else None


def threads_within(count: int, quota: float | None) -> int:
    """Return how many of `count` threads a CPU quota lets run all the time, 1 at least. quota: CPUs; None: no limit."""
    return count if quota is None else max(min(count, int(quota + 1e-6)), 1)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPUs' worth of time that the control groups of this process may use; None where there is no limit.

    Takes the smallest limit of the process's own group and all groups above it, in version 1 and in version 2, since
    each of them holds. root: where /proc and /sys are found. Files that are missing or malformed set no limit.
    """
    limits = [
        limit
        for mount, group in _groups(root)
        for folder in _up_to_the_top(mount, group)
        if (limit := (_limit_v2 if mount.is_v2 else _limit_v1)(folder)) is not None
    ]
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[tuple[_Mount, PurePosixPath]]:
    """The hierarchies that can limit CPU time, with this process's group in each of them."""
    paths = dict(_own_groups(root))
    mounts = list(_mounts(root)) or list(_usual_mounts(root))
    for mount in mounts:
        yield mount, paths.get(mount.is_v2, mount.top)


def _own_groups(root: Path) -> Iterator[tuple[bool, PurePosixPath]]:
    """From /proc/self/cgroup: whether a line is of version 2, and the group's path."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield True, PurePosixPath(path)
        elif "cpu" in controllers.split(","):
            yield False, PurePosixPath(path)


def _mounts(root: Path) -> Iterator[_Mount]:
    """From /proc/self/mountinfo: fields 4 and 5 are the root of a mount and its place; behind " - " is its type."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        is_v2 = kind[0] == "cgroup2"
        if is_v2 or "cpu" in kind[2].split(","):
            yield _Mount(root / _unescaped(fields[4]).lstrip("/"), PurePosixPath(_unescaped(fields[3])), is_v2)


def _usual_mounts(root: Path) -> Iterator[_Mount]:
    for places, is_v2 in ((_V2_MOUNTS, True), (_V1_MOUNTS, False)):
        for place in places:
            yield _Mount(root / place.lstrip("/"), PurePosixPath("/"), is_v2)


def _up_to_the_top(mount: _Mount, group: PurePosixPath) -> Iterator[Path]:
    """The folder of `group` and those above it, as far as they are mounted.

    A path that is not below the mount's top is seen from another namespace: then the top itself is all there is.
    """
    inner = group.relative_to(mount.top) if group.is_relative_to(mount.top) else PurePosixPath()
    if ".." in inner.parts:
        inner = PurePosixPath()
    for each in (inner, *inner.parents):
        yield mount.folder / each


def _limit_v2(folder: Path) -> float | None:
    """cpu.max: "QUOTA PERIOD" in microseconds, or "max PERIOD"."""
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    return _ratio(quota, period or "100000")


def _limit_v1(folder: Path) -> float | None:
    """cpu.cfs_quota_us (-1: none) and cpu.cfs_period_us."""
    return _ratio(_text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip() or "100000")


def _ratio(quota: str, period: str) -> float | None:
    if not (quota.isdecimal() and period.isdecimal()) or not int(quota) or not int(period):
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _unescaped(path: str) -> str:
    """Blanks and the like in mountinfo are octal: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
