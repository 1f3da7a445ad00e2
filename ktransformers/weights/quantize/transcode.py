"""Turns ggml types into others that have the same values, and any type into floats.

All kernels read the files' own types (`resident_type`). Where a format's values are `scale * small integer`, another
integer format with the same scales holds them exactly:

    Q5_0 -> Q8_0      same fp16 scale per 32, 5-bit codes in 8 bits
    IQ4_NL -> Q8_0    same fp16 scale per 32, the 16 values of its table are int8
    Q3_K -> Q6_K      same fp16 scale and signed integer scales per 16, 3-bit codes in 6 bits
    TQ1_0, TQ2_0 -> Q4_0   one fp16 scale per 256 repeated eight times, codes -1, 0, 1
    Q1_0 -> Q4_0      one fp16 scale per 128 repeated four times, codes -1 and 1
    NVFP4 -> BF16     4-bit-mantissa scales times 2-bit mantissas need at most 6 of BF16's 8 bits

Others have products of several scales, or an offset beside the scale. Equality with
`decode_blocks`, bit for bit, is the test of all of this. The first three are native (csrc/ops/weights/transcode.cpp).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.blocks import decode_blocks
from ktransformers.kernels.cpu import NATIVE_TYPES
from ktransformers.kernels.cpu.packing import transcode_blocks
from ktransformers.kernels.cpu.pages import advise_huge_pages, page_out
from ktransformers.kernels.types import QuantType, RawTensor, block_size, row_bytes, type_size
from ktransformers.system.cores import usable_cores
from ktransformers.weights.mapped_file import typed_view

__all__ = ["Transcoded", "dequantize", "resident_type", "transcode"]

U8Array = npt.NDArray[np.uint8]

CHUNK_WEIGHTS = 1 << 20

_DTYPES = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}
_NATIVE = {QuantType.Q5_0: QuantType.Q8_0, QuantType.IQ4_NL: QuantType.Q8_0, QuantType.Q3_K: QuantType.Q6_K}
_TERNARY = {QuantType.TQ1_0: 52, QuantType.TQ2_0: 64, QuantType.Q1_0: 0}  # and where the scale is


def resident_type(qtype: QuantType, name: str) -> QuantType:
    """Return the type that a tensor stored as `qtype` has once loaded. Raises UnsupportedError, naming the tensor."""
    if qtype in NATIVE_TYPES:
        return qtype
    raise UnsupportedError(
        f"tensor {name!r} is stored as {qtype.name}, which is no type of model weights that can be read"
    )


def transcode(raw: RawTensor, name: str, target: QuantType | None = None) -> RawTensor:
    """Return `raw` itself when it is of type `target`, else a lossless copy in it, made by all cores.

    target: None is `raw`'s own. Pages of a file that were only read for that are given back. Raises UnsupportedError,
    naming the tensor, where there is no target and the type is none of weights.
    """
    wanted = resident_type(raw.qtype, name) if target is None else target
    return raw if raw.qtype is wanted else Transcoded([raw], wanted)[0]


class Transcoded(Sequence[RawTensor]):
    """Tensors of one type and shape, each transcoded to `target` when it is asked for, and not kept.

    Those of a slice lie side by side in one buffer.
    """

    def __init__(self, stored: Sequence[RawTensor], target: QuantType):
        self._stored = stored
        self._target = target

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, index: int) -> RawTensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[RawTensor]: ...

    def __getitem__(self, index: int | slice) -> RawTensor | list[RawTensor]:
        if isinstance(index, slice):
            return self._made(self._stored[index])
        return self._made([self._stored[index]])[0]

    def _made(self, stored: Sequence[RawTensor]) -> list[RawTensor]:
        sizes = [raw.rows * row_bytes(self._target, raw.cols) for raw in stored]
        parts = torch.split(_own_pages(sum(sizes)), sizes)
        work = [
            (rows, raw.qtype, out[start:stop])
            for raw, part in zip(stored, parts, strict=True)
            for out in [part.reshape(raw.rows, -1)]
            for start, stop, rows in _row_chunks(raw)
        ]
        if len(work) == 1:
            self._convert(*work[0])
        else:
            with ThreadPoolExecutor(max_workers=usable_cores()) as pool:  # long loops let go of the GIL
                list(pool.map(lambda item: self._convert(*item), work))
        page_out(raw.data for raw in stored)
        return [RawTensor(part, self._target, raw.shape) for raw, part in zip(stored, parts, strict=True)]

    def _convert(self, rows: U8Array, qtype: QuantType, out: torch.Tensor) -> None:
        if qtype in _NATIVE:
            transcode_blocks(torch.from_numpy(rows), qtype, out)
        else:
            convert = _ternary_to_q4_0(qtype) if qtype in _TERNARY else _float_rows(qtype, self._target)
            out.numpy()[:] = convert(rows).reshape(out.shape)


def _own_pages(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] that leaves nothing behind in the heap: most are let go of as soon as they are packed."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    data = torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    advise_huge_pages(data)
    return data


def dequantize(raw: RawTensor, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a new tensor of `raw`'s logical shape with its values, rounded to `dtype` once. Any type that gguf can
    decode.
    """
    resident_type(raw.qtype, name)  # refuses what is no weight
    if raw.qtype in _DTYPES:
        out = typed_view(raw.data, _DTYPES[raw.qtype]).reshape(raw.shape).to(dtype, copy=True)
    else:
        out = torch.empty((raw.rows, raw.cols), dtype=dtype)
        for start, stop, rows in _row_chunks(raw):
            out[start:stop] = torch.from_numpy(_decode(rows, raw.qtype))
    page_out([raw.data])
    return out.reshape(raw.shape)


