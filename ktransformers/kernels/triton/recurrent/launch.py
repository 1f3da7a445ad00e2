"""Recurrent layers on the GPU: short convolution, scans with a state per sequence, gated norm. Knows no modules.

What `kernels.cpu.recurrent` has, by the same names (`kernels.recurrent_call` for what calls hold). Inputs are fp16,
bf16 or fp32 on one device with a contiguous last dimension, any other strides; states are fp32 and changed in place;
arithmetic is fp32. Results are fp32 unless `out` says otherwise. A wrong argument raises TypeError or ValueError that
names it.

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

from ktransformers.kernels.recurrent_call import ConvCall, GatedNormCall, ScanCall, SelectiveScanCall
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
    "gated_norm",
    "launch_chunks",
    "launch_rows",
    "scan_heads",
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


def causal_conv(call: ConvCall, *, columns: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Run a convolution whose weight is 2 to 8 wide. columns: int32 [C], those of x that channels read, of any number;
    None: x has a column for each.
    """
    x, weight, bias, states, step = call.x, call.weight, call.bias, call.states, call.step
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
    check_gate("activation", call.activation)
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
        HAS_COLUMNS=columns is not None, HAS_BIAS=bias is not None, KIND=call.activation,
        num_warps=4 if is_long else 1,
    )  # fmt: skip
    return result


