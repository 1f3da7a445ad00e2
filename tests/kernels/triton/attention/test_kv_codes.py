"""Keys and values as codes of 8 bits on the GPU: what is written, and attention over it, against the oracle."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import reference
from ktransformers.kernels.triton.attention import mla, paged
from ktransformers.kernels.triton.attention.kv_codes import widen_latents
from ktransformers.kernels.triton.attention.latent import norm_to_cache
from ktransformers.kernels.triton.attention.rope import (
    HeadNorms,
    KvSlots,
    LatentSlots,
    Rotation,
    latent_to_cache,
    rope_to_cache,
)
from tests.kernels.triton.attention.test_attention import DECODE, OPTIONS, PREFILL, TOLERANCE, case, with_sinks
from tests.kernels.triton.attention.test_mla import case as latent_case
from tests.support.checks.flat_calls import flat_attention, flat_mla
from tests.support.checks.products import product

attention = flat_attention(paged.attention)
mla_attention = flat_mla(mla.mla_attention)
oracle_attention = flat_attention(reference.attention)

CODES = [torch.int8, torch.float8_e4m3fn]
EACH = pytest.mark.parametrize("dtype", CODES, ids=str)
RANK, ROPE = 32, 16

ROWS = {"decode": DECODE, "prefill": PREFILL}


def bits(codes):
    """Codes that `==` compares by their bits."""
    return codes.contiguous().view(torch.uint8).cpu()


def numbers(codes, scales, split=0):
    """What codes [T, H, D] and their scales stand for, fp32."""
    if not split:
        return codes.float() * scales
    first, rest = codes.float().split((split, codes.shape[-1] - split), dim=-1)
    return torch.cat((first * scales[..., :1], rest * scales[..., 1:]), dim=-1)


def hard_rows(num_rows, heads, dim):
    """Rows of every magnitude, with ties, zeros, numbers below the least code, and some that are none."""
    rows = torch.randn(num_rows, heads, dim, generator=torch.Generator().manual_seed(4))
    rows *= 2.0 ** torch.arange(-110, 90, 200 / num_rows).floor()[:num_rows, None, None]
    rows[0] = (torch.arange(heads * dim).view(heads, dim) - 20) / 2  # halves between two codes of int8
    rows[0, :, 3] = 63.5
    rows[1] = 2.0 ** -torch.arange(heads * dim).float().view(heads, dim)  # down to subnormal e4m3 and below
    rows[1, :, 3] = 448.0
    rows[1, 0] = (torch.arange(dim) / 2 + 0.25) * -(2.0**-9)
    rows[1, 0, 3] = 448.0
    rows[2] = 0.0
    rows[3, 0, 2], rows[3, 1, dim - 1] = float("nan"), float("-inf")
    return rows


def same(got, want):
    return torch.equal(got.cpu().nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))


@EACH
def test_rows_are_kept_as_the_oracle_keeps_them(dtype, device):
    """Rotated by 0. Rows that are left out, and what lies between the heads of a wider cache, stay as they are."""
    k, v = hard_rows(12, 3, 21), hard_rows(12, 3, 33).flip(0)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(1))[:12]
    slots[5], slots[7] = -1, 40
    wide = [torch.zeros(20, 5, dim, dtype=dtype, device=device) for dim in (21, 33)]
    scales = [torch.full((20, 5, 1), 9.0, device=device) for _ in wide]
    cos, sin = torch.ones(12, 1, device=device), torch.zeros(12, 1, device=device)
    rope_to_cache(
        (torch.zeros(12, 3, 21, device=device), k.to(device), v.to(device)),
        Rotation(cos, sin, rotary_dim=2),
        KvSlots(wide[0][:, 1:4], wide[1][:, 1:4], slots.to(device), (scales[0][:, 1:4], scales[1][:, 1:4])),
    )
    for rows, cache, of in zip((k, v), wide, scales, strict=True):
        codes, want = reference.quantize_kv(rows, dtype)
        expected, held = torch.zeros(20, 5, rows.shape[-1], dtype=dtype), torch.full((20, 5, 1), 9.0)
        kept = (slots >= 0) & (slots < 20)
        expected[slots[kept], 1:4], held[slots[kept], 1:4] = codes[kept], want[kept]
        assert torch.equal(bits(cache), bits(expected))
        assert same(of, held)


def near(got, want, dtype, steps=1.0):
    """Whether codes and scales are those of fp32 rows that differ in their last bits: a code may be the next one."""
    codes, scales = got
    split = RANK if scales.shape[-1] == 2 else 0
    exact, of = reference.quantize_kv(want, dtype, split)
    torch.testing.assert_close(scales.cpu(), of, rtol=1e-5, atol=0)
    size = numbers(exact, of, split).abs() * 2.0**-3 if dtype is torch.float8_e4m3fn else 0.0
    step = torch.cat([of[..., :1].expand(*want.shape[:2], RANK), of[..., -1:].expand(*want.shape[:2], ROPE)], dim=-1)
    off = (numbers(codes.cpu(), scales.cpu(), split) - numbers(exact, of, split)).abs()
    assert bool((off <= steps * torch.maximum(step, torch.as_tensor(size)) * 1.01).all())
    assert (off > 1e-4 * step).sum() <= off.numel() // 100


@EACH
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_normed_and_rotated_keys(is_interleaved, dtype, device):
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    q, k, v, angles = draw(5, 4, 48), draw(5, 2, 48), draw(5, 2, 48), draw(5, 16)
    rotation = Rotation(angles.cos(), angles.sin(), is_interleaved, rotary_dim=32)
    norms = HeadNorms(draw(48), draw(48), 1e-6)
    plain, coded = [[torch.zeros(5, 2, 48, dtype=t, device=device) for _ in "kv"] for t in (torch.float32, dtype)]
    scales = torch.zeros(5, 2, 1, device=device), torch.zeros(5, 2, 1, device=device)
    slots = torch.arange(5, device=device)
    want = rope_to_cache((q, k, v), rotation, KvSlots(*plain, slots), norms)
    got = rope_to_cache((q, k, v), rotation, KvSlots(*coded, slots, scales), norms)
    assert torch.equal(got, want)
    for cache, of, rows in zip(coded, scales, plain, strict=True):
        near((cache, of), rows.cpu(), dtype)


@EACH
def test_latents_and_shared_keys(dtype, device):
    """By the kernels of few and of many rows, and read back as rows."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    compressed, weight, angles, q_rot = draw(6, RANK + ROPE), draw(RANK), draw(6, ROPE // 2), draw(6, 3, ROPE)
    compressed[:, RANK:] *= 30.0
    cos, sin, slots = angles.cos(), angles.sin(), torch.tensor([4, 0, -1, 7, 2, 5], device=device)
    plain = torch.zeros(8, 1, RANK + ROPE, device=device)
    norm, rotation = (weight, 1e-6), Rotation(cos, sin, True)
    latent_to_cache(q_rot, compressed, norm, rotation, LatentSlots(plain, slots))
    for is_small in (False, True):
        cache = torch.zeros(8, 1, RANK + ROPE, dtype=dtype, device=device)
        scales = torch.zeros(8, 1, 2, device=device)
        if is_small:
            norm_to_cache(compressed, norm, rotation, LatentSlots(cache, slots, scales))
        else:
            latent_to_cache(q_rot, compressed, norm, rotation, LatentSlots(cache, slots, scales))
        near((cache, scales), plain.cpu(), dtype)
        want = numbers(cache, scales, RANK)[:, 0]
        for chosen in (torch.arange(2, 7), torch.tensor([7, 0, 0], dtype=torch.int32)):
            ids, out = chosen.to(device), torch.full((len(chosen), RANK + ROPE), float("nan"), device=device)
            widen_latents(cache, scales, RANK, ids, out)
            assert torch.equal(out, want[ids.long()])


