"""The bytes a second that this machine reads from RAM and from its GPUs: measured in a moment, then remembered.

A measurement on a busy machine comes out too low, and predictions from it would not be bounds. So the best that was
ever measured counts, and `ktransformers doctor` measures anew. The file is one per machine in the user's cache folder;
deleting it forgets.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from ktransformers.engine.model.threads import limit_torch_threads
from ktransformers.errors import KTransformersError
from ktransformers.kernels.cpu import WorkerPool, limits
from ktransformers.system.cores import allowed_cpus, cpu_quota
from ktransformers.system.cpu_names import cpu_name
from ktransformers.system.user_files import replace_own
from ktransformers.system.user_folders import user_cache_dir

__all__ = ["BandwidthFile", "bandwidths", "measure_gpu", "measure_ram"]

logger = logging.getLogger(__name__)

_FORMAT = 1
_RAM_BYTES = 512 << 20  # more than the caches of most processors, and a third of a second on two cores
_GPU_BYTES = 256 << 20
_REPEATS = 3


def measure_ram(num_threads: int, nbytes: int = _RAM_BYTES) -> float:
    """Measure the bytes a second that the worker threads read together, the best of a few rounds."""
    limit_torch_threads()
    pool = WorkerPool(num_threads)
    try:
        return limits.read_bandwidth(pool, nbytes, _REPEATS)
    finally:
        pool.close()


def measure_gpu(name: str, nbytes: int = _GPU_BYTES) -> float:
    """Measure the bytes a second that a copy within the GPU "cuda:N" reads and writes, the best of a few rounds."""
    device = torch.device(name)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = math.inf
    for _ in range(_REPEATS + 1):  # the first one warms up
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * nbytes / best


class BandwidthFile:
    """The file that keeps a bandwidth measured on this machine. key: everything that it depends on."""

    def __init__(self, key: Mapping[str, object], folder: Path | None = None) -> None:
        self._key = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
        digest = hashlib.sha256(self._key.encode()).hexdigest()[:20]
        self.path = (folder or user_cache_dir()) / "bandwidth" / f"{digest}.json"

    def read(self) -> float | None:
        """Return the bytes a second that the file holds, or None.

        A file that cannot be understood is one logged line, and is written anew.
        """
        try:
            held = json.loads(self.path.read_text(encoding="utf-8"))
            rate = float(held["bytes_per_s"]) if held["key"] == self._key else 0.0
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.info("%s cannot be used (%s): bandwidth is measured anew", self.path, error)
            return None
        return rate if 0 < rate < math.inf else None

    def keep(self, rate: float) -> float:
        """Return the larger of `rate` and what the file holds, which it holds from now on."""
        before = self.read()
        if before is not None and before >= rate:
            return before
        try:
            replace_own(self.path, json.dumps({"key": self._key, "bytes_per_s": rate}).encode())
        except OSError as error:
            logger.debug("%s cannot be written (%s): bandwidth will be measured every time", self.path, error)
        return rate


def bandwidths(
    devices: Iterable[str],
    num_threads: int,
    *,
    is_anew: bool = False,
    folder: Path | None = None,
    ram: Callable[[int], float] = measure_ram,
    gpu: Callable[[str], float] = measure_gpu,
) -> dict[str, float]:
    """Return the bytes a second of each device, measured or remembered.

    Those that cannot be measured are missing, with one logged line each.
    is_anew: measure what is remembered, too. ram takes the number of threads, gpu a device's name.
    """
    found = {}
    for device in devices:
        is_ram = device == "cpu"
        file = BandwidthFile(_key_of_ram(num_threads) if is_ram else _key_of_gpu(device), folder)
        known = None if is_anew else file.read()
        try:
            found[device] = known or file.keep(ram(num_threads) if is_ram else gpu(device))
        except (KTransformersError, RuntimeError, AssertionError, MemoryError, ValueError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            logger.info("the bandwidth of %s cannot be measured: %s", "RAM" if is_ram else device, first)
    return found


def _key_of_ram(num_threads: int) -> dict[str, object]:
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    allowed = sorted(allowed_cpus())  # another part of the machine has other channels, or slower cores
    return {"cpu": cpu_name(), "threads": num_threads, "pages": pages, "cpus": allowed, "quota": cpu_quota()}


def _key_of_gpu(name: str) -> dict[str, object]:
    shown = torch.cuda.get_device_name(torch.device(name)) if torch.cuda.is_available() else "none"
    return {"gpu": shown}
