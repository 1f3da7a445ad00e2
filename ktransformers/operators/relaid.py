"""Weights in the form that the native kernels read fastest, made once while loading.

A matrix of a type in native.PACKED_TYPES is re-laid (native.pack), everything else stays as it is. The pages of the
file that were read for it are given back, so that memory holds each weight once.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktransformers.kernels import native
from ktransformers.kernels.native import ExpertWeights, WorkerPool
from ktransformers.kernels.quant import PackedTensor, RawTensor
from ktransformers.weights.source import TensorInfo

__all__ = ["relaid", "relaid_experts", "relaid_nbytes"]

_TILE_ROWS = 16
_PIECE = 32 << 20
"""Bytes of a matrix that are in memory twice while they are re-laid."""


def relaid_nbytes(info: TensorInfo) -> int:
    """Resident bytes of a matrix [N, K], or of E matrices [E, N, K], after `relaid`."""
    if info.resident_type not in native.PACKED_TYPES or len(info.shape) < 2:
        return info.nbytes
    count = info.shape[0] if len(info.shape) == 3 else 1
    return count * native.packed_nbytes(info.resident_type, info.shape[-2], info.shape[-1])


def relaid(weight: RawTensor, pool: WorkerPool) -> RawTensor | PackedTensor:
    """A matrix [N, K] as the kernels want it."""
    if weight.qtype not in native.PACKED_TYPES:
        return weight
    rows, cols = weight.shape
    data = native.empty_bytes(native.packed_nbytes(weight.qtype, rows, cols), pool)
    step = max(_PIECE // weight.row_bytes // _TILE_ROWS, 1) * _TILE_ROWS
    for start in range(0, rows, step):  # piece by piece: an LM head of its own is a good part of a small model
        piece = weight.rows_slice(start, min(start + step, rows))
        first = native.packed_nbytes(weight.qtype, start, cols)
        native.pack(piece, pool, data[first : first + native.packed_nbytes(weight.qtype, piece.rows, cols)])
        native.page_out(piece)
    return PackedTensor(data, weight.qtype, (rows, cols))


def _relaid_all(
    weights: Sequence[RawTensor | PackedTensor] | None, pool: WorkerPool
) -> Sequence[RawTensor | PackedTensor] | None:
    """One projection of all experts, side by side in one buffer."""
    if not weights or isinstance(weights[0], PackedTensor) or weights[0].qtype not in native.PACKED_TYPES:
        return weights
    rows, cols = weights[0].shape
    nbytes = native.packed_nbytes(weights[0].qtype, rows, cols)
    buffer = native.empty_bytes(len(weights) * nbytes, pool)
    made: list[RawTensor | PackedTensor] = []
    for i, weight in enumerate(weights):
        assert isinstance(weight, RawTensor)
        made.append(native.pack(weight, pool, buffer[i * nbytes : (i + 1) * nbytes]))
        native.page_out(weight)
    return made


def relaid_experts(weights: ExpertWeights, pool: WorkerPool) -> ExpertWeights:
    """The experts of one layer as the kernels want them."""
    up, down = _relaid_all(weights.up, pool), _relaid_all(weights.down, pool)
    assert up is not None
    assert down is not None
    gate = _relaid_all(weights.gate, pool)
    return ExpertWeights(gate, up, down, weights.gate_bias, weights.up_bias, weights.down_bias)
