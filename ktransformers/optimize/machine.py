"""Measures what this machine can hold: memory per device, with container limits. Knows no model and no rule."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ktransformers.operators.device import cuda_memory

__all__ = ["Machine", "detect_machine"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory of a machine in bytes.

    ram_bytes: what this process may use at most (the machine's RAM or its container's limit, whichever is less).
    available_bytes: what of it is free now, counting caches that the kernel gives back.
    devices: every device that operators can run on ("cpu", then "cuda:0" ...) and the bytes free on it.
    """

    ram_bytes: int
    available_bytes: int
    devices: Mapping[str, int]

    @property
    def default_device(self) -> str:
        """Device of modules that no rule places: the first accelerator, else the CPU."""
        return next((device for device in self.devices if device != "cpu"), "cpu")

    def with_gpu_budget(self, nbytes: int) -> Machine:
        """Return the machine with at most `nbytes` of each GPU; 0 for all that is free."""
        if not nbytes:
            return self
        devices = {name: free if name == "cpu" else min(free, nbytes) for name, free in self.devices.items()}
        return replace(self, devices=devices)

    def beside(self, nbytes: int) -> Machine:
        """Return the machine without `nbytes` of host memory, which other processes will take."""
        return replace(
            self,
            available_bytes=max(self.available_bytes - nbytes, 0),
            devices={**self.devices, "cpu": max(self.devices["cpu"] - nbytes, 0)},
        )


def detect_machine(root: Path = Path("/"), gpus: Callable[[], Mapping[str, int]] | None = None) -> Machine:
    """Measure this machine. root is where /proc and /sys are, gpus returns what GPUs have free (tests make both up)."""
    total, available = _host_memory(root)
    for limit, used in _cgroup_limits(root):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return Machine(ram_bytes=total, available_bytes=available, devices={"cpu": available, **(gpus or cuda_memory)()})


def _host_memory(root: Path) -> tuple[int, int]:
    """(total, available) from /proc/meminfo, or from sysconf where there is none."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest.strip()}
        return int(kib["MemTotal"]) * 1024, int(kib["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError) as error:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        logger.info("free memory cannot be read from /proc/meminfo (%s); counting all of the RAM as free", error)
        return total, total


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be dropped) of this process's control group and of each group around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no control groups on this system
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:  # version 2 has one tree for all controllers
            yield from _group_chain(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            yield from _group_chain(base, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _group_chain(base: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[tuple[int, int]]:
    # Inside a container the path may be the host's, of which only the top is mounted: missing levels are skipped.
    group = base / path.lstrip("/")
    while group.is_relative_to(base):
        found = _read_limit(group, limit, usage, cache)
        if found is not None:
            yield found
        if group == base:
            return
        group = group.parent


def _read_limit(group: Path, limit: str, usage: str, cache: str) -> tuple[int, int] | None:
    try:
        text = (group / limit).read_text().strip()
        if text == "max":
            return None
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(text), max(used - int(stat.get(cache, 0)), 0)
    except (OSError, ValueError):
        return None  # this level has no memory controller
