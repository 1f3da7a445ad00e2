"""Measures the routed experts of one layer, ours and peers' in turns, beside the read bandwidth of the same minute.

Layers take turns so that weights come from memory, not from caches. GB/s counts the weights of the experts that the
tokens touched; the limit of few tokens is the read bandwidth, that of many the products in registers. Weights are
random, routing is even. On request the same weights are measured with products of bf16 too (--cpu_prefill), and the
errors of both are stated. Each peer runs in a process of its own that is stopped while we measure others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ktransformers.cli.bench_fidelity import relative_errors, with_wish
from ktransformers.cli.bench_kt_kernel import kt_kernel_peer
from ktransformers.cli.bench_llama import llama_peer
from ktransformers.cli.bench_peer import PeerProcess, is_missing
from ktransformers.config import cpu_name
from ktransformers.kernels.cpu import MoeKernel, WorkerPool, limits
from ktransformers.kernels.types import (
    FP8_BLOCK,
    ActivationSpec,
    ExpertWeight,
    ExpertWeights,
    Fp8Matrix,
    OwnType,
    QuantType,
    RawTensor,
    WeightType,
    row_bytes,
    type_size,
)
from ktransformers.operators.linear.packed import pack_experts

__all__ = ["Shape", "bench_kernels", "machine_facts", "shown_machine"]

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
        return 2.0 * 3 * tokens * self.top_k * self.hidden * self.width


def _projection_types(name: str) -> tuple[WeightType, WeightType, WeightType]:
    """gate, up, down. Q4_K_M keeps down in Q6_K."""
    if name == "q4_k_m":
        return QuantType.Q4_K, QuantType.Q4_K, QuantType.Q6_K
    qtype = OwnType.F8_E4M3 if name == "fp8" else QuantType[name.upper()]
    return qtype, qtype, qtype


def _random_weight(qtype: WeightType, rows: int, cols: int) -> RawTensor | Fp8Matrix:
    """Random blocks whose scales are small numbers."""
    if isinstance(qtype, OwnType):
        values = torch.randint(0, 0x7F, (rows, cols), dtype=torch.uint8)
        return Fp8Matrix(values, torch.full((-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)), 1e-4))
    if qtype is QuantType.BF16:
        return RawTensor.from_tensor((torch.randn(rows, cols) * 0.02).to(torch.bfloat16))
    data = torch.randint(0, 256, (rows * row_bytes(qtype, cols),), dtype=torch.uint8)
    blocks = data.view(-1, type_size(qtype))
    if qtype is QuantType.MXFP4:
        blocks[:, 0] = 117  # 2^-11
        return RawTensor(data, qtype, (rows, cols))
    blocks[:, 209 if qtype is QuantType.Q6_K else 1] = 0x04  # the high byte of an fp16 scale: about 1e-4
    if qtype in (QuantType.Q4_K, QuantType.Q5_K):
        blocks[:, 3] = 0x04
    return RawTensor(data, qtype, (rows, cols))


class _Ours:
    """Our kernels on every layer; weights re-laid where they can be."""

    def __init__(self, shape: Shape, name: str, pool: WorkerPool):
        self._shape = shape
        gate, up, down = _projection_types(name)
        sizes = ((gate, shape.width, shape.hidden), (up, shape.width, shape.hidden), (down, shape.hidden, shape.width))
        self._layers: dict[str, list[MoeKernel]] = {"int8": [], "bf16": []}  # on the same weights
        for _ in range(shape.layers):
            parts: list[list[ExpertWeight]] = [[_random_weight(*size) for _ in range(shape.experts)] for size in sizes]
            self.expert_bytes = sum(part[0].nbytes for part in parts)
            weights = pack_experts(ExpertWeights(parts[0], parts[1], parts[2]), pool)
            for cpu_prefill, layers in self._layers.items():
                layers.append(MoeKernel(with_wish(weights, cpu_prefill == "bf16"), ActivationSpec(), pool))

    def measure(self, tokens: int, seconds: float, cpu_prefill: str = "int8") -> tuple[float, float]:
        """(seconds per layer, distinct experts per layer), means."""
        shape, layers, num_inputs = self._shape, self._layers[cpu_prefill], 16
        ids = torch.rand(num_inputs, tokens, shape.experts).argsort(-1)[..., : shape.top_k].contiguous()
        weights = torch.rand(num_inputs, tokens, shape.top_k)
        rows = torch.randn(tokens, shape.hidden)

        def once(i: int) -> None:
            layers[i % shape.layers].forward(rows, ids[i % num_inputs], weights[i % num_inputs])

        touched = sum(len(set(one.flatten().tolist())) for one in ids) / num_inputs
        return _time(once, seconds, shape.layers), touched


def _time(once: Callable[[int], None], seconds: float, warm_ups: int) -> float:
    for i in range(warm_ups):
        once(i)
    began, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() - began < seconds:
        once(count)
        count += 1
    return (time.perf_counter() - began) / count


def machine_facts(threads: int, pool: WorkerPool) -> dict[str, Any]:
    """The processor's name, threads, instruction set, and what it can do at best: GB/s read, int8 TOP/s."""
    bandwidth, peak = limits.read_bandwidth(pool), limits.int8_peak(pool)
    facts = {"cpu": cpu_name(), "threads": threads, "isa": pool.isa.value}
    return facts | {"read_bandwidth_gb_s": bandwidth / 1e9, "int8_peak_top_s": peak / 1e12}


def shown_machine(machine: dict[str, Any]) -> str:
    """machine_facts as the beginning of a line."""
    rate = machine["read_bandwidth_gb_s"]
    return f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}; reads {rate:.1f} GB/s"


