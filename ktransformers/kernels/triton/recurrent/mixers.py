"""Kernels between the projections of recurrent layers, in few launches. Knows their small weights; no modules.

A launch costs as much as a layer's state takes to read, so a decode step has two of them where the parts of
`recurrent.py` would take five to ten: the convolution, and the scan with its gates and its gated norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktransformers.kernels.recurrent_call import ConvCall, GatedNormCall, ScanCall
from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import power_of_two
from ktransformers.kernels.triton.recurrent.kernels import gates_kernel
from ktransformers.kernels.triton.recurrent.launch import (
    Mixer,
    Scan,
    causal_conv,
    check_gate,
    check_step,
    gated_norm,
    launch_chunks,
    launch_rows,
)
from ktransformers.kernels.types import StateStep

__all__ = ["DeltaNet", "delta_gates", "gated_delta_net", "interleaved_columns", "ssd_scan"]


def _check_small(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.float32 or not tensor.is_contiguous():
        raise TypeError(f"{name} must be contiguous fp32, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (decay, beta) of a `ScanCall` in fp32: rate softplus(a + bias), and sigmoid(b).

    a, b: [T, H], or [T, Hk, R] for the R value heads of each of Hk key heads, of any strides but the last. rate: [H],
    -exp(A_log). bias: [H]; [H, K] for a decay per key dimension, with an a of [T, H, K]. Both fp32.
    """
    if b.dim() == 2:
        b = b[:, None]
    rows, key_heads, group = b.shape
    heads, is_per_key = key_heads * group, bias.dim() == 2
    if a.dim() == 2:
        a = a[:, None]
    check_float("b", b, (None, None, None))
    check_float("a", a, (rows, *bias.shape) if is_per_key else (rows, key_heads, group))
    _check_small("rate", rate, (heads,))
    _check_small("bias", bias, (heads, a.shape[2]) if is_per_key else (heads,))
    decay = b.new_empty((rows, *bias.shape), dtype=torch.float32)
    beta = b.new_empty(rows, heads, dtype=torch.float32)
    if rows:
        size = a.shape[2] if is_per_key else 1
        gates_kernel[(rows,)](
            a, b, rate, bias, decay, beta, a.stride(0), a.stride(1), b.stride(0), b.stride(1), 0.0, 0.0,
            GROUP=group, HEADS=heads, K=size, BH=power_of_two(heads), BK=power_of_two(size), PER_KEY=is_per_key,
            SSM=False, num_warps=4,
        )  # fmt: skip
    return decay, beta


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes and small weights of a gated delta net (qwen3_next, qwen3_5) or of Kimi delta attention.

    conv_weight: [2 Hk K + Hv V, W], channels of q, k and v. rate: fp32 [Hv], -exp(A_log). bias: fp32 [Hv], or [Hv, K]
    for a decay per key dimension. norm_weight: [V]. columns: see `causal_conv`. gate: activation of the output's gate.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_weight: Tensor
    rate: Tensor
    bias: Tensor
    norm_weight: Tensor
    norm_eps: float
    conv_bias: Tensor | None = None
    columns: Tensor | None = None
    gate: str = "silu"
    l2norm_eps: float = 1e-6

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split what the convolution gives into q, k [T, Hk, K] and v [T, Hv, V]."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        q, k, v = mixed.split((keys, keys, values), dim=1)
        shape = (self.num_key_heads, self.key_dim)
        return q.unflatten(1, shape), k.unflatten(1, shape), v.unflatten(1, (-1, self.value_dim))

    def check(self, gate: Tensor, a: Tensor, b: Tensor) -> None:
        """Raise TypeError or ValueError unless the gates, and the small weights, have their shapes."""
        rows, group = gate.shape[0], self.num_value_heads // self.num_key_heads
        check_float("gate", gate, (rows, self.num_key_heads, group, self.value_dim))
        check_float("b", b, (rows, self.num_key_heads, group))
        of_heads = (self.num_value_heads, self.key_dim) if self.bias.dim() == 2 else (self.num_value_heads,)
        check_float("a", a, (rows, *of_heads) if len(of_heads) == 2 else (rows, self.num_key_heads, group))
        _check_small("net.rate", self.rate, (self.num_value_heads,))
        _check_small("net.bias", self.bias, of_heads)
        check_float("net.norm_weight", self.norm_weight, (self.value_dim,))
        check_gate("net.gate", self.gate)


