"""Products that are shares of a sum over processes: not rounded before it, and written where the sum wants them."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.experts.block import Addends
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.linear.matrix import gpu_matrix
from ktransformers.operators.partial_sums import PartialSums, RankGroup, ShareProduct
from ktransformers.weights.quantize.write import quantize
from tests.support.engines.fake_gpus import fake_hardware

pytest.importorskip("triton")

ROWS, COLS = 64, 256


class Watched(RankGroup):
    """One process, which keeps the shares it is given. memory: where they are to be."""

    rank, size = 0, 2

    def __init__(self, memory: torch.Tensor | None):
        self.memory = memory
        self.share = torch.empty(0)

    def sum(self, share: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a product is added up by sum_product")

    def sum_product(self, x: torch.Tensor, width: int, product: ShareProduct) -> torch.Tensor:
        self.share = product(x, self.memory)
        return self.share.to(x.dtype)

    def reserve(self, num_rows: int, width: int) -> None:
        raise AssertionError("it is loaded")


@pytest.mark.parametrize("has_memory", [True, False])
def test_a_share_is_fp32_and_where_it_is_wanted(has_memory: bool) -> None:
    memory = torch.full((3, ROWS), float("nan")) if has_memory else None
    group = Watched(memory)
    module = torch.nn.Linear(COLS, ROWS, bias=False, device="meta")
    values = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))
    data = torch.from_numpy(quantize(values.numpy(), QuantType.Q8_0)).flatten()
    with closing(WorkerPool(1)) as pool:
        devices = fake_hardware(dtype=torch.bfloat16).devices
        config = OperatorConfig(
            None, pool, devices=devices, partial_sums=PartialSums(group, frozenset({"o_proj"}), frozenset())
        )
        operator = KTransformersLinear(module, "o_proj", config, Placement(generate_device="cuda:0"))
        matrix = gpu_matrix(RawTensor(data, QuantType.Q8_0, (ROWS, COLS)), None, operator.device, pool, False)
        operator._matrix = matrix
        x = torch.randn(3, COLS, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
        got = operator(x)
        want = matrix(x, torch.float32)
    assert torch.equal(group.share, want)
    assert not torch.equal(group.share.to(torch.bfloat16).float(), want)  # it has more bits than are kept
    assert memory is None or group.share.data_ptr() == memory.data_ptr()
    assert torch.equal(got, want.to(torch.bfloat16))


def test_the_shared_expert_is_added_before_anything_is_rounded() -> None:
    routed, shared = torch.tensor([[256.0]]), torch.tensor([[1.0]])  # whose sum has nine bits: bf16 keeps eight
    addends = Addends(routed.bfloat16(), shared.bfloat16())
    assert addends.widened().total(None).tolist() == [[257.0]]  # type: ignore[arg-type]
    assert addends.total(None).tolist() == [[256.0]]  # type: ignore[arg-type]
