"""Weights re-laid for the native kernels, in memory that suits streams. See csrc/packed.inl, fp8.inl and bf16.inl.

Knows how matrices lie in memory; does not compute with them, and does not know where they come from.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor

from ktransformers.kernels.native_base import Isa, WorkerPool, check_tensor, check_weight, extension, has_bf16
from ktransformers.kernels.quant import Fp8Matrix, OwnType, PackedTensor, QuantType, RawTensor, WeightType

__all__ = ["PACKED_TYPES", "can_pack", "empty_bytes", "pack", "pack_fp8", "packed_nbytes", "page_out"]

logger = logging.getLogger(__name__)

#: The block formats that `pack` re-lays.
PACKED_TYPES = frozenset(
    {
        QuantType.Q8_0,
        QuantType.Q4_0,
        QuantType.MXFP4,
        QuantType.Q4_K,
        QuantType.Q5_K,
        QuantType.Q6_K,
        QuantType.IQ4_XS,
    }
)

TILE_ROWS = 16


def packed_nbytes(qtype: WeightType, rows: int, cols: int) -> int:
    """Bytes of a matrix after `pack` or `pack_fp8`: at most 3 % more, of rows filled up to a multiple of 16."""
    return int(-(-rows // TILE_ROWS) * extension.packed_tile_bytes(int(qtype), cols))


def can_pack(qtype: WeightType, cols: int, isa: Isa) -> bool:
    """Whether `pack` takes matrices of this type with `cols` columns, on a pool of this tier."""
    if qtype is QuantType.BF16:
        return has_bf16(isa) and cols % extension.BF16_COLS == 0
    return qtype in PACKED_TYPES


def pack(weight: RawTensor, pool: WorkerPool, out: Tensor | None = None) -> PackedTensor:
    """Re-lay a matrix [N, K] of a type in PACKED_TYPES, once, so that the kernels read it in one stream.

    out: uint8 [packed_nbytes(...)] to write to, made when None. Products with the result are bit-equal to those with
    `weight`, which is not needed any more. BF16 is re-laid for products of bf16, which are not: only where the pool has
    them, and K a multiple of 32 (`can_pack`).
    """
    check_weight("weight", weight, 2)
    if not can_pack(weight.qtype, weight.cols, pool.isa):
        raise ValueError(f"weight of {weight.cols} {weight.qtype.name} columns has no re-laid form on {pool.isa.value}")
    rows, cols = weight.shape
    nbytes = packed_nbytes(weight.qtype, rows, cols)
    data = empty_bytes(nbytes, pool) if out is None else out
    check_tensor("out", data, (nbytes,), torch.uint8)
    extension.pack(pool.handle, weight.data.data_ptr(), int(weight.qtype), rows, cols, data.data_ptr())
    return PackedTensor(data, weight.qtype, (rows, cols))


def pack_fp8(weight: Fp8Matrix, pool: WorkerPool, out: Tensor | None = None) -> PackedTensor:
    """Re-lay an FP8 matrix [N, K], once, into the only form in which kernels compute with it.

    out: as for `pack`. Activations stay fp32. A NaN code makes the outputs of all 16 rows of its tile NaN.
    """
    rows, cols = weight.shape
    for name, tensor in (("values", weight.values), ("scales", weight.scales)):
        if tensor.device.type != "cpu":
            raise ValueError(f"weight.{name} must be on the CPU, got {tensor.device}")
    nbytes = packed_nbytes(OwnType.F8_E4M3, rows, cols)
    data = empty_bytes(nbytes, pool) if out is None else out
    check_tensor("out", data, (nbytes,), torch.uint8)
    extension.pack_fp8(pool.handle, weight.values.data_ptr(), weight.scales.data_ptr(), rows, cols, data.data_ptr())
    return PackedTensor(data, OwnType.F8_E4M3, (rows, cols))


_MADV_HUGEPAGE, _MADV_PAGEOUT = 14, 21
_PAGE = 4096
_HUGE_PAGE = 2 << 20


def _advise(data: Tensor, page: int, advice: int) -> None:
    """madvise() for the whole pages under a tensor; a refusal is no error, for the advice is only a wish."""
    first = -(-data.data_ptr() // page) * page
    nbytes = data.data_ptr() + data.numel() - first
    if nbytes >= page:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if libc.madvise(first, nbytes // page * page, advice):
            logger.debug("madvise(%d) refused for %d bytes: errno %d", advice, nbytes, ctypes.get_errno())


def empty_bytes(nbytes: int, pool: WorkerPool) -> Tensor:
    """uint8 [nbytes], uninitialized, in huge pages where the system gives them: weights that are read in streams.

    Not on several NUMA nodes: the parts of an expert that belong to one node are smaller than such a page. On pages of
    its own, so that they can be pinned for a GPU: a driver refuses to copy from neighbours that are pinned in part.
    """
    whole = torch.empty(-(-nbytes // _PAGE) * _PAGE + _PAGE, dtype=torch.uint8)
    first = -whole.data_ptr() % _PAGE
    data = whole[first : first + nbytes]
    if pool.num_nodes == 1:
        _advise(data, _HUGE_PAGE, _MADV_HUGEPAGE)
    return data


def page_out(weight: RawTensor | Fp8Matrix) -> None:
    """Give the memory under a weight that was re-laid back to the system; its bytes stay readable, from the file.

    Linux only, and a hint: where the system refuses, the pages stay until memory runs short.
    """
    _advise(weight.values if isinstance(weight, Fp8Matrix) else weight.data, _PAGE, _MADV_PAGEOUT)
