"""The routed experts of one layer as one kernel: products, activation and the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import CpuLayout, WorkerPool, check_tensor, check_weight, layout_of, output
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import ActivationSpec, ExpertWeight, ExpertWeights, QuantType
from ktransformers.kernels.untraced import untraced

__all__ = ["MoeKernel"]


_Projection = tuple[int, int, int, list[int], int, int]


def _projection(
    name: str,
    tensors: Sequence[ExpertWeight] | None,
    bias: Tensor | None,
    num_experts: int,
    shape: tuple[int, int],
) -> _Projection:
    if tensors is None:
        if bias is not None:
            raise ValueError(f"{name}_bias is given, but there is no {name}")
        return (int(QuantType.F32), 0, 0, [], 0, int(CpuLayout.ROWS))
    if len(tensors) != num_experts:
        raise ValueError(f"{name} has {len(tensors)} experts, up has {num_experts}")
    qtype, layout = tensors[0].qtype, layout_of(check_weight(f"{name}[0]", tensors[0], 2))
    addresses = []
    for index, given in enumerate(tensors):
        tensor = check_weight(f"{name}[{index}]", given, 2)
        addresses.append(tensor.data.data_ptr())
        if tensor.qtype != qtype or layout_of(tensor) != layout:
            raise ValueError(f"{name}[{index}] is {tensor.qtype.name}, {name}[0] is {qtype.name}: give one type")
        if tensor.shape != shape:
            raise ValueError(f"{name}[{index}] must have shape {list(shape)}, got {list(tensor.shape)}")
    if bias is not None:
        check_tensor(f"{name}_bias", bias, (num_experts, shape[0]))
    return (int(qtype), shape[0], shape[1], addresses, 0 if bias is None else bias.data_ptr(), layout)


class MoeKernel:
    """The routed experts of one layer, ready to run. Keeps the weights alive and never copies them.

    layer: its number in the model, under which it is counted and recorded; -1: none.
    Raises ValueError when shapes, types or the number of experts do not fit together.
    """

    def __init__(self, weights: ExpertWeights, activation: ActivationSpec, pool: WorkerPool, layer: int = -1) -> None:
        if not weights.up:
            raise ValueError("there must be at least one expert")
        if weights.gate is None and activation.kind.is_clamped:
            raise ValueError(f"{activation.kind.name} needs a gate")
        check_weight("up[0]", weights.up[0], 2)
        width, hidden = weights.up[0].shape
        self.num_experts = len(weights.up)
        self.hidden_size = hidden
        self.weights = weights
        self.activation = activation
        self.pool = pool
        self.layer = layer
        self.handle = extension.Moe(
            _projection("gate", weights.gate, weights.gate_bias, self.num_experts, (width, hidden)),
            _projection("up", weights.up, weights.up_bias, self.num_experts, (width, hidden)),
            _projection("down", weights.down, weights.down_bias, self.num_experts, (hidden, width)),
            int(activation.kind),
            activation.alpha,
            activation.limit,
            layer,
        )

    @untraced
    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Return out[t] = ((w[t, 0] * y0) + w[t, 1] * y1) + ..., y_k the output of expert topk_ids[t, k].

        hidden_states: [T, H]. topk_ids: int64 or int32 [T, K]; an id equal to the number of experts is skipped, any
        other id out of range raises IndexError before any work. topk_weights: fp32 [T, K]. out: [T, H].
        """
        check_tensor("hidden_states", hidden_states, (None, self.hidden_size))
        tokens = hidden_states.shape[0]
        if topk_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"topk_ids must be int64 or int32, got {topk_ids.dtype}")
        ids = topk_ids.to(torch.int64)
        check_tensor("topk_ids", ids, (tokens, None), torch.int64)
        check_tensor("topk_weights", topk_weights, (tokens, ids.shape[1]))
        result = output(out, (tokens, self.hidden_size), hidden_states)
        self.handle.forward(
            self.pool.handle,
            hidden_states.data_ptr(),
            tokens,
            ids.data_ptr(),
            topk_weights.data_ptr(),
            ids.shape[1],
            result.data_ptr(),
        )
        return result
