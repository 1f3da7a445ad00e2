"""Rehearses launches as on an H100, on a machine without a GPU: Triton compiles for one, and nothing is launched.

    python -m tests.support.triton_kernels.rehearse_launches

Prints "rehearsed KERNELS compiled|from disk VARIANTS", of two devices, then what the log says of a variant that nobody
rehearsed.
"""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

from ktransformers.kernels.cpu.router import RouterSpec
from ktransformers.kernels.triton.common import elementwise
from ktransformers.kernels.triton.common.compiling import loading, warmup, watch_launches
from ktransformers.kernels.triton.experts.router import topk_router

DRIVER = SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)


def calls():
    outs = []
    for width in (64, 128):
        x = torch.empty(3, width, dtype=torch.bfloat16)
        outs.append(elementwise.rms_norm(x, x[0], 1e-6))
        elementwise.rms_norm(x[:2], x[0], 1e-6)  # the same variant
    outs.append(topk_router(torch.zeros(2, 8), RouterSpec(2))[0])
    return outs


def main():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
    triton.runtime.driver.set_active(DRIVER)
    reports = []
    with loading(), warmup(lambda done, total: reports.append((done, total))) as found:
        assert not any(out.any() for out in calls()), "what was not computed is 0"
        DRIVER.get_current_device = lambda: 1
        calls()
    total = found.num_compiled + found.num_from_disk
    assert reports == [(done, total) for done in range(total + 1)], reports
    caches = [elementwise._rms_norm_kernel.device_caches[device][0] for device in (0, 1)]
    assert all(caches[0][key] is not caches[1][key] for key in caches[0]), "each device loads its own"
    print("rehearsed", total, "from disk" if found.num_from_disk == total else "compiled", len(found.variants))
    with watch_launches(lambda variant: None, launches=False):  # as if launched, which takes a GPU
        calls()
        x = torch.empty(3, 32, dtype=torch.float32)
        elementwise.rms_norm(x, x[0], 1e-6)


if __name__ == "__main__":
    main()
