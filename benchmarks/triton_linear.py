"""Times the Triton products with quantized weights on real shapes; the last line is JSON.

    python benchmarks/triton_linear.py [--only linear fp8 moe align relay] [--tokens 1 4 8 64 2048] [--milliseconds MS]

Each line: microseconds per call, the bytes of the weights that the call needs over that time, and the arithmetic over
that time. Calls are replays of a CUDA graph that walks through copies of the weights (or through routings) larger than
the L2 cache, so that weights come from memory. Weights are random bits: their numbers mean nothing, the tests check
results. For experts the mean number of distinct experts per call is printed: it is what the bytes follow from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ktransformers.kernels.triton import runtime
from ktransformers.kernels.triton.align import moe_align
from ktransformers.kernels.triton.linear import Workspace, linear
from ktransformers.kernels.triton.moe import ExpertMatrices, MoeWorkspace, block_rows, moe
from ktransformers.kernels.triton.relay import GpuLayout, relaid_nbytes, relay
from ktransformers.kernels.types import OwnType, QuantType, row_bytes

CACHE = 200 << 20  # bytes to walk through: more than any L2
Row = dict[str, object]
Q4, Q5, Q6, Q8 = QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0

# (name, rows, cols, types)
LINEARS: tuple[tuple[str, int, int, tuple[QuantType, ...]], ...] = (
    ("qwen3-30b qkv", 5120, 2048, (Q4, Q5, Q6, Q8, QuantType.Q4_0)),
    ("qwen3-30b o", 2048, 4096, (Q4, Q6)),
    ("qwen3-30b lm_head", 151936, 2048, (Q6,)),
    ("deepseek-v3 q_a", 1536, 7168, (Q4,)),
    ("deepseek-v3 o", 7168, 16384, (Q4, Q6)),
    ("deepseek-v3 shared up", 2048, 7168, (Q4,)),
)
FP8S = (("deepseek-v3 kv_a", 576, 7168), ("deepseek-v3 q_b", 24576, 1536), ("deepseek-v3 o", 7168, 16384))
# (name, experts, top_k, hidden, width, type of gate and up, type of down)
MOES = (
    ("qwen3-30b", 128, 8, 2048, 768, Q4, Q6),
    ("deepseek-v2-lite", 64, 6, 2048, 1408, Q4, Q8),
    ("deepseek-v3", 256, 8, 7168, 2048, Q4, Q6),
)


def seconds_per_call(calls: Sequence[Callable[[], object]], milliseconds: float) -> float:
    """Time of one of `calls`, over replays of a graph that holds all of them one after another."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replays, elapsed = 1, 0.0
    while True:
        start.record()
        for _ in range(replays):
            graph.replay()
        stop.record()
        stop.synchronize()
        elapsed = start.elapsed_time(stop)
        if elapsed >= milliseconds:
            return elapsed / 1e3 / replays / len(calls)
        replays = max(2 * replays, int(replays * milliseconds / max(elapsed, 1e-3)))


def report(kernel: str, shape: str, kind: str, tokens: int, seconds: float, nbytes: float, flops: float) -> Row:
    row: Row = {
        "kernel": kernel,
        "shape": shape,
        "type": kind,
        "tokens": tokens,
        "us": round(seconds * 1e6, 2),
        "gb_per_s": round(nbytes / seconds / 1e9, 1),
        "tflop_per_s": round(flops / seconds / 1e12, 2),
    }
    print(
        f"{kernel:8} {shape:24} {kind:10} T={tokens:<6} {row['us']:>10} us {row['gb_per_s']:>8} GB/s "
        f"{row['tflop_per_s']:>8} TFLOP/s",
        flush=True,
    )
    return row


