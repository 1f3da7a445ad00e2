"""The scans of recurrent layers, wherever their layer is: native on the CPU, Triton on a GPU.

    T rows, S sequences of a step; Hk, Hv key and value heads, K, V their sizes; slots of a state, see StateStep

What every kernel has to agree with, row by row, is kernels/reference_recurrent.py. Knows tensors and steps, not layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu import recurrent as cpu_kernels
from ktransformers.kernels.triton.recurrent import launch as gpu_kernels
from ktransformers.kernels.types import StateStep
from ktransformers.operators.device import Device, use

__all__ = ["Scans"]


@dataclass(frozen=True, slots=True)
class Scans:
    """Scans of one layer on `device`. pool: of the CPU; None on a GPU, and while only planning. All states are fp32.

    Rows are fp32 or of the device's type; results are fp32 [T, ...]. Rows of no sequence give anything finite.
    """

    device: Device
    pool: WorkerPool | None

    def _run(self, name: str, tensors: tuple[Any, ...], **options: Any) -> Tensor:
        """Run the kernel of this name, which both modules have under the same arguments."""
        if self.device.is_gpu:
            use(self.device.torch_device)
            on_gpu: Callable[..., Tensor] = getattr(gpu_kernels, name)
            return on_gpu(*tensors, **options)
        on_cpu: Callable[..., Tensor] = getattr(cpu_kernels, name)
        return on_cpu(*tensors, **options, pool=self.pool)

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv: Tensor, step: StateStep, activation: str
    ) -> Tensor:
        """Depthwise causal convolution, y[t] = act(bias + sum_w weight[:, w] x[t - W + 1 + w]): x [T, C], weight [C,
        W], conv [slots, W - 1, C].

        activation: "silu" or "none".
        """
        return self._run("causal_conv", (x, weight, bias, conv, step), activation=activation)

    def delta_scan(
        self, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor, recurrent: Tensor, step: StateStep
    ) -> Tensor:
        """The gated delta rule, S = exp(decay) S; S += k (v - k S) beta; o = K^-0.5 q S, with q and k of length 1: [T,
        Hv, V].

        qkv: [T, Hk, K] twice and [T, Hv, V]; decay [T, Hv] or [T, Hv, K]; beta [T, Hv]; recurrent [slots, Hv, K, V].
        """
        scale = qkv[0].shape[-1] ** -0.5
        return self._run("delta_scan", (*qkv, decay, beta, recurrent, step), l2norm_eps=1e-6, scale=scale)

    def linear_scan(
        self, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, recurrent: Tensor, step: StateStep
    ) -> Tensor:
        """Linear attention with decay, S = exp(decay) S + k v; o = q S: [T, H, P].

        qkv: q and k [T, G, K], of H / G neighbouring heads each, and v [T, H, P]; decay [T, H]; recurrent
        [slots, H, K, P].
        """
        return self._run("linear_scan", (*qkv, decay, recurrent, step))

    def selective_scan(self, rows: tuple[Tensor, ...], a: Tensor, d: Tensor, states: Tensor, step: StateStep) -> Tensor:
        """Mamba's scan, S = exp(dt A) S + dt x B; o = C S + D x: [T, C].

        rows: x and dt [T, C], B and C [T, N]; a [C, N], d [C]; states [slots, C, N].
        """
        x, dt, b, c = rows
        return self._run("selective_scan", (x, dt, a, b, c, d, states, step))

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, form: tuple[bool, str]
    ) -> Tensor:
        """RMSNorm in groups of columns and a gate: x, gate [N, D], weight [D].

        form: whether the gate comes before the norm, and its activation, "silu" or "sigmoid".
        """
        options = {"eps": eps, "is_gate_first": form[0], "group_size": group_size, "activation": form[1]}
        return self._run("gated_norm", (x, gate, weight), **options)
