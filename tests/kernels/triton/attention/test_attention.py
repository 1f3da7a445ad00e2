"""Paged attention of the GPU against fp64: decode, prefill, and what must not change a row."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import reference
from ktransformers.kernels.triton.attention import paged
from ktransformers.kernels.triton.attention.launch import workspace_numel
from tests.support.checks.flat_calls import flat_attention

attention = flat_attention(paged.attention)
oracle_attention = flat_attention(reference.attention)

PAGE = 16
PAGES = 24

# Inputs are drawn in the tested type, so only the kernel rounds: probabilities to the cache's type (half a unit of
# 2^-11 or 2^-8) and the result to it (another half). Values are near 1 in magnitude and probabilities sum to 1, so an
# output is off by about two such halves; fp32 rounds in sums of some hundred terms.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def case(rows, heads, kv_heads, dim_k, dim_v, dtype, device, page=PAGE, seed=0):
    """rows: (sequence, kv_len) pairs. Returns q and the other arguments up to kv_lens; pages are scattered."""
    generator = torch.Generator().manual_seed(seed)
    num_seqs = 1 + max(seq for seq, _ in rows)
    pages = PAGES * PAGE // page
    table = torch.randperm(num_seqs * pages, generator=generator).to(torch.int32).reshape(num_seqs, pages)
    slots = num_seqs * PAGES * PAGE
    k = torch.randn(slots, kv_heads, dim_k, generator=generator).to(dtype)
    v = torch.randn(slots, kv_heads, dim_v, generator=generator).to(dtype)
    q = torch.randn(len(rows), heads, dim_k, generator=generator).to(dtype)
    seqs = torch.tensor([seq for seq, _ in rows], dtype=torch.int32)
    lens = torch.tensor([length for _, length in rows], dtype=torch.int32)
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in (q, k, v, table, page, seqs, lens))


def expected(arguments, scale, **options):
    cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
    options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items() if k != "counters"}
    return oracle_attention(*cpu, scale, **options)


def check(arguments, scale, **options):
    out = attention(*arguments, scale, **options)
    tolerance = TOLERANCE[arguments[0].dtype]
    torch.testing.assert_close(out.float().cpu(), expected(arguments, scale, **options), rtol=tolerance, atol=tolerance)


DECODE = [(0, 300), (1, 1), (2, 0), (3, 129)]
# Two chunks of different sequences, a decode row, a padding row; tiles hold the ends of several of them.
PREFILL = [(0, n) for n in range(180, 205)] + [(1, n) for n in range(1, 9)] + [(2, 70), (3, 0)]
OPTIONS = [
    {},
    {"window": 50},
    {"window": 50, "is_chunked": True},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 7, "sinks": True, "softcap": 5.0},
]
HEADS = [(4, 2, 64), (3, 1, 80), (2, 2, 96), (8, 1, 128), (2, 1, 192), (2, 1, 256), (20, 1, 40), (4, 2, 33)]


def with_sinks(options, heads, device):
    return {**options, "sinks": torch.linspace(-1, 2, heads, device=device)} if options.get("sinks") else options


@pytest.mark.every(4)
@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_options(options, rows, device):
    check(case(rows, 6, 2, 32, 48, torch.float32, device), 0.2, **with_sinks(options, 6, device))


@pytest.mark.every(3)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_splits_weighed_in_the_same_launch(options, device):
    arguments = case(DECODE, 6, 2, 32, 48, torch.float32, device)
    options, counters = with_sinks(options, 6, device), torch.zeros(8, dtype=torch.int32, device=device)
    check(arguments, 0.2, counters=counters, **options)
    assert not counters.any()
    out = torch.full((len(DECODE), 6, 48), float("nan"), device=device)
    numel = workspace_numel(1, 6, 2, 48, PAGES * PAGE, device)
    attention(*arguments, 0.2, counters=counters, out=out, workspace=torch.empty(2 * numel, device=device), **options)
    close = attention(*arguments, 0.2, **options)
    torch.testing.assert_close(out, close, rtol=1e-6, atol=1e-6)  # the same parts, divided before they are added


@pytest.mark.every(5)
@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_head_dims_in_half_precision(shape, rows, device):
    heads, kv_heads, dim = shape
    check(case(rows, heads, kv_heads, dim, dim, torch.float16, device), dim**-0.5)


@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_bfloat16_and_keys_wider_than_values(rows, device):
    check(case(rows, 4, 1, 48, 32, torch.bfloat16, device), 48**-0.5)


@pytest.mark.parametrize("page", [3, 64, PAGES * PAGE])
@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_page_sizes(page, rows, device):
    check(case(rows, 2, 1, 32, 32, torch.float32, device, page), 0.2)


def test_unused_slots_do_not_matter(device):
    for rows in (DECODE, PREFILL):
        arguments = case(rows, 2, 1, 32, 32, torch.float32, device)
        _, k, v, table, page, seqs, lens = arguments
        clean = attention(*arguments, 0.2, window=30)
        used = torch.zeros(k.shape[0], dtype=torch.bool)
        for seq, length in zip(seqs.tolist(), lens.tolist(), strict=True):
            for position in range(max(0, length - 30), length):
                used[table[seq, position // page] * page + position % page] = True
        k[~used], v[~used] = 1e30, 1e30
        # Tiles read slots before the window too, with probability 0; only what is not a number would show.
        assert torch.equal(attention(*arguments, 0.2, window=30), clean)


def test_slots_that_no_row_sees_may_hold_anything(device):
    for rows in (DECODE, PREFILL):
        arguments = case(rows, 2, 1, 32, 32, torch.float32, device)
        _, k, v, table, page, seqs, lens = arguments
        clean = attention(*arguments, 0.2)
        used = torch.zeros(k.shape[0], dtype=torch.bool)
        for seq, length in zip(seqs.tolist(), lens.tolist(), strict=True):
            for position in range(length):
                used[table[seq, position // page] * page + position % page] = True
        k[~used], v[~used] = float("nan"), float("nan")
        assert torch.equal(attention(*arguments, 0.2), clean)


def test_a_row_does_not_depend_on_the_rows_beside_it(device):
    arguments = case(DECODE, 4, 2, 32, 32, torch.float16, device)
    q, k, v, table, page, seqs, lens = arguments
    together = attention(*arguments, 0.2)
    for row in range(len(DECODE)):
        part = slice(row, row + 1)
        assert torch.equal(attention(q[part], k, v, table, page, seqs[part], lens[part], 0.2)[0], together[row])


def test_strided_tensors_and_given_memory(device):
    q, k, v, table, page, seqs, lens = case(DECODE, 4, 2, 32, 32, torch.float32, device)
    fused = torch.zeros(len(DECODE), 7, 40, device=device)
    fused[:, 2:6, :32] = q
    cache = torch.zeros(k.shape[0], 5, 32, device=device)
    cache[:, :2], cache[:, 3:] = k, v
    arguments = (fused[:, 2:6, :32], cache[:, :2], cache[:, 3:], table, page, seqs.long(), lens.long())
    numel = workspace_numel(len(DECODE), 4, 2, 32, table.shape[1] * page, q.device)
    workspace = torch.full((numel,), float("nan"), device=device)
    out = torch.full((len(DECODE), 4, 32), float("nan"), device=device)
    assert attention(*arguments, 0.2, out=out, workspace=workspace) is out
    torch.testing.assert_close(out.cpu(), expected(arguments, 0.2), rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="workspace must be"):
        attention(*arguments, 0.2, out=out, workspace=workspace[: numel // len(DECODE) - 1])


def test_rows_take_turns_in_a_small_workspace(device):
    arguments = case(DECODE, 4, 2, 32, 32, torch.float32, device)
    numel = workspace_numel(1, 4, 2, 32, PAGES * PAGE, device)
    want = attention(*arguments, 0.2)
    for rows in (1, 3):
        assert torch.equal(attention(*arguments, 0.2, workspace=torch.empty(rows * numel, device=device)), want)


def test_bad_arguments_are_named(device):
    q, k, v, table, page, seqs, lens = case(DECODE, 4, 2, 32, 32, torch.float32, device)

    def run(q=q, k=k, v=v, table=table, page=page, seqs=seqs, lens=lens, **options):
        return attention(q, k, v, table, page, seqs, lens, 0.2, **options)

    assert run(q=q[:0], seqs=seqs[:0], lens=lens[:0]).shape == (0, 4, 32)
    with pytest.raises(ValueError, match="query heads cannot share"):
        run(q=torch.randn(4, 3, 32, device=device))
    with pytest.raises(ValueError, match=r"k_cache .* must fit"):
        run(k=k[..., :16])
    with pytest.raises(TypeError, match="give one type"):
        run(v=v.half())
    with pytest.raises(TypeError, match="block_table must be int32"):
        run(table=table.long())
    with pytest.raises(TypeError, match="q must be fp16"):
        run(q=q.double())
    with pytest.raises(ValueError, match="last contiguous"):
        run(v=v.transpose(1, 2))
    with pytest.raises(ValueError, match="kv_lens must be"):
        run(lens=lens[:-1])
    with pytest.raises(ValueError, match="window"):
        run(window=-1)
    with pytest.raises(ValueError, match="sinks must be"):
        run(sinks=torch.zeros(5, device=device))


@pytest.mark.exhaustive
def test_rows_of_many_sequences_in_any_order(device):
    rows = [(seq, 10 * seq + step) for step in range(3) for seq in range(7)]
    check(case(rows, 4, 2, 32, 32, torch.float32, device), 0.2)
    check(case(sorted(rows), 4, 2, 32, 32, torch.float32, device), 0.2)
