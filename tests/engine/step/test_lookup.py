"""Tokens of a step looked up for a GPU: the bits of the table's rows in the GPU's type, however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from ktransformers.engine.step.layout import StepLayout
from ktransformers.engine.step.lookup import STAGED_ROWS, TokenLookup
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.operators.base import OperatorConfig
from ktransformers.operators.linear.embedding import KEmbedding
from ktransformers.weights.quantize.write import quantize
from tests.support.engines.fake_gpus import fake_hardware

VOCAB, WIDTH = 100, 64
NONE: Any = None
"""A step's context, which is for layers that look up n-grams."""


@pytest.fixture
def table() -> Iterator[KEmbedding]:
    values = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
    data = torch.from_numpy(quantize(values.numpy(), QuantType.Q8_0)).flatten()
    with closing(WorkerPool(1)) as pool:
        made = KEmbedding(torch.nn.Embedding(VOCAB, WIDTH, device="meta"), "embed", OperatorConfig(None, pool))  # type: ignore[arg-type]
        made._table = RawTensor(data, QuantType.Q8_0, (VOCAB, WIDTH))
        yield made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_the_table(table: KEmbedding, dtype: torch.dtype) -> None:
    """The rows of one look-up stay when the next one uses the same memory."""
    gpu = fake_hardware(dtype=dtype).devices["cuda:0"]
    lookup = TokenLookup(StepLayout(gpu, gpu, (gpu,), table, WIDTH))
    steps = [torch.randint(0, VOCAB, (count,)) for count in (1, STAGED_ROWS - 1, STAGED_ROWS, 300, 200)]
    assert table._table is not None
    got = [lookup(ids, NONE) for ids in steps]
    for ids, rows in zip(steps, got, strict=True):
        want = cpu.dequantize_rows(table._table, ids, table.config.require_pool())
        assert torch.equal(rows, want.to(gpu.torch_device, dtype))


def test_memory_is_made_once(table: KEmbedding) -> None:
    gpu = fake_hardware(dtype=torch.bfloat16).devices["cuda:0"]
    lookup = TokenLookup(StepLayout(gpu, gpu, (gpu,), table, WIDTH))
    places = []
    for count in (300, 300, STAGED_ROWS):
        lookup(torch.zeros(count, dtype=torch.int64), NONE)
        places.append(lookup._staged.data_ptr())
    assert len(set(places)) == 1


def test_a_scaled_table_is_asked_itself(table: KEmbedding) -> None:
    """A model's own scale is no row of the table."""
    gpu = fake_hardware(dtype=torch.bfloat16).devices["cuda:0"]
    double = torch.nn.Sequential(table, torch.nn.Hardtanh(-0.5, 0.5))
    ids = torch.arange(VOCAB)
    rows = TokenLookup(StepLayout(gpu, gpu, (gpu,), double, WIDTH))(ids, NONE)
    assert torch.equal(rows.cpu(), table(ids).clamp(-0.5, 0.5).to(torch.bfloat16))
