"""Blocks of GroupType, from their description in csrc/kernels/packed_groups.inl: random ones, their weights, products.

The arithmetic is the exact one of the kernels, in numpy. Knows nothing of the extension but the types' names.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.kernels.types import GroupType, RawTensor, block_size, row_bytes
from tests.support.int8_arithmetic import quantize_activations

_Float = npt.NDArray[np.float32]
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # twice the values


def _fields(qtype: GroupType) -> tuple[str, torch.dtype, bool]:
    """Kind of code, type of the scale, whether there are zero points."""
    if qtype.name == "MXFP8":
        return "F8", torch.float8_e8m0fnu, False
    if qtype.name == "NVFP4_F32":
        return "E2M1", torch.float32, False
    kind, _, scale, *zero = qtype.name.split("_")
    return kind, _SCALES[scale], bool(zero)


def random_blocks(qtype: GroupType, rows: int, cols: int, seed: int = 0) -> RawTensor:
    """Any codes that are numbers, under scales that are neither large nor all positive, with any zero points."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows * row_bytes(qtype, cols),), dtype=torch.uint8, generator=generator)
    kind, dtype, _ = _fields(qtype)
    size = block_size(qtype)
    blocks = data.view(rows * cols // size, -1)
    scales = torch.randn(len(blocks), generator=generator) * 0.02
    if dtype == torch.float8_e8m0fnu:
        blocks[:, 0] = torch.randint(110, 130, (len(blocks),), generator=generator).to(torch.uint8)
    else:
        blocks[:, : dtype.itemsize] = scales.to(dtype)[:, None].view(torch.uint8)
    if kind == "F8":
        codes = blocks[:, -size:]
        codes[(codes & 127) == 127] = 0x80
    if kind == "E2M1":
        number = torch.randn(rows, generator=generator).repeat_interleave(cols // 32)[:, None] * 0.02
        blocks[:, :4] = number.view(torch.uint8)
        blocks[:, 4:6] &= 0x7D  # no NaN
    return RawTensor(data, qtype, (rows, cols))


def _parts(weight: RawTensor) -> tuple[_Float, _Float]:
    """(values less zero points, scales), fp32 [rows, cols]; the values of E2M1 are doubled and its scales halved."""
    qtype = weight.qtype
    assert isinstance(qtype, GroupType)
    kind, dtype, has_zero = _fields(qtype)
    size, (rows, cols) = block_size(qtype), weight.shape
    blocks = weight.data.view(rows * cols // size, -1)
    if kind == "E2M1":
        number = blocks[:, :4].contiguous().view(torch.float32)
        scales = blocks[:, 4:6].contiguous().view(torch.float8_e4m3fn).float() * number / 2
        scales = scales.repeat_interleave(16, dim=1)
        codes = blocks[:, 6:].numpy()
        values = _E2M1[np.concatenate([codes & 15, codes >> 4], axis=1)]
        return values.reshape(rows, cols).astype(np.float32), scales.numpy().reshape(rows, cols)
    scales = blocks[:, : dtype.itemsize].contiguous().view(dtype).float().expand(-1, size).numpy()
    zeros = blocks[:, dtype.itemsize].contiguous().view(torch.int8).numpy()[:, None].astype(np.int32) if has_zero else 0
    body = blocks[:, dtype.itemsize + has_zero :].contiguous()
    if kind == "F8":
        values = body.view(torch.float8_e4m3fn).float().numpy()
    elif kind == "I8":
        values = body.view(torch.int8).numpy().astype(np.int32) - zeros
    else:
        some = body.numpy().reshape(len(blocks), -1, 16)
        codes = np.stack([some & 15, some >> 4], axis=2).reshape(len(blocks), size).astype(np.int32)
        values = codes - 8 - zeros
    return values.reshape(rows, cols).astype(np.float32), scales.reshape(rows, cols)


def dequantized(weight: RawTensor) -> torch.Tensor:
    """fp32 [rows, cols], each product rounded once."""
    values, scales = _parts(weight)
    return torch.from_numpy(values * scales)


def exact_linear(x: torch.Tensor, weight: RawTensor) -> torch.Tensor:
    """x [T, K] times the weight [N, K], bit for bit what the kernels give; not for FP8, whose order they choose."""
    values, scales = _parts(weight)
    step = 16 if weight.qtype.name == "NVFP4_F32" else 32
    out = np.zeros((x.shape[0], weight.rows), dtype=np.float32)
    for t in range(x.shape[0]):
        q, da = quantize_activations(x[t].numpy(), 32)
        products = (values.astype(np.int64) * q).reshape(weight.rows, -1, step).sum(axis=2).astype(np.float32)
        for b in range(products.shape[1]):
            out[t] += (scales[:, b * step] * da[b * step // 32]) * products[:, b]
    return torch.from_numpy(out)
