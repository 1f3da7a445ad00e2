"""benchmarks.roofline: measures the routed experts, and a GPU's products where there is one, and draws them.

The picture has them, and the peers', against the bandwidth and the products that the same run measured. Records of
earlier runs are drawn without measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.linear import bench_gpu_linear
from benchmarks.kernels.measure import KernelWork, bench_kernels
from benchmarks.roofline.picture import draw
from benchmarks.roofline.points import panels_of, point_rows, records_in
from ktransformers.bench.common.machine import shown_machine
from ktransformers.bench.common.report import Record
from ktransformers.bench.gpu.device import shown_gpu
from ktransformers.kernels.triton.common import runtime

__all__ = ["bench_roofline", "draw_recorded"]


def bench_roofline(work: KernelWork, picture: Path) -> Record:
    """Measure, print tables, write the SVG. The record is that of benchmarks.kernels, with the GPU's and all points."""
    cpu = bench_kernels(work)
    return _drawn(cpu, _measured_gpu(work.tokens), picture)


def draw_recorded(paths: Sequence[Path], picture: Path) -> Record:
    """The same of what files of JSON lines have last. Raises ConfigError where there is nothing to draw."""
    cpu, gpu = records_in(paths)
    if cpu is not None:
        print(shown_machine(cpu["machine"]))
    if gpu is not None:
        print(shown_gpu(gpu["machine"]))
    return _drawn(cpu, gpu, picture)


def _measured_gpu(tokens: Sequence[int]) -> Record | None:
    reason = runtime.available()
    if not torch.cuda.is_available() or reason is not None:
        print(f"the CPU alone is drawn: {reason or 'there is no CUDA device'}")
        return None
    return bench_gpu_linear(["linear", "moe"], tokens)


def _drawn(cpu: Record | None, gpu: Record | None, picture: Path) -> Record:
    panels = panels_of(cpu, gpu)
    points = point_rows(panels)
    picture.write_text(draw("What the kernels reach of what this machine can do", panels), encoding="utf-8")
    print(f"{picture}: open it in a browser")
    first: Record = cpu or gpu or {}
    return {**first, "bench": "roofline", "gpu": gpu if cpu else None, "points": points, "picture": str(picture)}
