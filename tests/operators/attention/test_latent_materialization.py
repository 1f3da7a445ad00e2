"""Which sequences of a step attend on expanded keys, what that takes, and that results are those of the definition."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from ktransformers.core import Phase
from ktransformers.kernels.triton.attention.rope import Rotation
from ktransformers.operators.attention.latent_gpu import GpuLatent, LatentStep
from ktransformers.operators.attention.latent_materialization import (
    EXPANSION_NBYTES,
    LatentDims,
    MaterializationPolicy,
    Rates,
    StepRuns,
    batches_of,
    is_worth_materializing,
)
from ktransformers.operators.context import ForwardContext

pytest.importorskip("triton")

DEEPSEEK = LatentDims(num_heads=128, rank=512, nope=128, rope=64, v_dim=128)
TINY = LatentDims(num_heads=3, rank=32, nope=16, rope=8, v_dim=24)
EQUAL = Rates(absorbed=1.0, expanded=1.0, dense=1.0, materialization=1.0, launch_us=0.0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def context_of(sequences, page_size, device, phase=Phase.PREFILL):
    """A step of (rows, positions) of each sequence, on scattered pages; on the CPU, and made ready for `device`."""
    rows = [num_rows for num_rows, _ in sequences]
    num_pages = [-(-length // page_size) for _, length in sequences]
    order = torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    table = torch.zeros(len(sequences), max(num_pages), dtype=torch.int32)
    for seq, pages in enumerate(order.split(num_pages)):
        table[seq, : len(pages)] = pages
    seq_ids = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)).to(torch.int32)
    kv_lens = torch.cat([torch.arange(length - n + 1, length + 1) for n, length in sequences]).to(torch.int32)
    positions = kv_lens.long() - 1
    slots = table[seq_ids.long(), positions // page_size].long() * page_size + positions % page_size
    context = ForwardContext(None, None, phase, page_size, slots, seq_ids, kv_lens, table)
    return context.replicated([device])


def forced(dims, dtype, nbytes=EXPANSION_NBYTES):
    return MaterializationPolicy(dims, dtype, Rates(), is_forced=True, nbytes=nbytes)


def test_products_decide_when_rates_are_equal():
    """The arithmetic of the module's docstring, counted pair by pair."""
    dims = DEEPSEEK
    for num_rows, length in ((1, 8192), (64, 8192), (170, 8192), (172, 65536), (512, 8192), (100, 100), (2048, 2048)):
        pairs = sum(length - num_rows + 1 + i for i in range(num_rows))
        absorbed = pairs * (512 + 64 + 512) + num_rows * (128 * 512 + 512 * 128)
        expanded = pairs * (128 + 64 + 128) + length * 512 * (128 + 128)
        assert is_worth_materializing(dims, num_rows, length, EQUAL) == (expanded < absorbed), (num_rows, length)
    assert not is_worth_materializing(dims, 160, 100_000, EQUAL)
    assert is_worth_materializing(dims, 180, 100_000, EQUAL)


def test_a_launch_is_not_worth_it_for_little():
    assert is_worth_materializing(TINY, 16, 16, EQUAL)
    assert not is_worth_materializing(TINY, 16, 16, dataclasses.replace(EQUAL, launch_us=1e9))


def test_the_rates_of_an_h100_expand_long_chunks_and_nothing_short():
    for rates in (Rates(), Rates().with_flashinfer()):
        assert not is_worth_materializing(DEEPSEEK, 1, 100_000, rates)
        assert not is_worth_materializing(DEEPSEEK, 16, 8192, rates)
        assert is_worth_materializing(DEEPSEEK, 4096, 4096, rates)
        assert is_worth_materializing(DEEPSEEK, 4096, 32768, rates)


