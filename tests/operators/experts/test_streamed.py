"""Experts that the GPU and the CPU compute together, against all of them on one side.

The GPU is Triton's interpreter on torch's CPU, computing in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ktransformers.errors import CapacityError, EngineError
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts, StreamShape
from ktransformers.kernels.types import Activation, ActivationSpec, ExpertWeights, PackedTensor, QuantType, RawTensor
from ktransformers.operators.base import ExpertStats
from ktransformers.operators.device import Device
from ktransformers.operators.experts.split import CpuRate, PrefillRates, Split
from ktransformers.weights.quantize.write import quantize
from tests.support.engines.inline_device import EagerCopies, InlineDriver, LazyCopies

pytest.importorskip("triton")

from ktransformers.engine.step.expert_streaming import cuda_tools, open_prefill
from ktransformers.kernels.triton.experts.matrices import ExpertMatrices, MoeEpilogue, MoeMatrices, RoutedRows
from ktransformers.kernels.triton.experts.moe import moe
from ktransformers.kernels.triton.quant.repack import GpuLayout
from ktransformers.operators.experts import streamed as expert_prefill
from ktransformers.operators.experts.host_experts import HostExperts
from ktransformers.operators.experts.staging import Staging, StagingSize
from ktransformers.operators.experts.streamed import ExpertPrefill, PrefillLayer, PrefillShape

E, K, H, INNER, T = 6, 2, 64, 32, 9
FLAT = CpuRate((1,), (1e-3,))
RATES = PrefillRates(1e-3, 0.0, FLAT, FLAT)
DEVICE = Device("cuda:0", torch.device("cpu"), torch.float32, is_gpu=True)


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with_threads = WorkerPool(2)
    yield with_threads
    with_threads.close()


OAI = ActivationSpec(Activation.SWIGLU_OAI, alpha=1.5, limit=0.75)


def make_kernel(pool: WorkerPool, seed: int, qtype: QuantType = QuantType.Q8_0, is_oai: bool = False) -> MoeKernel:
    """is_oai: gpt_oss's experts, with biases."""
    generator = torch.Generator().manual_seed(seed)

    def part(rows: int, cols: int, kind: QuantType) -> list[PackedTensor]:
        made = []
        for _ in range(E):
            values = torch.randn(rows, cols, generator=generator).numpy() * 0.2
            blocks = gguf.quants.quantize(values, kind) if kind is QuantType.MXFP4 else quantize(values, kind)
            raw = RawTensor(torch.from_numpy(blocks).reshape(-1), kind, (rows, cols))
            made.append(cpu.pack(raw, pool))
        whole = cpu.empty_bytes(sum(one.data.numel() for one in made), pool)  # on pages of its own, as loaders do
        side_by_side = torch.cat([one.data for one in made], out=whole).view(E, -1)
        return [PackedTensor(data, kind, (rows, cols)) for data in side_by_side]

    gate, up, down = (part(*shape) for shape in ((INNER, H, qtype), (INNER, H, qtype), (H, INNER, QuantType.Q8_0)))
    biases = [torch.randn(E, n, generator=generator) / 4 for n in (INNER, INNER, H)] if is_oai else []
    return MoeKernel(ExpertWeights(gate, up, down, *biases), OAI if is_oai else ActivationSpec(), pool)


class Rig:
    """An ExpertPrefill of a few layers with a given split of every call, None for the chooser's own."""

    def __init__(
        self, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, copies: EagerCopies, group: int, buffers: int = 3
    ):
        self.kernels = [
            make_kernel(pool, 0),
            make_kernel(pool, 1, QuantType.Q4_0),
            make_kernel(pool, 2),
            make_kernel(pool, 3, QuantType.MXFP4, is_oai=True),
        ]
        nbytes = max(HostExperts(kernel.weights).expert_nbytes for kernel in self.kernels)
        self.copies, self.driver = copies, InlineDriver()
        staging = Staging(StagingSize(buffers, group * (nbytes + 3 * 256)), torch.device("cpu"), copies)
        for buffer in staging._buffers:
            buffer.data.fill_(0x7E)  # NaN as fp16, wherever a copy is missing
        self.shape = PrefillShape(E, K, H, INNER, max_rows=16)
        self.cpu = AsyncCpuExperts(pool, StreamShape(16, K, H, torch.float32), self.driver)
        self.stats = ExpertStats()
        self.prefill = ExpertPrefill(DEVICE, self.shape, staging, self.cpu, self.driver, self.stats)
        self.prefill.rates, self.prefill.threshold = RATES, 2
        self.layers = [PrefillLayer(self.prefill, self.prefill.add_layer(kernel)) for kernel in self.kernels]
        self.split: tuple[int, ...] | None = None
        self.splits: list[Split] = []
        chooser = expert_prefill.choose_split

        def choose(*given: Any) -> Split:
            made, there = chooser(*given), given[2]
            if self.split is not None:
                kept = tuple(there) if set(there) <= set(self.split) else ()
                made = Split(kept, tuple(e for e in self.split if e not in kept), 0.0)
            self.splits.append(made)
            return made

        monkeypatch.setattr(expert_prefill, "choose_split", choose)

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.layers[layer].collect(self.layers[layer].submit(x, ids, weights), x)


