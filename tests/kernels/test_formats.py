"""The table of weight types: what it says is what files and kernels have, and nobody else says it."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES

from ktransformers.kernels import cpu
from ktransformers.kernels.extension import extension
from ktransformers.kernels.formats import FORMATS, Kernels
from ktransformers.kernels.triton.quant import cpu_packed_bytes
from ktransformers.kernels.triton.quant.repack import CPU_PACKED_TYPES, GPU_TYPES
from ktransformers.kernels.types import (
    FORK_TYPES,
    GroupType,
    OwnType,
    QuantType,
    WeightType,
    block_size,
    row_head,
    type_size,
)
from tests.support.checks.decoding import ROW_HEADS, SUB_BLOCKS, decoded, parts_of_rows, set_row_scales

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def test_records_agree_with_gguf() -> None:
    known = {int(kind) for kind in GGML_QUANT_SIZES}
    for number, record in FORMATS.items():
        if number in known:
            assert (record.block, record.nbytes) == GGML_QUANT_SIZES[QuantType(number)]
            assert record.name == QuantType(number).name
    assert FORMATS[OwnType.F8_E4M3].kernels is Kernels.FP8
    assert {QuantType(number) for number in FORMATS if number not in {*known, *OwnType}} == FORK_TYPES
    assert {QuantType(number): record.row_head for number, record in FORMATS.items() if record.row_head} == ROW_HEADS


@pytest.mark.parametrize("qtype", sorted(FORK_TYPES), ids=lambda qtype: qtype.name)
def test_records_of_forks_types_agree_with_their_layouts(qtype: QuantType) -> None:
    """The oracle takes a block apart to its last byte."""
    size = row_head(qtype) + type_size(qtype)
    d, scales, values = SUB_BLOCKS[qtype](np.zeros(size, dtype=np.uint8))
    assert (d, len(scales), sum(map(len, values))) == (0, len(values), block_size(qtype))
    for other in (size - 1, size + 1):
        with pytest.raises(struct.error):
            SUB_BLOCKS[qtype](np.zeros(other, dtype=np.uint8))


@pytest.mark.parametrize("qtype", sorted(cpu.PACKED_TYPES), ids=lambda qtype: qtype.name)
def test_numbers_of_a_block_are_where_the_table_says(qtype: QuantType) -> None:
    """Halved there and nowhere else, weights are halved."""
    row = np.random.default_rng(int(qtype)).integers(0, 256, row_head(qtype) + type_size(qtype), dtype=np.uint8)
    heads, blocks = parts_of_rows(row[None], qtype)
    halves = FORMATS[qtype].halves
    has_scale = bool(halves) or heads.size > 0
    assert has_scale == (qtype not in (QuantType.MXFP4, QuantType.NVFP4, QuantType.IQ1_M))

    def decoded_with(scale: float) -> np.ndarray:
        for at in halves:
            blocks[0, 0, at : at + 2] = np.array([scale], dtype=np.float16).view(np.uint8)
        set_row_scales(heads, np.array([scale]))
        return decoded(row[None], qtype)

    whole = decoded_with(0.75)
    assert (decoded_with(0.375) == (whole / 2 if has_scale else whole)).all()


@pytest.mark.parametrize(
    ("qtype", "cols", "nbytes"),
    [
        (QuantType.Q4_K, 512, 2 * (2 * 32 + 8 * 32 + 32 * 64)),  # d, dmin; scales, minima; lines: no head
        (QuantType.Q6_K, 256, 64 + 8 * 32 + 48 * 64),  # a head of 32 bytes is padded to 64
        (QuantType.Q6_K, 768, 128 + 3 * (8 * 32 + 48 * 64)),
        (QuantType.IQ4_K, 768, 128 + 3 * (8 * 32 + 32 * 64)),
        (QuantType.IQ6_K, 256, 64 + 8 * 32 + 48 * 64 + 64),  # a line for 16 bits of each row
        (QuantType.IQ4_KS, 768, 64 + 3 * (4 * 32 + 32 * 64)),  # one fp32 number of each row
        (QuantType.IQ3_KS, 512, 64 + 2 * (4 * 32 + 16 * 64 + 8 * 64)),
        (QuantType.Q8_0, 96, 128 + 3 * 512),
        (QuantType.Q4_1, 32, 64 + 256),  # d and m of 16 rows
        (QuantType.MXFP4, 160, 128 + 5 * 256),  # 80 bytes of exponents
        (QuantType.NVFP4, 64, 64 + 2 * 256),  # four scales of a row, two lines of codes for each 32 columns
        (QuantType.Q1_0, 128, 64 + 4 * 64),
        (QuantType.BF16, 64, 16 * 2 * 64),
        (OwnType.F8_E4M3, 256, 64 + 16 * 256),  # two fp32 scales
    ],
)
def test_packed_sizes_by_hand(qtype: WeightType, cols: int, nbytes: int) -> None:
    assert cpu.packed_nbytes(qtype, 16, cols) == nbytes
    assert cpu.packed_nbytes(qtype, 17, cols) == 2 * nbytes


@pytest.mark.parametrize("qtype", sorted(cpu.PACKED_TYPES), ids=lambda qtype: qtype.name)
def test_a_gpu_reads_tiles_of_the_sizes_that_are_packed(qtype: QuantType) -> None:
    for cols in (256, 512, 768, 1280):
        assert int(cpu_packed_bytes.tile_bytes(int(qtype), cols)) == cpu.packed_nbytes(qtype, 16, cols)


def test_no_type_is_taken_for_another() -> None:
    """What the table does not have is refused, on either side."""
    for number in (4, 15, 999, 1001, 2048 + 900):
        with pytest.raises(ValueError, match=str(number)):
            extension.packed_tile_bytes(number, 256)
        with pytest.raises(ValueError, match=str(number)):
            cpu_packed_bytes.block_bytes(number)
    for qtype in (QuantType.F32, QuantType.F16):
        with pytest.raises(ValueError, match=qtype.name):
            extension.packed_tile_bytes(int(qtype), 256)


def test_sets_of_types_are_those_of_the_table() -> None:
    unpacked = {QuantType.F32, QuantType.F16, QuantType.BF16}  # BF16 is packed for products of bf16 alone
    assert {int(qtype) for qtype in cpu.PACKED_TYPES | unpacked} == set(FORMATS) - {int(OwnType.F8_E4M3)}
    assert cpu.PACKED_TYPES | unpacked == cpu.NATIVE_TYPES
    assert cpu.PACKED_TYPES | set(GroupType) == GPU_TYPES | CPU_PACKED_TYPES


def test_sources_ask_the_table() -> None:
    """A case for each type is how sizes and kernels were said before, with a default for what was forgotten."""
    cases = {
        str(path.relative_to(CSRC)): count
        for path in CSRC.rglob("*")
        if path.is_file() and (count := len(re.findall(r"case QType::", path.read_text(encoding="utf-8"))))
    }
    assert cases == {"runtime/grids.cpp": 6}  # which grid has which type's values
