"""Packed weights of types with grids hold what csrc/kernels/packed/grid.inl says: decoded here by that description."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import quants

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import QuantType, RawTensor

Bytes = npt.NDArray[np.uint8]
Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Form:
    """upper: where bits of codes above 8 are. scales: "signs", "nibbles" or the sub-blocks that have one of 4 bits."""

    grid: type
    factor: float
    upper: str
    scales: str | int


FORMS = {
    QuantType.IQ2_XXS: Form(quants.IQ2_XXS, 1 / 8, "", "signs"),
    QuantType.IQ2_XS: Form(quants.IQ2_XS, 1 / 8, "signs", 16),
    QuantType.IQ2_S: Form(quants.IQ2_S, 1 / 8, "two", 16),
    QuantType.IQ3_XXS: Form(quants.IQ3_XXS, 1 / 4, "", "signs"),
    QuantType.IQ3_S: Form(quants.IQ3_S, 1, "one", 8),
    QuantType.IQ1_S: Form(quants.IQ1_S, 1, "nibbles", "nibbles"),
    QuantType.IQ1_M: Form(quants.IQ1_S, 1, "nibbles", 16),
}


def lines(data: Bytes, count: int) -> Int:
    """`count` lines from the start: [line, row, 4]."""
    return data[: 64 * count].reshape(count, 16, 4).astype(np.int64)


def decoded(block: Bytes, form: Form) -> npt.NDArray[np.float64]:
    """The weights of a block of 16 rows and 256 columns, divided by d: [row, column]."""
    grid = form.grid.grid.reshape(-1, form.grid.grid.shape[-1])
    of_codes, is_iq1 = 8 // grid.shape[1], form.upper == "nibbles"
    parts = lines(block, 8 * (of_codes + (not is_iq1))).reshape(8, -1, 16, 4)
    codes, behind = parts[:, :of_codes].copy(), block[parts.size :]
    signs = parts[:, of_codes] if not is_iq1 else np.zeros((8, 16, 4), dtype=np.int64)
    last = signs >> 7
    if form.upper == "signs":
        codes[:, 0] |= last << 8
    elif form.upper == "two":
        codes[:, 0] |= np.stack([lines(behind, 2)[s // 4] >> 2 * (s % 4) & 3 for s in range(8)]) << 8
    elif form.upper == "one":
        codes |= np.stack([lines(behind, 2) >> s & 1 for s in range(8)]) << 8
    nibbles = np.stack([lines(behind, 4)[s // 2] >> 4 * (s % 2) & 15 for s in range(8)]) if is_iq1 else last
    if is_iq1:
        codes[:, 0] |= (nibbles & 7) << 8
    spare = nibbles >> 3 if is_iq1 else last  # one bit a code
    as_number = (spare << np.arange(4)).sum(-1)  # [part, row]
    if form.scales == "signs":
        scales = as_number[:, None]
    elif form.scales == "nibbles":
        scales, spare = as_number[:, None] & 7, np.broadcast_to(as_number[..., None] >> 3, spare.shape)
    else:
        pairs = block[len(block) - 8 * int(form.scales) :].reshape(-1, 16).astype(np.int64)
        scales = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(8, -1, 16)  # [part, sub-block, row]
    values = np.moveaxis(grid[codes], 2, 0).reshape(16, 8, 4, 8)  # of lines of 4 codes each: in the order of columns
    if is_iq1:
        values = values + np.moveaxis(0.125 - 0.25 * spare, 1, 0)[..., None]
    else:
        seven = (signs[..., None] >> np.arange(8)) & 1
        if form.scales == "signs" or form.upper == "signs":
            seven[..., 7] = seven[..., :7].sum(-1) % 2
        values = values * (1 - 2 * np.moveaxis(seven, 1, 0))
    wide = np.repeat(np.moveaxis(scales, 2, 0).reshape(16, -1), 256 // (8 * scales.shape[1]), axis=1)
    found: npt.NDArray[np.float64] = values.reshape(16, 256) * (2 * wide + 1) * form.factor
    return found


@pytest.mark.parametrize("qtype", FORMS, ids=lambda qtype: qtype.name)
def test_bytes_are_as_they_are_described(make_weight, pool: WorkerPool, qtype: QuantType) -> None:
    form, (rows, cols) = FORMS[qtype], (37, 768)
    form.grid.init_grid()
    weight: RawTensor = make_weight(qtype, rows, cols)
    packed = cpu.pack(weight, pool).data.numpy().reshape(-(-rows // 16), -1)
    want = quants.dequantize(weight.data.numpy().reshape(rows, -1), qtype)
    head = 128  # 3 blocks of 16 halves, in full lines
    for tile, data in enumerate(packed):
        d = data[:96].view(np.float16).reshape(3, 16).astype(np.float32)
        blocks = data[head:].reshape(3, -1)
        got = np.concatenate([d[b][:, None] * decoded(blocks[b], form) for b in range(3)], axis=1)
        ids = [min(16 * tile + r, rows - 1) for r in range(16)]
        assert np.array_equal(got.astype(np.float32), want[ids])
    assert torch.equal(cpu.pack(weight, pool).data, torch.from_numpy(packed.reshape(-1)))
