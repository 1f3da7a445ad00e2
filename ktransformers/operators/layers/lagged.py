"""Hyper-connections that lag (DeepSeek-V4.1): a block's own weights of the streams collapse them for the next block.

    x            = sum_n pre[n] stream[n]              pre: what the block before has computed
    stream[m]    = post[m] block(x) + sum_n comb[n, m] stream[n]
    pre, post, comb of the streams in front of the block, as in DeepSeek-V4 (operators/layers/hyper.py)

The native kernel for DeepSeek-V4's connections computes post and comb; pre is a product of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.types import HyperSpec, RawTensor
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.wrapper import DenseState, WrapperOperator
from ktransformers.weights.source import WeightSource

if TYPE_CHECKING:
    from ktransformers.models.deepseek_v41.modeling import DeepseekV41Connection

__all__ = ["KLaggedConnection"]


class KLaggedConnection(WrapperOperator):
    """Operator of a block's connection: streams [1, T, N, H] in; pre [1, T, N], post [1, T, N], comb [1, T, N, N]."""

    OPS: ClassVar[dict[str, str]] = {"KLaggedNative": "native calls"}
    NUMBERS: ClassVar[tuple[str, ...]] = ("hc_mult", "hc_sinkhorn_iters", "hc_eps", "norm_eps")

    def __init__(self, module: nn.Module, key: str, config: OperatorConfig, placement: Placement | None = None):
        super().__init__(module, key, config, placement)
        missing = [name for name in (*self.NUMBERS, "fn", "base", "scale") if not hasattr(module, name)]
        if missing:
            raise UnsupportedError(f"KLaggedConnection cannot replace {key} ({type(module).__name__}): no {missing[0]}")
        if self.device.is_gpu:
            raise UnsupportedError(f"{key}: connections that lag run on the CPU; place it there")
        inner = self._module
        self.spec = HyperSpec(inner.hc_mult, inner.hc_sinkhorn_iters, inner.hc_eps, inner.norm_eps)
        if not 1 <= self.spec.streams <= cpu.MAX_STREAMS:
            raise UnsupportedError(f"{key} has {self.spec.streams} streams; up to {cpu.MAX_STREAMS} are supported")
        self._pre: RawTensor | None = None  # [N, N H], the rows of fn that give pre
        self._ones = torch.empty(0)

    @property
    def _module(self) -> DeepseekV41Connection:
        return cast("DeepseekV41Connection", self.inner)

    @override
    def op(self, phase: Phase) -> str:
        return "KLaggedNative"

    @override
    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32)

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        fn = self.inner.get_parameter("fn").detach()
        self._pre = RawTensor.from_tensor(fn[: self.spec.streams].contiguous())
        self._ones = torch.ones(fn.shape[1])
        self.inner._parameters["fn"] = nn.Parameter(cpu.split_columns(fn), requires_grad=False)

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return (self.inner,)

    @override
    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self._pre is not None, f"{self.key} is not loaded"
        inner = self._module
        pool, rows, num = self.config.require_pool(), streams[0].contiguous(), self.spec.streams
        post, comb, _ = cpu.collapse_streams(rows, inner.fn, inner.base, inner.scale, self.spec, pool)
        normed = cpu.rms_norm(rows.flatten(1), self._ones, self.spec.norm_eps, pool)
        with NativeMathMode(pool):
            pre = torch.sigmoid(cpu.linear(normed, self._pre, pool) * inner.scale[0] + inner.base[:num])
        return (pre + self.spec.eps)[None], post[None], comb[None]

    def collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Make a block's input [1, T, H] of streams, added up one after the other."""
        first, *others = zip(streams.unbind(2), pre[..., None].unbind(2), strict=True)
        total = first[0] * first[1]
        for stream, weight in others:
            total = total + stream * weight
        return total

    def mix(self, streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Mix a block's result [1, T, H] with its streams, which stay as they are."""
        rows = streams[0].clone()
        cpu.mix_streams(rows, out.reshape(len(rows), -1).contiguous(), post[0], comb[0], self.config.require_pool())
        return rows[None]