def interleaved_columns(num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int) -> Tensor:
    """Return `DeltaNet.columns` of a projection whose rows stand key head by key head: q, k, and v and gate of its
    value heads (in_proj_qkvz of qwen3_next). int32 [2 Hk K + Hv V], on the CPU.
    """
    values = num_value_heads // num_key_heads * value_dim
    of_all = torch.arange(num_key_heads * 2 * (key_dim + values), dtype=torch.int32).view(num_key_heads, -1)
    q, k, v, _ = of_all.split((key_dim, key_dim, values, values), dim=1)
    return torch.cat((q.flatten(), k.flatten(), v.flatten()))


def gated_delta_net(
    x: Tensor,
    gate: Tensor,
    a: Tensor,
    b: Tensor,
    net: DeltaNet,
    states: tuple[Tensor, Tensor],
    step: StateStep,
) -> Tensor:
    """Compute all between the projections of a gated delta net: convolution, gates, scan, gated norm. [T, Hv V], made
    like x.

    x: [T, 2 Hk K + Hv V], or what `net.columns` reads. gate: [T, Hk, R, V] with R = Hv / Hk, a and b: [T, Hk, R], all
    of any strides but the last; a is [T, Hv, K] for a decay per key dimension. states: "conv" and "recurrent". Two
    launches where no sequence goes chunk by chunk.
    """
    rows, heads, width = x.shape[0], net.num_value_heads, net.value_dim
    net.check(gate, a, b)
    check_step(step, rows, states[1], (heads, net.key_dim, width))
    mixed = x.new_empty(rows, net.conv_weight.shape[0])
    causal_conv(ConvCall(x, net.conv_weight, net.conv_bias, states[0], step), columns=net.columns, out=mixed)
    result = x.new_empty(rows, heads * width)
    if rows == 0 or step.num_seqs == 0:
        return result
    mixer = Mixer(net.rate, net.bias, net.norm_weight, gate, net.gate, net.norm_eps)
    of_heads, scale = result.unflatten(1, (heads, width)), net.key_dim**-0.5
    is_per_key = net.bias.dim() == 2
    call = ScanCall(*net.split(mixed), a, b, states[1], step, net.l2norm_eps, scale)
    scan = Scan(call, of_heads, is_per_key, mixer)
    if scan.is_chunked:
        result.zero_()  # rows of the other sequences, which are normed too and written last
        decay, beta = delta_gates(a, b, net.rate, net.bias)
        launch_chunks(Scan(replace(call, decay=decay, beta=beta), of_heads, is_per_key))
        norm = GatedNormCall(result, gate, net.norm_weight, net.norm_eps, group_size=width, activation=net.gate)
        gated_norm(norm, out=result)
    launch_rows(scan)
    return result


def ssd_scan(
    call: ScanCall, weights: tuple[Tensor, Tensor, Tensor], limits: tuple[float, float] = (0.0, float("inf"))
) -> Tensor:
    """Compute Mamba-2's scan (arXiv 2405.21060) of logits of dt: dt = softplus(dt + bias) within limits; S = exp(dt A)
    S + B (x) dt x; out = C' S + D x.

    call: C and B as q and k [T, G, N], each of H / G neighbouring heads, x as v [T, H, P], dt as decay [T, H], no beta;
    states [slots, H, N, P]. weights: rate (A, -exp(A_log)), bias (dt_bias) and D, fp32 [H] each. Returns
    fp32 [T, H, P].
    """
    c, b, x, dt, states, step = call.q, call.k, call.v, call.decay, call.states, call.step
    check_float("x", x, (None, None, None))
    rows, heads, width = x.shape
    check_float("dt", dt, (rows, heads))
    check_float("b", b, (rows, None, None))
    check_float("c", c, tuple(b.shape))
    groups, size = b.shape[1:]
    if heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups} groups")
    for name, weight in zip(("rate", "bias", "D"), weights, strict=True):
        _check_small(name, weight, (heads,))
    check_step(step, rows, states, (heads, size, width))
    result = x.new_empty(rows, heads, width, dtype=torch.float32)
    if result.numel() == 0 or step.num_seqs == 0:
        return result
    rate, bias, skip = weights
    scan = Scan(call, result, False, Mixer(rate, bias, skip, limits=limits))
    launch_rows(scan)
    if scan.is_chunked:
        decay, steps = (x.new_empty(rows, heads, dtype=torch.float32) for _ in range(2))
        gates_kernel[(rows,)](
            dt, None, rate, bias, decay, steps, dt.stride(0), 0, 0, 0, *map(float, limits),
            GROUP=heads, HEADS=heads, K=1, BH=power_of_two(heads), BK=1, PER_KEY=False, SSM=True, num_warps=4,
        )  # fmt: skip
        launch_chunks(replace(scan, call=replace(call, decay=decay)), steps)
    return result