def _row_chunks(raw: RawTensor) -> list[tuple[int, int, U8Array]]:
    """(first row, row after the last, their bytes [rows, row_bytes]) of about CHUNK_WEIGHTS weights each."""
    rows = raw.data.numpy().reshape(raw.rows, raw.row_bytes)
    step = max(1, CHUNK_WEIGHTS // max(raw.cols, 1))
    return [(start, min(start + step, raw.rows), rows[start : start + step]) for start in range(0, raw.rows, step)]


def _decode(rows: U8Array, qtype: QuantType) -> npt.NDArray[np.float32]:
    # A hostile block may hold an infinite or NaN scale: its values are then NaN, which is not worth a warning here.
    with np.errstate(all="ignore"):
        return decode_blocks(rows, qtype)


def _float_rows(qtype: QuantType, target: QuantType) -> Callable[[U8Array], U8Array]:
    def convert(rows: U8Array) -> U8Array:
        values = _decode(rows, qtype)
        if target is QuantType.F32:
            return values.view(np.uint8)
        bits = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8)
        out: U8Array = bits.numpy()
        return out

    return convert


def _codes(rows: U8Array, qtype: QuantType, scale_at: int) -> tuple[U8Array, npt.NDArray[np.int8]]:
    """fp16 scale bytes [blocks, 2] and integer codes [blocks, block size].

    The decoder yields the codes when every scale is set to 1, so no bit layout is repeated here.
    """
    blocks = rows.reshape(-1, type_size(qtype)).copy()
    scales = blocks[:, scale_at : scale_at + 2].copy()
    blocks[:, scale_at : scale_at + 2] = np.frombuffer(np.float16(1).tobytes(), dtype=np.uint8)
    codes = _decode(blocks.reshape(rows.shape), qtype).astype(np.int8)
    return scales, codes.reshape(-1, block_size(qtype))


def _ternary_to_q4_0(qtype: QuantType) -> Callable[[U8Array], U8Array]:
    def convert(rows: U8Array) -> U8Array:
        scales, codes = _codes(rows, qtype, _TERNARY[qtype])
        halves = (codes.reshape(-1, 2, 16) + np.int8(8)).view(np.uint8)
        nibbles = halves[:, 0] | halves[:, 1] << np.uint8(4)
        return np.concatenate([np.repeat(scales, block_size(qtype) // 32, axis=0), nibbles], axis=1)

    return convert
