"""The machine that a figure was measured on, and the memory that it took at most."""

from __future__ import annotations

import logging
import platform
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ktransformers.kernels.cpu import WorkerPool, limits
from ktransformers.optimize.machine import detect_machine
from ktransformers.system.cores import usable_cores
from ktransformers.system.cpu_names import cpu_name

__all__ = [
    "VideoMemory",
    "describe_machine",
    "machine_facts",
    "measured_machine",
    "ram_now",
    "ram_peak",
    "reset_ram_peak",
    "reset_vram_peak",
    "shown_machine",
    "vram_peak",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VideoMemory:
    """Bytes of memory over all CUDA devices.

    reserved: most that torch's allocator took from them; allocated: of that, in use.
    device_used: in use now by everybody, contexts and other programs too.
    """

    reserved: int
    allocated: int
    device_used: int


def describe_machine(pool: WorkerPool | None = None) -> dict[str, Any]:
    """Return CPU, memory, GPUs and versions, as plain data; of a pool, its threads, instruction set and nodes too."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    used = {} if pool is None else {"threads": pool.num_threads, "isa": pool.isa.value, "numa_nodes": pool.num_nodes}
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        **used,
        "ram_gb": round(detect_machine().ram_bytes / 1e9, 1),
        "gpus": [{"name": gpu.name, "vram_gb": round(gpu.total_memory / 1e9, 1)} for gpu in gpus],
        "cuda": torch.version.cuda if gpus else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def machine_facts(pool: WorkerPool) -> dict[str, Any]:
    """Return describe_machine, and what the pool's threads can do at best: GB/s read, int8 TOP/s."""
    bandwidth, peak = limits.read_bandwidth(pool), limits.int8_peak(pool)
    return describe_machine(pool) | {"read_bandwidth_gb_s": bandwidth / 1e9, "int8_peak_top_s": peak / 1e12}


def measured_machine(threads: int) -> dict[str, Any]:
    """Return machine_facts of a pool of `threads`, which is closed afterwards."""
    pool = WorkerPool(threads)
    try:
        return machine_facts(pool)
    finally:
        pool.close()


def shown_machine(machine: dict[str, Any]) -> str:
    """Return machine_facts as the beginning of a line."""
    rate = machine["read_bandwidth_gb_s"]
    return f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}; reads {rate:.1f} GB/s"


def reset_ram_peak() -> bool:
    """Restart the count of `ram_peak`. Returns False where the system cannot do that (it is Linux that can)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        logger.info("the peak of memory counts from the start of the program: %s", error)
        return False
    return True


def ram_peak() -> int:
    """Return the most bytes of RAM that this process has held, mapped files included."""
    return _ram("VmHWM:")


def ram_now() -> int:
    """Return the bytes of RAM that this process holds, mapped files included; where unknown, the most it has held."""
    return _ram("VmRSS:")


def _ram(line_of: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(line_of))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def reset_vram_peak() -> None:
    """Restart the count of `vram_peak`."""
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)


def vram_peak() -> VideoMemory | None:
    """Return the most VRAM that this process has held, or None without CUDA."""
    if not torch.cuda.is_available():
        return None
    devices = range(torch.cuda.device_count())
    free_and_total = [torch.cuda.mem_get_info(device) for device in devices]
    return VideoMemory(
        sum(torch.cuda.max_memory_reserved(device) for device in devices),
        sum(torch.cuda.max_memory_allocated(device) for device in devices),
        sum(total - free for free, total in free_and_total),
    )
