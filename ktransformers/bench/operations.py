"""The CPU's native kernels beside the torch calls that they replace: products, attention, scans, norms.

torch gets the same number of threads and weights that are already fp32 in memory, so that a ratio above 1 means that
the native kernel is faster than torch would be after paying nothing for the conversion. GB/s counts the bytes of the
weights (or of the K/V cache) once per call. GFLOP/s are attention's, of what its rows see, beside what fused
multiplications and additions of fp32 reach in registers. Routed experts are measured by kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor

from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.random_weights import random_raw
from ktransformers.bench.common.report import Column, FigureTable, Record, Row
from ktransformers.bench.common.timing import best_time, torch_threads
from ktransformers.kernels.attention_call import AttentionCall, RowPages
from ktransformers.kernels.cpu import NATIVE_TYPES, WorkerPool, attention, limits, linear, rms_norm
from ktransformers.kernels.cpu.recurrent import scan_heads
from ktransformers.kernels.recurrent_call import ScanCall
from ktransformers.kernels.types import StateStep

__all__ = ["bench_operations"]

_COLUMNS = (
    Column("op", 34),
    Column("us", 10, ".1f"),
    Column("torch_us", 10, ".1f", "torch us"),
    Column("speedup", 8, ".2f", "x torch"),
    Column("gb_s", 7, ".1f", "GB/s"),
    Column("of_bandwidth", 8, ".0%", "of read"),
    Column("gflop_s", 8, ".0f", "GFLOP/s"),
    Column("of_fp32", 8, ".0%", "of fp32"),
)


@dataclass(frozen=True, slots=True)
class OperationCase:
    """A call to measure. nbytes: read at least. flops: fp32 multiplications and additions, where they are the bound."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    nbytes: int
    flops: int | None = None


def _linear(pool: WorkerPool, size: int) -> Iterator[OperationCase]:
    """[T, size] x [size, size]^T for every type."""
    dense = torch.randn(size, size)
    for tokens in (1, 256):
        x = torch.randn(tokens, size)
        for qtype in sorted(NATIVE_TYPES):
            weight = random_raw(qtype, size, size)
            ours = partial(linear, x, weight, pool)
            yield OperationCase(
                f"linear {qtype.name} T={tokens}", ours, partial(functional.linear, x, dense), weight.nbytes
            )


