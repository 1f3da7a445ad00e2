"""Sums over GPUs of a machine: `python -m benchmarks.gpu.sums --gpus 2 [--width 5120]`.

Microseconds of one sum of fp32 [rows, width], replayed in a graph, by each way there is; then of products of a layer's
shape whose results are added up (engine/parallel/tensor_parallel). Tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from ktransformers.engine.parallel.tensor_parallel.collectives import (
    Collectives,
    GroupCollectives,
    PeerKernel,
    SymmetricCollectives,
    TorchKernels,
)
from ktransformers.engine.parallel.tensor_parallel.group import TensorGroup
from ktransformers.kernels.triton.quant.dequant import WeightMatrix
from ktransformers.kernels.triton.quant.repack import GpuLayout, repack
from ktransformers.kernels.types import QuantType
from ktransformers.operators.device import Device
from ktransformers.operators.linear.matrix import QuantizedMatrix, fp32_product

ROWS = (1, 2, 8, 64, 512, 2048)
Call = Callable[[], object]
Figures = dict[str, float]


def _median_us(call: Call, count: int) -> float:
    """Return the microseconds of one of the `count` sums that a call makes."""
    times: list[float] = []
    for _ in range(12):
        distributed.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / count)
    return statistics.median(times[2:])


def _graph_us(call: Call, count: int = 20) -> float:
    """Return the microseconds of one call of `count` in a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return _median_us(graph.replay, count)


def _ways(sums: SymmetricCollectives | None, rows: int, width: int) -> Iterator[tuple[str, Call]]:
    """Yield each way to add up a share, by name."""
    share = torch.zeros(rows, width, device="cuda")
    half = share.to(torch.bfloat16)
    yield "nccl bf16", lambda: distributed.all_reduce(half)
    yield "nccl", lambda: distributed.all_reduce(share)
    if sums is None:
        return
    memory, kernels, world = sums.memory(rows, width), torch.ops.symm_mem, distributed.group.WORLD
    assert memory is not None
    assert world is not None
    memory.zero_()
    yield "one-shot", lambda: kernels.one_shot_all_reduce_out(memory, "sum", world.group_name, share)
    yield "two-shot", lambda: kernels.two_shot_all_reduce_(memory, "sum", world.group_name)
    kernel = sums._kernel
    if isinstance(kernel, PeerKernel):
        yield "ours", lambda: kernel.add(memory, share)
        yield "ours to bf16", lambda: kernel.add(memory, half)


def _products(group: TensorGroup, sums: SymmetricCollectives | None, width: int, cols: int, rows: int) -> Figures:
    """Return the milliseconds of a Q4_K product x [rows, cols] -> [rows, width]: alone, and added up by each way."""
    device = Device("cuda:0", torch.device("cuda:0"), torch.bfloat16, is_gpu=True)
    blocks = torch.randint(0, 60, (width * cols // 256 * 144,), dtype=torch.uint8, device="cuda")  # finite scales
    data = repack(blocks, QuantType.Q4_K, width, cols)
    matrix = QuantizedMatrix(device, WeightMatrix(data, QuantType.Q4_K, width, cols, GpuLayout.PLANES), None)
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    found = {"alone": _median_us(lambda: [matrix(x, torch.bfloat16) for _ in range(4)], 4) / 1000}
    ways: dict[str, Collectives] = {"nccl": GroupCollectives()}
    if sums is not None:
        kernels = TorchKernels(torch.ops.symm_mem, distributed.group.WORLD.group_name, group.size)  # type: ignore[union-attr]
        ways |= {"torch": SymmetricCollectives(sums._buffer, kernels, GroupCollectives()), "ours": sums}
    for name, way in ways.items():
        group._collectives = way

        def call() -> list[torch.Tensor]:
            return [group.sum_product(x, width, lambda part, to: fp32_product(matrix, part, to)) for _ in range(4)]

        found[name] = _median_us(call, 4) / 1000
    return found


def _measure(rank: int, size: int, folder: str, width: int, cols: list[int]) -> None:
    if rank:  # as processes of a model: the driver sees all GPUs
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(size))))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank]
    group = TensorGroup(rank, size)
    group.reserve(max(ROWS), width)
    group.rendezvous(Path(folder) / "meeting", torch.device("cuda:0"))
    sums = group._collectives if isinstance(group._collectives, SymmetricCollectives) else None
    with torch.inference_mode():
        by_rows = {str(rows): {name: _graph_us(call) for name, call in _ways(sums, rows, width)} for rows in ROWS}
        products = {f"{rows} x {k}": _products(group, sums, width, k, rows) for k in cols for rows in (512, 1024, 2048)}
    if not rank:
        _show("us a sum of fp32", by_rows)
        _show("ms a product with its sum", products)
        record = {"bench": "sums", "gpus": size, "width": width, "sums_us": by_rows, "products_ms": products}
        print(json.dumps(record), flush=True)
    torch.cuda.synchronize()
    group.leave()


def _show(title: str, table: dict[str, Figures]) -> None:
    names = list(next(iter(table.values())))
    print(f"{title:26}" + "".join(f"{name:>18}" for name in names))
    for row, values in table.items():
        print(f"{row:26}" + "".join(f"{values[name]:18.3f}" for name in names), flush=True)


def main() -> None:
    """Start a process for each GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--cols", type=int, nargs="*", default=[4096, 12800], help="of the products, of one process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = args.gpus, folder, args.width, args.cols
        spawn(_measure, ranks, nprocs=args.gpus)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
