"""Random weights of any type. Their values do not matter for time, but NaN and subnormals would."""

from __future__ import annotations

import torch

from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.types import (
    FP8_BLOCK,
    BlockType,
    Fp8Matrix,
    GroupType,
    OwnType,
    QuantType,
    RawTensor,
    WeightType,
    row_bytes,
    row_head,
    type_size,
)

__all__ = ["random_raw", "random_weight"]

_UNQUANTIZED = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}


def random_weight(qtype: WeightType, rows: int, cols: int) -> RawTensor | Fp8Matrix:
    """Return a random matrix [rows, cols] of any type."""
    if isinstance(qtype, OwnType):
        values = torch.randint(0, 0x7F, (rows, cols), dtype=torch.uint8)
        return Fp8Matrix(values, torch.full((-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)), 1e-4))
    return random_raw(qtype, rows, cols)


def random_raw(qtype: BlockType, rows: int, cols: int) -> RawTensor:
    """Return a random matrix [rows, cols] of a block type: random blocks whose scales are small numbers."""
    if qtype in _UNQUANTIZED:
        return RawTensor.from_tensor((torch.randn(rows, cols) * 0.02).to(_UNQUANTIZED[qtype]))
    data = torch.randint(0, 256, (rows * row_bytes(qtype, cols),), dtype=torch.uint8)
    head = row_head(qtype)
    if head > 0:
        data.view(rows, -1)[:, head - 1] = 0x04 if head == 2 else 0x38  # the high byte of an fp16 or fp32 scale
        return RawTensor(data, qtype, (rows, cols))
    blocks = data.view(-1, type_size(qtype))
    if isinstance(qtype, GroupType):
        _tame_groups(qtype, blocks)
        return RawTensor(data, qtype, (rows, cols))
    if qtype is QuantType.MXFP4:
        blocks[:, 0] = 117  # 2^-11
        return RawTensor(data, qtype, (rows, cols))
    if qtype is QuantType.IQ1_M:  # the scale's four nibbles are the upper ones of four words
        blocks[:, 53] &= 0x0F
        blocks[:, 55] &= 0x0F
        blocks[:, 53] |= 0x40
        return RawTensor(data, qtype, (rows, cols))
    if qtype is QuantType.NVFP4:
        blocks[:, :4] = 0x01  # 2^-10
        return RawTensor(data, qtype, (rows, cols))
    for at in FORMATS[qtype].halves:
        blocks[:, at + 1] = 0x04  # the high byte of an fp16 scale: about 1e-4
    return RawTensor(data, qtype, (rows, cols))


def _tame_groups(qtype: GroupType, blocks: torch.Tensor) -> None:
    """No code is a NaN, scales are about 1e-4."""
    if qtype.name.startswith(("F8", "MXFP8")):
        blocks &= 0x7D
    if qtype.name == "MXFP8":
        blocks[:, 0] = 117
    elif qtype.name == "NVFP4_F32":
        blocks[:, 3], blocks[:, 4:6] = 0x39, 0x38
    else:
        scale = qtype.name.split("_")[2]
        blocks[:, 3 if scale == "F32" else 1] = 0x04 if scale == "F16" else 0x39
