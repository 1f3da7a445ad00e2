"""Recurrent layers: short convolutions, scans, gated norms. csrc/kernels/common/recurrent.inl states the arithmetic.

What calls hold is said in `kernels.recurrent_call`; all of it is fp32 here, and states are contiguous. Results do not
depend on how a prompt is cut into steps, nor on what else is in one. `out` is made when None. A step that does not fit
its slots raises ValueError, as does one in which a slot that one sequence writes is read or written by another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import WorkerPool, check_tensor, output
from ktransformers.kernels.extension import extension
from ktransformers.kernels.recurrent_call import ConvCall, GatedNormCall, ScanCall, SelectiveScanCall
from ktransformers.kernels.types import Activation, StateStep
from ktransformers.kernels.untraced import untraced

__all__ = [
    "GATES",
    "causal_conv",
    "delta_gates",
    "gated_norm",
    "native_step",
    "scan_heads",
    "selective_scan",
]

GATES = {"silu": Activation.SILU, "sigmoid": Activation.SIGMOID}
"""Activations of gates behind a norm."""

_LINEAR, _DELTA_HEADS, _DELTA_KEYS = range(3)
_NativeStep = tuple[int, int, int, int, int, int, int]


def native_step(step: StateStep, num_rows: int, num_slots: int) -> _NativeStep:
    """Return `step`, checked, as the extension takes it. num_slots: of the states."""
    num_seqs = step.read_slots.shape[0]
    for name, numbers, count in (
        ("first_rows", step.first_rows, num_seqs + 1),
        ("read_slots", step.read_slots, num_seqs),
        ("write_slots", step.write_slots, num_seqs),
        ("save_slots", step.save_slots, num_rows),
    ):
        check_tensor(name, numbers, (count,), torch.int32)
    return (
        num_rows, num_seqs, num_slots, step.first_rows.data_ptr(), step.read_slots.data_ptr(),
        step.write_slots.data_ptr(), step.save_slots.data_ptr(),
    )  # fmt: skip


def _check_rows(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Check fp32 rows on the CPU that may lie apart; each row is contiguous."""
    if tensor.dim() and tensor.shape[0] and tensor.dim() == len(shape):
        check_tensor(name, tensor[0], shape[1:])
        if shape[0] is None or tensor.shape[0] == shape[0]:
            return
    check_tensor(name, tensor, shape)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@untraced
