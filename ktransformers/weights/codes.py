"""Weights as codes under scales, as safetensors of few bits hold them: w = scale (value of the code - zero point).

Says for each kind which type holds the same numbers for the kernels, and writes rows of its blocks. Knows neither how
a library packs codes (packings.py) nor names (low_bits.py). Which type it becomes follows from headers alone:

    integers of 4, 8 bits, fp16 scales, no zero points     Q4_0, Q8_0: the same blocks of ggml, a scale per 32 columns
    other integers                                         I4_..., I8_...: GroupType, the scale as stored
    e2m1 under e8m0 scales per 32; e4m3 and fp32 per 16    MXFP4; NVFP4_F32
    e4m3 under e8m0 scales per 32; a float per row, group  MXFP8; F8_...
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
from ktransformers.kernels.types import BlockType, GroupType, QuantType, RawTensor, block_size, row_bytes
from ktransformers.weights.experts import FLOAT_DTYPES, BlockMatrix

__all__ = ["CodeKind", "CodeSpec", "Codes", "LowBitMatrix"]


class CodeKind(Enum):
    """What a code is. I4 is value + 8 in the low four bits of a byte, I8 a signed byte."""

    I4 = "I4"
    I8 = "I8"
    E2M1 = "E2M1"
    E4M3 = "F8"

    @property
    def is_integer(self) -> bool:
        return self in (CodeKind.I4, CodeKind.I8)


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
    """What headers say of a matrix [rows, cols].

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
        """As plans show it: I4_32_BF16, I8_ROW_F32_Z."""
        if self.scales in ("E8M0", "E4M3"):
            return {"E8M0": "MXFP", "E4M3": "NVFP"}[self.scales] + ("4" if self.kind is CodeKind.E2M1 else "8")
        group = "ROW" if self.group >= self.cols else str(self.group)
        shuffled = "_ACT" if self.is_shuffled else ""
        return f"{self.kind.value}_{group}_{self.scales}{'_Z' if self.has_zeros else ''}{shuffled}"

    @property
    def resident(self) -> BlockType:
        """The type that the kernels read. Raises UnsupportedError for scales that none of them has."""
        if self.kind is CodeKind.E2M1:
            known = {("E8M0", 32): QuantType.MXFP4, ("E4M3", 16): GroupType["NVFP4_F32"]}
            return self._small(known.get((self.scales, self.group)))
        if self.scales == "E8M0" and self.kind is CodeKind.E4M3:
            return self._small(GroupType["MXFP8"] if self.group == 32 else None)
        if self.scales not in ("F16", "BF16", "F32"):
            raise UnsupportedError(f"{self.kind.value} weights with scales of {self.scales} are not supported")
        if self.is_shuffled:
            return QuantType.F16
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
    """Some rows. codes: uint8 [rows, cols]. scales: [rows, groups], as stored.

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
        """What the codes say, fp32 [rows, cols]."""
        if self.kind is CodeKind.I4:
            return self.codes.float() - 8
        if self.kind is CodeKind.I8:
            return self.codes.view(torch.int8).float()
        if self.kind is CodeKind.E2M1:
            return _E2M1[self.codes.int()]
        return self.codes.view(torch.float8_e4m3fn).float()

    def dequantized(self, group: int) -> torch.Tensor:
        """The weights, fp32 [rows, cols], each product rounded once."""
        cols = self.codes.shape[1]
        index = torch.arange(cols) // group if self.index is None else self.index
        scales = self.scales.float()
        if self.numbers is not None:
            scales = scales * self.numbers[:, None]
        values = self.values()
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
    def write_blocks(self, start: int, stop: int, out: RawTensor) -> None:
        """Rows start .. stop - 1 into `out`, which is of the type `CodeSpec.resident`."""
        if out.qtype in FLOAT_DTYPES:
            values = self.rows_f32(start, stop)
            out.data.view(FLOAT_DTYPES[QuantType(out.qtype)]).copy_(values.reshape(-1))
            return
        codes = self.read(start, stop)
        size, cols = block_size(out.qtype), self.spec.cols
        count, blocks = stop - start, cols // size
        of_block = torch.arange(blocks) * size // self.spec.group
        parts = list[torch.Tensor]()
        if codes.numbers is not None:  # two groups are one block
            numbers = codes.numbers[:, None].expand(count, blocks).contiguous()
            parts = [_as_bytes(numbers, count, blocks), _as_bytes(codes.scales, count, blocks)]
        else:
            parts = [_as_bytes(codes.scales[:, of_block], count, blocks)]
        if codes.zeros is not None:
            parts.append(_as_bytes(codes.zeros[:, of_block], count, blocks))
        parts.append(_code_bytes(codes).reshape(count, blocks, -1))
        torch.cat(parts, dim=2, out=out.data.view(count, blocks, row_bytes(out.qtype, cols) // blocks))


def _as_bytes(values: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).reshape(rows, blocks, -1)


def _code_bytes(codes: Codes) -> torch.Tensor:
    """Bytes as they are; of 4 bits columns i and 16 + i of every 32 in one byte, as ggml has them."""
    if codes.kind in (CodeKind.I8, CodeKind.E4M3):
        return codes.codes.contiguous()
    halves = codes.codes.reshape(codes.codes.shape[0], -1, 2, 16)
    return halves[:, :, 0] | (halves[:, :, 1] << 4)
