"""Recurrent layers on the GPU: short convolution, scans with a state per sequence, gated norm. Knows no modules.

What `kernels.cpu.recurrent` has, by the same names. Inputs are fp16, bf16 or fp32 on one device with a contiguous last
dimension, any other strides; states are fp32 and changed in place; arithmetic is fp32. Results have the type of x or v
unless `out` says otherwise. A wrong argument raises TypeError or ValueError that names it.

A scan has two forms. Row by row is for few rows and for graphs (`StateStep.max_rows` None). Sequences of CHUNKED_ROWS
rows or more go chunk by chunk, by launches of their own beside those of the others: what a sequence gives does not
depend on the ones beside it, and not on how its prompt was cut as long as that is at multiples of CHUNK_ROWS. Between
the two forms, and where it is cut elsewhere, results agree to 1e-4 of the largest value.

Nothing here waits for the device or allocates by values, so that everything can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ktransformers.kernels.triton.elementwise import check_float
from ktransformers.kernels.triton.recurrent_chunks import CHUNK_ROWS, MAX_SLICES, chunks_kernel, prepare_kernel
from ktransformers.kernels.triton.recurrent_kernels import (
    conv_kernel,
    gated_norm_kernel,
    gates_kernel,
    rows_kernel,
    selective_kernel,
)
from ktransformers.kernels.triton.runtime import power_of_two
from ktransformers.kernels.types import StateStep

__all__ = [
    "CHUNKED_ROWS",
    "CHUNK_ROWS",
    "DeltaNet",
    "causal_conv",
    "delta_gates",
    "delta_scan",
    "gated_delta_net",
    "gated_norm",
    "linear_scan",
    "selective_scan",
    "workspace_nbytes",
]

CHUNKED_ROWS = 32
"""A sequence with at least so many rows in a step goes chunk by chunk."""

MAX_WIDTH = 8
"""Of a convolution."""

_TILE = 2048  # values of a state that one warp holds
_GATES = ("none", "silu", "sigmoid")


def _check_step(step: StateStep, rows: int, states: Tensor, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless `step` has so many rows and `states` are fp32 [slots, *shape]."""
    if states.dtype != torch.float32:
        raise TypeError(f"states must be fp32, got {states.dtype}")
    if tuple(states.shape[1:]) != shape or not (states.shape[0] == 0 or states[0].is_contiguous()):
        raise ValueError(f"states must have shape [slots, {shape}] with contiguous slots, got {list(states.shape)}")
    seqs = step.num_seqs
    wanted = {"first_rows": seqs + 1, "read_slots": seqs, "write_slots": seqs, "save_slots": rows, "kv_lens": rows}
    for name, count in wanted.items():
        tensor = getattr(step, name)
        if tensor.dtype != torch.int32 or tensor.device != states.device:
            raise TypeError(f"step.{name} must be int32 on {states.device}, got {tensor.dtype} on {tensor.device}")
        if tuple(tensor.shape) != (count,) or not tensor.is_contiguous():
            raise ValueError(f"step.{name} must be contiguous with shape [{count}], got {list(tensor.shape)}")


def _check_gate(name: str, kind: str) -> None:
    if kind not in _GATES:
        raise ValueError(f"{name} must be one of {', '.join(_GATES)}, got {kind!r}")


def _is_long(step: StateStep) -> bool:
    return step.max_rows is not None and step.max_rows >= CHUNKED_ROWS


