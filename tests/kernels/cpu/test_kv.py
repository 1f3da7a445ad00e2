"""Keys and values in fewer bits: how rows are kept, and attention over what is kept."""

from __future__ import annotations

import itertools

import pytest
import torch

from ktransformers.kernels import cpu, reference
from ktransformers.kernels.cpu import write_kv
from tests.support.checks.flat_calls import flat_attention
from tests.support.checks.products import product

attention = flat_attention(cpu.attention)
oracle_attention = flat_attention(reference.attention)

PAGE = 16
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
CODES = DTYPES[2:]


def bits(tensor):
    """The same memory as integers, whose equality is that of bits; one NaN for all."""
    if tensor.dtype is not torch.int8:
        tensor = torch.where(tensor.float().isnan(), torch.tensor(0.0).to(tensor.dtype), tensor)
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize])


def kept(rows, dtype, split=0):
    """(codes, scales) of rows [T, H, D] as the oracle keeps them, and the numbers that they stand for."""
    codes, scales = reference.quantize_kv(rows, dtype, split)
    if scales is None:
        return codes, None, codes.float()
    wide = [
        scales[..., :1].expand(*rows.shape[:2], split),
        scales[..., -1:].expand(*rows.shape[:2], rows.shape[-1] - split),
    ]
    return codes, scales, codes.float() * torch.cat(wide, dim=-1)


def hard_rows():
    """Rows [T, 3, 21] of every magnitude, with ties, zeros, subnormal numbers and some that are none."""
    rows = torch.randn(40, 3, 21, generator=torch.Generator().manual_seed(4))
    rows *= 2.0 ** torch.arange(-110, 90, 5)[:, None, None]
    rows[3] = (torch.arange(63).view(3, 21) - 20) / 2  # halves between two codes of int8, where 63.5 is the largest
    rows[3, :, 0] = 63.5
    rows[4] = 2.0 ** -torch.arange(63).float().view(3, 21)  # down to subnormal e4m3 and below
    rows[4, :, 0] = 448.0
    rows[4, 0] = (torch.arange(21) / 2 + 0.25) * 2.0**-9
    rows[4, 0, 0] = 448.0
    rows[5] = 0.0
    rows[6, 0, 2], rows[6, 1, 20], rows[6, 2, 7] = float("nan"), float("inf"), float("-inf")
    return rows


@product(strength=1, dtype=DTYPES, split=[0, 5])
def test_rows_are_kept_as_the_oracle_keeps_them(dtype, split, pools):
    rows, slots = hard_rows(), torch.randperm(50, generator=torch.Generator().manual_seed(1))[:40]
    codes, scales, _ = kept(rows, dtype, split)
    wide = torch.zeros(40, 3, 30)
    wide[..., 4:25] = rows
    for each, given in itertools.product(pools, (rows, wide[..., 4:25])):
        cache = torch.zeros(50, 3, 21, dtype=dtype)
        own = None if scales is None else torch.zeros(50, 3, scales.shape[-1])
        write_kv(given, slots, cache, own, each, split)
        assert torch.equal(bits(cache[slots]), bits(codes)), each
        if scales is not None:
            assert torch.equal(own[slots].nan_to_num(nan=-1.0), scales.nan_to_num(nan=-1.0)), each


def test_a_row_in_codes_is_near(pool):
    """int8: half a step of 127. e4m3: 4 bits of mantissa, or half a step of 2^-9 / 448 of the largest."""
    rows = torch.randn(30, 2, 64, generator=torch.Generator().manual_seed(2))
    largest = rows.abs().amax(-1, keepdim=True)
    for dtype, relative, absolute in (
        (torch.int8, 2.0**-22, 0.5 / 127),
        (torch.float8_e4m3fn, 2.0**-4, 2.0**-10 / 448),
    ):
        off = (kept(rows, dtype)[2] - rows).abs()
        assert bool((off <= relative * rows.abs() + (absolute + 2.0**-22) * largest).all()), dtype


