"""Paged attention: against fp64, and equal bits over tiers, threads, batches and chunks."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import cpu, reference
from tests.support.checks.flat_calls import flat_attention
from tests.support.checks.products import product

attention = flat_attention(cpu.attention)
oracle_attention = flat_attention(reference.attention)

PAGE = 16


def case(heads, kv_heads, dim_k, dim_v, seed=0):
    """Three sequences whose pages are scattered over one cache; returns q, k, v, table, seq_ids, kv_lens."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(3 * 90, generator=generator).to(torch.int32).reshape(3, 90)
    cache = torch.randn(3 * 90 * PAGE, kv_heads, dim_k, generator=generator)
    values = torch.randn(3 * 90 * PAGE, kv_heads, dim_v, generator=generator)
    seq_ids = torch.tensor([0] * 40 + [1] * 3 + [2] * 2 + [0])
    kv_lens = torch.tensor([*range(480, 520), 1, 2, 3, 64, 65, 1440])
    q = torch.randn(len(seq_ids), heads, dim_k, generator=generator)
    return q, cache, values, table, seq_ids, kv_lens


OPTIONS = [
    {},
    {"window": 100},
    {"window": 100, "is_chunked": True},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 7, "sinks": True, "softcap": 5.0},
]


@pytest.mark.every(3)
@product(strength=1, shape=[(8, 2, 64, 64), (6, 6, 40, 24), (20, 1, 48, 40)], options=OPTIONS)
def test_against_the_oracle_and_equal_bits(shape, options, pools):
    q, k, v, table, seq_ids, kv_lens = case(*shape)
    options = {**options, "sinks": torch.linspace(-1, 2, shape[0])} if options.get("sinks") else options
    arguments = (k, v, table, PAGE)
    out = attention(q, *arguments, seq_ids, kv_lens, 0.2, pools[0], **options)
    oracle = oracle_attention(q, *arguments, seq_ids, kv_lens, 0.2, **options)
    # Scores of magnitude s carry an error of about dim * 2^-24 * s, which exp turns into a relative error of p.
    torch.testing.assert_close(out, oracle, rtol=1e-4, atol=2e-5)
    for each in pools[1:]:
        assert torch.equal(attention(q, *arguments, seq_ids, kv_lens, 0.2, each, **options), out), each
    for start, stop in ((0, 1), (17, 18), (30, 37), (40, 46), (45, 46)):
        for each in (pools[0], pools[-1]):
            part = attention(q[start:stop], *arguments, seq_ids[start:stop], kv_lens[start:stop], 0.2, each, **options)
            assert torch.equal(part, out[start:stop]), (each, start)


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim_k", "dim_v", "options"),
    [
        (16, 2, 128, 128, {}),  # 48 rows of 8 heads: as many queries as a unit takes
        (
            5,
            1,
            24,
            72,
            {"window": 70},
        ),  # 76 rows of 5, then 74: two queries are left over; the values end in half a vector
        (7, 1, 136, 40, {"window": 33, "is_chunked": True}),  # a chunk of keys of 8 dimensions
        (3, 3, 64, 96, {"softcap": 3.0}),
        (24, 1, 40, 137, {"window": 5, "sinks": True}),  # two units of heads; most tiles are seen by a few rows only
    ],
)
def test_a_row_does_not_depend_on_the_rows_beside_it(heads, kv_heads, dim_k, dim_v, options, pools):
    """Rows over the borders of tiles and spans, in units of all sizes (one thread takes the largest), and alone."""
    generator = torch.Generator().manual_seed(heads)
    q, k, v, table, _, _ = case(heads, kv_heads, dim_k, dim_v, seed=5)
    q, kv_lens = torch.randn(150, heads, dim_k, generator=generator), torch.arange(400, 550)
    options = {**options, "sinks": torch.linspace(-1, 2, heads)} if options.get("sinks") else options

    def run(start, stop, each):
        seq_ids = torch.zeros(stop - start, dtype=torch.int64)
        return attention(q[start:stop], k, v, table, PAGE, seq_ids, kv_lens[start:stop], 0.2, each, **options)

    whole = run(0, 150, pools[-3])
    oracle = oracle_attention(q, k, v, table, PAGE, torch.zeros(150, dtype=torch.int64), kv_lens, 0.2, **options)
    torch.testing.assert_close(whole, oracle, rtol=1e-4, atol=2e-5)
    for each in pools:
        assert torch.equal(run(0, 150, each), whole), each
    for row in (0, 47, 48, 49, 111, 112, 113, 149):  # around positions 448 and 512
        assert torch.equal(run(row, row + 1, pools[-3]), whole[row : row + 1]), row


