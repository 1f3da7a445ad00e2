"""Recurrent layers on the GPU: short convolution, scans with a state per sequence, gated norm. Knows no modules.

What `kernels.cpu.recurrent` has, by the same names. Inputs are fp16, bf16 or fp32 on one device with a contiguous last
dimension, any other strides; states are fp32 and changed in place; arithmetic is fp32. Results are fp32 unless
`out` says otherwise. A wrong argument raises TypeError or ValueError that names it.

A scan has two forms. Row by row is for few rows and for graphs (`StateStep.max_rows` None). Sequences of CHUNKED_ROWS
rows or more go chunk by chunk, by launches of their own beside those of the others: what a sequence gives does not
depend on the ones beside it, and not on how its prompt was cut as long as that is at multiples of CHUNK_ROWS. Between
the two forms, and where it is cut elsewhere, results agree to 1e-4 of the largest value.

Nothing here waits for the device or allocates by values, so that everything can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import power_of_two
from ktransformers.kernels.triton.recurrent.chunks import CHUNK_ROWS, MAX_SLICES, chunks_kernel, prepare_kernel
from ktransformers.kernels.triton.recurrent.kernels import (
    conv_kernel,
    gated_norm_kernel,
    rows_kernel,
    selective_kernel,
)
from ktransformers.kernels.types import StateStep

__all__ = [
    "CHUNKED_ROWS",
    "CHUNK_ROWS",
    "Mixer",
    "Scan",
    "causal_conv",
    "check_gate",
    "check_step",
    "delta_scan",
    "gated_norm",
    "launch_chunks",
    "launch_rows",
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


def check_step(step: StateStep, rows: int, states: Tensor, shape: tuple[int, ...]) -> None:
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


def check_gate(name: str, kind: str) -> None:
    """Raise ValueError unless `kind` is an activation of gates."""
    if kind not in _GATES:
        raise ValueError(f"{name} must be one of {', '.join(_GATES)}, got {kind!r}")


def _is_long(step: StateStep) -> bool:
    return step.max_rows is not None and step.max_rows >= CHUNKED_ROWS


def step_pointers(step: StateStep) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    """Compute act(bias + sum_w weight[:, w] x_{t - W + 1 + w}) for each row t, where earlier inputs come from the
    state.

    x: [T, C], or with `columns` (int32 [C]) any number of columns of which channel c reads columns[c]. weight: [C, W],
    W from 2 to 8. bias: [C]. states: [slots, W - 1, C], the last inputs, oldest first. activation: "silu", "none".
    """
    channels, width = weight.shape
    if not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"weight must have 2 to {MAX_WIDTH} columns, got {width}")
    check_float("x", x, (None, channels if columns is None else None))
    if not weight.is_floating_point() or weight.device != x.device:
        raise TypeError(f"weight must be a float on {x.device}, got {weight.dtype} on {weight.device}")
    if bias is not None:
        check_float("bias", bias, (channels,))
    if columns is not None and (columns.dtype != torch.int32 or tuple(columns.shape) != (channels,)):
        raise TypeError(f"columns must be int32 [{channels}], got {columns.dtype} {list(columns.shape)}")
    check_gate("activation", activation)
    rows = x.shape[0]
    check_step(step, rows, states, (width - 1, channels))
    result = x.new_empty(rows, channels, dtype=torch.float32) if out is None else out
    check_float("out", result, (rows, channels))
    if step.num_seqs == 0 or rows == 0:
        return result
    is_long = _is_long(step)
    tile, block = (16, 64) if is_long else (1, 128)  # at least width - 1 rows where several programs share a sequence
    programs = -(-(step.max_rows or 1) // (4 * tile)) if is_long else 1
    conv_kernel[(-(-channels // block), step.num_seqs, programs)](
        x, columns, weight, bias, states, result, *step_pointers(step),
        x.stride(0), *weight.stride(), result.stride(0), states.stride(0), rows,
        C=channels, W=width, TAPS=power_of_two(width - 1), ROWS=tile, BLOCK=block,
        HAS_COLUMNS=columns is not None, HAS_BIAS=bias is not None, KIND=activation, num_warps=4 if is_long else 1,
    )  # fmt: skip
    return result


@dataclass(frozen=True, slots=True)
class Mixer:
    """What `rows_kernel` computes besides a scan whose decay and beta are still logits.

    rate, bias: fp32, what makes a decay of a logit. weight: of the gated norm, or with limits Mamba-2's D. gate:
    [T, Hk, R, V]. limits: of dt.
    """

    rate: Tensor
    bias: Tensor
    weight: Tensor
    gate: Tensor | None = None
    activation: str = ""
    norm_eps: float = 0.0
    limits: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Scan:
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
    mixer: Mixer | None = None

    @property
    def num_slices(self) -> int:
        """Number of parts into which a key is cut in chunks."""
        return max(1, power_of_two(self.q.shape[2]) // 64)

    @property
    def is_chunked(self) -> bool:
        """Whether sequences of CHUNKED_ROWS rows go chunk by chunk: keys of 257 columns would need too many parts."""
        return _is_long(self.step) and self.num_slices <= MAX_SLICES

    def constants(self) -> dict[str, Any]:
        """Return the constants that both forms of the scan are compiled for."""
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
) -> Scan:
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
    check_step(step, rows, states, (heads, key_dim, value_dim))
    result = v.new_empty(rows, heads, value_dim, dtype=torch.float32) if out is None else out
    check_float("out", result, (rows, heads, value_dim))
    if result.stride(1) != value_dim and heads > 1:
        raise ValueError(f"heads of out must be neighbours, got strides {result.stride()}")
    return Scan(q, k, v, decay, beta, states, step, eps, scale, result, decay.dim() == 3)


def _strides_of(scan: Scan, group: int) -> tuple[int, ...]:
    """Of decay, beta and gate, by row and by key head, and of the gate within a key head."""
    decay, beta, gate = scan.decay, scan.beta, scan.mixer.gate if scan.mixer else None
    of_decay = (decay.stride(0), decay.stride(1) if decay.dim() == 3 else group)
    of_beta = (0, 0) if beta is None else (beta.stride(0), beta.stride(1) if beta.dim() == 3 else group)
    return *of_decay, *of_beta, *((0, 0, 0) if gate is None else gate.stride()[:3])


def launch_rows(scan: Scan) -> None:
    """Launch the scan row by row, of the sequences that do not go chunk by chunk."""
    q, k, v, states, out, mixer = scan.q, scan.k, scan.v, scan.states, scan.out, scan.mixer
    constants = scan.constants()
    heads, value_dim = v.shape[1:]
    widest = power_of_two(value_dim)
    is_gated, is_ssm = mixer is not None and mixer.gate is not None, mixer is not None and mixer.limits is not None
    block = widest if is_gated else min(widest, max(1, _TILE // constants["BK"]))
    eps = (scan.eps or 0.0, mixer.norm_eps if mixer else 0.0)
    rows_kernel[(-(-value_dim // block), heads, scan.step.num_seqs)](
        q, k, v, scan.decay, scan.beta, mixer and mixer.rate, mixer and mixer.bias, mixer and mixer.gate,
        mixer and mixer.weight, states, out, *step_pointers(scan.step),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *_strides_of(scan, constants["GROUP"]),
        out.stride(0), states.stride(0), v.shape[0], float(eps[0]), float(scan.scale), float(eps[1]),
        *map(float, (mixer and mixer.limits) or (0.0, 0.0)),
        BV=block, LIMIT=CHUNKED_ROWS if scan.is_chunked else 0, DELTA=scan.beta is not None,
        GATES=mixer is not None, GATED=mixer.activation if mixer else "", SSM=is_ssm, **constants,
        num_warps=max(1, min(8, constants["BK"] * block // _TILE)),
    )  # fmt: skip


def launch_chunks(scan: Scan, dt: Tensor | None = None) -> None:
    """Launch the scan chunk by chunk, of the sequences that `launch_rows` leaves out. dt: of Mamba-2."""
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
        q, k, values, decay, w, pairs, units, dt, scan.mixer and scan.mixer.weight,
        scan.states, scan.out, *step_pointers(step), step.kv_lens,
        *inputs, *values.stride()[:2], *of_decay, scan.out.stride(0), scan.states.stride(0),
        BV=block, SLICES=slices, DELTA=w is not None, SSM=dt is not None, **constants,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _scan(scan: Scan) -> Tensor:
    if scan.out.numel() == 0 or scan.step.num_seqs == 0:
        return scan.out
    launch_rows(scan)
    if scan.is_chunked:
        launch_chunks(scan)
    return scan.out


def workspace_nbytes(rows: int, heads: int, key_dim: int, value_dim: int, *, is_delta: bool = True) -> int:
    """Return the bytes that `delta_scan`, or `linear_scan`, works in where rows go chunk by chunk."""
    return 4 * rows * heads * (CHUNK_ROWS + 2 + (key_dim + value_dim if is_delta else 0))


def delta_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    step: StateStep,
    l2norm_eps: float | None = None,
    scale: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The gated delta rule, row by row: S = exp(decay) S; S += k (x) beta (v - k' S); out = scale q' S.

    (Yang, Kautz and Hatamizadeh, arXiv 2412.06464; with a decay per key dimension Kimi Linear, arXiv 2510.26692.)
    q, k: [T, Hk, K]; value head h has key head h // (Hv / Hk). v: [T, Hv, V]. decay: [T, Hv] or [T, Hv, K], at most 0.
    beta: [T, Hv]. states: [slots, Hv, K, V]. l2norm_eps: q and k are divided by
    sqrt(sum of squares + l2norm_eps) first; None: they are not. Returns [T, Hv, V].
    """
    return _scan(_check_scan((q, k, v, decay, beta), states, step, l2norm_eps, scale, out))


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
    check_step(step, rows, states, (channels, size))
    result = x.new_empty(rows, channels, dtype=torch.float32) if out is None else out
    check_float("out", result, (rows, channels))
    if step.num_seqs == 0 or rows == 0:
        return result
    block_n = power_of_two(size)
    block = min(power_of_two(channels), max(1, 512 // block_n))
    selective_kernel[(-(-channels // block), step.num_seqs)](
        x, dt, a, b, c, skip, states, result, *step_pointers(step),
        x.stride(0), dt.stride(0), b.stride(0), c.stride(0), result.stride(0), states.stride(0), rows,
        C=channels, N=size, BC=block, BN=block_n, HAS_SKIP=skip is not None, num_warps=1,
    )  # fmt: skip
    return result


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
    all groups. group_size: D when None. activation: "silu", "sigmoid" or "none". out: may be x.
    """
    check_float("x", x, (None, None))
    rows, width = x.shape
    size = group_size or width
    if width % size:
        raise ValueError(f"groups of {size} columns do not divide {width}")
    check_float("weight", weight, (size if weight.numel() == size else width,))
    check_gate("activation", activation)
    if gate.dim() == 2:
        check_float("gate", gate, (rows, width))
        inner, strides = 1, (gate.stride(0), size, 0)
    else:
        check_float("gate", gate, (rows, None, None, size))
        inner, strides = gate.shape[2], (gate.stride(0), gate.stride(1), gate.stride(2))
        if gate.shape[1] * inner * size != width:
            raise ValueError(f"gate must have {width} values a row, got {list(gate.shape)}")
    result = x.new_empty(rows, width, dtype=torch.float32) if out is None else out
    check_float("out", result, (rows, width))
    if result.numel():
        block = power_of_two(size)
        gated_norm_kernel[(rows, width // size)](
            x, gate, weight, result, x.stride(0), *strides, result.stride(0), 0 if weight.numel() == size else size,
            float(eps), GROUP=inner, SIZE=size, BLOCK=block, GATE_FIRST=is_gate_first, KIND=activation,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return result
