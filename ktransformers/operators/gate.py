"""Routers: which experts a token goes to, and with which weight.

Families differ in how they score and choose (softmax or sigmoid, groups, correction bias), so the Hugging Face router
keeps its own forward; only the matrix product and the sigmoid inside it are rerouted to native kernels. BLAS sums in
another order for another number of rows, and torch computes a tensor's last elements with other code than the rest:
either would make a token's experts depend on who shares its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ktransformers.core import Phase
from ktransformers.kernels import native
from ktransformers.kernels.quant import QuantType, RawTensor
from ktransformers.operators.activation import sigmoid
from ktransformers.operators.wrapper import WrapperOperator

_SIGMOIDS = frozenset({torch.sigmoid, torch.Tensor.sigmoid, functional.sigmoid})

__all__ = ["KMoEGate", "NativeMathMode"]


class NativeMathMode(TorchFunctionMode):
    """While active, `torch.nn.functional.linear` and `torch.sigmoid` on fp32 CPU tensors run on native kernels."""

    def __init__(self, pool: native.WorkerPool):
        super().__init__()
        self.pool = pool

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and self._can_run(*args, **kwargs):
            return self._linear(*args, **kwargs)
        if func in _SIGMOIDS and not kwargs and args[0].dtype is torch.float32 and args[0].device.type == "cpu":
            return sigmoid(args[0], self.pool)
        return func(*args, **kwargs)

    @staticmethod
    def _can_run(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
        tensors = [input, weight] if bias is None else [input, weight, bias]
        return weight.dim() == 2 and all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = weight.detach().contiguous()
        raw = RawTensor(weight.view(torch.uint8).view(-1), QuantType.F32, tuple(weight.shape))
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        out = native.linear(rows, raw, self.pool, bias=bias)
        return out.view(*input.shape[:-1], weight.shape[0])


class KMoEGate(WrapperOperator):
    """Any router of `transformers`: [T, H] in, (router_logits, topk_weights [T, K], topk_ids [T, K]) out."""

    OPS: ClassVar[dict[str, str]] = {"KMoEGateNative": "the family's own routing on native kernels"}

    def op(self, phase: Phase) -> str:
        return "KMoEGateNative"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with NativeMathMode(self.config.require_pool()):
            return self.inner(*args, **kwargs)
