"""Measures what predictions need of a GPU: its memory, its products, PCIe both ways, launches, handing over to the CPU.

Products are the kernels' own, replayed from a graph over weights larger than the L2 cache, in the shape of an attention
projection. A kernel takes its time however small it is, which is part of what a layer costs; so the time of a byte is
the difference of a large matrix and a small one. Experts on a GPU read their weights as these do, so their times are
taken from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import torch

from ktransformers.bench.bandwidth import measure_gpu
from ktransformers.bench.gpu.device import BF16, Gpu
from ktransformers.bench.gpu.hand_over import HandOverWork, measure_hand_over
from ktransformers.bench.gpu.linear import random_weights
from ktransformers.bench.probe_steps import launch_costs
from ktransformers.config import EngineConfig
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.triton.linear import Workspace, linear
from ktransformers.kernels.triton.relay import GpuLayout
from ktransformers.kernels.types import QuantType
from ktransformers.optimize.machine_speed import Curve, GpuSpeed

__all__ = ["probe_gpu", "probe_pcie"]

_ROWS, _FEW_ROWS, _COLS = 5120, 512, 2048
_TOKENS = (1, 16, 64, 512)
_TYPES = (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.MXFP4)
_MATMUL = 4096
_PCIE_BYTES = 256 << 20


def probe_gpu(name: str, threads: int, say: Callable[[str], None] = lambda text: None) -> GpuSpeed:
    """Everything of the GPU "cuda:N". threads: of the CPU, which experts are handed over to. say: told what is next."""
    with torch.cuda.device(name), torch.inference_mode():
        gpu = Gpu()
        say(f"memory of {name}, PCIe")
        read, (to_gpu, from_gpu) = measure_gpu(name), probe_pcie(name)
        say(f"products of {name}")
        curves = {qtype.name: _curve(gpu, qtype) for qtype in _TYPES} | {"BF16": _bf16_curve(gpu)}
        a, b = gpu.randn(_MATMUL, _MATMUL), gpu.randn(_MATMUL, _MATMUL)
        matmul = 2e6 * _MATMUL**3 / gpu.median_us(lambda: a @ b)
        say(f"launches of {name}")
        one = torch.zeros(1, device=gpu.device)
        launch = 1e-6 * gpu.graph_us([partial(one.add_, 1.0)] * 100)
        with closing(WorkerPool(threads)) as pool:
            hand_over = measure_hand_over(pool, HandOverWork(("empty",), (1,), 24, threads, 0, 50.0))
    say(f"steps of small models on {name}")
    steps, launches = launch_costs(threads, EngineConfig(use_cuda=True))
    return GpuSpeed(
        name=torch.cuda.get_device_name(name),
        read=read,
        matmul=matmul,
        to_gpu=to_gpu,
        from_gpu=from_gpu,
        launch=launch,
        hand_over=hand_over,
        linear=curves,
        experts={kind: curve for kind, curve in curves.items() if kind != "BF16"},
        steps=steps,
        launches=launches,
    )


def probe_pcie(name: str, nbytes: int = _PCIE_BYTES) -> tuple[float, float]:
    """Bytes a second to the GPU and from it, out of pinned memory; the best of a few copies."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=name)

    def rate(copy: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(4):
            torch.cuda.synchronize(name)
            began = time.perf_counter()
            copy()
            torch.cuda.synchronize(name)
            best = min(best, time.perf_counter() - began)
        return nbytes / best

    there_rate = rate(lambda: there.copy_(host, non_blocking=True))
    return there_rate, rate(lambda: host.copy_(there, non_blocking=True))


def _curve(gpu: Gpu, qtype: QuantType) -> Curve:
    few, many = (_times(gpu, qtype, rows) for rows in (_FEW_ROWS, _ROWS))
    nbytes = random_weights(gpu, qtype, _ROWS, _COLS)[0].numel()
    return _slope(few, many, nbytes)


def _times(gpu: Gpu, qtype: QuantType, rows: int) -> list[float]:
    """Seconds of a product with [rows, _COLS] at each of _TOKENS."""
    weights = random_weights(gpu, qtype, rows, _COLS)
    seconds = []
    for count in _TOKENS:
        x, out = gpu.randn(count, _COLS), torch.empty(count, rows, dtype=BF16, device=gpu.device)
        space = Workspace.allocate(gpu.device, count)
        calls = [
            partial(linear, x, one, qtype, rows, _COLS, out=out, layout=GpuLayout.PLANES, workspace=space)
            for one in weights
        ]
        seconds.append(1e-6 * gpu.graph_us(calls))
    return seconds


def _bf16_curve(gpu: Gpu) -> Curve:
    times = []
    for rows in (_FEW_ROWS, _ROWS):
        weights = [gpu.randn(rows, _COLS) for _ in range(gpu.copies(2 * rows * _COLS))]
        inputs = [gpu.randn(count, _COLS) for count in _TOKENS]
        calls = [[partial(torch.nn.functional.linear, x, one) for one in weights] for x in inputs]
        times.append([1e-6 * gpu.graph_us(some) for some in calls])
    return _slope(times[0], times[1], 2 * _ROWS * _COLS)


def _slope(few: Sequence[float], many: Sequence[float], nbytes: int) -> Curve:
    """Seconds of a byte. few, many: of matrices of _FEW_ROWS and _ROWS; nbytes: of the latter."""
    more = nbytes * (1 - _FEW_ROWS / _ROWS)
    return Curve(tuple(map(float, _TOKENS)), tuple(max(b - a, 0.0) / more for a, b in zip(few, many, strict=True)))