def case(heads, kv_heads, dim_k, dim_v, seed=0):
    """Two sequences whose pages are scattered over one cache; returns q, rows of keys and values, and the places."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(2 * 90, generator=generator).to(torch.int32).reshape(2, 90)
    slots = 2 * 90 * PAGE
    seq_ids, kv_lens = torch.tensor([0] * 20 + [1] * 3), torch.tensor([*range(500, 520), 1, 65, 1440])
    q = torch.randn(len(seq_ids), heads, dim_k, generator=generator)
    keys = torch.randn(slots, kv_heads, dim_k, generator=generator) * torch.rand(
        slots, kv_heads, 1, generator=generator
    )
    values = torch.randn(slots, kv_heads, dim_v, generator=generator)
    return q, keys, values, (table, PAGE, seq_ids, kv_lens, 0.2)


OPTIONS = [{}, {"window": 100}, {"window": 100, "is_chunked": True}, {"softcap": 3.0}, {"window": 70, "sinks": True}]


@pytest.mark.every(3)
@product(strength=1, dtype=DTYPES[1:], shape=[(8, 2, 64, 64), (6, 6, 40, 24), (20, 1, 148, 139)], options=OPTIONS)
def test_attention_over_what_is_kept(dtype, shape, options, pools):
    q, keys, values, places = case(*shape)
    options = {**options, "sinks": torch.linspace(-1, 2, shape[0])} if options.get("sinks") else options
    (k, k_scales, k_numbers), (v, v_scales, v_numbers) = kept(keys, dtype), kept(values, dtype)
    options = {**options, "scales": (k_scales, v_scales)}
    out = attention(q, k, v, *places, pools[0], **options)
    plain = {name: value for name, value in options.items() if name != "scales"}
    oracle = oracle_attention(q, k_numbers, v_numbers, *places, **plain)
    torch.testing.assert_close(out, oracle, rtol=1e-4, atol=2e-5)  # of fp32 sums, see test_attention.py
    table, page, seq_ids, kv_lens, scale = places
    for each in pools:
        assert torch.equal(attention(q, k, v, *places, each, **options), out), each
        for start, stop in ((0, 1), (7, 18), (19, 23)):
            part = attention(
                q[start:stop], k, v, table, page, seq_ids[start:stop], kv_lens[start:stop], scale, each, **options
            )
            assert torch.equal(part, out[start:stop]), (each, start)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_sums_are_those_of_fp32(dtype, pools):
    """Numbers that fp32 holds too, and scales that are powers of two, are summed as an fp32 cache's: the same bits."""
    q, keys, values, places = case(8, 2, 70, 50)
    most = {torch.bfloat16: 1.0, torch.int8: 127.0, torch.float8_e4m3fn: 448.0}[dtype]
    powers = 2.0 ** torch.randint(-10, -6, (len(keys), 2), generator=torch.Generator().manual_seed(7))
    for rows in (keys, values):  # the largest magnitude is a power of two times the largest code
        rows.mul_(0.05).clamp_(-0.1, 0.1)
        rows[..., 0] = most * powers
    (k, k_scales, k_numbers), (v, v_scales, v_numbers) = kept(keys, dtype), kept(values, dtype)
    want = attention(q, k_numbers, v_numbers, *places, pools[0])
    for each in pools:
        assert torch.equal(attention(q, k, v, *places, each, scales=(k_scales, v_scales)), want), each


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_latent_keys_have_two_scales(dtype, pools):
    """MLA: the first dimensions are the values too, the rotated rest has a scale of its own."""
    q, keys, _, places = case(16, 1, 160, 144)
    keys[..., 144:] *= 50.0
    k, scales, numbers = kept(keys, dtype, split=144)
    outs = [attention(q, k, k[..., :144], *places, each, scales=(scales, scales[..., :1])) for each in pools]
    oracle = oracle_attention(q, numbers, numbers[..., :144], *places)
    # Scores of up to 50 * 0.2 * 160^0.5 * 3 carry 160 * 2^-24 of that, which exp makes relative.
    torch.testing.assert_close(outs[0], oracle, rtol=4e-3, atol=1e-3)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_what_is_not_seen_does_not_matter(dtype, pools):
    q, keys, values, places = case(4, 2, 32, 32)
    (k, k_scales, _), (v, v_scales, _) = kept(keys, dtype), kept(values, dtype)
    clean = attention(q, k, v, *places, pools[0], scales=(k_scales, v_scales), window=50)
    used, (table, _, seq_ids, kv_lens, _) = torch.zeros(len(k), dtype=torch.bool), places
    for seq, length in zip(seq_ids.tolist(), kv_lens.tolist(), strict=True):
        for position in range(max(0, length - 50), length):
            used[table[seq, position // PAGE] * PAGE + position % PAGE] = True
    k_scales[~used], v_scales[~used] = float("nan"), float("inf")
    for each in pools:
        out = attention(q, k, v, *places, each, scales=(k_scales, v_scales), window=50)
        assert torch.equal(out, clean), each


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_is_not_read_or_written_beyond_its_end(dtype, pools, guarded):
    rows = torch.randn(PAGE, 1, 33, generator=torch.Generator().manual_seed(3))
    codes, scales, _ = kept(rows, dtype)
    cache = guarded.copy_to_end(codes.reshape(-1).view(torch.uint8)).view(dtype).reshape(PAGE, 1, 33)
    q = torch.randn(2, 3, 33, generator=torch.Generator().manual_seed(5))
    places = torch.zeros(1, 1, dtype=torch.int32), PAGE, torch.zeros(2, dtype=torch.int64), torch.tensor([15, 16]), 0.3
    want = attention(q, codes, codes, *places, pools[0], scales=(scales, scales))
    for each in pools:
        write_kv(rows, torch.arange(PAGE), cache, None if scales is None else scales.clone(), each)
        assert torch.equal(attention(q, cache, cache, *places, each, scales=(scales, scales)), want), each


def test_wrong_caches_are_named(pool):
    rows, slots = torch.randn(2, 1, 8), torch.tensor([0, 1])
    codes, scales = torch.zeros(4, 1, 8, dtype=torch.int8), torch.zeros(4, 1, 1)
    with pytest.raises(IndexError, match="row 1 goes to slot 4 of a cache of 4"):
        write_kv(rows, torch.tensor([0, 4]), codes, scales, pool)
    with pytest.raises(IndexError, match="slot -1"):
        write_kv(rows, torch.tensor([-1, 0]), codes, scales, pool)
    with pytest.raises(TypeError, match=r"scales must be torch\.float32 on the CPU for a cache of torch\.int8"):
        write_kv(rows, slots, codes, None, pool)
    with pytest.raises(ValueError, match=r"scales must have shape \[4, 1, 1\] or \[4, 1, 2\], got \[4, 1, 3\]"):
        write_kv(rows, slots, codes, torch.zeros(4, 1, 3), pool)
    with pytest.raises(ValueError, match="two scales want a split between 0 and 8, got 8"):
        write_kv(rows, slots, codes, torch.zeros(4, 1, 2), pool, split=8)
    with pytest.raises(ValueError, match=r"scales goes with codes of 8 bits, not with torch\.bfloat16"):
        write_kv(rows, slots, codes.bfloat16(), scales, pool)
    with pytest.raises(ValueError, match="slots must be"):
        write_kv(rows, slots[:1], codes, scales, pool)
    with pytest.raises(ValueError, match="rows must have shape"):
        write_kv(rows[..., :4], slots, codes, scales, pool)
    with pytest.raises(TypeError, match="rows must be"):
        write_kv(rows.double(), slots, codes, scales, pool)
    places = torch.zeros(1, 1, dtype=torch.int32), 4, slots * 0, slots + 1, 0.3
    with pytest.raises(TypeError, match="give one type"):
        attention(rows, codes, codes.bfloat16(), *places, pool, scales=(scales, None))
    with pytest.raises(ValueError, match=r"scales of values must have shape \[4, 1, 1\]"):
        attention(rows, codes, codes, *places, pool, scales=(scales, torch.zeros(4, 1, 2)))
    with pytest.raises(ValueError, match="have no two parts"):
        attention(rows, codes, codes, *places, pool, scales=(torch.zeros(4, 1, 2), scales))
