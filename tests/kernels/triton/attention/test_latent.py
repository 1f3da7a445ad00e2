"""What latent attention computes around attending, against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import reference
from ktransformers.kernels.triton.attention.latent import absorb, expand, norm_to_cache
from ktransformers.kernels.triton.attention.rope import LatentSlots, Rotation
from ktransformers.operators.attention.mla import rotate
from tests.support.triton_kernels.comparing import RELATIVE, close, normal


def rotation_of(rows, half, device, is_interleaved=True):
    turns = 3 * normal(rows, half, seed=5)
    return Rotation(turns.cos().to(device), turns.sin().to(device), is_interleaved)


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("has_query", [True, False])
def test_norms_rotation_and_cache_write(has_query, is_interleaved, device):
    rows, rank, rotary = 3, 64, 12
    both = normal(rows, 40 + rank + rotary, device=device)
    query, compressed = (both[:, :40], both[:, 40:]) if has_query else (None, both[:, 40:])
    weight, q_weight = normal(rank, device=device, seed=1), normal(40, device=device, seed=2)
    cache = torch.full((8, 1, rank + rotary), torch.nan, device=device)
    slots = torch.tensor([5, -1, 2], device=device)
    rotation = rotation_of(rows, rotary // 2, device, is_interleaved)
    target, query_norm = LatentSlots(cache, slots), (q_weight, 1e-5) if has_query else None
    out = norm_to_cache(compressed, (weight, 1e-6), rotation, target, query, query_norm)
    if has_query:
        close(out, reference.rms_norm(query.cpu(), q_weight.cpu(), 1e-5))
    else:
        assert out is None
    latent = reference.rms_norm(compressed[:, :rank].cpu(), weight.cpu(), 1e-6)
    cos, sin = rotation.cos.cpu().double(), rotation.sin.cpu().double()
    key = rotate(compressed[:, None, rank:].cpu().double(), cos, sin, is_interleaved)
    for row, slot in ((0, 5), (2, 2)):
        close(cache[slot, 0, :rank], latent[row])
        close(cache[slot, 0, rank:], key[row, 0])
    assert cache[[0, 1, 3, 4, 6, 7]].isnan().all()


def test_slots_beyond_the_cache_are_not_written(device):
    compressed, weight = normal(3, 20, device=device), normal(8, device=device, seed=1)
    memory = torch.full((6, 1, 20), 9.0, device=device)  # a cache of 4 slots, and what comes after it
    slots = torch.tensor([4, 3, 1 << 20], device=device)
    rotation = rotation_of(3, 6, device)
    norm_to_cache(compressed, (weight, 1e-6), rotation, LatentSlots(memory[:4], slots))
    assert bool((memory[3] != 9.0).all())
    assert bool((memory[4:] == 9.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_absorb_and_expand(rows, dtype, device):
    heads, nope, rank, rotary, width = 3, 24, 128, 8, 40
    q = normal(rows, heads + 1, nope + rotary, dtype=dtype, device=device)[:, 1:]
    k_b = (normal(heads, nope, rank, seed=1) / nope**0.5).to(dtype).to(device)
    rotation = rotation_of(rows, rotary // 2, device)
    out = absorb(q, k_b, rotation)
    wide = q.cpu().double()
    close(out[..., :rank], torch.einsum("thn,hnr->thr", wide[..., :nope], k_b.cpu().double()), RELATIVE[dtype])
    close(out[..., rank:], rotate(wide[..., nope:], rotation.cos.cpu().double(), rotation.sin.cpu().double(), True))
    v_b = (normal(heads, rank, width, seed=2) / rank**0.5).to(dtype).to(device)
    latent = out[..., :rank]
    values = expand(latent, v_b)
    close(values, torch.einsum("thr,hrv->thv", latent.cpu().double(), v_b.cpu().double()), RELATIVE[dtype])


def test_refuses_what_does_not_fit(device):
    q, k_b = normal(2, 3, 24, device=device), normal(4, 16, 32, device=device)
    with pytest.raises(ValueError, match="q must have shape"):
        absorb(q, k_b, rotation_of(2, 4, device))
    with pytest.raises(ValueError, match="do not fit"):
        expand(normal(2, 4, 16, device=device), k_b.half())
