"""What `bench` says of the machine and of the memory that was held."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ktransformers.bench.common import machine as bench_machine
from ktransformers.kernels.cpu import WorkerPool


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two devices with 10 and 20 GB; returns the devices whose peaks were reset."""
    reset: list[int] = []
    names = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda i: SimpleNamespace(name=f"gpu {i}", total_memory=(i + 1) * 10**10),
        "mem_get_info": lambda i: (10**9, (i + 1) * 10**10),
        "max_memory_reserved": lambda i: (4, 8)[i],
        "max_memory_allocated": lambda i: (3, 6)[i],
        "reset_peak_memory_stats": reset.append,
    }
    for name, function in names.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return reset


def test_vram_is_that_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = fake_cuda(monkeypatch)
    bench_machine.reset_vram_peak()
    assert reset == [0, 1]
    assert bench_machine.vram_peak() == bench_machine.VideoMemory(reserved=12, allocated=9, device_used=28 * 10**9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_machine.vram_peak() is None


def test_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    pool = WorkerPool(1)
    try:
        machine = bench_machine.describe_machine(pool)
    finally:
        pool.close()
    assert machine["gpus"] == [{"name": "gpu 0", "vram_gb": 10.0}, {"name": "gpu 1", "vram_gb": 20.0}]
    assert (machine["threads"], machine["torch"]) == (1, torch.__version__)
    assert machine["cpu"]
    assert machine["ram_gb"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are reset through /proc")
def test_ram_peak_counts_from_its_reset() -> None:
    nbytes = 256 << 20
    np.ones(nbytes, np.uint8)  # held and let go before: counts only until the reset
    high = bench_machine.ram_peak()
    if not bench_machine.reset_ram_peak():
        pytest.skip("this system does not let a process reset its peak")
    low = bench_machine.ram_peak()
    assert low <= high - nbytes // 2
    np.ones(nbytes, np.uint8)
    assert bench_machine.ram_peak() >= low + nbytes // 2
