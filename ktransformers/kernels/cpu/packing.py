"""Weights packed for the native kernels, in memory that suits streams. See packed, fp8 and bf16.inl in csrc/kernels.

Knows how matrices lie in memory; does not compute with them, and does not know where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ktransformers.kernels.cpu import pages
from ktransformers.kernels.cpu.base import Isa, WorkerPool, check_tensor, check_weight, has_bf16
from ktransformers.kernels.extension import extension
from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.types import (
    Fp8Matrix,
    GroupType,
    OwnType,
    PackedTensor,
    QuantType,
    RawTensor,
    WeightType,
    block_size,
    type_size,
)

__all__ = [
    "PACKED_TYPES",
    "can_pack",
    "copy_parts",
    "empty_bytes",
    "let_go",
    "pack",
    "pack_all",
    "pack_fp8",
    "pack_times",
    "packed_nbytes",
    "page_out",
    "transcode_blocks",
    "unmapped",
    "write_group_blocks",
]

#: The block formats of ggml that `pack` packs; it packs every GroupType too.
PACKED_TYPES = frozenset(QuantType(number) for number, format in FORMATS.items() if format.is_packed)

TILE_ROWS: int = extension.TILE_ROWS


def packed_nbytes(qtype: WeightType, rows: int, cols: int) -> int:
    """Return the bytes of a matrix after `pack` or `pack_fp8`: at most 3 % more (Q3_K and IQ1_M: 5 %), of rows in full
    tiles.
    """
    return int(-(-rows // TILE_ROWS) * extension.packed_tile_bytes(int(qtype), cols))


def can_pack(qtype: WeightType, cols: int, isa: Isa) -> bool:
    """Whether `pack` takes matrices of this type with `cols` columns, on a pool with this instruction set."""
    if qtype is QuantType.BF16:
        return has_bf16(isa) and cols % extension.BF16_COLS == 0
    return qtype in PACKED_TYPES or isinstance(qtype, GroupType)


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
    """Pack matrices of one type and shape in one go, side by side, as `pack` or `pack_fp8` does.

    out: uint8 [count * packed_nbytes(...)]. Much faster than one by one where there are many threads.
    """
    qtype, shape = weights[0].qtype, weights[0].shape
    _check_packable("weights[0]", weights[0], pool)
    for index, weight in enumerate(weights):  # of a model with many small experts this is most of what Python does
        if weight.qtype is not qtype or weight.shape != shape:
            raise ValueError(f"weights[{index}] is {weight.qtype.name} {list(weight.shape)}, weights[0] is not")
        if not (weight.data if isinstance(weight, RawTensor) else weight.values).is_cpu:
            _check_packable(f"weights[{index}]", weight, pool)
    rows, cols = shape
    size = packed_nbytes(qtype, rows, cols)
    data = empty_bytes(len(weights) * size, pool) if out is None else out
    check_tensor("out", data, (len(weights) * size,), torch.uint8)
    if qtype is OwnType.F8_E4M3:
        pairs = [(w.values.data_ptr(), w.scales.data_ptr()) for w in weights if isinstance(w, Fp8Matrix)]
        extension.pack_fp8(pool.handle, pairs, rows, cols, data.data_ptr())
    else:
        addresses = [w.data.data_ptr() for w in weights if isinstance(w, RawTensor)]
        extension.pack(pool.handle, addresses, int(qtype), rows, cols, data.data_ptr())
    return [PackedTensor(part, qtype, (rows, cols)) for part in data.view(len(weights), size).unbind(0)]


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
    """Allocate uint8 [nbytes], uninitialized, in huge pages where the system gives them: for weights that are read in
    streams.

    Not on several NUMA nodes: the parts of an expert that belong to one node are smaller than such a page. On pages of
    its own, so that they can be pinned for a GPU: a driver refuses to copy from neighbours that are pinned in part.
    """
    whole = torch.empty(-(-nbytes // pages.PAGE) * pages.PAGE + pages.PAGE, dtype=torch.uint8)
    first = -whole.data_ptr() % pages.PAGE
    data = whole[first : first + nbytes]
    if pool.num_nodes == 1:
        pages.advise_huge_pages(data)
    return data


def copy_parts(parts: Sequence[Tensor], pool: WorkerPool, out: Tensor) -> Tensor:
    """Copy uint8 `parts` side by side to `out` [bytes] and return it. Parts of mapped files are read from the file.

    Parts are contiguous, and none of them in `out`. RuntimeError when a file cannot be read.
    """
    for index, part in enumerate(parts):
        check_tensor(f"parts[{index}]", part, (None,) * part.dim(), torch.uint8)
    check_tensor("out", out, (sum(part.numel() for part in parts),), torch.uint8)
    extension.copy_parts(pool.handle, [(part.data_ptr(), part.numel()) for part in parts], out.data_ptr())
    return out


def unmapped(weight: RawTensor, pool: WorkerPool) -> RawTensor:
    """Return a matrix in memory of its own, to which a mapped one is read from its file. RuntimeError when that cannot
    be read.
    """
    if not pages.is_mapped(weight.data):
        return weight
    data = copy_parts([weight.data], pool, empty_bytes(weight.nbytes, pool))
    let_go([weight])
    return replace(weight, data=data)


def pack_times() -> tuple[float, float]:
    """Return the seconds that all threads of this process took so far to read what was packed or copied, and to pack
    it.
    """
    read, packed = extension.pack_times()
    return read / 1e9, packed / 1e9


def let_go(weights: Sequence[RawTensor | Fp8Matrix]) -> None:
    """Page out weights that were packed or copied (`page_out`), where that left something in memory.

    That is scales of FP8 matrices, which are read through the map, and all where files leave the system's cache.
    """
    if pages.is_cache_dropped() or any(isinstance(weight, Fp8Matrix) for weight in weights[:1]):
        page_out(*weights)


def page_out(*weights: RawTensor | Fp8Matrix) -> None:
    """Give the memory under weights that were read back to the system, if they lie in a file: see `pages.page_out`."""
    fp8 = [weight for weight in weights if isinstance(weight, Fp8Matrix)]
    raw = [weight.data for weight in weights if isinstance(weight, RawTensor)]
    pages.page_out([*raw, *(weight.values for weight in fp8), *(weight.scales for weight in fp8)])


def write_group_blocks(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, numbers: Tensor | None, group: int, out: RawTensor
) -> None:
    """Write rows of codes, scales and zero points, apart as safetensors have them, to `out` as blocks of its type.

    codes: uint8 [N, K], or [N, K / 2] with two columns of four bits in a byte, the first the low half. scales: [N, G],
    one per `group` columns of a type that the blocks have; of NVFP4_F32 uint8 [N, K / 16], and numbers fp32 [N]. zeros:
    int8 [N, G] or None. All contiguous. One thread; raises ValueError for what does not fit.
    """
    rows, cols = out.rows, out.cols
    size, is_paired = block_size(out.qtype), codes.shape[1] != cols
    check_tensor("codes", codes, (rows, cols // 2 if is_paired else cols), torch.uint8)
    groups, piece = scales.shape[1], scales.element_size()
    if numbers is not None:
        groups, piece, group = groups // 2, 2, size
        check_tensor("numbers", numbers, (rows,), torch.float32)
    check_tensor("scales", scales, (rows, groups * piece // scales.element_size()), scales.dtype)
    if zeros is not None:
        check_tensor("zeros", zeros, (rows, groups), torch.int8)
    head = piece + (0 if zeros is None else 1) + (0 if numbers is None else 4)
    if type_size(out.qtype) != head + (size // 2 if is_paired else size):
        raise ValueError(f"blocks of {out.qtype.name} have other parts than codes of {codes.shape[1]} bytes a row")
    extension.write_group_blocks(
        codes.data_ptr(),
        is_paired,
        scales.data_ptr(),
        piece,
        0 if zeros is None else zeros.data_ptr(),
        0 if numbers is None else numbers.data_ptr(),
        (rows, cols, groups, size, group),
        out.data.data_ptr(),
    )


def transcode_blocks(rows: Tensor, qtype: QuantType, out: Tensor) -> None:
    """Write blocks of Q5_0 or IQ4_NL as Q8_0, of Q3_K as Q6_K, with the same values bit for bit.

    See csrc/ops/weights/transcode.cpp.
    rows: uint8 of whole blocks, contiguous; out: uint8 for as many. One thread; raises ValueError for another type.
    """
    check_tensor("rows", rows, (None,) * rows.dim(), torch.uint8)
    check_tensor("out", out, (None,) * out.dim(), torch.uint8)
    target = QuantType.Q6_K if qtype is QuantType.Q3_K else QuantType.Q8_0
    count = rows.numel() // type_size(qtype)
    if rows.numel() != count * type_size(qtype) or out.numel() != count * type_size(target):
        raise ValueError(f"{rows.numel()} bytes of {qtype.name} do not become {out.numel()} bytes of {target.name}")
    extension.transcode(int(qtype), rows.data_ptr(), count, out.data_ptr())
