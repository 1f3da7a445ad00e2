"""The routed experts of one layer as one kernel: products, activation and the weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import CpuLayout, WorkerPool, check_tensor, check_weight, layout_of, output
from ktransformers.kernels.cpu.expert_store import ExpertStore, RecordPart
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


def _checked(weights: ExpertWeights) -> tuple[_Projection, _Projection, _Projection]:
    """The projections of experts in memory: gate, up, down."""
    if not weights.up:
        raise ValueError("there must be at least one expert")
    check_weight("up[0]", weights.up[0], 2)
    count, (width, hidden) = len(weights.up), weights.up[0].shape
    return (
        _projection("gate", weights.gate, weights.gate_bias, count, (width, hidden)),
        _projection("up", weights.up, weights.up_bias, count, (width, hidden)),
        _projection("down", weights.down, weights.down_bias, count, (hidden, width)),
    )


def _stored(weights: ExpertWeights, store: ExpertStore, number: int) -> tuple[_Projection, _Projection, _Projection]:
    """The projections of experts in a store, whose biases alone are in `weights`."""
    if weights.up or weights.down or weights.gate:
        raise ValueError("weights has matrices of experts, and so has the store: give biases alone")
    layout, count = store.layout(number), store.num_experts(number)

    def one(name: str, part: RecordPart | None, bias: Tensor | None) -> _Projection:
        if part is None:
            return _projection(name, None, bias, count, (0, 0))
        if bias is not None:
            check_tensor(f"{name}_bias", bias, (count, part.rows))
        return (int(part.qtype), part.rows, part.cols, [], 0 if bias is None else bias.data_ptr(), int(part.layout))

    return (
        one("gate", layout.gate, weights.gate_bias),
        one("up", layout.up, weights.up_bias),
        one("down", layout.down, weights.down_bias),
    )


class MoeKernel:
    """The routed experts of one layer, ready to run. Keeps the weights alive and never copies them.

    layer: its number in the model, under which it is counted and recorded; -1: none. store: of experts that are read
    from files, and the layer's number there; `weights` then has biases alone, its lists are empty. Results are the same
    bit for bit, whatever is in memory.
    Raises ValueError when shapes, types or the number of experts do not fit together.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        activation: ActivationSpec,
        pool: WorkerPool,
        layer: int = -1,
        store: tuple[ExpertStore, int] | None = None,
    ) -> None:
        gate, up, down = _checked(weights) if store is None else _stored(weights, *store)
        if not gate[1] and activation.kind.is_clamped:
            raise ValueError(f"{activation.kind.name} needs a gate")
        self.num_experts = len(weights.up) if store is None else store[0].num_experts(store[1])
        self.hidden_size = up[2]
        self.weights = weights
        self.activation = activation
        self.pool = pool
        self.layer = layer
        self.store = store
        self.handle = extension.Moe(
            gate,
            up,
            down,
            int(activation.kind),
            activation.alpha,
            activation.limit,
            layer,
            None if store is None else store[0].handle,
            0 if store is None else store[1],
        )

    @untraced
    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Return out[t] = ((w[t, 0] * y0) + w[t, 1] * y1) + ..., y_k the output of expert topk_ids[t, k].

        hidden_states: [T, H]. topk_ids: int64 or int32 [T, K]; an id equal to the number of experts is skipped, any
        other id out of range raises IndexError before any work. topk_weights: fp32 [T, K]. out: [T, H]. With a store,
        waits for what it has to read, and raises ReadError where it cannot: `out` is then undefined.
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
