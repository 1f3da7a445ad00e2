"""Hyper-connections: several streams of hidden states become the input of a block.

    N streams of a token, each of H columns

KHyperConnection is for those of DeepSeek-V4 (arXiv 2512.24880), whose weights are fp32 on every device: they are small,
and transformers keeps them so in any precision of a model. KGatedStreams is for Qwen4's, which are two narrow products
and gates. What mixes a block's result with the streams on the CPU is in operators/layers/streams.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.kernels import cpu
from ktransformers.kernels.triton.attention.gated_streams import collapse_streams, norm_streams, scaled_silu
from ktransformers.kernels.triton.attention.hyper import collapse
from ktransformers.kernels.types import Activation, ActivationSpec, HyperSpec
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.recognize.hyper import GatedSpec, recognize_gated, recognize_hyper
from ktransformers.operators.wrapper import DenseState, WrapperOperator
from ktransformers.weights.source import WeightSource

__all__ = ["KGatedStreams", "KHyperConnection"]


class KHyperConnection(WrapperOperator):
    """Operator that collapses streams [1, T, N, H]: those that enter a block, or those behind the last layer."""

    OPS: ClassVar[dict[str, str]] = {
        "KHyperNative": "one native call",
        "KHyperTriton": "two Triton kernels",
        "KHyperTorch": "the module's own forward, with weights in fp32",
    }

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        spec = recognize_hyper(module)
        is_native = spec is not None and spec.streams <= cpu.MAX_STREAMS
        self.spec: HyperSpec | None = spec if is_native or self.device.is_gpu else None

    @override
    def op(self, phase: Phase) -> str:
        if self.spec is None:
            return "KHyperTorch"
        return "KHyperTriton" if self.device.is_gpu else "KHyperNative"

    @override
    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32)

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        if self.spec is not None and not self.device.is_gpu:
            self.inner._parameters["fn"] = nn.Parameter(cpu.split_columns(self._weights[0]), requires_grad=False)

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return () if self.spec is None else self.inner.modules()

    @property
    def _weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights: Any = self.inner
        return weights.fn, weights.base, weights.scale

    @override
    def forward(self, streams: torch.Tensor) -> Any:
        """Return what the module returns: how a block's result is mixed with the streams, and its input [1, T, H]."""
        x = self.device.to_device(streams)
        if self.spec is None:
            return self.inner(x)
        rows = x[0].contiguous()
        if self.device.is_gpu:
            made = collapse(rows, *self._weights, self.spec)
        else:
            made = cpu.collapse_streams(rows, *self._weights, self.spec, self.config.require_pool())
        return tuple(part[None] for part in made)


class KGatedStreams(WrapperOperator):
    """Operator that collapses streams [1, T, N H] with gates: those that enter a block, or those behind the last
    layer. Its products stay children of the module, and are planned for themselves.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KGatedNative": "native kernels around two products",
        "KGatedTriton": "Triton kernels around two products",
        "KGatedTorch": "the module's own forward",
    }
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"hc_norm"})

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        spec = recognize_gated(module)
        is_native = spec is not None and spec.streams <= cpu.MAX_STREAMS
        self.spec: GatedSpec | None = spec if is_native or self.device.is_gpu else None

    @override
    def op(self, phase: Phase) -> str:
        if self.spec is None:
            return "KGatedTorch"
        return "KGatedTriton" if self.device.is_gpu else "KGatedNative"

    @override
    def state(self) -> DenseState:
        dtype = None if self.spec is None else torch.float32
        return DenseState(self.inner.get_submodule("hc_norm"), f"{self.key}.hc_norm", self.device, dtype)

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        if self.spec is not None:
            held = self.inner.get_submodule("hc_norm")._parameters
            weight = held["weight"]
            assert weight is not None, "it was loaded"
            held["weight"] = nn.Parameter(weight + self.spec.offset, requires_grad=False)

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return () if self.spec is None else (self.inner, self.inner.get_submodule("hc_norm"))

    @override
    def forward(self, streams: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what the module returns: a block's input [1, T, H], the streams and the weights [1, T, N] by which its
        result is added to them; or the first alone.
        """
        x, spec = self.device.to_device(streams), self.spec
        inner: Any = self.inner
        if spec is None:
            return inner(x)  # type: ignore[no-any-return]
        parts, pool = inner, None if self.device.is_gpu else self.config.require_pool()
        rows = x[0].contiguous()
        if pool is None:
            normed = norm_streams(rows, parts.hc_norm.weight, spec.eps, spec.streams)
        else:
            normed = cpu.norm_streams(rows, parts.hc_norm.weight, spec.eps, spec.streams, pool)
        inject = parts.block_inject_weight(normed) if spec.has_weights else None
        narrow = parts.input_mix_weight_down(normed)
        if pool is None:
            mixed = parts.input_mix_weight_up(scaled_silu(narrow, 1.0 / spec.streams))
            collapsed, weights = collapse_streams(normed, mixed, inject, spec.streams)
        else:
            narrow = cpu.activate(ActivationSpec(Activation.SILU), None, narrow / spec.streams, pool)
            collapsed = cpu.gate_streams(normed, parts.input_mix_weight_up(narrow), spec.streams, pool)
            weights = None if inject is None else _injected(inject / spec.streams, pool)
        return collapsed[None] if weights is None else (collapsed[None], x, weights[None])


def _injected(inject: torch.Tensor, pool: cpu.WorkerPool) -> torch.Tensor:
    return 2 * cpu.activate(ActivationSpec(Activation.SIGMOID), None, inject, pool)