@pytest.fixture(params=[EagerCopies, LazyCopies])
def copies(request: pytest.FixtureRequest) -> EagerCopies:
    made: EagerCopies = request.param()
    return made


def inputs(seed: int = 0, rows: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every fifth id is E, which counts for nothing; expert 5 gets no token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, H, generator=generator)
    ids = torch.rand(rows, E - 1, generator=generator).argsort(1)[:, :K].contiguous()
    ids.view(-1)[::5] = E
    return x, ids, torch.rand(rows, K, generator=generator)


def all_on_gpu(kernel: MoeKernel, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    def whole(part: object) -> ExpertMatrices:
        tensors = [one for one in part if isinstance(one, PackedTensor)]  # type: ignore[attr-defined]
        rows, cols = tensors[0].shape
        assert isinstance(tensors[0].qtype, QuantType)
        return ExpertMatrices(
            torch.stack([one.data for one in tensors]), tensors[0].qtype, rows, cols, GpuLayout.CPU_PACKED
        )

    parts = (kernel.weights.gate, kernel.weights.up, kernel.weights.down)
    out = torch.empty_like(x)
    epilogue = MoeEpilogue.of(kernel.weights, kernel.activation, x.device)
    return moe(RoutedRows(x.half(), ids.int(), weights), MoeMatrices(*map(whole, parts), epilogue), out)


def check(got: torch.Tensor, kernel: MoeKernel, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Int8 activations on the CPU are off by 2^-8 of a block's largest value each; fp16 by less."""
    want = kernel.forward(x, ids, weights)
    assert torch.isfinite(got).all()
    assert (got - want).norm() <= 2e-2 * want.norm()


@pytest.mark.every(4)
@interpreted
@pytest.mark.parametrize("split", [(0, 1, 2, 3, 4), (1, 3), (2,)])
@pytest.mark.parametrize("group", [1, 4])
def test_a_split_is_the_sum_of_its_sides(
    split: tuple[int, ...], group: int, pool: WorkerPool, copies: EagerCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers whose weights have different types, so that buffers are used again for others; one with biases."""
    rig = Rig(pool, monkeypatch, copies, group)
    rig.split = split
    on_gpu_rows = 0
    for layer in (0, 1, 2, 3):
        x, ids, weights = inputs(layer)
        got = rig.run(layer, x, ids, weights)
        check(got, rig.kernels[layer], x, ids, weights)
        is_gpu = torch.isin(ids, torch.tensor(split))
        on_gpu = all_on_gpu(rig.kernels[layer], x, torch.where(is_gpu, ids, E), weights)
        on_cpu = rig.kernels[layer].forward(x, torch.where(is_gpu, E, ids), weights)
        assert torch.equal(got, on_gpu + on_cpu)
        on_gpu_rows += int((is_gpu & (ids != E)).sum())
    assert rig.stats.totals()[0] == on_gpu_rows  # kernels count the others


@interpreted
def test_all_on_the_cpu_is_the_kernel(pool: WorkerPool, copies: EagerCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(pool, monkeypatch, copies, 2)
    rig.split = ()
    x, ids, weights = inputs()
    assert torch.equal(rig.run(0, x, ids, weights), rig.kernels[0].forward(x, ids, weights))
    assert copies.num_bytes == 0


@interpreted
def test_the_choosers_own_split_copies_activated_experts_only(
    pool: WorkerPool, copies: EagerCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(pool, monkeypatch, copies, 2)
    x, ids, weights = inputs()
    check(rig.run(3, x, ids, weights), rig.kernels[3], x, ids, weights)
    (split,) = rig.splits
    assert 0 < len(split.copied) < E - 1
    assert copies.num_bytes == len(split.copied) * HostExperts(rig.kernels[3].weights).expert_nbytes


@interpreted
def test_experts_are_copied_ahead_and_used(
    pool: WorkerPool, copies: EagerCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(pool, monkeypatch, copies, 2)
    rig.split = (0, 1, 2, 3)
    for turn in range(2):
        for layer in (0, 1, 2):
            x, ids, weights = inputs(10 * turn + layer)
            check(rig.run(layer, x, ids, weights), rig.kernels[layer], x, ids, weights)
    first, second = rig.splits[:3], rig.splits[3:]
    assert [bool(split.there) for split in first] == [False, True, True]
    assert len(second[1].there) <= 2  # those with most rows in the first turn, if all of them are in the split
    # A step that leaves the order gives up what was copied ahead.
    x, ids, weights = inputs(5)
    check(rig.run(0, x, ids, weights), rig.kernels[0], x, ids, weights)
    check(rig.run(2, x, ids, weights), rig.kernels[2], x, ids, weights)
    assert rig.splits[-1].there == ()


@interpreted
def test_neighbours_in_memory_are_one_copy(
    pool: WorkerPool, copies: EagerCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(pool, monkeypatch, copies, 6)
    rig.split = (0, 1, 2, 4)
    rig.run(3, *inputs())
    assert copies.num_copies == 6


@interpreted
def test_which_steps_it_takes(pool: WorkerPool, copies: EagerCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(pool, monkeypatch, copies, 2)
    assert [rows for rows in (1, 2, 16, 17) if rig.layers[0].takes(inputs(rows=rows)[0])] == [2, 16]
    assert not rig.layers[0].takes(inputs(rows=16)[0].to("meta"))  # rows that are elsewhere


@interpreted
def test_ids_out_of_range(pool: WorkerPool, copies: EagerCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(pool, monkeypatch, copies, 2)
    x, ids, weights = inputs()
    ids[0, 0] = E + 1
    with pytest.raises(IndexError, match="7, but there are 6"):
        rig.layers[0].submit(x, ids, weights)


@interpreted
def test_a_failure_on_the_cpu_is_raised_by_collect(
    pool: WorkerPool, copies: EagerCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(pool, monkeypatch, copies, 2)
    rig.split = (0,)
    x, ids, weights = inputs()
    submit = rig.cpu.submit_staged

    def damaging(layer: int, ids: np.ndarray) -> None:
        submit(layer, np.full_like(ids, E + 5))

    monkeypatch.setattr(rig.cpu, "submit_staged", damaging)
    ticket = rig.layers[0].submit(x, ids, weights)
    with pytest.raises(EngineError, match="layer 0"):
        rig.layers[0].collect(ticket, x)
    monkeypatch.undo()
    rig.cpu.check()


def test_what_cannot_be_copied(pool: WorkerPool) -> None:
    kernel = make_kernel(pool, 0)
    with pytest.raises(ValueError, match="with a gate"):
        HostExperts(replace(kernel.weights, gate=None))
    raw = [RawTensor.from_tensor(torch.zeros(INNER, H)) for _ in range(E)]
    with pytest.raises(ValueError, match="of a type"):
        HostExperts(replace(kernel.weights, up=raw))


def test_no_room_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CapacityError, match="prefill_device: cpu"):
        Staging(StagingSize(2, 100), torch.device("cpu"), EagerCopies())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_buffers", [3, 8])
def test_on_a_device(num_buffers: int, pool: WorkerPool) -> None:
    """Real streams: copies that come too late, or too early, would be seen in some of many steps."""
    device = Device("cuda:0", torch.device("cuda:0"), torch.bfloat16, is_gpu=True)
    tools = cuda_tools(device)
    assert tools is not None
    kernels = [make_kernel(pool, seed) for seed in range(3)]
    kernels.append(make_kernel(pool, 3, QuantType.MXFP4, is_oai=True))
    nbytes = HostExperts(kernels[0].weights).expert_nbytes
    shape, size = PrefillShape(E, K, H, INNER, 64), StagingSize(num_buffers, 2 * (nbytes + 3 * 256))
    stream = open_prefill(device, kernels, shape, size, tools, remembers=False)
    assert stream is not None
    assert stream.pinned.nbytes >= 4 * E * nbytes
    slow = CpuRate((1,), (100.0,))
    stream.prefill.threshold = 2
    for rates in (RATES, PrefillRates(1e-3, 0.0, slow, slow), PrefillRates(900.0, 0.0, FLAT, FLAT)):
        stream.prefill.rates = rates
        for step in range(30):
            x, ids, weights = inputs(step, rows=2 + 2 * step)
            for number, kernel in enumerate(kernels):
                layer = PrefillLayer(stream.prefill, number)
                moved = x.cuda().bfloat16()
                assert layer.takes(moved)
                ticket = layer.submit(moved, ids.cuda(), weights.cuda())
                got = layer.collect(ticket, moved).float().cpu()
                stream.prefill.check()
                check(got, kernel, moved.float().cpu(), ids, weights)
    stream.close()


@pytest.mark.parametrize("budget", [1 << 20, 100 << 20, 1 << 30, 1 << 40])
@pytest.mark.parametrize(("nbytes", "count"), [(2_800_000, 128), (27_000_000, 256), (100, 4)])
def test_staging_keeps_to_its_budget(nbytes: int, count: int, budget: int) -> None:
    size = StagingSize.of(nbytes, count, budget)
    if size is None:
        assert budget < 3 * (nbytes + 768)
        return
    assert size.num_buffers >= 3
    assert size.nbytes >= nbytes
    assert size.total_nbytes <= min(budget, 512 << 20)
    assert size.total_nbytes <= 3.5 * (nbytes + 768) * count
