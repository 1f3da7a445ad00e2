"""Oracles of the kernels of recurrent layers, slowly, in plain torch: row by row, in fp64, states in place.

See `kernels.recurrent_call` for shapes; states may have any floating dtype here. Knows nothing of the extension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from ktransformers.kernels.recurrent_call import ConvCall, GatedNormCall, ScanCall, SelectiveScanCall
from ktransformers.kernels.types import StateStep

__all__ = ["causal_conv", "delta_gates", "gated_norm", "scan_heads", "selective_scan"]


def _scan(
    states: Tensor, step: StateStep, out: Tensor, advance: Callable[[Tensor, int], tuple[Tensor, Tensor]]
) -> None:
    """out[t] = y with (state, y) = advance(state, t), for the rows of each sequence; all read before any writes."""
    reads = [states[slot].double() if slot >= 0 else torch.zeros_like(states[0]).double() for slot in step.read_slots]
    for seq, state in enumerate(reads):
        first, end = int(step.first_rows[seq]), int(step.first_rows[seq + 1])
        for row in range(first, end):
            state, out[row] = advance(state, row)
            if step.save_slots[row] >= 0:
                states[step.save_slots[row]] = state.to(states.dtype)
        if end > first and step.write_slots[seq] >= 0:
            states[step.write_slots[seq]] = state.to(states.dtype)


def causal_conv(call: ConvCall) -> Tensor:
    """Depthwise causal convolution over each sequence."""
    wide, weight, out = call.x.double(), call.weight.double().T, torch.zeros_like(call.x)
    bias = 0 if call.bias is None else call.bias.double()

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([state, wide[row][None]])
        y = (inputs * weight).sum(0) + bias
        return inputs[1:], functional.silu(y) if call.activation == "silu" else y

    _scan(call.states, call.step, out, advance)
    return out


def scan_heads(call: ScanCall) -> Tensor:
    """The gated delta rule, or linear attention with decay, row by row."""
    q, k, v, share = call.q.double(), call.k.double(), call.v, call.v.shape[1] // call.q.shape[1]
    if call.l2norm_eps is not None:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + call.l2norm_eps) for x in (q, k))
    queries, keys = (x.repeat_interleave(share, 1) for x in (q, k))
    factors = call.decay.double().exp().reshape(*v.shape[:2], -1, 1)  # [T, H, K or 1, 1]
    beta, out = None if call.beta is None else call.beta.double(), torch.zeros_like(v)

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state, value = state * factors[row], v[row].double()
        if beta is not None:
            value = (value - torch.einsum("hk,hkv->hv", keys[row], state)) * beta[row][:, None]
        state = state + keys[row][:, :, None] * value[:, None]
        return state, call.scale * torch.einsum("hk,hkv->hv", queries[row], state)

    _scan(call.states, call.step, out, advance)
    return out


def selective_scan(call: SelectiveScanCall) -> Tensor:
    """Mamba's selective scan, row by row."""
    wide, steps, out = call.x.double(), call.dt.double(), torch.zeros_like(call.x)
    a, b, c, d = call.a.double(), call.b.double(), call.c.double(), 0 if call.d is None else call.d.double()

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state = state * torch.exp(steps[row][:, None] * a) + (steps[row] * wide[row])[:, None] * b[row]
        return state, state @ c[row] + d * wide[row]

    _scan(call.states, call.step, out, advance)
    return out


def gated_norm(call: GatedNormCall) -> Tensor:
    """RMSNorm of groups of columns, times the gate's SiLU or sigmoid."""
    x, gate, weight = call.x.double(), call.gate.double(), call.weight.double()
    factor = functional.silu(gate) if call.activation == "silu" else torch.sigmoid(gate)
    groups = (x * factor if call.is_gate_first else x).view(len(x), -1, call.group_size or x.shape[1])
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + call.eps)).flatten(1)
    result = weight.repeat(x.shape[1] // len(weight)) * normed
    gated: Tensor = result if call.is_gate_first else result * factor
    return gated.float()


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute decay (in log space) and beta of Gated DeltaNet."""
    wide = a.double() + bias.double()
    softplus = torch.logaddexp(wide, torch.zeros_like(wide))
    return (rate.double() * softplus).float(), torch.sigmoid(b.double()).float()
