"""Unpacks codes, scales and zero points as the libraries that quantize safetensors pack them: bytes of a file to
`Codes`.

    words      compressed-tensors, 4 or 8 bits:  int32 [rows, cols * bits / 32], value + 8 or + 128, the first lowest
    bytes      8 bits, FP8:                      [rows, cols]
    pairs      NVFP4, MXFP4:                     uint8 [rows, cols / 2], the first column in the low nibble
    GPTQ       int32 [cols * bits / 32, rows], value + 8 or + 128; scales [groups, rows], zeros
               [groups, rows * bits / 32]
    AWQ        int32 [cols, rows / 8], eight rows in the order 0 2 4 6 1 3 5 7; scales and zeros as GPTQ, in that order
    gemv       AWQ's other way: int32 [rows, cols / 8], the first lowest; scales [rows, 8 n] of which the first `groups`
               count, zeros int32 [rows, n]

Gets tensors as they lie in the memory map, and slices of them; each class has read(start, stop), see LowBitMatrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktransformers.errors import TensorMismatchError
from ktransformers.weights.safetensors.codes import CodeKind, Codes

__all__ = ["ByteRows", "ColumnWords", "GemvRows", "PairRows", "WordRows", "unpack_words"]

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where, in a word of AWQ, row i of eight is."""


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 [..., n] -> uint8 [..., n * 32 / bits], the lowest bits first. bits: 4 or 8."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def _integers(words: torch.Tensor, kind: CodeKind, cols: int) -> torch.Tensor:
    """Words of rows, with values + 8 or + 128, as `Codes` has them."""
    data = words.contiguous().view(torch.uint8)
    return data[:, : -(-cols // 2)] if kind is CodeKind.I4 else data[:, :cols] ^ 0x80


def _zeros(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Zero points of such codes, as what is subtracted from a value: int8."""
    return (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


@dataclass(frozen=True, slots=True)
class WordRows:
    """Rows of compressed-tensors' pack-quantized format.

    words: int32 [rows, ceil(cols * bits / 32)]. scales: [rows, groups]. zeros: int32 [ceil(rows * bits / 32), groups],
    packed along rows. index: int32 [cols] or None.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    cols: int
    index: torch.Tensor | None = None

    def read(self, start: int, stop: int) -> Codes:
        """Unpack rows start .. stop - 1, see LowBitMatrix."""
        kind = CodeKind.I4 if self.bits == 4 else CodeKind.I8
        codes = _integers(self.words[start:stop], kind, self.cols)
        zeros = None
        if self.zeros is not None:
            per_word = 32 // self.bits
            first = start // per_word
            some = unpack_words(self.zeros[first : -(-stop // per_word)].T, self.bits)
            zeros = _zeros(some[:, start - first * per_word : stop - first * per_word].T, self.bits)
        index = None if self.index is None else self.index.long()
        return Codes(kind, codes, self.scales[start:stop], zeros, index=index)


@dataclass(frozen=True, slots=True)
class GemvRows:
    """Rows of AWQ packed for gemv.

    words: int32 [rows, cols / 8]. scales: [rows, 8 n]. zeros: int32 [rows, n]; the first `groups` of both count.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: int

    def read(self, start: int, stop: int) -> Codes:
        """Unpack rows start .. stop - 1, see LowBitMatrix."""
        codes = self.words[start:stop].contiguous().view(torch.uint8)
        zeros = _zeros(unpack_words(self.zeros[start:stop], 4)[:, : self.groups], 4)
        return Codes(CodeKind.I4, codes, self.scales[start:stop, : self.groups], zeros)


@dataclass(frozen=True, slots=True)
class ByteRows:
    """Rows with a byte per weight. kind: I8 or E4M3. codes: [rows, cols]; scales, zeros (int8): [rows, groups].

    block_rows: rows that share their scales, which are [ceil(rows / block_rows), groups] then.
    """

    kind: CodeKind
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    block_rows: int = 1

    def read(self, start: int, stop: int) -> Codes:
        """Unpack rows start .. stop - 1, see LowBitMatrix."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        scales = self.scales[start:stop]
        if self.block_rows > 1:  # bytes, since torch gathers no rows of some types of scales
            rows = torch.arange(start, stop) // self.block_rows
            scales = self.scales.contiguous().view(torch.uint8)[rows].view(self.scales.dtype)
        return Codes(self.kind, self.codes[start:stop].view(torch.uint8), scales, zeros)


@dataclass(frozen=True, slots=True)
class PairRows:
    """Rows with two columns of e2m1 in a byte: uint8 [rows, cols / 2]. numbers: fp32 [rows], of NVFP4."""

    pairs: torch.Tensor
    scales: torch.Tensor
    numbers: torch.Tensor | None = None

    def read(self, start: int, stop: int) -> Codes:
        """Unpack rows start .. stop - 1, see LowBitMatrix."""
        numbers = None if self.numbers is None else self.numbers[start:stop]
        return Codes(CodeKind.E2M1, self.pairs[start:stop].view(torch.uint8), self.scales[start:stop], numbers=numbers)


@dataclass(frozen=True, slots=True)
class ColumnWords:
    """Matrix of GPTQ and AWQ: a column's codes lie in a row of words, scales and zero points likewise.

    words: int32, GPTQ [cols * bits / 32, rows], AWQ [cols, rows * bits / 32]. scales: [groups, rows]. zeros: int32
    [groups, rows * bits / 32]. zero_offset: what is added to them, 1 in GPTQ's first version. index: int32 [cols].
    is_symmetric: zero points are all the same, 8 or 128. Raises TensorMismatchError where they are not.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    kind: CodeKind
    is_awq: bool
    zero_offset: int = 0
    index: torch.Tensor | None = None
    is_symmetric: bool = False

    @property
    def bits(self) -> int:
        return 4 if self.kind is CodeKind.I4 else 8

    def read(self, start: int, stop: int) -> Codes:
        """Unpack rows start .. stop - 1, see LowBitMatrix."""
        if self.is_awq:
            codes = self._awq_codes(start, stop)
        else:
            words = self.words[:, start:stop].T
            codes = _integers(words, self.kind, words.shape[1] * 32 // self.bits)
        zeros = None
        if self.zeros is not None:
            stored = self._by_words(self.zeros, start, stop)
            zeros = _zeros((stored + self.zero_offset) & ((1 << self.bits) - 1), self.bits)
        if zeros is not None and self.is_symmetric:
            if zeros.any():
                raise TensorMismatchError("the config says sym, and the files have zero points that differ")
            zeros = None
        index = None if self.index is None else self.index.long()
        return Codes(self.kind, codes, self.scales[:, start:stop].T, zeros, index=index)

    def _awq_codes(self, start: int, stop: int) -> torch.Tensor:
        """Pairs of columns of rows start .. stop - 1."""
        first = start // 8
        words = self.words[:, first : -(-stop // 8)].T.contiguous()  # [rows / 8, cols]
        planes = words.view(torch.uint8).view(*words.shape, 4).movedim(2, 0).contiguous()  # two rows in each
        even, odd = planes[..., 0::2], planes[..., 1::2]
        halves = ((even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0))
        places = torch.stack(halves, dim=1).flatten(0, 1)
        return places[list(_AWQ_PLACES)].transpose(0, 1).flatten(0, 1)[start - 8 * first : stop - 8 * first]

    def _by_words(self, words: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Rows start .. stop - 1 [rows, n] of words [n, rows * bits / 32]."""
        per_word = 32 // self.bits
        first = start // per_word
        some = unpack_words(words[:, first : -(-stop // per_word)], self.bits)
        if self.is_awq:
            some = some.reshape(len(some), -1, 8)[..., list(_AWQ_PLACES)].flatten(-2)
        return some[:, start - first * per_word : stop - first * per_word].T
