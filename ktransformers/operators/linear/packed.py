"""Weights in the form that the native kernels read fastest, made once while loading.

A matrix that cpu.can_pack allows is packed (cpu.pack): quantized ones, and BF16 where it is to be multiplied in
bf16; so is an FP8 one (cpu.pack_fp8). Everything else stays as it is. What is packed is read from the file a piece at a
time, so that memory holds each weight once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, TypeGuard

import torch

from ktransformers.config import CPU_BF16S, CPU_PREFILLS
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.base import CpuLayout, Isa
from ktransformers.kernels.cpu.expert_store import RecordLayout
from ktransformers.kernels.types import (
    ExpertWeight,
    ExpertWeights,
    Fp8Matrix,
    GroupType,
    OwnType,
    PackedTensor,
    QuantType,
    RawTensor,
    WeightType,
)
from ktransformers.operators.base import OperatorConfig
from ktransformers.weights.source import ExpertsInfo, TensorInfo
from ktransformers.weights.stored_experts.records import RecordMatrix, record_layout

__all__ = ["CpuProducts", "experts_record", "pack_experts", "pack_matrix", "resident_nbytes"]

logger = logging.getLogger(__name__)

_PRECISE = re.compile(r"(^|\.)(\w*attn|\w*attention|gate|router)(\.|$)")
"""Names of attention and routers, and of what is in them."""
_PIECE = 32 << 20
"""Bytes of weights made on demand that are in memory twice, or, where that is more, _SHARE for each thread."""
_SHARE = 8 << 20


@dataclass(frozen=True, slots=True)
class CpuProducts:
    """Types in which an operator's matrices are multiplied on the CPU.

    wants_bf16: quantized ones with many rows in bf16, see PackedTensor. takes_bf16: whether activations in front of
    BF16 ones may be rounded to bf16.
    """

    KWARGS: ClassVar[frozenset[str]] = frozenset({"cpu_prefill", "cpu_bf16"})
    """What a rule file may say of it."""

    wants_bf16: bool = False
    takes_bf16: bool = True

    @classmethod
    def of(
        cls, key: str, config: OperatorConfig, cpu_prefill: str | None = None, cpu_bf16: str | None = None
    ) -> CpuProducts:
        """Return the types for the operator `key`: what the rule file says, or else what holds for all.

        Routers, where rounding sends tokens to other experts, and attention's projections take no bf16 unless it says
        so. Raises UnsupportedError for values that there are not.
        """
        prefill = cpu_prefill or config.cpu_prefill
        bf16 = cpu_bf16 or ("fp32" if _PRECISE.search(key) else config.cpu_bf16)
        for name, chosen, known in (("cpu_prefill", prefill, CPU_PREFILLS), ("cpu_bf16", bf16, CPU_BF16S)):
            if chosen not in known:
                raise UnsupportedError(f"{key}: {name} {chosen!r} is not one of {', '.join(known)}")
        return cls(prefill == "bf16", bf16 == "bf16")


def resident_nbytes(info: TensorInfo, products: CpuProducts) -> int:
    """Return the resident bytes of a matrix [N, K], or of E matrices [E, N, K], after `pack_matrix`."""
    if len(info.shape) < 2 or not _has_tiles(info.resident_type, info.shape[-1], cpu.active_isa(), products.takes_bf16):
        return info.nbytes
    count = info.shape[0] if len(info.shape) == 3 else 1
    return count * cpu.packed_nbytes(info.resident_type, info.shape[-2], info.shape[-1])


_DEFAULT = CpuProducts()


def pack_matrix(
    weight: RawTensor | Fp8Matrix, pool: WorkerPool, products: CpuProducts = _DEFAULT
) -> RawTensor | PackedTensor:
    """Pack a matrix [N, K] as the kernels want it."""
    if isinstance(weight, RawTensor) and not _is_packed(weight, pool, products.takes_bf16):
        return weight
    wants_bf16 = _takes_bf16(products, weight.qtype)
    rows, cols = weight.shape
    data = cpu.empty_bytes(cpu.packed_nbytes(weight.qtype, rows, cols), pool)
    cpu.pack_all([weight], pool, data)
    cpu.let_go([weight])
    return PackedTensor(data, weight.qtype, (rows, cols), wants_bf16)


def _takes_bf16(products: CpuProducts, qtype: WeightType) -> bool:
    """Whether many rows are multiplied in bf16: not with weights in groups, whose only products are exact."""
    if products.wants_bf16 and isinstance(qtype, GroupType):
        _log_exact(qtype)
        return False
    return products.wants_bf16


@cache
def _log_exact(qtype: GroupType) -> None:
    logger.warning("weights of type %s are multiplied exactly: there are no products of bf16 with them", qtype.name)


def _is_packed(weight: ExpertWeight, pool: WorkerPool, takes_bf16: bool) -> TypeGuard[RawTensor | Fp8Matrix]:
    return not isinstance(weight, PackedTensor) and _has_tiles(weight.qtype, weight.shape[-1], pool.isa, takes_bf16)


def _has_tiles(qtype: WeightType, cols: int, isa: Isa, takes_bf16: bool) -> bool:
    """Whether matrices of this type with `cols` columns are packed."""
    if qtype is QuantType.BF16 and not takes_bf16:
        return False  # the packed form is for products of bf16 alone
    return qtype is OwnType.F8_E4M3 or cpu.can_pack(qtype, cols, isa)


def _packed_all(weights: Sequence[ExpertWeight], pool: WorkerPool) -> list[PackedTensor]:
    """All side by side in one buffer: in one job, but several at a time where they are made on demand."""
    rows, cols = weights[0].shape
    nbytes = cpu.packed_nbytes(weights[0].qtype, rows, cols)
    buffer = cpu.empty_bytes(len(weights) * nbytes, pool)
    at_once = len(weights)
    if not isinstance(weights, list):
        at_once = max(max(_PIECE, _SHARE * pool.num_threads) // max(weights[0].nbytes, 1), 1)
    made = list[PackedTensor]()
    for first in range(0, len(weights), at_once):
        some = [weight for weight in weights[first : first + at_once] if isinstance(weight, RawTensor | Fp8Matrix)]
        made += cpu.pack_all(some, pool, buffer[first * nbytes : (first + len(some)) * nbytes])
        cpu.let_go(some)
    assert len(made) == len(weights), "all experts of a projection share one type"
    return made


def _copied_all(weights: Sequence[ExpertWeight], pool: WorkerPool) -> Sequence[ExpertWeight]:
    """One projection of all experts as they are, side by side in one buffer."""
    raw = [weight for weight in weights if isinstance(weight, RawTensor)]
    assert len(raw) == len(weights), "FP8 matrices are packed"
    nbytes = [weight.nbytes for weight in raw]
    buffer = cpu.copy_parts([weight.data for weight in raw], pool, cpu.empty_bytes(sum(nbytes), pool))
    cpu.let_go(raw)
    return [replace(weight, data=data) for weight, data in zip(raw, torch.split(buffer, nbytes), strict=True)]


def _projection(
    weights: Sequence[ExpertWeight] | None, pool: WorkerPool, products: CpuProducts, is_pinned: bool
) -> Sequence[ExpertWeight] | None:
    """One projection of all experts, side by side in one buffer if they are packed or pinned."""
    if not weights:
        return weights
    if not _is_packed(weights[0], pool, products.takes_bf16):
        kept = weights if isinstance(weights, list) else weights[:]  # of what is made on demand
        return _copied_all(kept, pool) if is_pinned else kept
    wants_bf16, made = _takes_bf16(products, weights[0].qtype), _packed_all(weights, pool)
    return [replace(one, wants_bf16=True) for one in made] if wants_bf16 else made


def pack_experts(
    weights: ExpertWeights, pool: WorkerPool, products: CpuProducts = _DEFAULT, *, is_pinned: bool = False
) -> ExpertWeights:
    """Pack the experts of one layer as the kernels want them.

    is_pinned: whether their memory is to be pinned for a GPU. Those that stay as they are in the memory map of a file,
    which cannot be, are then copied out of it.
    """
    gate, up, down = (_projection(part, pool, products, is_pinned) for part in (weights.gate, weights.up, weights.down))
    assert up is not None
    assert down is not None
    return ExpertWeights(gate, up, down, weights.gate_bias, weights.up_bias, weights.down_bias)


def experts_record(info: ExpertsInfo, products: CpuProducts) -> RecordLayout:
    """Return how the matrices of one expert lie behind each other after `pack_experts`."""
    parts = [None if part is None else _matrix(part, products) for part in (info.gate, info.up, info.down)]
    up, down = parts[1], parts[2]
    assert up is not None
    assert down is not None
    return record_layout(parts[0], up, down)


def _matrix(info: TensorInfo, products: CpuProducts) -> RecordMatrix:
    qtype, (_, rows, cols) = info.resident_type, info.shape
    layout = CpuLayout.ROWS
    if _has_tiles(qtype, cols, cpu.active_isa(), products.takes_bf16):
        layout = CpuLayout.TILES_BF16 if _takes_bf16(products, qtype) else CpuLayout.TILES
    return RecordMatrix(qtype, rows, cols, layout)