def _step_pointers(step: StateStep) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return step.first_rows, step.read_slots, step.write_slots, step.save_slots


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    step: StateStep,
    activation: str = "silu",
    *,
    columns: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """act(bias + sum_w weight[:, w] x_{t - W + 1 + w}) for each row t, where earlier inputs come from the state.

    x: [T, C], or with `columns` (int32 [C]) any number of columns of which channel c reads columns[c]. weight: [C, W],
    W from 2 to 8. bias: [C]. states: [slots, W - 1, C], the last inputs, oldest first. activation: "silu", "none".
    """
    channels, width = weight.shape
    if not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"weight must have 2 to {MAX_WIDTH} columns, got {width}")
    check_float("x", x, (None, channels if columns is None else None))
    check_float("weight", weight, (channels, width))
    if not weight.is_contiguous():
        raise ValueError("weight must be contiguous")
    if bias is not None:
        check_float("bias", bias, (channels,))
    if columns is not None and (columns.dtype != torch.int32 or tuple(columns.shape) != (channels,)):
        raise TypeError(f"columns must be int32 [{channels}], got {columns.dtype} {list(columns.shape)}")
    _check_gate("activation", activation)
    rows = x.shape[0]
    _check_step(step, rows, states, (width - 1, channels))
    result = x.new_empty(rows, channels) if out is None else out
    check_float("out", result, (rows, channels))
    if step.num_seqs == 0 or rows == 0:
        return result
    is_long = _is_long(step)
    tile, block = (16, 64) if is_long else (1, 128)  # at least width - 1 rows where several programs share a sequence
    programs = -(-(step.max_rows or 1) // (4 * tile)) if is_long else 1
    conv_kernel[(-(-channels // block), step.num_seqs, programs)](
        x, columns, weight, bias, states, result, *_step_pointers(step),
        x.stride(0), result.stride(0), states.stride(0), rows,
        C=channels, W=width, TAPS=power_of_two(width - 1), ROWS=tile, BLOCK=block,
        HAS_COLUMNS=columns is not None, HAS_BIAS=bias is not None, KIND=activation, num_warps=4 if is_long else 1,
    )  # fmt: skip
    return result


@dataclass(frozen=True, slots=True)
class _Scan:
    """A checked scan: q, k [T, Hk, K], v [T, Hv, V], decay [T, Hv] or [T, Hv, K], beta [T, Hv] with the delta rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None
    states: Tensor
    step: StateStep
    eps: float | None
    scale: float
    out: Tensor
    is_per_key: bool

    @property
    def num_slices(self) -> int:
        """Parts of a key in chunks."""
        return max(1, power_of_two(self.q.shape[2]) // 64)

    @property
    def is_chunked(self) -> bool:
        """Whether sequences of CHUNKED_ROWS rows go chunk by chunk: keys of 257 columns would need too many parts."""
        return _is_long(self.step) and self.num_slices <= MAX_SLICES

    def constants(self) -> dict[str, Any]:
        heads, key_dim, value_dim = self.states.shape[1:]
        return {
            "GROUP": heads // self.q.shape[1], "K": key_dim, "V": value_dim, "BK": power_of_two(key_dim),
            "PER_KEY": self.is_per_key, "NORM": self.eps is not None,
        }  # fmt: skip


def _check_scan(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    states: Tensor,
    step: StateStep,
    eps: float | None,
    scale: float,
    out: Tensor | None,
) -> _Scan:
    q, k, v, decay, beta = inputs
    check_float("q", q, (None, None, None))
    rows, key_heads, key_dim = q.shape
    check_float("k", k, (rows, key_heads, key_dim))
    check_float("v", v, (rows, None, None))
    heads, value_dim = v.shape[1:]
    if heads % key_heads:
        raise ValueError(f"{heads} value heads cannot share {key_heads} key heads")
    check_float("decay", decay, (rows, heads) if decay.dim() == 2 else (rows, heads, key_dim))
    if beta is not None:
        check_float("beta", beta, (rows, heads))
    _check_step(step, rows, states, (heads, key_dim, value_dim))
    result = v.new_empty(rows, heads, value_dim) if out is None else out
    check_float("out", result, (rows, heads, value_dim))
    if result.stride(1) != value_dim and heads > 1:
        raise ValueError(f"heads of out must be neighbours, got strides {result.stride()}")
    return _Scan(q, k, v, decay, beta, states, step, eps, scale, result, decay.dim() == 3)


@dataclass(frozen=True, slots=True)
class _Fused:
    """What `rows_kernel` does besides the scan: makes decay and beta of logits, norms and gates the result."""

    gate: Tensor
    net: DeltaNet


def _launch_rows(scan: _Scan, fused: _Fused | None = None) -> None:
    """The scan row by row, of the sequences that do not go chunk by chunk."""
    q, k, v, states, out = scan.q, scan.k, scan.v, scan.states, scan.out
    constants = scan.constants()
    heads, value_dim = v.shape[1:]
    widest = power_of_two(value_dim)
    block = widest if fused else min(widest, max(1, _TILE // constants["BK"]))
    decay, beta = scan.decay, scan.beta
    if fused is None:
        gate, net = None, None
        head = decay.stride(1) if scan.is_per_key else constants["GROUP"]
        numbers = (decay.stride(0), head, 0 if beta is None else beta.stride(0), constants["GROUP"], 0, 0, 0)
    else:
        gate, net = fused.gate, fused.net
        numbers = (*decay.stride()[:2], *(beta.stride()[:2] if beta is not None else ()), *gate.stride()[:3])
    rows_kernel[(-(-value_dim // block), heads, scan.step.num_seqs)](
        q, k, v, decay, beta, net and net.a_log, net and net.dt_bias, gate, net and net.norm_weight, states, out,
        *_step_pointers(scan.step), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *numbers,
        out.stride(0), states.stride(0), v.shape[0], float(scan.eps or 0.0), float(scan.scale),
        float(net.norm_eps if net else 0.0),
        BV=block, LIMIT=CHUNKED_ROWS if scan.is_chunked else 0, DELTA=beta is not None,
        GATES=fused is not None, GATED=net.gate if net else "", **constants,
        num_warps=max(1, min(8, constants["BK"] * block // _TILE)),
    )  # fmt: skip


def _launch_chunks(scan: _Scan) -> None:
    """The scan chunk by chunk, of the sequences that `_launch_rows` leaves out."""
    q, k, v, decay, step = scan.q, scan.k, scan.v, scan.decay, scan.step
    rows, heads, value_dim = v.shape
    constants = scan.constants() | {"LIMIT": CHUNKED_ROWS, "HEADS": heads}
    slices, is_normed = scan.num_slices, constants.pop("NORM")
    constants["BK"] = max(16, constants["BK"] // slices)
    widest, inputs = max(16, power_of_two(value_dim)), (*q.stride()[:2], *k.stride()[:2])
    of_decay = (decay.stride(0), decay.stride(1))
    pairs, units = (v.new_empty(rows, heads, width, dtype=torch.float32) for width in (CHUNK_ROWS, 2))
    values, w = v, None
    if scan.beta is not None:
        values, w = (v.new_empty(rows, heads, width, dtype=torch.float32) for width in (value_dim, q.shape[2]))
    chunks = (int(step.max_rows or 0) + 2 * CHUNK_ROWS - 2) // CHUNK_ROWS
    prepare_kernel[(chunks, heads, step.num_seqs)](
        q, k, v, decay, scan.beta, values, w, pairs, units, step.first_rows, step.kv_lens,
        *inputs, *v.stride()[:2], *of_decay, 0 if scan.beta is None else scan.beta.stride(0),
        float(scan.eps or 0.0), float(scan.scale),
        BV=min(64, widest), DELTA=w is not None, NORM=is_normed, **constants, num_warps=4, num_stages=1,
    )  # fmt: skip
    block = min(widest, 32)
    chunks_kernel[(-(-value_dim // block), heads, step.num_seqs)](
        q, k, values, decay, w, pairs, units, scan.states, scan.out, *_step_pointers(step), step.kv_lens,
        *inputs, *values.stride()[:2], *of_decay, scan.out.stride(0), scan.states.stride(0),
        BV=block, SLICES=slices, DELTA=w is not None, **constants, num_warps=4, num_stages=1,
    )  # fmt: skip


def _scan(scan: _Scan) -> Tensor:
    if scan.out.numel() == 0 or scan.step.num_seqs == 0:
        return scan.out
    _launch_rows(scan)
    if scan.is_chunked:
        _launch_chunks(scan)
    return scan.out


def workspace_nbytes(rows: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Bytes that `delta_scan` works in while sequences go chunk by chunk."""
    return 4 * rows * heads * (key_dim + value_dim + CHUNK_ROWS + 2)


def delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    step: StateStep,
    l2norm: float | None = None,
    scale: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The gated delta rule, row by row: S = exp(decay) S; S += k (x) beta (v - k' S); out = scale q' S.

    (Yang, Kautz and Hatamizadeh, arXiv 2412.06464; with a decay per key dimension Kimi Linear, arXiv 2510.26692.)
    q, k: [T, Hk, K]; value head h has key head h // (Hv / Hk). v: [T, Hv, V]. decay: [T, Hv] or [T, Hv, K], at most 0.
    beta: [T, Hv]. states: [slots, Hv, K, V]. l2norm: q and k are divided by sqrt(sum of squares + l2norm) first; None:
    they are not. Returns [T, Hv, V].
    """
    return _scan(_check_scan((q, k, v, decay, beta), states, step, l2norm, scale, out))


def linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    states: Tensor,
    step: StateStep,
    scale: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Linear attention with a decay: S = exp(decay) S + k (x) v; out = scale q' S.

    Mamba-2 (arXiv 2405.21060: k is B, q is C, v is dt x, decay is dt A) and lightning attention. q, k: [T, Hk, K];
    value head h has key head (group) h // (Hv / Hk). v: [T, Hv, V]. decay: [T, Hv], at most 0. states:
    [slots, Hv, K, V]. Returns [T, Hv, V].
    """
    check_float("decay", decay, (None, None))
    return _scan(_check_scan((q, k, v, decay, None), states, step, None, scale, out))


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    states: Tensor,
    step: StateStep,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Mamba's scan (arXiv 2312.00752): S = exp(dt A) S + dt x B; out = S C + D x.

    x, dt: [T, C]. a (A): [C, N], negative. b, c (B, C): [T, N]. skip (D): [C]. states: [slots, C, N]. Returns [T, C].
    """
    check_float("x", x, (None, None))
    rows, channels = x.shape
    check_float("dt", dt, (rows, channels))
    check_float("a", a, (channels, None))
    size = a.shape[1]
    check_float("b", b, (rows, size))
    check_float("c", c, (rows, size))
    if skip is not None:
        check_float("skip", skip, (channels,))
    if not a.is_contiguous():
        raise ValueError("a must be contiguous")
    _check_step(step, rows, states, (channels, size))
    result = x.new_empty(rows, channels) if out is None else out
    check_float("out", result, (rows, channels))
    if step.num_seqs == 0 or rows == 0:
        return result
    block_n = power_of_two(size)
    block = min(power_of_two(channels), max(1, 512 // block_n))
    selective_kernel[(-(-channels // block), step.num_seqs)](
        x, dt, a, b, c, skip, states, result, *_step_pointers(step),
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), result.stride(0), states.stride(0), rows,
        C=channels, N=size, BC=block, BN=block_n, HAS_SKIP=skip is not None, num_warps=1,
    )  # fmt: skip
    return result


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(decay, beta) of `delta_scan` in fp32: -exp(a_log) softplus(a + dt_bias), and sigmoid(b).

    a: [T, Hk, R] for Hk R heads, or [T, H, K] with a dt_bias of [H, K]. b: [T, Hk, R]. a_log: fp32 [H]; dt_bias: fp32
    [H] or [H, K].
    """
    heads, per_key = a_log.numel(), dt_bias.dim() == 2
    check_float("b", b, (None, None, None))
    rows, key_heads, group = b.shape
    check_float("a", a, (rows, *dt_bias.shape) if per_key else (rows, key_heads, group))
    for name, tensor, count in (("a_log", a_log, heads), ("dt_bias", dt_bias, heads * (a.shape[2] if per_key else 1))):
        if tensor.dtype != torch.float32 or tensor.numel() != count or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous fp32 with {count} values, got {list(tensor.shape)}")
    if key_heads * group != heads:
        raise ValueError(f"b must be of {heads} heads, got {key_heads} x {group}")
    decay = b.new_empty((rows, *dt_bias.shape), dtype=torch.float32)
    beta = b.new_empty(rows, heads, dtype=torch.float32)
    if rows:
        size = a.shape[2] if per_key else 1
        gates_kernel[(rows,)](
            a, b, a_log, dt_bias, decay, beta, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
            GROUP=group, HEADS=heads, K=size, BH=power_of_two(heads), BK=power_of_two(size), PER_KEY=per_key,
            num_warps=4,
        )  # fmt: skip
    return decay, beta


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int | None = None,
    is_gate_first: bool = False,
    activation: str = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """RMS norm of groups of columns, times weight and act(gate); the gate comes before the norm with is_gate_first.

    x: [T, D]. gate: [T, D], or [T, Hk, R, group_size] of any strides but the last. weight: [D], or [group_size] for
    all groups. group_size: D when None. activation: "silu", "sigmoid" or "none". out: made like x; may be x.
    """
    check_float("x", x, (None, None))
    rows, width = x.shape
    size = group_size or width
    if width % size:
        raise ValueError(f"groups of {size} columns do not divide {width}")
    check_float("weight", weight, (size if weight.numel() == size else width,))
    _check_gate("activation", activation)
    if gate.dim() == 2:
        check_float("gate", gate, (rows, width))
        inner, strides = 1, (gate.stride(0), size, 0)
    else:
        check_float("gate", gate, (rows, None, None, size))
        inner, strides = gate.shape[2], (gate.stride(0), gate.stride(1), gate.stride(2))
        if gate.shape[1] * inner * size != width:
            raise ValueError(f"gate must have {width} values a row, got {list(gate.shape)}")
    result = x.new_empty(rows, width) if out is None else out
    check_float("out", result, (rows, width))
    if result.numel():
        block = power_of_two(size)
        gated_norm_kernel[(width // size, rows)](
            x, gate, weight, result, x.stride(0), *strides, result.stride(0), 0 if weight.numel() == size else size,
            float(eps), GROUP=inner, SIZE=size, BLOCK=block, GATE_FIRST=is_gate_first, KIND=activation,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return result


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Sizes and small weights of a gated delta net (qwen3_next, qwen3_5) or of Kimi delta attention; all fp32.

    conv_weight: [2 Hk K + Hv V, W], channels of q, k and v. a_log: [Hv]. dt_bias: [Hv], or [Hv, K] for a decay per key
    dimension. norm_weight: [V]. columns: see `causal_conv`. gate: activation of the output's gate.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    norm_eps: float
    conv_bias: Tensor | None = None
    columns: Tensor | None = None
    gate: str = "silu"
    l2norm: float = 1e-6

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T, Hk, K] and v [T, Hv, V] of what the convolution gives."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        q, k, v = mixed.split((keys, keys, values), dim=1)
        shape = (-1, self.num_key_heads, self.key_dim)
        return q.unflatten(1, shape[1:]), k.unflatten(1, shape[1:]), v.unflatten(1, (-1, self.value_dim))


def gated_delta_net(
    x: Tensor,
    gate: Tensor,
    a: Tensor,
    b: Tensor,
    net: DeltaNet,
    states: tuple[Tensor, Tensor],
    step: StateStep,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """All between the projections of a gated delta net: convolution, gates, scan, gated norm. [T, Hv V], made like x.

    x: [T, 2 Hk K + Hv V], or what `net.columns` reads. gate: [T, Hk, R, V] with R = Hv / Hk, a and b: [T, Hk, R], all
    of any strides but the last; a is [T, Hv, K] for a decay per key dimension. states: "conv" and "recurrent". Two
    launches where no sequence goes chunk by chunk.
    """
    rows, heads, width = x.shape[0], net.num_value_heads, net.value_dim
    group = heads // net.num_key_heads
    check_float("gate", gate, (rows, net.num_key_heads, group, width))
    check_float("b", b, (rows, net.num_key_heads, group))
    is_per_key = net.dt_bias.dim() == 2
    check_float("a", a, (rows, heads, net.key_dim) if is_per_key else (rows, net.num_key_heads, group))
    _check_gate("net.gate", net.gate)
    mixed = causal_conv(x, net.conv_weight, net.conv_bias, states[0], step, columns=net.columns)
    q, k, v = net.split(mixed)
    result = x.new_empty(rows, heads * width) if out is None else out
    check_float("out", result, (rows, heads * width))
    if rows == 0 or step.num_seqs == 0:
        return result
    of_heads = result.unflatten(1, (heads, width))
    scale = net.key_dim**-0.5
    made = _Scan(q, k, v, a, b, states[1], step, net.l2norm, scale, of_heads, is_per_key)
    _check_step(step, rows, states[1], (heads, net.key_dim, width))
    if made.is_chunked:
        result.zero_()  # rows of the other sequences, which are normed too and written last
        decay, beta = delta_gates(a, b, net.a_log, net.dt_bias)
        _launch_chunks(replace(made, decay=decay, beta=beta))
        gated_norm(result, gate, net.norm_weight, net.norm_eps, group_size=width, activation=net.gate, out=result)
    _launch_rows(made, _Fused(gate, net))
    return result
