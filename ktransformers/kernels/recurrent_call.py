"""Arguments of one call of a recurrent layer's kernels, as every implementation takes them.

    T rows of a step, H heads, Hk key heads, K key and V value dimensions, C channels, N states of a channel

`kernels.cpu.recurrent`, `kernels.triton.recurrent` and the oracle `kernels.reference_recurrent` compute the same from
one record. Rows are those of a flattened step, and may lie apart; rows of no sequence give zeros. States are fp32
[slots, ...] and change in place as `step` says (`StateStep`). Records check nothing: each implementation checks what it
reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ktransformers.kernels.types import StateStep

__all__ = ["ConvCall", "GatedNormCall", "ScanCall", "SelectiveScanCall"]


@dataclass(frozen=True, slots=True)
class ConvCall:
    """Depthwise causal convolution: y[t] = act(bias + sum_w weight[:, w] * x[t - W + 1 + w]), [T, C].

    x: [T, C]. weight: [C, W], W <= 8. bias: [C]. states: [slots, W - 1, C], the inputs before, oldest first.
    activation: "silu" or "none".
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    states: Tensor
    step: StateStep
    activation: str = "silu"


@dataclass(frozen=True, slots=True)
class ScanCall:
    """A scan of heads, [T, H, V]. With beta the gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464; with a
    decay per key dimension Kimi Linear, arXiv 2510.26692), S = exp(decay) S; S += k (x) (v - k^T S) * beta; without
    linear attention with decay (Mamba-2, arXiv 2405.21060, and lightning attention), S = exp(decay) S + k (x) v; then
    o = scale * q^T S.

    q, k: [T, Hk, K], v: [T, H, V]; head h reads key head h // (H / Hk). decay: in log space, at most 0, [T, H], or with
    beta [T, H, K]. beta: [T, H]. states: [slots, H, K, V]. l2norm_eps: q and k become x / sqrt(sum(x^2) + eps) first;
    None: they are as they should be.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None
    states: Tensor
    step: StateStep
    l2norm_eps: float | None = None
    scale: float = 1.0

    @property
    def is_per_key(self) -> bool:
        """Whether each key dimension has a decay of its own."""
        return self.beta is not None and self.decay.dim() == 3


@dataclass(frozen=True, slots=True)
class SelectiveScanCall:
    """Mamba's scan (arXiv 2312.00752): S = exp(dt * A) S + (dt * x) B; y = C S + D x, channel by channel, [T, C].

    x, dt: [T, C]; b, c: [T, N]. a: [C, N], negative, contiguous. d: [C]. states: [slots, C, N].
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    states: Tensor
    step: StateStep


@dataclass(frozen=True, slots=True)
class GatedNormCall:
    """RMSNorm of groups of columns, times act(gate): weight * norm(x) * act(gate), or weight * norm(x * act(gate)) with
    is_gate_first; [T, D].

    x, gate: [T, D]. weight: [D], or [group_size] for all groups. group_size: columns that share a mean; None: all.
    activation: "silu" or "sigmoid".
    """

    x: Tensor
    gate: Tensor
    weight: Tensor
    eps: float
    group_size: int | None = None
    is_gate_first: bool = False
    activation: str = "silu"
