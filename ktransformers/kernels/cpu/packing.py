"""Weights packed for the native kernels, in memory that suits streams. See packed, fp8 and bf16.inl in csrc/kernels.

Knows how matrices lie in memory; does not compute with them, and does not know where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktransformers.kernels.cpu import pages
from ktransformers.kernels.cpu.base import Isa, WorkerPool, check_tensor, check_weight, has_bf16
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import Fp8Matrix, OwnType, PackedTensor, QuantType, RawTensor, WeightType, type_size

__all__ = [
    "PACKED_TYPES",
    "can_pack",
    "empty_bytes",
    "pack",
    "pack_all",
    "pack_fp8",
    "packed_nbytes",
    "page_out",
    "transcode_blocks",
]

#: The block formats that `pack` packs.
PACKED_TYPES = frozenset(
    {
        QuantType.Q4_0,
        QuantType.Q4_1,
        QuantType.Q5_0,
        QuantType.Q5_1,
        QuantType.Q8_0,
        QuantType.Q2_K,
        QuantType.Q3_K,
        QuantType.Q4_K,
        QuantType.Q5_K,
        QuantType.Q6_K,
        QuantType.IQ4_NL,
        QuantType.IQ4_XS,
        QuantType.TQ1_0,
        QuantType.TQ2_0,
        QuantType.MXFP4,
        QuantType.NVFP4,
    }
)

TILE_ROWS: int = extension.TILE_ROWS


def packed_nbytes(qtype: WeightType, rows: int, cols: int) -> int:
    """Bytes of a matrix after `pack` or `pack_fp8`: at most 3 % more (Q3_K 5 %), of rows filled up to 16s."""
    return int(-(-rows // TILE_ROWS) * extension.packed_tile_bytes(int(qtype), cols))


def can_pack(qtype: WeightType, cols: int, isa: Isa) -> bool:
    """Whether `pack` takes matrices of this type with `cols` columns, on a pool of this tier."""
    if qtype is QuantType.BF16:
        return has_bf16(isa) and cols % extension.BF16_COLS == 0
    return qtype in PACKED_TYPES


def pack(weight: RawTensor, pool: WorkerPool, out: Tensor | None = None) -> PackedTensor:
    """Pack a matrix [N, K] of a type in PACKED_TYPES, once, so that the kernels read it in one stream.

    out: uint8 [packed_nbytes(...)] to write to, made when None. Products with the result are bit-equal to those with
    `weight`, which is not needed any more. BF16 is packed for products of bf16, which are not: only where the pool has
    them, and K a multiple of 32 (`can_pack`).
    """
    return pack_all([weight], pool, out)[0]


def pack_all(
    weights: Sequence[RawTensor | Fp8Matrix], pool: WorkerPool, out: Tensor | None = None
) -> list[PackedTensor]:
    """`pack` or `pack_fp8` of matrices of one type and shape in one go, side by side.

    out: uint8 [count * packed_nbytes(...)]. Much faster than one by one where there are many threads.
    """
    qtype, (rows, cols) = weights[0].qtype, weights[0].shape
    for index, weight in enumerate(weights):
        _check_packable(f"weights[{index}]", weight, pool)
        if weight.qtype is not qtype or weight.shape != (rows, cols):
            raise ValueError(f"weights[{index}] is {weight.qtype.name} {list(weight.shape)}, weights[0] is not")
    size = packed_nbytes(qtype, rows, cols)
    data = empty_bytes(len(weights) * size, pool) if out is None else out
    check_tensor("out", data, (len(weights) * size,), torch.uint8)
    if qtype is OwnType.F8_E4M3:
        pairs = [(w.values.data_ptr(), w.scales.data_ptr()) for w in weights if isinstance(w, Fp8Matrix)]
        extension.pack_fp8(pool.handle, pairs, rows, cols, data.data_ptr())
    else:
        addresses = [w.data.data_ptr() for w in weights if isinstance(w, RawTensor)]
        extension.pack(pool.handle, addresses, int(qtype), rows, cols, data.data_ptr())
    parts = (data[index * size : (index + 1) * size] for index in range(len(weights)))
    return [PackedTensor(part, qtype, (rows, cols)) for part in parts]


def _check_packable(name: str, weight: RawTensor | Fp8Matrix, pool: WorkerPool) -> None:
    if isinstance(weight, Fp8Matrix):
        for part, tensor in (("values", weight.values), ("scales", weight.scales)):
            if tensor.device.type != "cpu":
                raise ValueError(f"{name}.{part} must be on the CPU, got {tensor.device}")
        return
    check_weight(name, weight, 2)
    if not can_pack(weight.qtype, weight.cols, pool.isa):
        raise ValueError(f"{name} of {weight.cols} {weight.qtype.name} columns has no packed form on {pool.isa.value}")


def pack_fp8(weight: Fp8Matrix, pool: WorkerPool, out: Tensor | None = None) -> PackedTensor:
    """Pack an FP8 matrix [N, K], once, into the only form in which kernels compute with it.

    out: as for `pack`. Activations stay fp32. A NaN code makes the outputs of all 16 rows of its tile NaN.
    """
    return pack_all([weight], pool, out)[0]


def empty_bytes(nbytes: int, pool: WorkerPool) -> Tensor:
    """uint8 [nbytes], uninitialized, in huge pages where the system gives them: weights that are read in streams.

    Not on several NUMA nodes: the parts of an expert that belong to one node are smaller than such a page. On pages of
    its own, so that they can be pinned for a GPU: a driver refuses to copy from neighbours that are pinned in part.
    """
    whole = torch.empty(-(-nbytes // pages.PAGE) * pages.PAGE + pages.PAGE, dtype=torch.uint8)
    first = -whole.data_ptr() % pages.PAGE
    data = whole[first : first + nbytes]
    if pool.num_nodes == 1:
        pages.advise_huge_pages(data)
    return data


def page_out(*weights: RawTensor | Fp8Matrix) -> None:
    """Give the memory under weights that were read back to the system, if they lie in a file: see `pages.page_out`."""
    pages.page_out(weight.values if isinstance(weight, Fp8Matrix) else weight.data for weight in weights)


def transcode_blocks(rows: Tensor, qtype: QuantType, out: Tensor) -> None:
    """Blocks of Q5_0 or IQ4_NL as Q8_0, of Q3_K as Q6_K, with the same values bit for bit (csrc/ops/transcode.cpp).

    rows: uint8 of whole blocks, contiguous; out: uint8 for as many. One thread; raises ValueError for another type.
    """
    check_tensor("rows", rows, (None,) * rows.dim(), torch.uint8)
    check_tensor("out", out, (None,) * out.dim(), torch.uint8)
    target = QuantType.Q6_K if qtype is QuantType.Q3_K else QuantType.Q8_0
    count = rows.numel() // type_size(qtype)
    if rows.numel() != count * type_size(qtype) or out.numel() != count * type_size(target):
        raise ValueError(f"{rows.numel()} bytes of {qtype.name} do not become {out.numel()} bytes of {target.name}")
    extension.transcode(int(qtype), rows.data_ptr(), count, out.data_ptr())
