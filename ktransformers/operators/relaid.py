"""Weights in the form that the native kernels read fastest, made once while loading.

A matrix of a type in native.PACKED_TYPES is re-laid (native.pack), and so is an FP8 one (native.pack_fp8); everything
else stays as it is. The pages of the file that were read for it are given back, so that memory holds each weight once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch

from ktransformers.kernels import native
from ktransformers.kernels.native import ExpertWeight, ExpertWeights, WorkerPool
from ktransformers.kernels.quant import FP8_BLOCK, Fp8Matrix, OwnType, PackedTensor, RawTensor
from ktransformers.weights.source import TensorInfo

__all__ = ["relaid", "relaid_experts", "relaid_nbytes"]

_TILE_ROWS = 16
_PIECE = 32 << 20
"""Bytes of a matrix that are in memory twice while they are re-laid."""


def relaid_nbytes(info: TensorInfo) -> int:
    """Resident bytes of a matrix [N, K], or of E matrices [E, N, K], after `relaid`."""
    is_relaid = info.resident_type in native.PACKED_TYPES or info.resident_type is OwnType.F8_E4M3
    if not is_relaid or len(info.shape) < 2:
        return info.nbytes
    count = info.shape[0] if len(info.shape) == 3 else 1
    return count * native.packed_nbytes(info.resident_type, info.shape[-2], info.shape[-1])


def relaid(weight: RawTensor | Fp8Matrix, pool: WorkerPool) -> RawTensor | PackedTensor:
    """A matrix [N, K] as the kernels want it."""
    if isinstance(weight, RawTensor) and not _is_relaid(weight):
        return weight
    rows, cols = weight.shape
    data = native.empty_bytes(native.packed_nbytes(weight.qtype, rows, cols), pool)
    unit = FP8_BLOCK if isinstance(weight, Fp8Matrix) else _TILE_ROWS
    step = max(_PIECE // max(weight.nbytes // max(rows, 1), 1) // unit, 1) * unit
    for start in range(0, rows, step):  # piece by piece: an LM head of its own is a good part of a small model
        stop = min(start + step, rows)
        first = native.packed_nbytes(weight.qtype, start, cols)
        _relay(weight.rows_slice(start, stop), pool, data[first : native.packed_nbytes(weight.qtype, stop, cols)])
    return PackedTensor(data, weight.qtype, (rows, cols))


def _is_relaid(weight: ExpertWeight) -> TypeGuard[RawTensor | Fp8Matrix]:
    return isinstance(weight, Fp8Matrix) or (isinstance(weight, RawTensor) and weight.qtype in native.PACKED_TYPES)


def _relay(weight: RawTensor | Fp8Matrix, pool: WorkerPool, out: torch.Tensor) -> PackedTensor:
    made = native.pack_fp8(weight, pool, out) if isinstance(weight, Fp8Matrix) else native.pack(weight, pool, out)
    native.page_out(weight)
    return made


def _relaid_all(weights: Sequence[ExpertWeight] | None, pool: WorkerPool) -> Sequence[ExpertWeight] | None:
    """One projection of all experts, side by side in one buffer."""
    if not weights or not _is_relaid(weights[0]):
        return weights
    rows, cols = weights[0].shape
    nbytes = native.packed_nbytes(weights[0].qtype, rows, cols)
    buffer = native.empty_bytes(len(weights) * nbytes, pool)
    made = list[ExpertWeight]()
    for i, weight in enumerate(weights):
        assert _is_relaid(weight)
        made.append(_relay(weight, pool, buffer[i * nbytes : (i + 1) * nbytes]))
    return made


def relaid_experts(weights: ExpertWeights, pool: WorkerPool) -> ExpertWeights:
    """The experts of one layer as the kernels want them."""
    up, down = _relaid_all(weights.up, pool), _relaid_all(weights.down, pool)
    assert up is not None
    assert down is not None
    gate = _relaid_all(weights.gate, pool)
    return ExpertWeights(gate, up, down, weights.gate_bias, weights.up_bias, weights.down_bias)