def test_heads_share_the_budget():
    room = EXPANSION_NBYTES // 2
    for length in (100, 2048, 4096, 8192, 32768, 131072):
        heads = DEEPSEEK.heads_at_once(length, room)
        assert 1 <= heads <= 128
        assert length * (576 + heads * 256) <= room
        turns = -(-128 // heads)
        more = -(-128 // max(1, turns - 1))
        assert turns == 1 or length * (576 + more * 256) + 3 * 128 > room, "fewer turns would have fitted"
    assert DEEPSEEK.heads_at_once(1 << 20, room) == 0
    assert not forced(DEEPSEEK, torch.bfloat16).materializes(4096, 1 << 20)


def test_sequences_are_expanded_together_while_all_heads_fit():
    room = 1000 * (576 + 128 * 256) + 3 * 128
    assert batches_of([300, 600, 100, 1, 5000, 10, 20], DEEPSEEK, room) == [[0, 1, 2], [3], [4], [5, 6]]
    assert batches_of([], DEEPSEEK, room) == []


def test_a_step_is_planned_once(device):
    context = context_of([(1, 9), (12, 20), (1, 3), (2, 2), (7, 7)], 4, device)
    choice = forced(TINY, torch.float32)
    materialization = StepRuns.materialization_of(context, choice, device)
    assert StepRuns.materialization_of(context, forced(TINY, torch.float32), device) is materialization
    (batch,) = materialization.batches
    assert (batch.num_positions, batch.num_heads) == (20 + 2 + 7, 3)
    assert materialization.rest.tolist() == [0, 13]
    few = dataclasses.replace(choice, is_forced=False)
    assert StepRuns.materialization_of(context, few, device) is None
    assert StepRuns.materialization_of(dataclasses.replace(context, phase=Phase.GENERATE), choice, device) is None


def test_rows_in_another_order_are_runs_of_their_own(device):
    """No step is laid out so; it would be slow, and not wrong."""
    context = context_of([(4, 6)], 4, device)
    order = torch.tensor([2, 3, 0, 1])
    runs = StepRuns(dataclasses.replace(context, kv_lens=context.kv_lens[order])).runs
    assert [(run.first_row, run.num_rows, run.length) for run in runs] == [(0, 2, 6), (2, 2, 4)]
    padded = torch.tensor([0, 0, 1, 2], dtype=torch.int32)
    runs = StepRuns(dataclasses.replace(context, kv_lens=padded)).runs
    assert [(run.num_rows, run.length) for run in runs] == [(1, 0), (1, 0), (2, 2)]


def step_of(dims, sequences, page_size, dtype, device):
    """Weights, queries [T, H, N + P] and a step whose cache holds what came before."""
    generator = torch.Generator().manual_seed(4)

    def made(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.25).to(device, dtype)

    context = context_of(sequences, page_size, device)
    num_rows, num_slots = len(context.seq_ids), (int(context.block_table.max()) + 1) * page_size
    gpu = GpuLatent(made(dims.num_heads, dims.nope, dims.rank), made(dims.num_heads, dims.rank, dims.v_dim))
    angles = torch.rand(num_rows, dims.rope // 2, generator=generator).to(device) * 6
    norm = (torch.rand(dims.rank, generator=generator).to(device, dtype) + 0.5, 1e-6)
    cache, compressed = made(num_slots, 1, dims.rank + dims.rope), made(num_rows, dims.rank + dims.rope)
    step = LatentStep(compressed, norm, Rotation(angles.cos(), angles.sin(), True), cache, context.on(device), 0.2)
    return gpu, made(num_rows, dims.num_heads, dims.nope + dims.rope), step, context


def defined(gpu, q, step):
    """[T, H, V] in fp64 by the expanded form's definition, row by row. The step's latents are in the cache already."""
    k_b, v_b, q, cache = (x.double().cpu() for x in (gpu.k_b, gpu.v_b, q, step.cache[:, 0]))
    cos, sin = (x.double().cpu() for x in (step.rotation.cos, step.rotation.sin))
    nope, rank = k_b.shape[1:]
    a, b = q[..., nope::2], q[..., nope + 1 :: 2]
    q_rot = torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1)
    context, rows = step.context, []
    for t, (seq, length) in enumerate(zip(context.seq_ids.tolist(), context.kv_lens.tolist(), strict=True)):
        positions, size = torch.arange(length), context.page_size
        seen = cache[context.block_table.cpu()[seq, positions // size].long() * size + positions % size]
        keys = torch.einsum("lr,hnr->hln", seen[:, :rank], k_b)
        logits = torch.einsum("hn,hln->hl", q[t, :, :nope], keys) + q_rot[t] @ seen[:, rank:].T
        values = torch.einsum("lr,hrv->hlv", seen[:, :rank], v_b)
        rows.append(torch.einsum("hl,hlv->hv", torch.softmax(logits * step.scale, -1), values))
    return torch.stack(rows).float()


@pytest.mark.every(3)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_results_are_those_of_the_definition(page_size, device):
    """Decoding sequences between prompts and chunks after a prefix; the absorbed form gives the same.

    fp32: sums of up to 40 terms of products that are at most some units, in another order.
    """
    sequences = [(1, 9), (20, 33), (1, 3), (2, 2), (17, 17)]
    gpu, q, step, context = step_of(TINY, sequences, page_size, torch.float32, device)
    results = []
    for nbytes in (EXPANSION_NBYTES, 4 * (4000 + 3 * 128)):
        choice = forced(TINY, torch.float32, nbytes)
        materialization = StepRuns.materialization_of(context, choice, device)
        workspace = torch.full((choice.room,), float("nan"), device=device)
        expanded = dataclasses.replace(step, materialization=materialization, workspace=workspace)
        results.append(gpu.attend(q, expanded))
        assert workspace.numel() * 4 <= nbytes
        assert len(materialization.batches) == (1 if nbytes == EXPANSION_NBYTES else 2)
    results.append(gpu.attend(q, step))
    want = defined(gpu, q, step)
    for got in results:
        torch.testing.assert_close(got.cpu(), want, rtol=3e-5, atol=3e-5)


def test_positions_that_follow_one_another_are_not_gathered(device):
    """The static cache: one page. Heads take turns in the workspace, the last turn with fewer of them."""
    dims = dataclasses.replace(TINY, num_heads=5)
    gpu, q, step, context = step_of(dims, [(10, 30)], 64, torch.float32, device)
    choice = forced(dims, torch.float32, 4 * (30 * (40 + 2 * 40) + 3 * 128))
    materialization = StepRuns.materialization_of(context, choice, device)
    (batch,) = materialization.batches
    assert isinstance(batch.slots, slice)
    assert batch.num_heads == 2
    assert materialization.rest is None
    workspace = torch.full((choice.room,), float("nan"), device=device)
    got = gpu.attend(q, dataclasses.replace(step, materialization=materialization, workspace=workspace))
    torch.testing.assert_close(got.cpu(), defined(gpu, q, step), rtol=3e-5, atol=3e-5)


def test_no_position_is_lost_between_batches(device):
    lengths = [(3, n) for n in (5, 9, 30, 2 + 1, 12)]
    context = context_of(lengths, 4, device)
    runs = StepRuns(context)
    for nbytes in (4 * 3000, 4 * 5000, EXPANSION_NBYTES):
        materialization = runs.materialization(forced(TINY, torch.float32, nbytes), device)
        tiles = list(itertools.chain.from_iterable(batch.tiles.tolist() for batch in materialization.batches))
        assert sorted(row for first, n, _, _ in tiles for row in range(first, first + n)) == list(range(15))
        assert sum(batch.num_positions for batch in materialization.batches) == sum(length for _, length in lengths)
