"""A process of several that add up on GPUs of their own, as those of a model that is cut do; and several of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from ktransformers.engine.parallel.tensor_parallel.collectives import (
    GroupCollectives,
    PeerKernel,
    SymmetricCollectives,
    TorchKernels,
)
from ktransformers.engine.parallel.tensor_parallel.group import TensorGroup

Work = Callable[[TensorGroup, Path], None]
CAPACITY = (2048, 5120)
SHAPES = [(1, 5120), (2, 5120), (3, 2880), (8, 5120), (64, 5120), (1, 7), (5, 33), (511, 4097), (512, 5120), CAPACITY]


def _begin(rank: int, size: int, folder: str, work: Work) -> None:
    if rank:  # the driver sees all GPUs, others their own
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(i) for i in range(size)] if visible is None else visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[rank]
    group = TensorGroup(rank, size)
    group.reserve(*CAPACITY)
    group.rendezvous(Path(folder) / "meeting", torch.device("cuda:0"))
    with torch.inference_mode():
        work(group, Path(folder))
    torch.cuda.synchronize()
    group.leave()


def run_ranks(size: int, folder: Path, work: Work) -> None:
    """Run `work`, of a module, in `size` processes. Raises what one of them fails with."""
    made: Any = multiprocessing
    made.spawn(_begin, (size, str(folder), work), nprocs=size)


def shares_of(size: int, shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """The shares of all ranks, fp32 on the CPU, of very different sizes: their sum depends on the order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** (rank % 3) for rank in range(size)]


def in_order(shares: list[torch.Tensor]) -> torch.Tensor:
    """Their sum in fp32, in the order of the ranks."""
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    return total


def expect(got: torch.Tensor, shares: list[torch.Tensor]) -> None:
    """Check a sum: the bits of the shares in the order of ranks, which are near those of fp64."""
    want = in_order(shares)
    exact = torch.stack(shares).double().sum(0)
    largest = torch.stack(shares).double().abs().sum(0)
    assert bool(((want.double() - exact).abs() <= len(shares) * 2.0**-24 * largest).all())
    assert torch.equal(got.cpu(), want), f"{list(got.shape)}: {(got.cpu() - want).abs().max()}"


def check_way(group: TensorGroup, folder: Path) -> None:
    """GPUs that reach each other's memory add up there, by our kernel."""
    assert isinstance(group._collectives, SymmetricCollectives), type(group._collectives)
    assert isinstance(group._collectives._kernel, PeerKernel), type(group._collectives._kernel)


def check_sums(group: TensorGroup, folder: Path) -> None:
    """Sums of many sizes one after another, from their own memory and from the group's."""
    sums = group._collectives
    assert sums is not None
    for seed in range(2):
        for shape in SHAPES:
            shares = shares_of(group.size, shape, seed)
            mine = shares[group.rank].cuda()
            expect(group.sum(mine.clone()), shares)
            memory = sums.memory(*shape)
            for dtype in (torch.float32, torch.bfloat16):
                out = torch.empty(shape, dtype=dtype, device="cuda")
                sums.add(mine.clone() if memory is None else memory.copy_(mine), out)
                assert torch.equal(out.cpu(), in_order(shares).to(dtype)), (shape, dtype)


def check_gathers(group: TensorGroup, folder: Path) -> None:
    """Shares side by side, of a few rows of logits and of more than the memory of sums holds."""
    sums = group._collectives
    assert sums is not None
    for seed, shape in enumerate([(1, 75968), (8, 75968), (3, 33), (150, 75968), (1, 5120)]):
        shares = shares_of(group.size, shape, seed)
        mine, memory = shares[group.rank].cuda(), sums.memory(*shape)
        out = torch.empty(shape[0], group.size * shape[1], device="cuda")
        sums.gather(mine if memory is None else memory.copy_(mine), out)
        assert torch.equal(out.cpu(), torch.cat(shares, dim=1)), shape