def random_bytes(count: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda")


def copies(nbytes: int) -> int:
    return max(1, min(64, CACHE // nbytes))


def time_linear(tokens: Sequence[int], milliseconds: float) -> list[Row]:
    rows = []
    for name, n, k, types in LINEARS:
        for qtype in types:
            size = relaid_nbytes(qtype, n, k)
            weights = [random_bytes(size) for _ in range(copies(size))]
            for count in tokens:
                x = torch.randn(count, k, dtype=torch.bfloat16, device="cuda")
                out = torch.empty(count, n, dtype=torch.bfloat16, device="cuda")
                space = Workspace.allocate("cuda", count)
                calls = [
                    partial(linear, x, w, qtype, n, k, out=out, layout=GpuLayout.PLANES, workspace=space)
                    for w in weights
                ]
                seconds = seconds_per_call(calls, milliseconds)
                rows.append(report("linear", name, qtype.name, count, seconds, size, 2 * count * n * k))
    return rows


def time_fp8(tokens: Sequence[int], milliseconds: float) -> list[Row]:
    rows = []
    for name, n, k in FP8S:
        size = n * k + 4 * -(-n // 128) * -(-k // 128)
        weights = [random_bytes(size) for _ in range(copies(size))]
        for count in tokens:
            x = torch.randn(count, k, dtype=torch.bfloat16, device="cuda")
            out = torch.empty(count, n, dtype=torch.bfloat16, device="cuda")
            space = Workspace.allocate("cuda", count)
            options = {"out": out, "layout": GpuLayout.PLANES, "workspace": space}
            calls = [partial(linear, x, w, OwnType.F8_E4M3, n, k, **options) for w in weights]
            seconds = seconds_per_call(calls, milliseconds)
            rows.append(report("fp8", name, "e4m3", count, seconds, size, 2 * count * n * k))
    return rows


def routings(tokens: int, top_k: int, num_experts: int, count: int) -> list[Tensor]:
    """Evenly spread routing: distinct experts for each token."""
    return [
        torch.rand(tokens, num_experts, device="cuda").argsort(dim=1)[:, :top_k].to(torch.int32).contiguous()
        for _ in range(count)
    ]


def time_moe(tokens: Sequence[int], milliseconds: float) -> list[Row]:
    rows = []
    for name, num, top_k, hidden, width, first, second in MOES:

        def matrices(qtype: QuantType, n: int, k: int, num: int = num) -> ExpertMatrices:
            data = random_bytes(num * relaid_nbytes(qtype, n, k)).view(num, -1)
            return ExpertMatrices(data, qtype, n, k, layout=GpuLayout.PLANES)

        gate, up = matrices(first, width, hidden), matrices(first, width, hidden)
        down = matrices(second, hidden, width)
        expert_bytes = gate.nbytes + up.nbytes + down.nbytes
        for count in tokens:
            ids = routings(count, top_k, num, 16 if count <= 64 else 2)
            distinct = sum(len(i.unique()) for i in ids) / len(ids)
            x = torch.randn(count, hidden, dtype=torch.bfloat16, device="cuda")
            out = torch.empty_like(x)
            weights = torch.rand(count, top_k, device="cuda")
            space = MoeWorkspace.allocate(x, top_k, num, up, down)
            calls = [partial(moe, x, i, weights, gate, up, down, out, workspace=space) for i in ids]
            seconds = seconds_per_call(calls, milliseconds)
            flops = 6 * count * top_k * hidden * width
            row = report("moe", name, f"{first.name}/{second.name}", count, seconds, distinct * expert_bytes, flops)
            row["distinct_experts"] = round(distinct, 1)
            rows.append(row)
    return rows


def time_align(tokens: Sequence[int], milliseconds: float) -> list[Row]:
    rows = []
    for count in tokens:
        ids = routings(count, 8, 128, 1)[0]
        block = block_rows(ids.numel(), 128)
        out = moe_align(ids, 128, block)
        seconds = seconds_per_call([partial(moe_align, ids, 128, block, out=out)], milliseconds)
        rows.append(report("align", "128 experts, top 8", f"block {block}", count, seconds, ids.numel() * 4, 0))
    return rows


def time_repack(milliseconds: float) -> list[Row]:
    rows = []
    for qtype in (Q4, Q6):
        raw = random_bytes(16 * 2048 * row_bytes(qtype, 768)).view(16, -1)
        seconds = seconds_per_call([partial(relay, raw, qtype, 2048, 768)], milliseconds)
        rows.append(report("relay", "16 x 2048 x 768", qtype.name, 0, seconds, raw.numel(), 0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kernels = ("linear", "fp8", "moe", "align", "relay")
    parser.add_argument("--only", nargs="+", choices=kernels, default=kernels)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 64, 512, 2048])
    parser.add_argument("--milliseconds", type=float, default=30.0, help="of each measurement")
    arguments = parser.parse_args()
    reason = runtime.available()
    if reason is not None or not torch.cuda.is_available():
        parser.error(f"nothing to measure: {reason or 'no CUDA device'}")
    torch.manual_seed(0)
    rows: list[Row] = []
    if "linear" in arguments.only:
        rows += time_linear(arguments.tokens, arguments.milliseconds)
    if "fp8" in arguments.only:
        rows += time_fp8(arguments.tokens, arguments.milliseconds)
    if "moe" in arguments.only:
        rows += time_moe(arguments.tokens, arguments.milliseconds)
    if "align" in arguments.only:
        rows += time_align(arguments.tokens, arguments.milliseconds)
    if "relay" in arguments.only:
        rows += time_repack(arguments.milliseconds)
    device = torch.cuda.get_device_name()
    print(
        json.dumps({"device": device, "torch": torch.__version__, "triton": runtime.triton.__version__, "rows": rows})
    )


if __name__ == "__main__":
    main()
