"""Latent attention of the GPU against fp64."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import reference
from ktransformers.kernels.triton.attention import mla
from ktransformers.kernels.triton.attention.launch import workspace_numel
from tests.support.checks.flat_calls import flat_attention, flat_mla

mla_attention = flat_mla(mla.mla_attention)
oracle_attention = flat_attention(reference.attention)

PAGE, PAGES = 16, 20
# As in test_attention: the probabilities' and the result's rounding, half a unit of 2^-11 each for fp16; here sums
# have up to 576 terms, whose fp32 rounding stays below that.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3}

DECODE = [(0, 300), (1, 0), (2, 129)]
PREFILL = [(0, n) for n in range(60, 74)] + [(1, 1), (1, 2), (2, 70), (0, 0)]


def case(rows, heads, rank, rope, dtype, device):
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(3 * PAGES, generator=generator).to(torch.int32).reshape(3, PAGES)
    cache = torch.randn(3 * PAGES * PAGE, 1, rank + rope, generator=generator).to(dtype)
    q = torch.randn(len(rows), heads, rank + rope, generator=generator).to(dtype)
    seqs, lens = (torch.tensor(values, dtype=torch.int32) for values in zip(*rows, strict=True))
    return (q.to(device), cache.to(device), table.to(device), PAGE, seqs.to(device), lens.to(device))


def check(rows, heads, rank, rope, dtype, device, **options):
    q, cache, *rest = case(rows, heads, rank, rope, dtype, device)
    scale = (rank + rope) ** -0.5
    out = mla_attention(q, cache, rank, *rest, scale, **options)
    cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in (q, cache, cache[..., :rank], *rest)]
    want = oracle_attention(*cpu, scale, **options)
    torch.testing.assert_close(out.float().cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.every(4)
@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("heads", [4, 16, 20, 128])
def test_heads(heads, rows, device):
    check(rows, heads, 32, 16, torch.float16, device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_the_shape_of_deepseek(rows, device):
    check(rows, 16, 512, 64, torch.float16, device)
    check(rows[-2:], 16, 512, 64, torch.float32, device)


def test_softcap(device):
    check(DECODE, 6, 32, 16, torch.float32, device, softcap=2.0)


def test_given_memory_and_no_rows(device):
    q, cache, table, page, seqs, lens = case(DECODE, 4, 32, 16, torch.float32, device)
    numel = workspace_numel(len(DECODE), 4, 1, 32, table.shape[1] * page, q.device)
    out = torch.full((len(DECODE), 4, 32), float("nan"), device=device)
    workspace = torch.full((numel,), float("nan"), device=device)
    want = mla_attention(q, cache, 32, table, page, seqs, lens, 0.1)
    assert mla_attention(q, cache, 32, table, page, seqs, lens, 0.1, out=out, workspace=workspace) is out
    assert torch.equal(out, want)
    assert mla_attention(q[:0], cache, 32, table, page, seqs[:0], lens[:0], 0.1).shape == (0, 4, 32)


def test_bad_arguments_are_named(device):
    q, cache, *rest = case(DECODE, 4, 32, 16, torch.float32, device)
    for rank in (8, 16, 24, 64):
        with pytest.raises(ValueError, match="rank must be"):
            mla_attention(q, cache, rank, *rest, 0.1)
    with pytest.raises(ValueError, match="cache must have shape"):
        mla_attention(q, cache.expand(-1, 2, -1), 32, *rest, 0.1)