def test_values_that_alias_keys_and_strided_caches(pools):
    """MLA: one latent row is key and value. The cache is a slice of a larger tensor."""
    generator = torch.Generator().manual_seed(1)
    store = torch.randn(20 * PAGE, 2, 100, generator=generator)
    k, v = store[:, 1:, :96], store[:, 1:, :80]
    table = torch.arange(20, dtype=torch.int32).flip(0)[None].contiguous()
    q = torch.randn(5, 24, 96, generator=generator)
    seq_ids, kv_lens = torch.zeros(5, dtype=torch.int32), torch.tensor([1, 17, 200, 319, 320])
    oracle = oracle_attention(q, k, v, table, PAGE, seq_ids, kv_lens, 0.1)
    outs = [attention(q, k, v, table, PAGE, seq_ids, kv_lens, 0.1, each) for each in pools]
    torch.testing.assert_close(outs[0], oracle, rtol=1e-4, atol=2e-5)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_unused_slots_do_not_matter(pools):
    q, k, v, table, seq_ids, kv_lens = case(4, 2, 32, 32)
    clean = attention(q, k, v, table, PAGE, seq_ids, kv_lens, 0.2, pools[0], window=50)
    used = torch.zeros(k.shape[0], dtype=torch.bool)
    for seq, length in zip(seq_ids.tolist(), kv_lens.tolist(), strict=True):
        for position in range(max(0, length - 50), length):
            used[table[seq, position // PAGE] * PAGE + position % PAGE] = True
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[~used], dirty_v[~used] = float("nan"), float("inf")
    for each in pools:
        out = attention(q, dirty_k, dirty_v, table, PAGE, seq_ids, kv_lens, 0.2, each, window=50)
        assert torch.equal(out, clean)


def test_rows_that_see_nothing(pools):
    q, k, v, table, _, _ = case(4, 2, 32, 32)
    lens = torch.tensor([0, 5])
    out = attention(
        q[:2], k, v, table, PAGE, torch.zeros(2, dtype=torch.int64), lens, 0.2, pools[-1], sinks=torch.zeros(4)
    )
    assert torch.equal(out[0], torch.zeros(4, 32))
    assert bool(out[1].abs().sum() > 0)
    empty = attention(q[:0], k, v, table, PAGE, lens[:0], lens[:0], 0.2, pools[-1])
    assert empty.shape == (0, 4, 32)


def test_not_a_number_does_not_crash_or_spread(pools):
    q, k, v, table, seq_ids, kv_lens = case(4, 2, 32, 32)
    clean = attention(q, k, v, table, PAGE, seq_ids, kv_lens, 0.2, pools[0])
    q[3, 1, 7] = float("nan")
    for each in pools:
        out = attention(q, k, v, table, PAGE, seq_ids, kv_lens, 0.2, each)
        assert bool(out[3, 1].isnan().all())
        out[3, 1] = clean[3, 1]
        assert torch.equal(out, clean)


def test_keys_and_values_that_end_at_a_page(pools, guarded):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(PAGE, 1, 33, generator=generator)
    cache = guarded.copy_to_end(values.reshape(-1).view(torch.uint8)).view(torch.float32).reshape(PAGE, 1, 33)
    q = torch.randn(2, 3, 33, generator=generator)
    table = torch.zeros(1, 1, dtype=torch.int32)
    seq_ids, kv_lens = torch.zeros(2, dtype=torch.int64), torch.tensor([15, 16])
    expected = attention(q, values, values, table, PAGE, seq_ids, kv_lens, 0.3, pools[0])
    for each in pools:
        assert torch.equal(attention(q, cache, cache, table, PAGE, seq_ids, kv_lens, 0.3, each), expected)


def test_bad_arguments_are_named(pool):
    q, k, v, table, seq_ids, kv_lens = case(4, 2, 32, 32)

    def run(q=q, k=k, v=v, table=table, page=PAGE, seqs=seq_ids, lens=kv_lens, **options):
        return attention(q, k, v, table, page, seqs, lens, 0.2, pool, **options)

    with pytest.raises(ValueError, match="seq_id 3 is no row of block_table"):
        run(seqs=seq_ids + 1)
    with pytest.raises(ValueError, match="seq_id -1"):
        run(seqs=seq_ids - 1)
    with pytest.raises(ValueError, match="kv_len 1441 does not fit"):
        run(lens=kv_lens + 1)
    with pytest.raises(ValueError, match="kv_len -1"):
        run(lens=kv_lens - 2)
    bad = table.clone()
    bad[1, 0] = 270
    with pytest.raises(ValueError, match="page 270 of block_table lies outside"):
        run(table=bad)
    bad[1, 0] = -1
    with pytest.raises(ValueError, match="page -1"):
        run(table=bad)
    bad[1, 0], bad[0, 3] = 0, -5
    with pytest.raises(ValueError, match="page -5"):
        run(table=bad)
    with pytest.raises(ValueError, match="query heads cannot share"):
        run(q=torch.randn(46, 3, 32))
    with pytest.raises(ValueError, match="k_cache must have shape"):
        run(k=k[..., :16])
    with pytest.raises(ValueError, match="last dimension is contiguous"):
        run(v=v.transpose(1, 2))
    with pytest.raises(TypeError, match=r"v_cache must be one of torch\.float32, torch\.bfloat16"):
        run(v=v.half())
    with pytest.raises(TypeError, match=r"block_table must be torch\.int32"):
        run(table=table.long())
    with pytest.raises(ValueError, match="kv_lens must have shape"):
        run(lens=kv_lens[:-1])
    with pytest.raises(ValueError, match="window"):
        run(window=-1)
    with pytest.raises(ValueError, match="sinks must have shape"):
        run(sinks=torch.zeros(5))


def test_lengths_beyond_int32_are_refused(pools):
    q, k, v, table, seq_ids, kv_lens = case(4, 2, 32, 32)
    with pytest.raises(ValueError, match="kv_lens holds a number"):
        attention(q, k, v, table, PAGE, seq_ids, kv_lens.to(torch.int64) + 2**32, 0.2, pools[0])
