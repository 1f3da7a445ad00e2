"""The GPU that is measured: how long calls take on it, and what it can do at best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ktransformers.bench.common.bandwidth import measure_gpu
from ktransformers.bench.common.machine import describe_machine
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.triton.common import runtime

__all__ = ["BF16", "Gpu", "relative_error", "require_gpu", "shown_gpu"]

BF16 = torch.bfloat16
_L2_BYTES = 128 << 20  # more than any L2 cache holds
_MATMUL_SIZE = 8192


def require_gpu() -> None:
    """Raise UnsupportedError when there is no GPU that Triton can use."""
    reason = runtime.available()
    if reason is not None or not torch.cuda.is_available():
        raise UnsupportedError(f"this measures a GPU: {reason or 'there is no CUDA device'}")


class Gpu:
    """The current CUDA device. Raises UnsupportedError when there is none that Triton can use."""

    def __init__(self) -> None:
        require_gpu()
        self.device = torch.device("cuda")
        torch.manual_seed(0)

    def facts(self) -> dict[str, Any]:
        """Return the machine, GB/s of a copy within the GPU, and TFLOP/s of a large matrix product in bf16."""
        a, b = self.randn(_MATMUL_SIZE, _MATMUL_SIZE), self.randn(_MATMUL_SIZE, _MATMUL_SIZE)
        rate = 2e-6 * _MATMUL_SIZE**3 / self.median_us(lambda: a @ b)
        limits = {"copy_gb_s": measure_gpu("cuda:0") / 1e9, "matmul_tflop_s": rate}
        return describe_machine() | {"triton": runtime.triton.__version__} | limits

    def randn(self, *shape: int) -> Tensor:
        """Return normally distributed numbers in bf16."""
        return torch.randn(*shape, device=self.device, dtype=BF16)

    def copies(self, nbytes: int) -> int:
        """Return how many sets of inputs exceed the L2 cache; at least four, so that launches overlap as in a model."""
        return max(4, min(64, -(-_L2_BYTES // nbytes)))

    def median_us(self, call: Callable[[], object], repeats: int = 7, warm_ups: int = 2) -> float:
        """Return the median microseconds of a call on the GPU, once it is compiled and warm."""
        for _ in range(warm_ups):
            call()
        cuda: Any = torch.cuda
        times: list[float] = []
        for _ in range(repeats):
            start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(1000 * start.elapsed_time(stop))
        return statistics.median(times)

    def graph_us(self, calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
        """Return the median microseconds of one of `calls`, from replays of a graph of all of them."""
        cuda: Any = torch.cuda
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            for call in calls:
                call()
        stream.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            for call in calls:
                call()
        return self.median_us(graph.replay, repeats, warm_ups=3) / len(calls)


def shown_gpu(facts: dict[str, Any]) -> str:
    """Return Gpu.facts as a line."""
    return (
        f"{facts['gpus'][0]['name']}: copies {facts['copy_gb_s']:.0f} GB/s, matrix products "
        f"{facts['matmul_tflop_s']:.0f} TFLOP/s"
    )


def relative_error(out: Tensor, want: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((out.float() - want.float()).abs().max() / want.float().abs().max())
