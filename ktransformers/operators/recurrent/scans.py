"""The scans of recurrent layers, wherever their layer is: native on the CPU, Triton on a GPU, else one row at a time.

    T rows, S sequences of a step; Hk, Hv key and value heads, K, V their sizes; slots of a state, see StateStep

One row at a time is what every kernel has to agree with, in fp32, and slow. Knows tensors and steps, not layers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import StateStep
from ktransformers.operators.device import Device, use

__all__ = ["Scans"]


@functools.cache
def _kernel(module: str, name: str) -> Callable[..., Tensor] | None:
    """A function of `kernels`, None where this version has none."""
    full = f"ktransformers.kernels.{module}"
    if importlib.util.find_spec(full) is None:
        return None
    found: Callable[..., Tensor] | None = getattr(importlib.import_module(full), name, None)
    return found


@dataclass(frozen=True, slots=True)
class Scans:
    """Of one layer on `device`. pool: of the CPU; None on a GPU, and while only planning. All states are fp32.

    Rows are fp32 or of the device's type; results are fp32 [T, ...]. Rows of no sequence give anything finite.
    """

    device: Device
    pool: WorkerPool | None

    def _run(self, name: str, plain: Callable[..., Tensor], tensors: tuple[Any, ...], **options: Any) -> Tensor:
        kernel = _kernel("triton.recurrent" if self.device.is_gpu else "cpu.recurrent", name)
        if kernel is None:
            return plain(*(t.float() if isinstance(t, Tensor) else t for t in tensors), **options)
        if self.device.is_gpu:
            use(self.device.torch_device)
            return kernel(*tensors, **options)
        return kernel(*tensors, **options, pool=self.pool)

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv: Tensor, step: StateStep, activation: str
    ) -> Tensor:
        """y[t] = act(bias + sum_w weight[:, w] x[t - W + 1 + w]): x [T, C], weight [C, W], conv [slots, W - 1, C].

        activation: "silu" or "none".
        """
        return self._run("causal_conv", _causal_conv, (x, weight, bias, conv, step), activation=activation)

    def delta_scan(
        self, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor, recurrent: Tensor, step: StateStep
    ) -> Tensor:
        """S = exp(decay) S; S += k (v - k S) beta; o = K^-0.5 q S, with q and k of length 1: [T, Hv, V].

        qkv: [T, Hk, K] twice and [T, Hv, V]; decay [T, Hv] or [T, Hv, K]; beta [T, Hv]; recurrent [slots, Hv, K, V].
        """
        scale = qkv[0].shape[-1] ** -0.5
        return self._run("delta_scan", _delta_scan, (*qkv, decay, beta, recurrent, step), l2norm_eps=1e-6, scale=scale)

    def linear_scan(
        self, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, recurrent: Tensor, step: StateStep
    ) -> Tensor:
        """S = exp(decay) S + k v; o = q S: [T, H, P].

        qkv: q and k [T, G, K], of H / G neighbouring heads each, and v [T, H, P]; decay [T, H]; recurrent
        [slots, H, K, P].
        """
        return self._run("linear_scan", _linear_scan, (*qkv, decay, recurrent, step))

    def selective_scan(self, rows: tuple[Tensor, ...], a: Tensor, d: Tensor, states: Tensor, step: StateStep) -> Tensor:
        """S = exp(dt A) S + dt x B; o = C S + D x: [T, C].

        rows: x and dt [T, C], B and C [T, N]; a [C, N], d [C]; states [slots, C, N].
        """
        x, dt, b, c = rows
        return self._run("selective_scan", _selective_scan, (x, dt, a, b, c, d, states, step))

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, form: tuple[bool, str]
    ) -> Tensor:
        """RMSNorm in groups of columns and a gate: x, gate [N, D], weight [D].

        form: whether the gate comes before the norm, and its activation, "silu" or "sigmoid".
        """
        options = {"eps": eps, "is_gate_first": form[0], "group_size": group_size, "activation": form[1]}
        return self._run("gated_norm", _gated_norm, (x, gate, weight), **options)


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "none":
        return x
    return functional.silu(x) if activation == "silu" else torch.sigmoid(x)


def _scan(
    states: Tensor, step: StateStep, out: Tensor, advance: Callable[[Tensor, int], tuple[Tensor, Tensor]]
) -> Tensor:
    """advance: a state and a row -> the state behind it and what goes to out[row]."""
    bounds, reads, writes = (t.tolist() for t in (step.first_rows, step.read_slots, step.write_slots))
    saves = step.save_slots.tolist()
    firsts = [torch.zeros_like(states[0]) if slot < 0 else states[slot].clone() for slot in reads]
    for first, last, state, write in zip(bounds, bounds[1:], firsts, writes, strict=False):
        for row in range(first, last):
            state, out[row] = advance(state, row)
            if saves[row] >= 0:
                states[saves[row]] = state
        if write >= 0 and last > first:
            states[write] = state
    return out


def _causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv: Tensor, step: StateStep, *, activation: str
) -> Tensor:
    taps = weight.T.contiguous()

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        seen = torch.cat((state, x[row : row + 1]))
        return seen[1:], (seen * taps).sum(0)

    out = _scan(conv, step, torch.zeros_like(x), advance)
    return _activated(out if bias is None else out + bias, activation)


def _delta_scan(  # noqa: PLR0913 - as the kernels have it
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    recurrent: Tensor,
    step: StateStep,
    *,
    l2norm_eps: float | None,
    scale: float,
) -> Tensor:
    share = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(share, 1), k.repeat_interleave(share, 1)
    if l2norm_eps is not None:
        q, k = (rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + l2norm_eps) for rows in (q, k))
    kept = decay.exp().view(*decay.shape[:2], -1, 1)  # [T, Hv, K or 1, 1]

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state = state * kept[row]
        key = k[row].unsqueeze(-1)
        delta = (v[row] - (state * key).sum(-2)) * beta[row].unsqueeze(-1)
        state = state + key * delta.unsqueeze(-2)
        return state, (state * q[row].unsqueeze(-1)).sum(-2) * scale

    return _scan(recurrent, step, torch.zeros_like(v), advance)


def _linear_scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, recurrent: Tensor, step: StateStep) -> Tensor:
    share = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(share, 1), k.repeat_interleave(share, 1)
    kept = decay.exp()[..., None, None]

    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        state = state * kept[row] + k[row].unsqueeze(-1) * v[row].unsqueeze(-2)
        return state, (state * q[row].unsqueeze(-1)).sum(-2)

    return _scan(recurrent, step, torch.zeros_like(v), advance)


def _selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, states: Tensor, step: StateStep
) -> Tensor:
    def advance(state: Tensor, row: int) -> tuple[Tensor, Tensor]:
        grown = dt[row].unsqueeze(-1)
        state = torch.exp(grown * a) * state + grown * x[row].unsqueeze(-1) * b[row]
        return state, (state * c[row]).sum(-1) + d * x[row]

    return _scan(states, step, torch.zeros_like(x), advance)


def _gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, is_gate_first: bool, group_size: int, activation: str
) -> Tensor:
    gate = _activated(gate, activation)
    if is_gate_first:
        x = x * gate
    groups = x.view(len(x), -1, group_size)
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).view(x.shape) * weight
    return normed if is_gate_first else normed * gate
