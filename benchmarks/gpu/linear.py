"""The Triton products with quantized weights, on real shapes.

Each line: microseconds per call, the bytes of the weights that the call needs over that time, and the arithmetic over
that time. Calls are replays of a CUDA graph that walks through copies of the weights (or through routings) larger than
the L2 cache, so that weights come from memory. Weights are random bits: their numbers mean nothing, the tests check
results. For experts the mean number of distinct experts per call is printed: it is what the bytes follow from.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.bench.gpu.device import BF16, Gpu, shown_gpu
from ktransformers.bench.gpu.random_matrices import random_bytes, random_matrices, random_weights
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import chosen, numbers
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.kernels.triton.experts.align import moe_align
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices, MoeMatrices, RoutedRows
from ktransformers.kernels.triton.experts.moe import moe
from ktransformers.kernels.triton.experts.workspace import MoeWorkspace, block_rows
from ktransformers.kernels.triton.linear.linear import Workspace, linear
from ktransformers.kernels.triton.quant.dequant import WeightMatrix
from ktransformers.kernels.triton.quant.repack import CPU_PACKED_TYPES, GPU_TYPES, GpuLayout, repack
from ktransformers.kernels.types import OwnType, QuantType, WeightType, row_bytes
from ktransformers.operators.linear.matrix import gpu_layout

__all__ = ["COMPARED_TYPES", "bench_gpu_linear", "main"]

_COLUMNS = (
    Column("kernel", 7),
    Column("shape", 24),
    Column("type", 10),
    Column("tokens", 6),
    Column("us", 10, ".2f"),
    Column("gb_per_s", 8, ".1f", "GB/s"),
    Column("of_copy", 8, ".0%", "of copy"),
    Column("tflop_per_s", 8, ".2f", "TFLOP/s"),
    Column("distinct_experts", 8, ".1f", "experts"),
    Column("tokens_per_s", 10, ".0f", "tokens/s"),
    Column("of_q4_k", 8, ".2f", "of Q4_K"),
)

Q4, Q5, Q6, Q8 = QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0

#: What "types" compares: Q4_K, and then all other block types that the kernels read.
COMPARED_TYPES: tuple[WeightType, ...] = (
    Q4,
    *sorted((GPU_TYPES | CPU_PACKED_TYPES) - {Q4}, key=lambda qtype: qtype.name),
)

# (name, rows, cols, types)
_LINEARS: tuple[tuple[str, int, int, tuple[QuantType, ...]], ...] = (
    ("qwen3-30b qkv", 5120, 2048, (Q4, Q5, Q6, Q8, QuantType.Q4_0)),
    ("qwen3-30b o", 2048, 4096, (Q4, Q6)),
    ("qwen3-30b lm_head", 151936, 2048, (Q6,)),
    ("deepseek-v3 q_a", 1536, 7168, (Q4,)),
    ("deepseek-v3 o", 7168, 16384, (Q4, Q6)),
    ("deepseek-v3 shared up", 2048, 7168, (Q4,)),
)
_FP8S = (("deepseek-v3 kv_a", 576, 7168), ("deepseek-v3 q_b", 24576, 1536), ("deepseek-v3 o", 7168, 16384))
# (name, experts, top_k, hidden, width, type of gate and up, type of down)
_MOES = (
    ("qwen3-30b", 128, 8, 2048, 768, Q4, Q6),
    ("deepseek-v2-lite", 64, 6, 2048, 1408, Q4, Q8),
    ("deepseek-v3", 256, 8, 7168, 2048, Q4, Q6),
)


@dataclass(slots=True)
class _Work:
    """Calls to measure, each of which moves nbytes and computes flops."""

    kernel: str
    shape: str
    type: str
    tokens: int
    calls: Sequence[Callable[[], object]]
    nbytes: float
    flops: float = 0.0
    distinct_experts: float | None = None
    is_compared: bool = False  # with other types of the same shape: tokens a second are shown

    def row(self, gpu: Gpu, copy_rate: float) -> Row:
        """copy_rate: GB/s that the GPU copies."""
        us = gpu.graph_us(self.calls)
        rate = self.nbytes / us / 1e3
        return {
            "kernel": self.kernel,
            "shape": self.shape,
            "type": self.type,
            "tokens": self.tokens,
            "us": us,
            "gb_per_s": rate,
            "of_copy": rate / copy_rate,
            "tflop_per_s": self.flops / us / 1e6,
            "distinct_experts": self.distinct_experts,
            "tokens_per_s": self.tokens / us * 1e6 if self.is_compared else None,
            "of_q4_k": None,
        }


def _linear_works(
    gpu: Gpu, name: str, qtype: WeightType, shape: tuple[int, int], tokens: Sequence[int]
) -> Iterator[_Work]:
    n, k = shape
    layout = gpu_layout(qtype, n, k)
    weights = [WeightMatrix(data, qtype, n, k, layout) for data in random_weights(gpu, qtype, n, k)]
    for count in tokens:
        x, out = gpu.randn(count, k), torch.empty(count, n, dtype=BF16, device=gpu.device)
        space = Workspace.allocate(gpu.device, count)
        calls = [partial(linear, x, weight, out=out, workspace=space) for weight in weights]
        yield _Work("linear", name, qtype.name, count, calls, weights[0].data.numel(), 2 * count * n * k)


def linear_works(gpu: Gpu, tokens: Sequence[int]) -> Iterator[_Work]:
    """Quantized matrices."""
    for name, n, k, types in _LINEARS:
        for qtype in types:
            yield from _linear_works(gpu, name, qtype, (n, k), tokens)


def fp8_works(gpu: Gpu, tokens: Sequence[int]) -> Iterator[_Work]:
    """FP8 with block scales."""
    for name, n, k in _FP8S:
        size = n * k + 4 * -(-n // 128) * -(-k // 128)
        copies = [random_bytes(gpu, size) for _ in range(gpu.copies(size))]
        weights = [WeightMatrix(data, OwnType.F8_E4M3, n, k, GpuLayout.PLANES) for data in copies]
        for count in tokens:
            x, out = gpu.randn(count, k), torch.empty(count, n, dtype=BF16, device=gpu.device)
            space = Workspace.allocate(gpu.device, count)
            calls = [partial(linear, x, weight, out=out, workspace=space) for weight in weights]
            yield _Work("fp8", name, "e4m3", count, calls, size, 2 * count * n * k)


def _routings(gpu: Gpu, tokens: int, top_k: int, num_experts: int, count: int) -> list[Tensor]:
    """Evenly spread routing: distinct experts for each token."""
    return [
        torch.rand(tokens, num_experts, device=gpu.device).argsort(dim=1)[:, :top_k].to(torch.int32).contiguous()
        for _ in range(count)
    ]


@dataclass(frozen=True, slots=True)
class _Experts:
    """Of a layer: name, number, experts of a token, sizes, type of gate and up, type of down."""

    name: str
    num: int
    top_k: int
    hidden: int
    width: int
    first: WeightType
    second: WeightType

    def works(self, gpu: Gpu, tokens: Sequence[int]) -> Iterator[_Work]:
        """With so many tokens each."""

        def matrices(qtype: WeightType, n: int, k: int) -> ExpertMatrices:
            return ExpertMatrices(random_matrices(gpu, qtype, n, k, self.num), qtype, n, k, gpu_layout(qtype, n, k))

        gate, up = (matrices(self.first, self.width, self.hidden) for _ in range(2))
        down = matrices(self.second, self.hidden, self.width)
        experts = MoeMatrices(gate, up, down)
        for count in tokens:
            ids = _routings(gpu, count, self.top_k, self.num, 16 if count <= 64 else 2)
            distinct = sum(len(set(i.flatten().tolist())) for i in ids) / len(ids)
            x, weights = gpu.randn(count, self.hidden), torch.rand(count, self.top_k, device=gpu.device)
            out = torch.empty_like(x)
            space = MoeWorkspace.allocate(x, self.top_k, self.num, up, down)
            yield _Work(
                kernel="moe",
                shape=self.name,
                type=f"{self.first.name}/{self.second.name}",
                tokens=count,
                calls=[partial(moe, RoutedRows(x, i, weights), experts, out, workspace=space) for i in ids],
                nbytes=distinct * (gate.nbytes + up.nbytes + down.nbytes),
                flops=6 * count * self.top_k * self.hidden * self.width,
                distinct_experts=distinct,
            )


def moe_works(gpu: Gpu, tokens: Sequence[int]) -> Iterator[_Work]:
    """The experts of a layer."""
    for one in _MOES:
        yield from _Experts(*one).works(gpu, tokens)


def type_works(gpu: Gpu, tokens: Sequence[int], types: Sequence[WeightType] = COMPARED_TYPES) -> Iterator[_Work]:
    """A matrix and the experts of a layer, all in one type after another."""
    for qtype in types:
        name, rows, cols, _ = _LINEARS[0]
        works = [
            _linear_works(gpu, name, qtype, (rows, cols), tokens),
            _Experts(*_MOES[0][:5], qtype, qtype).works(gpu, tokens),
        ]
        for work in chain(*works):
            work.is_compared, work.type = True, qtype.name
            yield work


def align_works(gpu: Gpu, tokens: Sequence[int]) -> Iterator[_Work]:
    """Sorting rows by expert."""
    for count in tokens:
        ids = _routings(gpu, count, 8, 128, 1)[0]
        block = block_rows(ids.numel(), 128)
        out = moe_align(ids, 128, block)
        calls = [partial(moe_align, ids, 128, block, out=out)]
        yield _Work("align", "128 experts, top 8", f"block {block}", count, calls, ids.numel() * 4)


def repack_works(gpu: Gpu, tokens: Sequence[int]) -> Iterator[_Work]:
    """From a file's layout to the GPU's, whatever the tokens."""
    for qtype in (Q4, Q6):
        raw = random_bytes(gpu, 16 * 2048 * row_bytes(qtype, 768)).view(16, -1)
        calls = [partial(repack, raw, qtype, 2048, 768)]
        yield _Work("repack", "16 x 2048 x 768", qtype.name, 0, calls, raw.numel())


_WORKS: dict[str, Callable[[Gpu, Sequence[int]], Iterator[_Work]]] = {
    "linear": linear_works,
    "fp8": fp8_works,
    "moe": moe_works,
    "types": type_works,
    "align": align_works,
    "repack": repack_works,
}


def bench_gpu_linear(
    kernels: Sequence[str], tokens: Sequence[int], gpu: Gpu | None = None, types: Sequence[WeightType] = COMPARED_TYPES
) -> Record:
    """Print a table, a line per kernel, shape, type and number of tokens.

    kernels: of _WORKS. types: of "types", shown beside Q4_K where that comes first.
    """
    gpu = gpu or Gpu()
    facts = gpu.facts()
    print(shown_gpu(facts))
    table = FigureTable(_COLUMNS)
    us_of_q4 = dict[tuple[str, int], float]()
    for kernel in kernels:
        works = type_works(gpu, tokens, types) if kernel == "types" else _WORKS[kernel](gpu, tokens)
        for work in works:
            row = work.row(gpu, facts["copy_gb_s"])
            if work.is_compared:
                us_of_q4.setdefault((work.kernel, work.tokens), row["us"] if work.type == Q4.name else math.nan)
                ratio = us_of_q4[work.kernel, work.tokens] / row["us"]
                row["of_q4_k"] = None if math.isnan(ratio) else ratio
            table.add(row)
    return {"machine": facts, "rows": table.rows}


def _measure_linear(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    names, tokens = chosen(args.only, "only", list(_WORKS)), numbers(args.tokens, "tokens")
    known = {qtype.name: qtype for qtype in COMPARED_TYPES}
    types = [known[name] for name in chosen(args.types.upper() or ",".join(known), "types", list(known))]
    return print_record("gpu_linear", args.json, partial(bench_gpu_linear, names, tokens, types=types))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "Products with quantized weights on a GPU, in the shapes of several models: microseconds, GB/s, TFLOP/s."
    parser, group = benchmark_parser("gpu.linear", text, _measure_linear)
    text = "some of these (%(default)s)"
    group.add_argument("--only", default=",".join(_WORKS), metavar="NAMES", help=text)
    text = "of weights that `types` measures, beside Q4_K where that comes first (all that are read)"
    group.add_argument("--types", default="", metavar="NAMES", help=text)
    group.add_argument("--tokens", default="1,2,4,8,16,64,512,2048", help="token counts (%(default)s)")
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