@dataclass(frozen=True, slots=True)
class Mixer:
    """Parts of a layer that `rows_kernel` computes besides a scan whose decay and beta are still logits.

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
    """A checked call of a scan and where its result goes. With a mixer decay and beta are logits, of its shapes."""

    call: ScanCall
    out: Tensor
    is_per_key: bool
    mixer: Mixer | None = None

    @property
    def num_slices(self) -> int:
        """Number of parts into which a key is cut in chunks."""
        return max(1, power_of_two(self.call.q.shape[2]) // 64)

    @property
    def is_chunked(self) -> bool:
        """Whether sequences of CHUNKED_ROWS rows go chunk by chunk: keys of 257 columns would need too many parts."""
        return _is_long(self.call.step) and self.num_slices <= MAX_SLICES

    def constants(self) -> dict[str, Any]:
        """Return the constants that both forms of the scan are compiled for."""
        heads, key_dim, value_dim = self.call.states.shape[1:]
        return {
            "GROUP": heads // self.call.q.shape[1], "K": key_dim, "V": value_dim, "BK": power_of_two(key_dim),
            "PER_KEY": self.is_per_key, "NORM": self.call.l2norm_eps is not None,
        }  # fmt: skip


def _checked(call: ScanCall, out: Tensor | None) -> Scan:
    q, v, decay = call.q, call.v, call.decay
    check_float("q", q, (None, None, None))
    rows, key_heads, key_dim = q.shape
    check_float("k", call.k, (rows, key_heads, key_dim))
    check_float("v", v, (rows, None, None))
    heads, value_dim = v.shape[1:]
    if heads % key_heads:
        raise ValueError(f"{heads} value heads cannot share {key_heads} key heads")
    check_float("decay", decay, (rows, heads, key_dim) if call.is_per_key else (rows, heads))
    if call.beta is not None:
        check_float("beta", call.beta, (rows, heads))
    check_step(call.step, rows, call.states, (heads, key_dim, value_dim))
    result = v.new_empty(rows, heads, value_dim, dtype=torch.float32) if out is None else out
    check_float("out", result, (rows, heads, value_dim))
    if result.stride(1) != value_dim and heads > 1:
        raise ValueError(f"heads of out must be neighbours, got strides {result.stride()}")
    return Scan(call, result, call.is_per_key)


def _strides_of(scan: Scan, group: int) -> tuple[int, ...]:
    """Of decay, beta and gate, by row and by key head, and of the gate within a key head."""
    decay, beta, gate = scan.call.decay, scan.call.beta, scan.mixer.gate if scan.mixer else None
    of_decay = (decay.stride(0), decay.stride(1) if decay.dim() == 3 else group)
    of_beta = (0, 0) if beta is None else (beta.stride(0), beta.stride(1) if beta.dim() == 3 else group)
    return *of_decay, *of_beta, *((0, 0, 0) if gate is None else gate.stride()[:3])


def launch_rows(scan: Scan) -> None:
    """Launch the scan row by row, of the sequences that do not go chunk by chunk."""
    call, out, mixer = scan.call, scan.out, scan.mixer
    q, k, v, states = call.q, call.k, call.v, call.states
    constants = scan.constants()
    heads, value_dim = v.shape[1:]
    widest = power_of_two(value_dim)
    is_gated, is_ssm = mixer is not None and mixer.gate is not None, mixer is not None and mixer.limits is not None
    block = widest if is_gated else min(widest, max(1, _TILE // constants["BK"]))
    eps = (call.l2norm_eps or 0.0, mixer.norm_eps if mixer else 0.0)
    rows_kernel[(-(-value_dim // block), heads, call.step.num_seqs)](
        q, k, v, call.decay, call.beta, mixer and mixer.rate, mixer and mixer.bias, mixer and mixer.gate,
        mixer and mixer.weight, states, out, *step_pointers(call.step),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *_strides_of(scan, constants["GROUP"]),
        out.stride(0), states.stride(0), v.shape[0], float(eps[0]), float(call.scale), float(eps[1]),
        *map(float, (mixer and mixer.limits) or (0.0, 0.0)),
        BV=block, LIMIT=CHUNKED_ROWS if scan.is_chunked else 0, DELTA=call.beta is not None,
        GATES=mixer is not None, GATED=mixer.activation if mixer else "", SSM=is_ssm, **constants,
        num_warps=max(1, min(8, constants["BK"] * block // _TILE)),
    )  # fmt: skip


def launch_chunks(scan: Scan, dt: Tensor | None = None) -> None:
    """Launch the scan chunk by chunk, of the sequences that `launch_rows` leaves out. dt: of Mamba-2."""
    call = scan.call
    q, k, v, decay, beta, step = call.q, call.k, call.v, call.decay, call.beta, call.step
    rows, heads, value_dim = v.shape
    constants = scan.constants() | {"LIMIT": CHUNKED_ROWS, "HEADS": heads}
    slices, is_normed = scan.num_slices, constants.pop("NORM")
    constants["BK"] = max(16, constants["BK"] // slices)
    widest, inputs = max(16, power_of_two(value_dim)), (*q.stride()[:2], *k.stride()[:2])
    of_decay = (decay.stride(0), decay.stride(1))
    pairs, units = (v.new_empty(rows, heads, width, dtype=torch.float32) for width in (CHUNK_ROWS, 2))
    values, w = v, None
    if beta is not None:
        values, w = (v.new_empty(rows, heads, width, dtype=torch.float32) for width in (value_dim, q.shape[2]))
    chunks = (int(step.max_rows or 0) + 2 * CHUNK_ROWS - 2) // CHUNK_ROWS
    prepare_kernel[(chunks, heads, step.num_seqs)](
        q, k, v, decay, beta, values, w, pairs, units, step.first_rows, step.kv_lens,
        *inputs, *v.stride()[:2], *of_decay, 0 if beta is None else beta.stride(0),
        float(call.l2norm_eps or 0.0), float(call.scale),
        BV=min(64, widest), DELTA=w is not None, NORM=is_normed, **constants, num_warps=4, num_stages=1,
    )  # fmt: skip
    block = min(widest, 32)
    chunks_kernel[(-(-value_dim // block), heads, step.num_seqs)](
        q, k, values, decay, w, pairs, units, dt, scan.mixer and scan.mixer.weight,
        call.states, scan.out, *step_pointers(step), step.kv_lens,
        *inputs, *values.stride()[:2], *of_decay, scan.out.stride(0), call.states.stride(0),
        BV=block, SLICES=slices, DELTA=w is not None, SSM=dt is not None, **constants,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def workspace_nbytes(rows: int, heads: int, key_dim: int, value_dim: int, *, is_delta: bool = True) -> int:
    """Return the bytes that `scan_heads` works in where rows go chunk by chunk."""
    return 4 * rows * heads * (CHUNK_ROWS + 2 + (key_dim + value_dim if is_delta else 0))


def scan_heads(call: ScanCall, *, out: Tensor | None = None) -> Tensor:
    """Run the gated delta rule, or linear attention with decay."""
    scan = _checked(call, out)
    if scan.out.numel() and call.step.num_seqs:
        launch_rows(scan)
        if scan.is_chunked:
            launch_chunks(scan)
    return scan.out


def selective_scan(call: SelectiveScanCall, *, out: Tensor | None = None) -> Tensor:
    """Run Mamba's scan."""
    x, dt, a, b, c, skip, states, step = call.x, call.dt, call.a, call.b, call.c, call.d, call.states, call.step
    check_float("x", x, (None, None))
    rows, channels = x.shape
    check_float("dt", dt, (rows, channels))
    check_float("a", a, (channels, None))
    size = a.shape[1]
    check_float("b", b, (rows, size))
    check_float("c", c, (rows, size))
    if skip is not None:
        check_float("d", skip, (channels,))
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


def gated_norm(call: GatedNormCall, *, out: Tensor | None = None) -> Tensor:
    """Run a gated norm, whose gate may be [T, Hk, R, group_size] of any strides but the last, too, and whose activation
    "none". out: may be x.
    """
    x, gate, weight, is_gate_first = call.x, call.gate, call.weight, call.is_gate_first
    check_float("x", x, (None, None))
    rows, width = x.shape
    size = call.group_size or width
    if width % size:
        raise ValueError(f"groups of {size} columns do not divide {width}")
    check_float("weight", weight, (size if weight.numel() == size else width,))
    check_gate("activation", call.activation)
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
            float(call.eps), GROUP=inner, SIZE=size, BLOCK=block, GATE_FIRST=is_gate_first, KIND=call.activation,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return result