@EACH
def test_every_code_is_read(dtype, device):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[~codes.float().isnan()]  # of e4m3 two are no numbers, and never written
    cache = codes.view(-1, 1, 1).expand(-1, 1, 32).contiguous().to(device)
    out = torch.empty(len(cache), 32, device=device)
    widen_latents(cache, torch.ones(len(cache), 1, 2, device=device), 16, torch.arange(len(cache), device=device), out)
    assert torch.equal(out.cpu(), codes.float()[:, None].expand(-1, 32))


def coded(rows, dtype, device, split=0):
    """Codes and scales of rows on the device, and the numbers that they stand for."""
    codes, scales = reference.quantize_kv(rows.float().cpu(), dtype, split)
    return codes.to(device), scales.to(device), numbers(codes, scales, split)


def attended(arguments, dtype, device, scale, **options):
    """Attention over codes, and the oracle over the numbers that they stand for."""
    q, k, v, *places = arguments
    (k, k_scales, k_numbers), (v, v_scales, v_numbers) = coded(k, dtype, device), coded(v, dtype, device)
    got = attention(q, k, v, *places, scale, scales=(k_scales, v_scales), **options)
    places = [x.cpu() if isinstance(x, torch.Tensor) else x for x in places]
    plain = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items() if name != "counters"}
    return got.float().cpu(), oracle_attention(q.cpu(), k_numbers, v_numbers, *places, scale, **plain)


@product(strength=1, dtype=CODES, step=[*ROWS], options=OPTIONS)
def test_attention_with_options(options, step, dtype, device):
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    options = {**with_sinks(options, 6, device), "counters": counters}
    got, want = attended(case(ROWS[step], 6, 2, 32, 48, torch.float32, device), dtype, device, 0.2, **options)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)  # as without codes, which products hold exactly


@product(strength=1, dtype=CODES, step=[*ROWS], shape=[(4, 1, 48, 32), (2, 2, 96, 96), (3, 1, 33, 80)])
def test_attention_in_bf16(shape, step, dtype, device):
    """Queries in bf16, and columns in two parts."""
    heads, kv_heads, dim_k, dim_v = shape
    arguments = case(ROWS[step], heads, kv_heads, dim_k, dim_v, torch.bfloat16, device)
    got, want = attended(arguments, dtype, device, dim_k**-0.5)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[torch.bfloat16], atol=TOLERANCE[torch.bfloat16])


