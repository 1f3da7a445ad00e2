"""Weights as codes under scales, as safetensors of few bits hold them: w = scale (value of the code - zero point).

Says for each kind which type holds the same numbers for the kernels, and writes rows of its blocks. Knows neither how
a library packs codes (packings.py) nor names (low_bits.py). Which type it becomes follows from headers alone:

    integers of 4, 8 bits, fp16 scales, no zero points     Q4_0, Q8_0: the same blocks of ggml, a scale per 32 columns
    other integers                                         I4_..., I8_...: GroupType, the scale as stored
    e2m1 under e8m0 scales per 32; e4m3 and fp32 per 16    MXFP4; NVFP4_F32
    e4m3 under e8m0 scales; a float per row, group         MXFP8; F8_...
    columns in groups by an index of their own (GPTQ)      F16, the products that the format's library multiplies with
    groups that are no multiple of 32 columns              F32

A scale for 128 columns or more, or for a row, is repeated in blocks of 128 columns where they fit, else of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from typing_extensions import override

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu.packing import write_group_blocks
from ktransformers.kernels.types import BlockType, GroupType, QuantType, RawTensor
from ktransformers.weights.experts import FLOAT_DTYPES, BlockMatrix

__all__ = ["CodeKind", "CodeSpec", "Codes", "LowBitMatrix"]


class CodeKind(Enum):
    """Kinds of codes. I4 is value + 8, I8 a signed byte. Two codes of four bits are a byte, the first the low half."""

    I4 = "I4"
    I8 = "I8"
    E2M1 = "E2M1"
    E4M3 = "F8"

    @property
    def is_integer(self) -> bool:
        return self in (CodeKind.I4, CodeKind.I8)


CHUNK_WEIGHTS = 1 << 17  # written at a time, times ROW_MULTIPLE
ROW_MULTIPLE = 8  # of the rows that one word of AWQ has

SCALE_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "E8M0": torch.float8_e8m0fnu,
    "E4M3": torch.float8_e4m3fn,
}
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass(frozen=True, slots=True)
class CodeSpec:
    """Format, by its headers, of a matrix [rows, cols] of codes.

    group: columns that share a scale. scales: one of SCALE_DTYPES; E4M3 has an fp32 number per row besides.
    is_shuffled: an index says which group a column is of.
    """

    kind: CodeKind
    cols: int
    group: int
    scales: str
    has_zeros: bool = False
    is_shuffled: bool = False

    @property
    def name(self) -> str:
        """Name of the weight format as plans show it: I4_32_BF16, I8_ROW_F32_Z."""
        if self.scales in ("E8M0", "E4M3"):
            return {"E8M0": "MXFP", "E4M3": "NVFP"}[self.scales] + ("4" if self.kind is CodeKind.E2M1 else "8")
        group = "ROW" if self.group >= self.cols else str(self.group)
        shuffled = "_ACT" if self.is_shuffled else ""
        return f"{self.kind.value}_{group}_{self.scales}{'_Z' if self.has_zeros else ''}{shuffled}"

    @property
    def resident(self) -> BlockType:
        """Type of the matrix that the kernels read. Raises UnsupportedError for scales that none of them has."""
        if self.kind is CodeKind.E2M1:
            known = {("E8M0", 32): QuantType.MXFP4, ("E4M3", 16): GroupType["NVFP4_F32"]}
            return self._small(known.get((self.scales, self.group)))
        if self.scales == "E8M0" and self.kind is CodeKind.E4M3:
            return self._small(GroupType["MXFP8"] if self.group % 32 == 0 or self.group >= self.cols else None)
        if self.scales not in ("F16", "BF16", "F32"):
            raise UnsupportedError(f"{self.kind.value} weights with scales of {self.scales} are not supported")
        if self.is_shuffled:  # in the type of the scales, as the libraries multiply them
            return QuantType[self.scales]
        is_whole = self.group >= self.cols
        if self.cols % 32 or (self.group % 32 and not is_whole):
            return QuantType.F32
        if self.kind.is_integer and self.scales == "F16" and not self.has_zeros:
            return QuantType.Q4_0 if self.kind is CodeKind.I4 else QuantType.Q8_0
        size = 128 if self.cols % 128 == 0 and (is_whole or self.group % 128 == 0) else 32
        return GroupType[f"{self.kind.value}_{size}_{self.scales}{'_Z' if self.has_zeros else ''}"]

    def _small(self, found: BlockType | None) -> BlockType:
        if found is None:
            raise UnsupportedError(
                f"{self.kind.value} weights with scales of {self.scales} per {self.group} columns are not supported"
            )
        return QuantType.F32 if self.cols % 32 else found


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes and scales of some rows. codes: uint8 [rows, cols], of four bits [rows, cols / 2]. scales: [rows, groups],
    as stored.

    zeros: int8 [rows, groups], what is subtracted from a value, or None. numbers: fp32 [rows], of E4M3 scales, which
    they are multiplied with. index: int64 [cols], the group of each column where `CodeSpec.is_shuffled`.
    """

    kind: CodeKind
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    numbers: torch.Tensor | None = None
    index: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Return what the codes stand for, fp32 [rows, cols]."""
        if self.kind is CodeKind.I8:
            return self.codes.view(torch.int8).float()
        if self.kind is CodeKind.E4M3:
            return self.codes.view(torch.float8_e4m3fn).float()
        single = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)
        return single.float() - 8 if self.kind is CodeKind.I4 else _E2M1[single.int()]

    def dequantized(self, group: int) -> torch.Tensor:
        """Return the weights, fp32 [rows, cols], each product rounded once."""
        values = self.values()
        index = torch.arange(values.shape[1]) // group if self.index is None else self.index
        scales = self.scales.float()
        if self.numbers is not None:
            scales = scales * self.numbers[:, None]
        if self.zeros is not None:
            values -= self.zeros.float()[:, index]
        return values * scales[:, index]


@dataclass(frozen=True, slots=True)
class LowBitMatrix(BlockMatrix):
    """A matrix of codes, not loaded yet. read(start, stop): rows start .. stop - 1."""

    spec: CodeSpec
    rows: int
    read: Callable[[int, int], Codes]

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.spec.cols)

    @property
    def resident(self) -> BlockType:
        return self.spec.resident

    @override
    def view(self) -> RawTensor | None:
        return None

    @override
    def rows_f32(self, start: int, stop: int) -> torch.Tensor:
        return self.read(start, stop).dequantized(self.spec.group)

    @override
    def write_blocks(self, out: RawTensor) -> None:
        """Write all rows to `out`, which is of the type `CodeSpec.resident`, some at a time."""
        step = max(CHUNK_WEIGHTS // max(self.spec.cols, 1), 1) * ROW_MULTIPLE
        for start in range(0, self.rows, step):
            stop = min(start + step, self.rows)
            self._write(start, stop, out.rows_slice(start, stop))

    def _write(self, start: int, stop: int, out: RawTensor) -> None:
        if out.qtype in FLOAT_DTYPES:
            values = self.rows_f32(start, stop)
            out.data.view(FLOAT_DTYPES[QuantType(out.qtype)]).copy_(values.reshape(-1))
            return
        codes = self.read(start, stop)
        scales = codes.scales.contiguous()
        zeros, numbers = (None if one is None else one.contiguous() for one in (codes.zeros, codes.numbers))
        write_group_blocks(codes.codes.contiguous(), scales, zeros, numbers, self.spec.group, out)
