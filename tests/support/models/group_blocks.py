"""Random blocks of GroupType, their weights, and products with them.

The arithmetic is the exact one of the kernels, in numpy. Knows nothing of the extension but the types' names.
"""

from __future__ import annotations

import numpy as np
import torch

from ktransformers.kernels import reference
from ktransformers.kernels.types import GroupType, RawTensor, block_size, row_bytes
from tests.support.checks.int8_arithmetic import quantize_activations

_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


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


def dequantized(weight: RawTensor) -> torch.Tensor:
    """fp32 [rows, cols], each product rounded once."""
    return reference.dequantize(weight)


def exact_linear(x: torch.Tensor, weight: RawTensor) -> torch.Tensor:
    """x [T, K] times the weight [N, K], bit for bit what the kernels give; not for FP8, whose order they choose."""
    values, scales = (part.numpy() for part in reference.group_parts(weight))
    step = 16 if weight.qtype.name == "NVFP4_F32" else 32
    out = np.zeros((x.shape[0], weight.rows), dtype=np.float32)
    for t in range(x.shape[0]):
        q, da = quantize_activations(x[t].numpy(), 32)
        products = (values.astype(np.int64) * q).reshape(weight.rows, -1, step).sum(axis=2).astype(np.float32)
        for b in range(products.shape[1]):
            out[t] += (scales[:, b * step] * da[b * step // 32]) * products[:, b]
    return torch.from_numpy(out)