@EACH
def test_pages_of_one_position_and_a_part_of_the_heads(dtype, device):
    """As attention to chosen positions has them: a slot and a head become a slot."""
    q, k, v, table, page, seqs, lens = case([(0, 20), (1, 7)], 4, 2, 32, 32, torch.float32, device)
    (k, k_scales, _), (v, v_scales, _) = coded(k, dtype, device), coded(v, dtype, device)
    want = attention(q, k, v, table, page, seqs, lens, 0.2, scales=(k_scales, v_scales))
    flat = [x.view(-1, 1, x.shape[-1]) for x in (k, v, k_scales, v_scales)]
    positions = torch.arange(20, device=device)
    slots = table[:, positions // page] * page + positions % page
    for head in (0, 1):
        part = attention(
            q[:, 2 * head : 2 * head + 2], *flat[:2], (2 * slots + head).int(), 1, seqs, lens, 0.2,
            scales=(flat[2], flat[3]),
        )  # fmt: skip
        torch.testing.assert_close(part, want[:, 2 * head : 2 * head + 2], rtol=2e-6, atol=2e-6)


@EACH
def test_slots_that_no_row_sees_may_hold_anything(dtype, device):
    for rows in (DECODE, PREFILL):
        q, k, v, table, page, seqs, lens = case(rows, 2, 1, 32, 32, torch.float32, device)
        (k, k_scales, _), (v, v_scales, _) = coded(k, dtype, device), coded(v, dtype, device)
        clean = attention(q, k, v, table, page, seqs, lens, 0.2, scales=(k_scales, v_scales))
        used = torch.zeros(k.shape[0], dtype=torch.bool)
        for seq, length in zip(seqs.tolist(), lens.tolist(), strict=True):
            for position in range(length):
                used[table[seq, position // page] * page + position % page] = True
        k_scales[~used], v_scales[~used] = float("nan"), float("nan")
        assert torch.equal(attention(q, k, v, table, page, seqs, lens, 0.2, scales=(k_scales, v_scales)), clean)


@product(strength=1, dtype=CODES, step=[*ROWS], kind=[torch.float32, torch.bfloat16])
def test_latent_attention(kind, step, dtype, device):
    """The rotated part is far larger than the latent, and has a scale of its own."""
    q, cache, *places = latent_case([(seq % 3, min(n, 300)) for seq, n in ROWS[step]], 20, RANK, ROPE, kind, device)
    cache[..., RANK:] *= 20.0
    cache, scales, wide = coded(cache, dtype, device, RANK)
    got = mla_attention(q, cache, RANK, *places, 0.05, scales=scales).float().cpu()
    places = [x.cpu() if isinstance(x, torch.Tensor) else x for x in places]
    want = oracle_attention(q.cpu(), wide, wide[..., :RANK], *places, 0.05)
    # logits of up to 100 carry 100 * 2^-24 times some sums in fp32, which exp makes relative
    tolerance = 2e-4 if kind is torch.float32 else TOLERANCE[kind]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@EACH
def test_bad_arguments_are_named(dtype, device):
    q, k, v, *places = case(DECODE, 4, 2, 32, 32, torch.float32, device)
    (k, k_scales, _), (v, v_scales, _) = coded(k, dtype, device), coded(v, dtype, device)
    with pytest.raises(TypeError, match=r"scales of k_cache must be torch.float32"):
        attention(q, k, v, *places, 0.2)
    with pytest.raises(TypeError, match="scales of v_cache"):
        attention(q, k, v, *places, 0.2, scales=(k_scales, v_scales.half()))
    with pytest.raises(ValueError, match=r"scales of v_cache must have shape"):
        attention(q, k, v, *places, 0.2, scales=(k_scales, v_scales[:, :1]))
    with pytest.raises(TypeError, match="has no room"):
        attention(q.half(), k, v, *places, 0.2, scales=(k_scales, v_scales))
    with pytest.raises(ValueError, match="go with codes"):
        attention(q, k.float(), v.float(), *places, 0.2, scales=(k_scales, v_scales))
    slots, cos, out = (
        torch.zeros(4, dtype=torch.int32, device=device),
        torch.ones(4, 1, device=device),
        q[:2, 0].clone(),
    )
    given = KvSlots(k, v.float(), slots, (k_scales, None))
    with pytest.raises(TypeError, match="give one type"):
        rope_to_cache((q, q[:, :2], q[:, :2]), Rotation(cos, cos, rotary_dim=2), given)
    latents = k[:, :1], k_scales[:, :1].expand(-1, -1, 2).contiguous()
    with pytest.raises(ValueError, match="want codes and a rank"):
        widen_latents(*latents, 32, slots[:2], out)
    with pytest.raises(ValueError, match="slots must be"):
        widen_latents(*latents, 16, slots, out)
