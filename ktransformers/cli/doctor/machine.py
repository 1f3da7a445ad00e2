"""The checks of doctor about the machine: cores, memory, limits of the container and the process, disks, the port.

Every check takes what it reads from as an argument; root is where /proc, /sys and /dev are.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ktransformers.cli.doctor.findings import Check, Finding, ok, warning
from ktransformers.cli.doctor.system import system_checks
from ktransformers.system.cores import (
    allowed_cpus,
    count_cores,
    cpu_quota,
    physical_cores,
    slow_cpus,
    threads_within,
    usable_cores,
)
from ktransformers.system.cpu_names import cpu_name
from ktransformers.system.disk_speed import DiskSpeed, largest_file, measure_disk
from ktransformers.system.user_folders import user_cache_dir

__all__ = [
    "cores",
    "disk_reads",
    "disks",
    "judge_cores",
    "judge_limits",
    "judge_swap",
    "machine_checks",
    "memory",
    "port",
    "ram_bandwidth",
    "shared_memory",
]

ROOT = Path("/")
GIB = 1 << 30
_ROOM_FOR_A_MODEL = 20 * GIB
_LEAST_FREE = 2 * GIB
_LEAST_FILES = 1024
_LEAST_SHM = 64 << 20
_SLOW = 8e9  # bytes a second: less than one channel of DDR4
_SLOW_DISK = 1e9  # bytes a second: less than any NVMe
_LEAST_READ = 64 << 20  # bytes of a file, for a measurement that says something


def machine_checks(*, has_bandwidth: bool = True, model: Path | None = None) -> list[Check]:
    """Return the checks of the machine in the order of the report.

    has_bandwidth: whether to measure how fast memory and the disk are read. model: whose disk; None: what is in the
    hub's cache.
    """
    measured = [Check("memory bandwidth", ram_bandwidth), Check("disk reads", lambda: disk_reads(model))]
    return [
        Check("cores", cores),
        Check("memory", memory),
        Check("swap", lambda: judge_swap(meminfo())),
        *system_checks(),
        *(measured if has_bandwidth else ()),
        Check("limits", limits),
        Check("/dev/shm", shared_memory),
        Check("disk", disks),
        Check("port", port),
    ]


def cores(root: Path = ROOT) -> Iterable[Finding]:
    """Compare the cores that the process may run on with those of the machine."""
    allowed = allowed_cpus()
    num_slow = count_cores(slow_cpus(allowed, root), root)
    return [judge_cores(physical_cores(), len(allowed), os.cpu_count() or 1, cpu_quota(root), cpu_name(), num_slow)]


def judge_cores(
    physical: int, allowed: int, logical: int, quota: float | None, name: str, num_slow: int = 0
) -> Finding:
    """Judge the number of cores. physical: of those that the process may run on. num_slow: efficiency
    cores among these.

    allowed, logical: hyper-threads, by affinity and in all.
    """
    kinds = f" ({physical - num_slow} performance, {num_slow} efficiency)" if num_slow else ""
    text = f"{physical} physical{kinds}, {allowed} logical ({name})"
    if threads_within(physical, quota) < physical:
        return warning("cores", f"{text}, but the control group's CPU quota is {quota:g} of them: "
                       f"--cpu_infer is {threads_within(physical, quota)} by itself",
                       "for more, raise docker --cpus, Kubernetes' limits.cpu or systemd's CPUQuota")  # fmt: skip
    if allowed < logical:
        return warning("cores", f"{text} of {logical}, by the affinity of this process",
                       "start without taskset or numactl to use all")  # fmt: skip
    return ok("cores", text)


def meminfo(root: Path = ROOT) -> Mapping[str, int]:
    """Return /proc/meminfo in bytes by name; empty where there is none."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in pairs if rest.strip()}


def memory(root: Path = ROOT) -> Iterable[Finding]:
    """Report how much memory is free, by the container's limit where that is less."""
    from ktransformers.optimize.machine import detect_machine

    found, total = detect_machine(root, gpus=dict), meminfo(root).get("MemTotal", 0)
    text = f"{found.available_bytes / GIB:.1f} of {found.ram_bytes / GIB:.1f} GiB are free"
    if found.ram_bytes < total:
        text += f"; the container's limit, of {total / GIB:.1f} GiB"
    if found.available_bytes < _LEAST_FREE:
        return [warning("memory", text, "close other programs, or raise the container's limit (--memory)")]
    return [ok("memory", text)]