def check_captured_gathers(group: TensorGroup, folder: Path) -> None:
    """A graph of sums with a gather behind them, as a decode step is, replayed with new numbers."""
    sums = group._collectives
    assert sums is not None
    shapes = [(1, 5120), (1, 5120), (1, 75968)]
    inputs = [torch.zeros(shape, device="cuda") for shape in shapes]
    out = torch.empty(1, group.size * shapes[-1][1], device="cuda")

    def work() -> list[torch.Tensor]:
        added = [group.sum(each.clone()) for each in inputs[:-1]]
        sums.gather(inputs[-1], out)
        return added

    work()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    for seed in range(5):
        shares = [shares_of(group.size, shape, 10 * seed + i) for i, shape in enumerate(shapes)]
        for each, mine in zip(inputs, shares, strict=True):
            each.copy_(mine[group.rank])
        graph.replay()
        for got, mine in zip(outputs, shares, strict=False):
            expect(got, mine)
        assert torch.equal(out.cpu(), torch.cat(shares[-1], dim=1))


def check_captured(group: TensorGroup, folder: Path) -> None:
    """Graphs of several sums of one size and of all, replayed with new numbers, eager sums between them."""
    for shapes in ([(1, 5120)] * 20, [(64, 5120), (3, 2880), (128, 5120)]):
        inputs = [torch.zeros(shape, device="cuda") for shape in shapes]
        for each in inputs:
            group.sum(each.clone())
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [group.sum(each.clone()) for each in inputs]
        for seed in range(5):
            shares = [shares_of(group.size, shape, 100 * seed + i) for i, shape in enumerate(shapes)]
            for each, mine in zip(inputs, shares, strict=True):
                each.copy_(mine[group.rank])
            graph.replay()
            for got, mine in zip(outputs, shares, strict=True):
                expect(got, mine)
            expect(group.sum(shares[0][group.rank].cuda()), shares[0])


def check_products(group: TensorGroup, folder: Path) -> None:
    """Sums of products have the bits of the sum in fp32, rounded once.

    Products are of small whole numbers, so that tiles of any shape make the same of them.
    """
    for num_rows in (1, 3, 512, 1300, 2048):
        generator = torch.Generator().manual_seed(num_rows)
        x = torch.randint(-4, 5, (num_rows, 512), generator=generator).float()
        weights = [torch.randint(-4, 5, (512, 2048), generator=generator).float() for _ in range(group.size)]
        mine = weights[group.rank].cuda().to(torch.bfloat16)

        def product(part: torch.Tensor, memory: torch.Tensor | None, mine: torch.Tensor = mine) -> torch.Tensor:
            made = torch.mm(part, mine, out_dtype=torch.float32)
            return made if memory is None else memory.copy_(made)

        want = sum(x @ weight for weight in weights)
        assert isinstance(want, torch.Tensor)
        for _ in range(3):
            got = group.sum_product(x.cuda().to(torch.bfloat16), 2048, product)
            assert torch.equal(got.cpu(), want.to(torch.bfloat16)), num_rows


def check_torch_kernels(group: TensorGroup, folder: Path) -> None:
    """The same checks of torch's kernels, which take the place of ours where that cannot be had."""
    sums = group._collectives
    if isinstance(sums, SymmetricCollectives):
        name = str(torch.distributed.group.WORLD.group_name)  # type: ignore[union-attr]
        sums._kernel = TorchKernels(torch.ops.symm_mem, name, group.size)
        check_sums(group, folder)
        check_gathers(group, folder)
        check_captured(group, folder)
        check_products(group, folder)


def check_nccl(group: TensorGroup, folder: Path) -> None:
    """The same checks where GPUs have to use NCCL. Of two processes the order of a sum makes no difference."""
    group._collectives = GroupCollectives()
    check_sums(group, folder)
    check_gathers(group, folder)
    check_captured(group, folder)
    check_products(group, folder)