def _row(name: str, shape: Shape, tokens: int, ours: _Ours, seconds: float, bandwidth: float) -> dict[str, Any]:
    took, touched = ours.measure(tokens, seconds)
    rate = touched * ours.expert_bytes / took
    return {
        "type": name,
        "tokens": tokens,
        "us": took * 1e6,
        "gb_s": rate / 1e9,
        "tflop_s": shape.flops(tokens) / took / 1e12,
        "of_bandwidth": rate / bandwidth,
        "touched_experts": touched,
    }


def _start_peers(names: list[str], shape: Shape, threads: int, seconds: float) -> list[PeerProcess]:
    """Those that are installed; the others are named in a printed line."""
    chosen = [_PEERS[name][2] for name in dict.fromkeys(names) if not is_missing(name, *_PEERS[name][:2])]
    return [start(asdict(shape), threads, seconds) for start in chosen]


def _add_bf16(row: dict[str, Any], ours: _Ours, seconds: float) -> None:
    """The same with products of bf16."""
    took, _ = ours.measure(row["tokens"], seconds, "bf16")
    row["bf16_us"] = took * 1e6


def _say_errors(name: str, shape: Shape, pool: WorkerPool) -> dict[str, float]:
    gate, up, down = _projection_types(name)
    errors = relative_errors(
        _random_weight(gate, shape.width, shape.hidden),
        _random_weight(up, shape.width, shape.hidden),
        _random_weight(down, shape.hidden, shape.width),
        pool,
    )
    shown = ", ".join(f"{kind} {error:.2e}" for kind, error in errors.items())
    print(f"{name:>8} error of an expert's outputs against fp64 (RMS, relative), many tokens: {shown}")
    return errors


def bench_kernels(
    shape: Shape,
    types: list[str],
    tokens: list[int],
    threads: int,
    seconds: float,
    peers: list[str],
    peer_format: str,
    cpu_prefill: str = "int8",
) -> dict[str, Any]:
    """Print a table, a line per type and token count. Returns the record, in JSON types.

    cpu_prefill: bf16 measures its products as well, and the errors of both.
    peers: of kt-kernel and llama.cpp; one that is not installed is said and left out. peer_format: one of kt-kernel's
    own formats, measured after each of our types; empty for none.
    """
    with ExitStack() as stack:
        children = _start_peers(peers, shape, threads, seconds)  # before our threads are bound to anything
        for child in children:
            stack.callback(child.close)
        pool = WorkerPool(threads)
        stack.callback(pool.close)
        machine = machine_facts(threads, pool)
        print(f"{shown_machine(machine)}; int8 in registers {machine['int8_peak_top_s']:.2f} TOP/s")
        head = f"{'type':>8} {'tokens':>6} {'us':>10} {'GB/s':>7} {'of read':>8} {'TFLOP/s':>8}"
        is_bf16 = cpu_prefill == "bf16"
        if is_bf16:
            head += f" {'bf16 us':>10} {'x exact':>8}"
            machine["bf16_peak_tflop_s"] = limits.bf16_peak(pool) / 1e12
            if pool.has_bf16:
                print(f"bf16 in registers {machine['bf16_peak_tflop_s']:.2f} TFLOP/s")
            else:
                print(f"{pool.isa.value} has no products of bf16: both ways are the exact one")
        print(
            f"{shape.shown()}\n{head}" + "".join(f" {peer.name:>10} {'us, x ours':>10}" for peer in children),
            flush=True,
        )
        rows: list[dict[str, Any]] = []
        errors: dict[str, dict[str, float]] = {}
        for name in types:
            ours = _Ours(shape, name, pool)
            for count in tokens:
                row = _row(name, shape, count, ours, seconds, machine["read_bandwidth_gb_s"] * 1e9)
                if is_bf16:
                    _add_bf16(row, ours, seconds)
                row["peer_us"] = {peer.name: peer.ask(f"{name} {count}") for peer in children}
                _print(row)
                rows.append(row)
            if peer_format:  # its own format, in the same minutes as our rows above
                _measure_format(rows[-len(tokens) :], peer_format, children)
            del ours
            if is_bf16:
                errors[name] = _say_errors(name, shape, pool)
    return {"machine": machine, "shape": asdict(shape), "rows": rows, "errors": errors}


def _measure_format(rows: list[dict[str, Any]], peer_format: str, children: list[PeerProcess]) -> None:
    """kt-kernel's own format at the token counts of `rows`, added to them and printed."""
    for peer in (one for one in children if one.name == "kt-kernel"):
        for row in rows:
            took = peer.ask(f"{peer_format} {row['tokens']}")
            row["peer_format"], row["peer_format_us"] = peer_format, took
            if took:
                ratio = took / row["us"]
                print(f"{row['tokens']:>15} tokens: kt-kernel {peer_format} {took:.0f} us, {ratio:.2f} times ours")


def _print(row: dict[str, Any]) -> None:
    peers = ((f"{took:.0f}", f"{took / row['us']:.2f}") if took else ("-", "-") for took in row["peer_us"].values())
    bf16 = f" {row['bf16_us']:>10.0f} {row['us'] / row['bf16_us']:>8.2f}" if "bf16_us" in row else ""
    print(
        f"{row['type']:>8} {row['tokens']:>6} {row['us']:>10.0f} {row['gb_s']:>7.1f} {row['of_bandwidth']:>8.0%} "
        f"{row['tflop_s']:>8.3f}{bf16}" + "".join(f" {took:>10} {ratio:>10}" for took, ratio in peers),
        flush=True,
    )
