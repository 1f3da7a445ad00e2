"""The scans of recurrent layers, wherever their layer is: native on the CPU, Triton on a GPU.

What every kernel has to agree with, row by row, is kernels/reference_recurrent.py. Knows tensors and steps, not layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu import recurrent as cpu_kernels
from ktransformers.kernels.recurrent_call import ConvCall, GatedNormCall, ScanCall, SelectiveScanCall
from ktransformers.kernels.triton.recurrent import launch as gpu_kernels
from ktransformers.kernels.types import StateStep
from ktransformers.operators.device import Device, use

__all__ = ["Scans"]

CallT = TypeVar("CallT")


@dataclass(frozen=True, slots=True)
class Scans:
    """Scans of one layer on `device`. pool: of the CPU; None on a GPU, and while only planning. All states are fp32.

    Rows are fp32 or of the device's type; results are fp32 [T, ...]. Rows of no sequence give anything finite.
    """

    device: Device
    pool: WorkerPool | None

    def _run(
        self, call: CallT, on_cpu: Callable[[CallT, WorkerPool], Tensor], on_gpu: Callable[[CallT], Tensor]
    ) -> Tensor:
        if self.device.is_gpu:
            use(self.device.torch_device)
            return on_gpu(call)
        assert self.pool is not None, "scans that are only planned"
        return on_cpu(call, self.pool)

    def causal_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv: Tensor, step: StateStep, activation: str
    ) -> Tensor:
        """Depthwise causal convolution, see ConvCall."""
        call = ConvCall(x, weight, bias, conv, step, activation)
        return self._run(call, cpu_kernels.causal_conv, gpu_kernels.causal_conv)

    def delta_scan(
        self, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor, recurrent: Tensor, step: StateStep
    ) -> Tensor:
        """The gated delta rule with q and k of length 1, and q scaled by K^-0.5, see ScanCall."""
        call = ScanCall(*qkv, decay, beta, recurrent, step, l2norm_eps=1e-6, scale=qkv[0].shape[-1] ** -0.5)
        return self._run(call, cpu_kernels.scan_heads, gpu_kernels.scan_heads)

    def linear_scan(
        self, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, recurrent: Tensor, step: StateStep
    ) -> Tensor:
        """Linear attention with decay, see ScanCall."""
        return self._run(ScanCall(*qkv, decay, None, recurrent, step), cpu_kernels.scan_heads, gpu_kernels.scan_heads)

    def selective_scan(self, rows: tuple[Tensor, ...], a: Tensor, d: Tensor, states: Tensor, step: StateStep) -> Tensor:
        """Mamba's scan, see SelectiveScanCall. rows: x, dt, B and C."""
        x, dt, b, c = rows
        call = SelectiveScanCall(x, dt, a, b, c, d, states, step)
        return self._run(call, cpu_kernels.selective_scan, gpu_kernels.selective_scan)

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, form: tuple[bool, str]
    ) -> Tensor:
        """RMSNorm in groups of columns and a gate, see GatedNormCall. form: its is_gate_first and activation."""
        call = GatedNormCall(x, gate, weight, eps, group_size, *form)
        return self._run(call, cpu_kernels.gated_norm, gpu_kernels.gated_norm)
