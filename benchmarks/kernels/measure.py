"""Measures the routed experts of one layer, ours and peers' in turns, beside the read bandwidth of the same minute.

Layers take turns so that weights come from memory, not from caches. GB/s counts the weights of the experts that the
tokens touched; the limit of few tokens is the read bandwidth, that of many the products in registers. Weights are
random, routing is even. On request the same weights are measured with products of bf16 too (--cpu_prefill), and the
errors of both are stated. Each peer runs in a process of its own that is stopped while we measure others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch

from benchmarks.kernels.errors import relative_errors, with_wish
from benchmarks.peers.base import PeerProcess, is_missing, mean_time
from benchmarks.peers.kt_kernel import kt_kernel_peer
from benchmarks.peers.llama import llama_peer
from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.random_weights import random_weight
from ktransformers.bench.common.report import Column, FigureTable, Record, Row
from ktransformers.kernels.cpu import MoeKernel, WorkerPool, limits
from ktransformers.kernels.types import (
    ActivationSpec,
    ExpertWeight,
    ExpertWeights,
    GroupType,
    OwnType,
    QuantType,
    WeightType,
)
from ktransformers.operators.linear.packed import pack_experts

__all__ = ["KernelWork", "Shape", "bench_kernels"]

_PEERS = {
    "kt-kernel": ("kt_kernel", "kt-kernel", kt_kernel_peer),
    "llama.cpp": ("llama_cpp", "llama-cpp-python", llama_peer),
}
"""Name: package, name for pip, what starts it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """E experts, K per token, H hidden, I intermediate; layers are measured in turn."""

    experts: int
    top_k: int
    hidden: int
    width: int
    layers: int

    def shown(self) -> str:
        """For people."""
        return (
            f"{self.experts} experts, {self.top_k} per token, hidden size {self.hidden}, intermediate size "
            f"{self.width}; {self.layers} layers in turn"
        )

    def flops(self, tokens: int) -> float:
        """Of one layer."""
        return 2.0 * 3 * tokens * self.top_k * self.hidden * self.width


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What is measured: `shape` in each of `types` at each number of `tokens`, `seconds` per figure.

    peers: of kt-kernel and llama.cpp; one that is not installed is said and left out. peer_format: one of kt-kernel's
    own formats, measured after each of our types; empty for none. cpu_prefill, cpu_activations: bf16 and int16 measure
    such products as well; bf16 their errors too. has_all_peaks: what the machine does with bf16 and fp32 at best is
    measured beside int8.
    """

    shape: Shape
    types: Sequence[str]
    tokens: Sequence[int]
    threads: int
    seconds: float
    peers: Sequence[str] = ()
    peer_format: str = ""
    cpu_prefill: str = "int8"
    cpu_activations: str = "int8"
    has_all_peaks: bool = False

    @property
    def others(self) -> list[str]:
        """Ways to multiply that are measured beside the default."""
        return [one for one, name in (("bf16", self.cpu_prefill), ("int16", self.cpu_activations)) if one == name]


_COLUMNS = (
    Column("type", 8),
    Column("tokens", 6),
    Column("us", 10, ".0f"),
    Column("gb_s", 7, ".1f", "GB/s"),
    Column("of_bandwidth", 8, ".0%", "of read"),
    Column("tflop_s", 8, ".3f", "TFLOP/s"),
)


def _other_columns(name: str) -> tuple[Column, Column]:
    """Of a way to multiply: microseconds, and how many times as fast as the default it is."""
    ratio = "x_exact" if name == "bf16" else "x_int8"
    return Column(f"{name}_us", 10, ".0f", f"{name} us"), Column(ratio, 8, ".2f", ratio.replace("_", " "))


def _projection_types(name: str) -> tuple[WeightType, WeightType, WeightType]:
    """gate, up, down. Q4_K_M keeps down in Q6_K."""
    if name == "q4_k_m":
        return QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K
    known = {"FP8": OwnType.F8_E4M3, **GroupType.__members__, **QuantType.__members__}
    qtype = known[name.upper()]
    return qtype, qtype, qtype


class _Ours:
    """Our kernels on every layer; weights repacked where they can be."""

    def __init__(self, shape: Shape, name: str, pool: WorkerPool, wide: WorkerPool | None):
        self._shape = shape
        gate, up, down = _projection_types(name)
        sizes = ((gate, shape.width, shape.hidden), (up, shape.width, shape.hidden), (down, shape.hidden, shape.width))
        pools = {"int8": pool, "bf16": pool} | ({} if wide is None else {"int16": wide})
        self._layers: dict[str, list[MoeKernel]] = {way: [] for way in pools}  # on the same weights
        for _ in range(shape.layers):
            parts: list[list[ExpertWeight]] = [[random_weight(*size) for _ in range(shape.experts)] for size in sizes]
            self.expert_bytes = sum(part[0].nbytes for part in parts)
            weights = pack_experts(ExpertWeights(parts[0], parts[1], parts[2]), pool)
            for way, layers in self._layers.items():
                layers.append(MoeKernel(with_wish(weights, way == "bf16"), ActivationSpec(), pools[way]))

    def measure(self, tokens: int, seconds: float, way: str = "int8") -> tuple[float, float]:
        """(seconds per layer, distinct experts per layer), means."""
        # Primes, which share no factor with the number of layers: a layer that met the same rows again would find its
        # experts in a server's cache. Many tokens touch all experts anyway.
        shape, layers, num_inputs = self._shape, self._layers[way], 61 if tokens <= 64 else 17
        ids = torch.rand(num_inputs, tokens, shape.experts).argsort(-1)[..., : shape.top_k].contiguous()
        weights = torch.rand(num_inputs, tokens, shape.top_k)
        rows = torch.randn(tokens, shape.hidden)

        def once(i: int) -> None:
            layers[i % shape.layers].forward(rows, ids[i % num_inputs], weights[i % num_inputs])

        touched = sum(len(set(one.flatten().tolist())) for one in ids) / num_inputs
        return mean_time(once, seconds, shape.layers), touched


def _row(name: str, tokens: int, ours: _Ours, work: KernelWork, bandwidth: float) -> Row:
    took, touched = ours.measure(tokens, work.seconds)
    rate = touched * ours.expert_bytes / took
    row = {
        "type": name,
        "tokens": tokens,
        "us": took * 1e6,
        "gb_s": rate / 1e9,
        "tflop_s": work.shape.flops(tokens) / took / 1e12,
        "of_bandwidth": rate / bandwidth,
        "touched_experts": touched,
    }
    for way in work.others:
        us, ratio = _other_columns(way)
        other, _ = ours.measure(tokens, work.seconds, way)
        row |= {us.key: other * 1e6, ratio.key: took / other}
    return row


def _start_peers(work: KernelWork) -> list[PeerProcess]:
    """Those that are installed; the others are named in a printed line."""
    chosen = [_PEERS[name][2] for name in dict.fromkeys(work.peers) if not is_missing(name, *_PEERS[name][:2])]
    return [start(asdict(work.shape), work.threads, work.seconds) for start in chosen]


def _print_errors(name: str, shape: Shape, pool: WorkerPool) -> dict[str, float]:
    gate, up, down = _projection_types(name)
    errors = relative_errors(
        random_weight(gate, shape.width, shape.hidden),
        random_weight(up, shape.width, shape.hidden),
        random_weight(down, shape.hidden, shape.width),
        pool,
    )
    shown = ", ".join(f"{kind} {error:.2e}" for kind, error in errors.items())
    print(f"{name:>8} error of an expert's outputs against fp64 (RMS, relative), many tokens: {shown}")
    return errors


def bench_kernels(work: KernelWork) -> Record:
    """Print a table, a line per type and token count. Returns the record."""
    with ExitStack() as stack:
        children = _start_peers(work)  # before our threads are bound to anything
        for child in children:
            stack.callback(child.close)
        pool = WorkerPool(work.threads)
        stack.callback(pool.close)
        wide = WorkerPool(work.threads, planes=2) if "int16" in work.others else None
        if wide is not None:
            stack.callback(wide.close)
        machine = machine_facts(pool)
        print(f"{shown_machine(machine)}; int8 in registers {machine['int8_peak_top_s']:.2f} TOP/s")
        if work.has_all_peaks:
            machine["fp32_peak_tflop_s"] = limits.fp32_peak(pool) / 1e12
            print(f"fp32 in registers {machine['fp32_peak_tflop_s']:.2f} TFLOP/s")
        if work.has_all_peaks or work.cpu_prefill == "bf16":
            machine["bf16_peak_tflop_s"] = limits.bf16_peak(pool) / 1e12
            if pool.has_bf16:
                print(f"bf16 in registers {machine['bf16_peak_tflop_s']:.2f} TFLOP/s")
            elif work.cpu_prefill == "bf16":
                print(f"{pool.isa.value} has no products of bf16: both ways are the exact one")
        print(work.shape.shown())
        rows, errors = _rows(work, children, (pool, wide), machine["read_bandwidth_gb_s"] * 1e9)
    return {"machine": machine, "shape": asdict(work.shape), "rows": rows, "errors": errors}


def _rows(
    work: KernelWork, children: list[PeerProcess], pools: tuple[WorkerPool, WorkerPool | None], bandwidth: float
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Every figure, printed as it comes, and the errors by type where products of bf16 are measured."""
    peers = [
        (Column(peer.name, 10, ".0f"), Column(f"{peer.name} / ours", 10, ".2f", "us, x ours")) for peer in children
    ]
    others = [_other_columns(way) for way in work.others]
    table = FigureTable([*_COLUMNS, *(one for pair in (*others, *peers) for one in pair)])
    errors: dict[str, dict[str, float]] = {}
    for name in work.types:
        ours = _Ours(work.shape, name, *pools)
        for count in work.tokens:
            row = _row(name, count, ours, work, bandwidth)
            took = row["peer_us"] = {peer.name: peer.ask(f"{name} {count}") for peer in children}
            ratios = {f"{peer} / ours": None if us is None else us / row["us"] for peer, us in took.items()}
            table.add(row, **took, **ratios)
        if work.peer_format:  # its own format, in the same minutes as our rows above
            _measure_format(table.rows[-len(work.tokens) :], work.peer_format, children)
        del ours
        if "bf16" in work.others:
            errors[name] = _print_errors(name, work.shape, pools[0])
    return table.rows, errors


def _measure_format(rows: list[Row], peer_format: str, children: list[PeerProcess]) -> None:
    """kt-kernel's own format at the token counts of `rows`, added to them and printed."""
    for peer in (one for one in children if one.name == "kt-kernel"):
        for row in rows:
            took = peer.ask(f"{peer_format} {row['tokens']}")
            row["peer_format"], row["peer_format_us"] = peer_format, took
            if took:
                ratio = took / row["us"]
                print(f"{row['tokens']:>15} tokens: kt-kernel {peer_format} {took:.0f} us, {ratio:.2f} times ours")
