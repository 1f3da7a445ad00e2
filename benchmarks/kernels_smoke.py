"""Times each native kernel against the torch path that it replaces; the last line is JSON.

    python benchmarks/kernels_smoke.py [--threads N] [--isa scalar|avx2|avx512_vnni] [--seconds S]

torch gets the same number of threads and weights that are already fp32 in memory, so that a ratio above 1 means that
the native kernel is faster than torch would be after paying nothing for the conversion. GB/s counts the bytes of the
weights (or of the K/V cache) once per call.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as functional

from ktransformers.config import cpu_name
from ktransformers.kernels.cpu import NATIVE_TYPES, Isa, MoeKernel, WorkerPool, active_isa, attention, linear, rms_norm
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, QuantType, RawTensor, row_bytes

Timing = dict[str, object]


def best_time(run: Callable[[], object], seconds: float) -> float:
    """Shortest of the runs that fit in `seconds` (at least three), in seconds."""
    run()
    best, start, count = float("inf"), time.perf_counter(), 0
    while count < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
        count += 1
    return best


def random_weight(qtype: QuantType, *shape: int) -> RawTensor:
    """Weights with random bits. Their values do not matter for time, but NaN and subnormals would."""
    data = torch.randint(0, 120, (*shape[:-1], row_bytes(qtype, shape[-1])), dtype=torch.uint8)
    if qtype in (QuantType.F32, QuantType.F16, QuantType.BF16):
        dtype = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}[qtype]
        return RawTensor.from_tensor((torch.randn(shape) * 0.02).to(dtype))
    return RawTensor(data.reshape(-1), qtype, shape)


def record(name: str, ours: float, theirs: float, nbytes: int) -> Timing:
    """One row of the result, printed as it is made."""
    row: Timing = {
        "op": name,
        "us": round(ours * 1e6, 1),
        "torch_us": round(theirs * 1e6, 1),
        "speedup": round(theirs / ours, 2),
        "gb_per_s": round(nbytes / ours / 1e9, 2),
    }
    print(
        f"{name:34s} {row['us']:>10} us  torch {row['torch_us']:>9} us   x{row['speedup']:<5} {row['gb_per_s']:>6} GB/s"
    )
    return row


def bench_linear(pool: WorkerPool, seconds: float) -> list[Timing]:
    """[T, 2048] x [2048, 2048]^T for every type."""
    rows = []
    size = 2048
    dense = torch.randn(size, size)
    for tokens in (1, 256):
        x = torch.randn(tokens, size)
        theirs = best_time(partial(functional.linear, x, dense), seconds)
        for qtype in sorted(NATIVE_TYPES):
            weight = random_weight(qtype, size, size)
            ours = best_time(partial(linear, x, weight, pool), seconds)
            rows.append(record(f"linear {qtype.name} T={tokens}", ours, theirs, weight.nbytes))
    return rows


def eager_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The loop of transformers' eager experts: one index_add per expert that a token chose."""
    out = torch.zeros_like(x)
    mask = functional.one_hot(ids, gate_up.shape[0]).permute(2, 1, 0)
    for expert in mask.sum(dim=(1, 2)).nonzero().flatten().tolist():
        slot, token = torch.where(mask[expert])
        gate, up = functional.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        y = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, token, y * weights[token, slot, None])
    return out


def bench_moe(pool: WorkerPool, seconds: float) -> list[Timing]:
    """16 experts of width 768, top-4, hidden size 2048."""
    rows = []
    experts, width, hidden, top_k = 16, 768, 2048, 4
    gate_up, down = torch.randn(experts, 2 * width, hidden) * 0.02, torch.randn(experts, hidden, width) * 0.02
    for tokens in (1, 256):
        x = torch.randn(tokens, hidden)
        ids = torch.rand(tokens, experts).topk(top_k).indices
        weights = torch.rand(tokens, top_k)
        theirs = best_time(partial(eager_experts, x, ids, weights, gate_up, down), seconds)
        for qtype in (QuantType.BF16, QuantType.Q8_0, QuantType.Q4_K, QuantType.Q6_K):
            gates = [random_weight(qtype, width, hidden) for _ in range(experts)]
            ups = [random_weight(qtype, width, hidden) for _ in range(experts)]
            downs = [random_weight(qtype, hidden, width) for _ in range(experts)]
            kernel = MoeKernel(ExpertWeights(gates, ups, downs), ActivationSpec(), pool)
            ours = best_time(partial(kernel.forward, x, ids, weights), seconds)
            used = len(set(ids.flatten().tolist()))
            rows.append(record(f"moe {qtype.name} T={tokens}", ours, theirs, used * 3 * gates[0].nbytes))
    return rows


def bench_attention(pool: WorkerPool, seconds: float) -> list[Timing]:
    """GQA 32 / 4 heads of 128, and MLA 16 heads of 512 + 64 over one latent head."""
    rows = []
    page = 64
    for name, heads, kv_heads, dim_k, dim_v in (("gqa", 32, 4, 128, 128), ("mla", 16, 1, 576, 512)):
        for tokens, context in ((1, 4096), (256, 1024)):
            cache = torch.randn(context, kv_heads, dim_k)
            values = torch.randn(context, kv_heads, dim_v) if name == "gqa" else cache[..., :dim_v]
            table = torch.arange(context // page, dtype=torch.int32)[None]
            q = torch.randn(tokens, heads, dim_k)
            seqs = torch.zeros(tokens, dtype=torch.int32)
            lens = torch.arange(context - tokens + 1, context + 1)
            mask = torch.arange(context)[None] < lens[:, None]
            query, key, value = q.transpose(0, 1)[None], cache.transpose(0, 1)[None], values.transpose(0, 1)[None]
            theirs = best_time(
                partial(functional.scaled_dot_product_attention, query, key, value, attn_mask=mask, enable_gqa=True),
                seconds,
            )
            ours = best_time(
                partial(attention, q, cache, values, table, page, seqs, lens, 0.1, pool),
                seconds,
            )
            shared = 0 if name == "mla" else values.numel()
            rows.append(
                record(f"attention {name} T={tokens} ctx={context}", ours, theirs, 4 * (cache.numel() + shared))
            )
    return rows


def bench_rms_norm(pool: WorkerPool, seconds: float) -> list[Timing]:
    """[T, 2048]."""
    rows = []
    weight = torch.randn(2048)
    for tokens in (1, 256):
        x = torch.randn(tokens, 2048)
        theirs = best_time(partial(functional.rms_norm, x, (2048,), weight, 1e-6), seconds)
        ours = best_time(partial(rms_norm, x, weight, 1e-6, pool), seconds)
        rows.append(record(f"rms_norm T={tokens}", ours, theirs, 8 * x.numel()))
    return rows


def main() -> None:
    """Parse the options, run every benchmark, print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=[isa.value for isa in Isa], default=None)
    parser.add_argument("--seconds", type=float, default=0.2, help="time to spend on each measurement")
    parser.add_argument("--only", nargs="*", choices=["linear", "moe", "attention", "rms_norm"], default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    pool = WorkerPool(options.threads, Isa(options.isa) if options.isa else active_isa())
    machine = {"cpu": cpu_name(), "threads": options.threads, "isa": pool.isa.value, "torch": torch.__version__}
    print(machine)
    benches = {"linear": bench_linear, "moe": bench_moe, "attention": bench_attention, "rms_norm": bench_rms_norm}
    with torch.inference_mode():
        rows = [row for name in options.only or benches for row in benches[name](pool, options.seconds)]
    print(json.dumps({"bench": "kernels_smoke", **machine, "rows": rows}))


if __name__ == "__main__":
    main()