def _attention(pool: WorkerPool, size: int) -> Iterator[OperationCase]:
    """GQA 32 / 4 heads of 128, and MLA 16 heads of 512 + 64 over one latent head; 2 * size positions at most.

    A token of a long text, the last chunk of a text, and whole texts. gqa_bf16: products of bf16, of a cache of bf16.
    """
    page = 64
    for name, heads, kv_heads, dim_k, dim_v in (("gqa", 32, 4, 128, 128), ("mla", 16, 1, 576, 512)):
        for tokens, context in ((1, 2 * size), (size // 8, size // 2), (size // 4, size // 4), (size, size)):
            cache = torch.randn(context, kv_heads, dim_k)
            values = torch.randn(context, kv_heads, dim_v) if name == "gqa" else cache[..., :dim_v]
            table = torch.arange(context // page, dtype=torch.int32)[None]
            q = torch.randn(tokens, heads, dim_k)
            seqs = torch.zeros(tokens, dtype=torch.int32)
            lens = torch.arange(context - tokens + 1, context + 1)
            mask = torch.arange(context)[None] < lens[:, None]
            query, key, value = q.transpose(0, 1)[None], cache.transpose(0, 1)[None], values.transpose(0, 1)[None]
            sdpa = functional.scaled_dot_product_attention
            theirs = partial(sdpa, query, key, value, attn_mask=mask, enable_gqa=True)
            pages = RowPages(table, page, seqs, lens)
            ours = partial(attention, AttentionCall(q, cache, values, pages, 0.1), pool)
            nbytes = 4 * (cache.numel() + (values.numel() if name == "gqa" else 0))
            flops = 2 * int(lens.sum()) * heads * (dim_k + dim_v)
            yield OperationCase(f"attention {name} T={tokens} ctx={context}", ours, theirs, nbytes, flops)
            if name == "gqa":
                kept = cache.bfloat16(), values.bfloat16()
                ours = partial(attention, AttentionCall(q, *kept, pages, 0.1), pool, bf16_products=True)
                yield OperationCase(f"attention gqa_bf16 T={tokens} ctx={context}", ours, theirs, nbytes // 2, flops)


def _rms_norm(pool: WorkerPool, size: int) -> Iterator[OperationCase]:
    """[T, size]."""
    weight = torch.randn(size)
    for tokens in (1, 256):
        x = torch.randn(tokens, size)
        theirs = partial(functional.rms_norm, x, (size,), weight, 1e-6)
        yield OperationCase(f"rms_norm T={tokens}", partial(rms_norm, x, weight, 1e-6, pool), theirs, 8 * x.numel())


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule in torch, row by row; q and k as they are."""
    out = torch.empty_like(v)
    for row in range(len(q)):
        state = state * decay[row].exp()[:, None, None]
        delta = (v[row] - torch.einsum("hk,hkv->hv", k[row], state)) * beta[row][:, None]
        state = state + k[row][:, :, None] * delta[:, None]
        out[row] = torch.einsum("hk,hkv->hv", q[row], state)
    return out


def _delta_scan(pool: WorkerPool, size: int) -> Iterator[OperationCase]:
    """Gated DeltaNet, size / 128 heads of 128 x 128. Bytes: of the state, read and written once."""
    heads = size // 128
    for tokens in (1, 64):
        q, k, v = (torch.randn(tokens, heads, 128) for _ in range(3))
        decay, beta, states = -torch.rand(tokens, heads), torch.rand(tokens, heads), torch.zeros(1, heads, 128, 128)
        bounds, slot = (torch.tensor(x, dtype=torch.int32) for x in ([0, tokens], [0]))
        lens = torch.arange(1, tokens + 1, dtype=torch.int32)
        step = StateStep(bounds, slot, slot, torch.full_like(lens, -1), lens)
        ours = partial(scan_heads, ScanCall(q, k / 12, v, decay, beta, states, step), pool)
        theirs = partial(_delta_rule, q, k / 12, v, decay, beta, states[0].clone())
        yield OperationCase(f"delta_scan H={heads} T={tokens}", ours, theirs, 8 * states.numel())


_CASES = {"linear": _linear, "attention": _attention, "delta_scan": _delta_scan, "rms_norm": _rms_norm}


def _figures(case: OperationCase, seconds: float, machine: Row) -> Row:
    took, torch_took = best_time(case.ours, seconds), best_time(case.theirs, seconds)
    rate = case.nbytes / took / 1e9
    work = None if case.flops is None else case.flops / took / 1e9
    return {
        "op": case.name,
        "us": took * 1e6,
        "torch_us": torch_took * 1e6,
        "speedup": torch_took / took,
        "gb_s": rate,
        "of_bandwidth": rate / machine["read_bandwidth_gb_s"],
        "gflop_s": work,
        "of_fp32": None if work is None else work / machine["fp32_peak_gflop_s"],
    }


def bench_operations(names: Sequence[str], threads: int, seconds: float, size: int) -> Record:
    """Measure the native kernels beside torch; print a table, a line per kernel and shape. names: of those in `_CASES`.

    seconds: per figure.
    """
    pool = WorkerPool(threads)
    try:
        machine = machine_facts(pool) | {"fp32_peak_gflop_s": limits.fp32_peak(pool) / 1e9}
        print(f"{shown_machine(machine)}, {machine['fp32_peak_gflop_s']:.0f} GFLOP/s of fp32")
        table = FigureTable(_COLUMNS)
        with torch.inference_mode(), torch_threads(threads):
            for case in (case for name in names for case in _CASES[name](pool, size)):
                table.add(_figures(case, seconds, machine))
    finally:
        pool.close()
    return {"machine": machine, "rows": table.rows}