def causal_conv(call: ConvCall, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """Run a convolution; fastest where the weight is the transpose of a contiguous [W, C]."""
    x, weight, states = call.x, call.weight, call.states
    if call.activation not in ("silu", "none"):
        raise ValueError(f'activation must be "silu" or "none", got {call.activation!r}')
    check_tensor("weight", weight if weight.is_contiguous() else weight.t(), (None, None))
    channels, width = weight.shape
    if not 1 <= width <= extension.MAX_CONV_WIDTH:
        raise ValueError(f"a convolution must be 1 to {extension.MAX_CONV_WIDTH} wide, got {width}")
    _check_rows("x", x, (None, channels))
    if call.bias is not None:
        check_tensor("bias", call.bias, (channels,))
    check_tensor("states", states, (None, width - 1, channels))
    result = output(out, (x.shape[0], channels), x)
    extension.causal_conv(
        pool.handle,
        native_step(call.step, x.shape[0], states.shape[0]),
        (x.data_ptr(), weight.data_ptr(), _address(call.bias), result.data_ptr(), states.data_ptr()),
        (x.stride(0), channels, width, *weight.stride()),
        call.activation == "silu",
    )
    return result


@untraced
def scan_heads(call: ScanCall, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """Run the gated delta rule, or linear attention with decay."""
    q, k, v, decay, beta, states = call.q, call.k, call.v, call.decay, call.beta, call.states
    if v.dim() != 3 or q.dim() != 3:
        raise ValueError(f"q, k and v must have 3 dimensions, got {list(q.shape)} and {list(v.shape)}")
    num_rows, heads, dim_v = v.shape
    key_heads, dim_k = q.shape[1:]
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"{heads} value heads cannot share {key_heads} key heads")
    _check_rows("q", q, (num_rows, key_heads, dim_k))
    _check_rows("k", k, (num_rows, key_heads, dim_k))
    _check_rows("v", v, (num_rows, heads, dim_v))
    _check_rows("decay", decay, (num_rows, heads, dim_k) if call.is_per_key else (num_rows, heads))
    if beta is not None:
        _check_rows("beta", beta, (num_rows, heads))
    check_tensor("states", states, (None, heads, dim_k, dim_v))
    result = output(out, (num_rows, heads, dim_v), q, k, v)
    extension.scan_heads(
        pool.handle,
        native_step(call.step, num_rows, states.shape[0]),
        (q.data_ptr(), k.data_ptr(), v.data_ptr(), decay.data_ptr(), _address(beta), result.data_ptr(),
         states.data_ptr()),
        (q.stride(0), k.stride(0), v.stride(0), decay.stride(0), 0 if beta is None else beta.stride(0)),
        (key_heads, heads, dim_k, dim_v),
        _LINEAR if beta is None else _DELTA_KEYS if call.is_per_key else _DELTA_HEADS,
        -1.0 if call.l2norm_eps is None else float(call.l2norm_eps),
        float(call.scale),
    )  # fmt: skip
    return result


@untraced
def selective_scan(call: SelectiveScanCall, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """Run Mamba's scan."""
    x, dt, a, b, c, states = call.x, call.dt, call.a, call.b, call.c, call.states
    check_tensor("a", a, (None, None))
    channels, size = a.shape
    _check_rows("x", x, (None, channels))
    _check_rows("dt", dt, (x.shape[0], channels))
    _check_rows("b", b, (x.shape[0], size))
    _check_rows("c", c, (x.shape[0], size))
    if call.d is not None:
        check_tensor("d", call.d, (channels,))
    check_tensor("states", states, (None, channels, size))
    result = output(out, (x.shape[0], channels), x, dt, b, c)
    extension.selective_scan(
        pool.handle,
        native_step(call.step, x.shape[0], states.shape[0]),
        (x.data_ptr(), dt.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr(), _address(call.d), result.data_ptr(),
         states.data_ptr()),
        (x.stride(0), dt.stride(0), b.stride(0), c.stride(0)),
        (channels, size),
    )  # fmt: skip
    return result


@untraced
def gated_norm(call: GatedNormCall, pool: WorkerPool, out: Tensor | None = None) -> Tensor:
    """Run a gated norm. out: may be x."""
    x, gate, weight = call.x, call.gate, call.weight
    if call.activation not in GATES:
        raise ValueError(f'activation must be "silu" or "sigmoid", got {call.activation!r}')
    check_tensor("x", x, (None, None))
    rows, cols = x.shape
    size = cols if call.group_size is None else call.group_size
    if size < 1 or cols % size:
        raise ValueError(f"group_size must divide {cols} columns, got {size}")
    _check_rows("gate", gate, (rows, cols))
    check_tensor("weight", weight, (size,) if weight.shape == (size,) else (cols,))
    result = x if out is x else output(out, (rows, cols), gate)
    extension.gated_norm(
        pool.handle,
        (x.data_ptr(), gate.data_ptr(), weight.data_ptr(), result.data_ptr()),
        (rows, cols // size, size),
        (gate.stride(0), size, size if weight.shape == (cols,) else 0),
        float(call.eps),
        call.is_gate_first,
        int(GATES[call.activation]),
    )
    return result


@untraced
def delta_gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, pool: WorkerPool) -> tuple[Tensor, Tensor]:
    """Compute the gates of Gated DeltaNet from two of its projections: rate * softplus(a + bias), and sigmoid(b).

    a, b: [T, H]. rate: [H], -exp(A_log). bias: [H], dt_bias. Returns decay (in log space) and beta, [T, H].
    """
    check_tensor("a", a, (None, None))
    rows, heads = a.shape
    check_tensor("b", b, (rows, heads))
    check_tensor("rate", rate, (heads,))
    check_tensor("bias", bias, (heads,))
    decay, beta = torch.empty_like(a), torch.empty_like(b)
    addresses = tuple(tensor.data_ptr() for tensor in (a, b, rate, bias, decay, beta))
    extension.delta_gates(pool.handle, addresses, rows, heads)
    return decay, beta
