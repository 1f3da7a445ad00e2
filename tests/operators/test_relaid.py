"""Re-laying in pieces while loading: the same bytes as in one go."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import native
from ktransformers.kernels.native import WorkerPool
from ktransformers.kernels.quant import Fp8Matrix, PackedTensor, QuantType, RawTensor
from ktransformers.operators import relaid as module
from ktransformers.weights.quantize import quantize


@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0])
@pytest.mark.parametrize("rows", [16, 100, 257])
def test_pieces_make_the_whole(qtype: QuantType, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(rows, 512, generator=torch.Generator().manual_seed(1)).numpy()
    weight = RawTensor(torch.from_numpy(quantize(values, qtype)).reshape(-1), qtype, (rows, 512))
    pool = WorkerPool(1)
    whole = native.pack(weight, pool)
    monkeypatch.setattr(module, "_PIECE", 40 * weight.row_bytes)  # 32 rows at a time
    made = module.relaid(weight, pool)
    assert isinstance(made, PackedTensor)
    assert torch.equal(made.data, whole.data)
    assert made.shape == (rows, 512)
    pool.close()


@pytest.mark.parametrize("rows", [16, 300, 513])
def test_pieces_of_fp8_make_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 127, (rows, 260), dtype=torch.uint8, generator=generator)
    weight = Fp8Matrix(values, torch.rand(-(-rows // 128), 3, generator=generator))
    pool = WorkerPool(1)
    whole = native.pack_fp8(weight, pool)
    monkeypatch.setattr(module, "_PIECE", 300 * 260)  # 256 rows at a time
    made = module.relaid(weight, pool)
    assert isinstance(made, PackedTensor)
    assert torch.equal(made.data, whole.data)
    assert made.shape == (rows, 260)
    pool.close()


def test_unquantized_weights_stay_where_they_are() -> None:
    weight = RawTensor.from_tensor(torch.zeros(16, 32))
    assert module.relaid(weight, WorkerPool(1)) is weight