def judge_swap(memory: Mapping[str, int]) -> list[Finding]:
    """Judge the swap in use: weights that are swapped out are read from disk in every step."""
    total, free = memory.get("SwapTotal", 0), memory.get("SwapFree", 0)
    if not total:
        return [ok("swap", "none")]
    text = f"{(total - free) / GIB:.1f} of {total / GIB:.1f} GiB in use"
    if total - free > GIB and total - free > total // 4:
        return [warning("swap", text, "close other programs; what was swapped out stays slow")]
    return [ok("swap", text)]


def ram_bandwidth(measure: Callable[[], Mapping[str, float]] | None = None) -> Iterable[Finding]:
    """Measure how fast memory is read; the best of all times is kept, and `plan` predicts with it."""
    if measure is None:
        from ktransformers.bench.common.bandwidth import bandwidths

        rate = bandwidths(["cpu"], usable_cores(), is_anew=True).get("cpu")
    else:
        rate = measure().get("cpu")
    if rate is None:
        return [warning("memory bandwidth", "cannot be measured", "ktransformers doctor, with more memory free")]
    text = f"{rate / 1e9:.1f} GB/s read by all cores together"
    if rate < _SLOW:
        return [warning("memory bandwidth", text, "look for other programs (top), and for empty memory channels")]
    return [ok("memory bandwidth", text)]


def limits() -> Iterable[Finding]:
    """Report the process's limits, where the system has such."""
    try:
        import resource
    except ImportError:
        return [ok("limits", "this system has none")]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return judge_limits(*(None if n == resource.RLIM_INFINITY else n for n in (locked, files)))


def judge_limits(locked: int | None, files: int | None) -> list[Finding]:
    """Judge the limits on bytes of locked memory (ulimit -l) and open files (ulimit -n); None: no limit."""
    found = [ok("locked memory", "unlimited" if locked is None else f"{locked / 2**20:.0f} MiB; CUDA's is not counted")]
    shown = "unlimited" if files is None else str(files)
    if files is not None and files < _LEAST_FILES:
        return [*found, warning("open files", f"{shown}: a server with many clients needs more", "ulimit -n 65536")]
    return [*found, ok("open files", shown)]


def shared_memory(root: Path = ROOT) -> Iterable[Finding]:
    """Check the size of /dev/shm: containers have little of it; NCCL and torch's workers want some."""
    folder = root / "dev/shm"
    if not folder.is_dir():
        return [ok("/dev/shm", "this system has none")]
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB are free"
    if usage.free < _LEAST_SHM:
        return [warning("/dev/shm", text, "delete what is in it, or start the container with --shm-size 1g")]
    return [ok("/dev/shm", text)]


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which huggingface_hub keeps models."""
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"


def disks(folders: Mapping[str, Path] | None = None) -> Iterable[Finding]:
    """Check the room for models, and whether the caches can be written to."""
    folders = folders or {"cache": user_cache_dir(), "models": hub_cache()}
    variables = {"cache": "XDG_CACHE_HOME", "models": "HF_HOME"}
    for name, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        text = f"{folder}: {free / GIB:.1f} GiB are free"
        remedy = f"set {variables.get(name, 'XDG_CACHE_HOME')} to a folder"
        if not os.access(there, os.W_OK):
            yield warning(f"disk of {name}", f"{folder} cannot be written to", f"{remedy} of yours")
        elif name == "models" and free < _ROOM_FOR_A_MODEL:
            yield warning(f"disk of {name}", f"{text}, little for a model", f"{remedy} on a larger disk")
        else:
            yield ok(f"disk of {name}", text)


def disk_reads(
    model: Path | None = None, cache: Path | None = None, measure: Callable[[Path], DiskSpeed] = measure_disk
) -> Iterable[Finding]:
    """Measure how fast the disk under a model delivers experts: those that do not fit into RAM are read from there.

    model: a file or a folder; None: of the hub's cache, of which the largest file stands for all. Nothing is found
    where there is no file that is large enough.
    """
    path = largest_file([model or cache or hub_cache()]) if model is None or model.is_dir() else model
    if path is None or path.stat().st_size < _LEAST_READ:
        return
    try:
        speed = measure(path)
    except OSError as error:
        yield warning("disk reads", f"{path} cannot be read: {error.strerror or error}", "check the disk (dmesg)")
        return
    if speed.bytes_per_s < _SLOW_DISK:
        yield warning("disk reads", f"{speed}: slow for experts that are read from there",
                      "for a model larger than RAM, keep its files on an NVMe disk")  # fmt: skip
    else:
        yield ok("disk reads", str(speed))


def port(number: int = 10002) -> Iterable[Finding]:
    """Whether `ktransformers serve` can have its port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError:
            text = f"{number} is in use, by a server that runs or by another program"
            return [warning("port", text, f"ktransformers serve --port {number + 1}")]
    return [ok("port", f"{number} is free for ktransformers serve")]
