"""Oracles of the kernels of recurrent layers, slowly, in plain torch: row by row, in fp64, states in place.

The names and arguments are those of `kernels.cpu.recurrent` without a pool; see there for shapes. States may have any
floating dtype. Knows nothing of the extension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from ktransformers.kernels.types import StateStep

__all__ = ["causal_conv", "delta_gates", "delta_scan", "gated_norm", "linear_scan", "selective_scan"]


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


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: StateStep, activation: str
) -> Tensor:
    """Depthwise causal convolution over each sequence."""
    wide, out = x.double(), torch.zeros_like(x)

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([state, wide[row][None]])
        y = (inputs * weight.double().T).sum(0) + (0 if bias is None else bias.double())
        return inputs[1:], functional.silu(y) if activation == "silu" else y

    _scan(states, step, out, advance)
    return out


def delta_scan(  # noqa: PLR0913 - what a call of the kernel takes
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    step: StateStep,
    l2norm_eps: float | None,
    scale: float,
) -> Tensor:
    """The gated delta rule, row by row."""
    share = v.shape[1] // q.shape[1]
    if l2norm_eps is not None:
        q, k = (x.double() * torch.rsqrt(x.double().square().sum(-1, keepdim=True) + l2norm_eps) for x in (q, k))
    queries, keys = (x.double().repeat_interleave(share, 1) for x in (q, k))
    factors = decay.double().exp().reshape(*v.shape[:2], -1, 1)  # [T, H, K or 1, 1]
    out = torch.zeros_like(v)

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state = state * factors[row]
        memory = torch.einsum("hk,hkv->hv", keys[row], state)
        delta = (v[row].double() - memory) * beta[row].double()[:, None]
        state = state + keys[row][:, :, None] * delta[:, None]
        return state, scale * torch.einsum("hk,hkv->hv", queries[row], state)

    _scan(states, step, out, advance)
    return out


def linear_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, states: Tensor, step: StateStep) -> Tensor:
    """Linear attention with decay, row by row."""
    share = v.shape[1] // q.shape[1]
    queries, keys = (x.double().repeat_interleave(share, 1) for x in (q, k))
    factors, out = decay.double().exp(), torch.zeros_like(v)

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state = state * factors[row][:, None, None] + keys[row][:, :, None] * v[row].double()[:, None]
        return state, torch.einsum("hk,hkv->hv", queries[row], state)

    _scan(states, step, out, advance)
    return out


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, step: StateStep
) -> Tensor:
    """Mamba's selective scan, row by row."""
    wide, steps, out = x.double(), dt.double(), torch.zeros_like(x)

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state = state * torch.exp(steps[row][:, None] * a.double())
        state = state + (steps[row] * wide[row])[:, None] * b[row].double()
        return state, state @ c[row].double() + (0 if d is None else d.double() * wide[row])

    _scan(states, step, out, advance)
    return out


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int | None = None,
    is_gate_first: bool = False,
    activation: str = "silu",
) -> Tensor:
    """RMSNorm of groups of columns, times the gate's SiLU or sigmoid."""
    factor = functional.silu(gate.double()) if activation == "silu" else torch.sigmoid(gate.double())
    wide = x.double() * factor if is_gate_first else x.double()
    groups = wide.view(len(x), -1, group_size or x.shape[1])
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(1)
    result = weight.double().repeat(x.shape[1] // len(weight)) * normed
    gated: Tensor = result if is_gate_first else result * factor
    return gated.float()


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute decay (in log space) and beta of Gated DeltaNet."""
    wide = a.double() + bias.double()
    softplus = torch.logaddexp(wide, torch.zeros_like(wide))
    return (rate.double() * softplus).float(), torch.sigmoid(b.double()).float()
