"""Which modules a step's torch code is watched for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.exact import NativeMathMode, modules_on_torch


def gated(x: Tensor, y: Tensor) -> Tensor:
    return functional.silu(x) * y


class Direct(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class ByAFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gated(x, x)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


def test_activations_are_found_wherever_a_forward_asks_for_them() -> None:
    model = nn.ModuleDict({"a": Direct(), "b": Plain(), "c": nn.Sequential(Plain(), ByAFunction()), "d": nn.SiLU()})
    assert modules_on_torch(model) == ["a", "c.1", "d"]


def test_they_do_not_depend_on_their_place_in_a_tensor() -> None:
    """Torch computes the last elements of a tensor with other code than the rest: of 7 rows of 100, the last twelve."""
    x, module, pool = torch.randn(2100, 100, generator=torch.Generator().manual_seed(0)), ByAFunction(), WorkerPool(1)
    with NativeMathMode(pool):
        whole, parts = module(x), torch.cat([module(rows) for rows in x.split(7)])
    assert torch.equal(whole, parts)
    pool.close()


def test_the_mode_works_where_function_modes_are_off() -> None:
    x, pool = torch.linspace(-3, 3, 77), WorkerPool(1)
    with NativeMathMode(pool):
        want = torch.sigmoid(x)
    mode = NativeMathMode(pool)
    with torch._C.DisableTorchFunction():
        with mode, mode:
            got = torch.sigmoid(x)
        assert not torch._C._is_torch_function_enabled()
    assert torch.equal(got, want)
