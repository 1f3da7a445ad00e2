"""Layers that share a product on a GPU: which of them, and what each gets of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.linear.joined import JoinedLinears, side_by_side
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.linear.matrix import gpu_matrix
from ktransformers.weights.quantize.write import quantize
from tests.support.checks.dict_source import raw_f32
from tests.support.engines.fake_gpus import fake_hardware

pytest.importorskip("triton")

MakeLayer = Callable[[int, QuantType], KTransformersLinear]
COLS = 256


@pytest.fixture
def layer() -> Iterator[MakeLayer]:
    """A linear operator on the GPU with random weights [rows, COLS] of a type."""
    with closing(WorkerPool(1)) as pool:
        config = OperatorConfig(None, pool, devices=fake_hardware().devices)

        def made(rows: int, kind: QuantType) -> KTransformersLinear:
            module = torch.nn.Linear(COLS, rows, bias=False, device="meta")
            operator = KTransformersLinear(module, "part", config, Placement(generate_device="cuda:0"))
            values = torch.randn(rows, COLS, generator=torch.Generator().manual_seed(rows))
            weight = raw_f32(values)
            if kind is not QuantType.F32:
                data = torch.from_numpy(quantize(values.numpy(), kind)).flatten()
                weight = RawTensor(data, kind, (rows, COLS))
            operator._matrix = gpu_matrix(weight, None, operator.device, pool, is_dense_wanted=False)
            return operator

        yield made


def test_dense_and_quantized_layers_are_joined_each_with_their_like(layer: MakeLayer) -> None:
    """As of a Gated DeltaNet whose small projections were not quantized."""
    kinds = [(64, QuantType.Q8_0), (8, QuantType.F32), (40, QuantType.Q8_0), (16, QuantType.F32)]
    parts = [layer(rows, kind) for rows, kind in kinds]
    x = parts[0].device.to_device(torch.randn(3, COLS, generator=torch.Generator().manual_seed(1)))
    each = [part(x).clone() for part in parts]
    joined = JoinedLinears(parts)
    assert joined.num_products == 2
    for got, alone, want in zip(joined(x), (part(x) for part in parts), each, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5 * COLS**0.5)  # sums of fp32, perhaps in another order
        assert torch.allclose(alone, want, rtol=1e-5, atol=1e-5 * COLS**0.5)


def test_a_layer_without_its_like_stays_alone(layer: MakeLayer) -> None:
    parts = [layer(64, QuantType.Q8_0), layer(8, QuantType.F32)]
    assert JoinedLinears(parts).num_products == 2
    assert JoinedLinears(parts[:1]).num_products == 1


def test_neighbouring_columns_are_put_side_by_side_without_a_copy() -> None:
    whole = torch.arange(24.0).view(2, 12)
    a, b, c = whole.split((3, 4, 5), dim=1)
    beside = side_by_side([a, b])
    assert beside.data_ptr() == whole.data_ptr()
    assert torch.equal(beside, whole[:, :7])
    for parts in ([a, c], [b, a], [a, b.clone()]):
        copied = side_by_side(parts)
        assert torch.equal(copied, torch.cat(parts, dim=1))
        assert copied.data_ptr() not in {part.data_ptr() for part in parts}
