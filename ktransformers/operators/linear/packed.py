"""Weights in the form that the native kernels read fastest, made once while loading.

A matrix that cpu.can_pack allows is packed (cpu.pack): quantized ones, and BF16 where it is to be multiplied in
bf16; so is an FP8 one (cpu.pack_fp8). Everything else stays as it is. The pages of the file that were read are given
back, so that memory holds each weight once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import torch

from ktransformers.config import CPU_BF16S, CPU_PREFILLS
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.packing import TILE_ROWS
from ktransformers.kernels.types import (
    FP8_BLOCK,
    ExpertWeight,
    ExpertWeights,
    Fp8Matrix,
    OwnType,
    PackedTensor,
    QuantType,
    RawTensor,
)
from ktransformers.weights.source import TensorInfo

__all__ = ["pack_experts", "pack_matrix", "resident_nbytes", "takes_bf16", "wants_bf16"]

_PRECISE = re.compile(r"(^|\.)(\w*attn|\w*attention|gate|router)(\.|$)")
"""Names of attention and routers, and of what is in them."""
_PIECE = 32 << 20
"""Bytes of weights that are in memory twice while they are packed, or, where that is more, _SHARE for each thread."""
_SHARE = 8 << 20


def resident_nbytes(info: TensorInfo, *, takes_bf16: bool = True) -> int:
    """Resident bytes of a matrix [N, K], or of E matrices [E, N, K], after `pack_matrix`."""
    if len(info.shape) < 2 or (info.resident_type is QuantType.BF16 and not takes_bf16):
        return info.nbytes
    is_fp8 = info.resident_type is OwnType.F8_E4M3
    if not is_fp8 and not cpu.can_pack(info.resident_type, info.shape[-1], cpu.active_isa()):
        return info.nbytes
    count = info.shape[0] if len(info.shape) == 3 else 1
    return count * cpu.packed_nbytes(info.resident_type, info.shape[-2], info.shape[-1])


def wants_bf16(key: str, given: str | None, default: str) -> bool:
    """What cpu_prefill says for the operator `key`: its own in the rule file, or the default of all."""
    chosen = default if given is None else given
    if chosen not in CPU_PREFILLS:
        raise UnsupportedError(f"{key}: cpu_prefill {chosen!r} is not one of {', '.join(CPU_PREFILLS)}")
    return chosen == "bf16"


def takes_bf16(key: str, given: str | None, default: str) -> bool:
    """Whether activations in front of BF16 weights of the operator `key` may be rounded to bf16.

    given: what the rule file says for it; default: for all but routers, where rounding sends tokens to other experts,
    and attention's projections.
    """
    chosen = given or ("fp32" if _PRECISE.search(key) else default)
    if chosen not in CPU_BF16S:
        raise UnsupportedError(f"{key}: cpu_bf16 {chosen!r} is not one of {', '.join(CPU_BF16S)}")
    return chosen == "bf16"


def pack_matrix(
    weight: RawTensor | Fp8Matrix, pool: WorkerPool, *, wants_bf16: bool = False, takes_bf16: bool = True
) -> RawTensor | PackedTensor:
    """A matrix [N, K] as the kernels want it. wants_bf16: see PackedTensor; takes_bf16: see above."""
    if isinstance(weight, RawTensor) and not _is_packed(weight, pool, takes_bf16):
        return weight
    rows, cols = weight.shape
    data = cpu.empty_bytes(cpu.packed_nbytes(weight.qtype, rows, cols), pool)
    unit = FP8_BLOCK if isinstance(weight, Fp8Matrix) else TILE_ROWS
    step = max(_PIECE // max(weight.nbytes // max(rows, 1), 1) // unit, 1) * unit
    for start in range(0, rows, step):  # piece by piece: an LM head of its own is a good part of a small model
        stop = min(start + step, rows)
        first = cpu.packed_nbytes(weight.qtype, start, cols)
        _pack(weight.rows_slice(start, stop), pool, data[first : cpu.packed_nbytes(weight.qtype, stop, cols)])
    return PackedTensor(data, weight.qtype, (rows, cols), wants_bf16)


def _is_packed(weight: ExpertWeight, pool: WorkerPool, takes_bf16: bool) -> TypeGuard[RawTensor | Fp8Matrix]:
    if isinstance(weight, RawTensor):
        if weight.qtype is QuantType.BF16 and not takes_bf16:
            return False  # the packed form is for products of bf16 alone
        return cpu.can_pack(weight.qtype, weight.cols, pool.isa)
    return isinstance(weight, Fp8Matrix)


def _pack(weight: RawTensor | Fp8Matrix, pool: WorkerPool, out: torch.Tensor) -> PackedTensor:
    made = cpu.pack_fp8(weight, pool, out) if isinstance(weight, Fp8Matrix) else cpu.pack(weight, pool, out)
    cpu.page_out(weight)
    return made


def _packed_all(weights: Sequence[ExpertWeight], pool: WorkerPool) -> list[PackedTensor]:
    """All side by side in one buffer, several at a time."""
    rows, cols = weights[0].shape
    nbytes = cpu.packed_nbytes(weights[0].qtype, rows, cols)
    buffer = cpu.empty_bytes(len(weights) * nbytes, pool)
    at_once = max(max(_PIECE, _SHARE * pool.num_threads) // max(weights[0].nbytes, 1), 1)
    made = list[PackedTensor]()
    for first in range(0, len(weights), at_once):
        some = [weight for weight in weights[first : first + at_once] if _is_packed(weight, pool, takes_bf16=True)]
        made += cpu.pack_all(some, pool, buffer[first * nbytes : (first + len(some)) * nbytes])
        cpu.page_out(*some)
    assert len(made) == len(weights), "all experts of a projection share one type"
    return made


def _copied_all(weights: Sequence[ExpertWeight], pool: WorkerPool) -> Sequence[ExpertWeight]:
    """One projection of all experts as they are, side by side in one buffer."""
    buffer = cpu.empty_bytes(sum(weight.nbytes for weight in weights), pool)
    made, at = list[ExpertWeight](), 0
    for weight in weights:
        assert isinstance(weight, RawTensor)
        data = buffer[at : at + weight.nbytes].copy_(weight.data)
        made.append(replace(weight, data=data))
        cpu.page_out(weight)
        at += weight.nbytes
    return made


def _projection(
    weights: Sequence[ExpertWeight] | None, pool: WorkerPool, wants_bf16: bool, takes_bf16: bool, is_pinned: bool
) -> Sequence[ExpertWeight] | None:
    """One projection of all experts, side by side in one buffer if they are packed or pinned."""
    if not weights:
        return weights
    if not _is_packed(weights[0], pool, takes_bf16):
        kept = weights if isinstance(weights, list) else weights[:]  # of what is made on demand
        return _copied_all(kept, pool) if is_pinned else kept
    return [replace(made, wants_bf16=wants_bf16) for made in _packed_all(weights, pool)]


def pack_experts(
    weights: ExpertWeights,
    pool: WorkerPool,
    *,
    wants_bf16: bool = False,
    takes_bf16: bool = True,
    is_pinned: bool = False,
) -> ExpertWeights:
    """The experts of one layer as the kernels want them. wants_bf16: see PackedTensor; takes_bf16: see `pack_matrix`.

    is_pinned: whether their memory is to be pinned for a GPU. Those that stay as they are in the memory map of a file,
    which cannot be, are then copied out of it.
    """
    gate, up, down = (
        _projection(part, pool, wants_bf16, takes_bf16, is_pinned) for part in (weights.gate, weights.up, weights.down)
    )
    assert up is not None
    assert down is not None
    return ExpertWeights(gate, up, down, weights.gate_bias, weights.up_bias, weights.down_bias)
