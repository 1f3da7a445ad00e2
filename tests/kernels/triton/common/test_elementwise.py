"""Norms, activations, rotation and cache writes of the GPU against fp64 torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from ktransformers.kernels import reference
from ktransformers.kernels.triton.attention.rope import (
    HeadNorms,
    KvSlots,
    LatentSlots,
    Rotation,
    latent_to_cache,
    rope_to_cache,
)
from ktransformers.kernels.triton.common.elementwise import activate, add_rms_norm, gate_heads, rms_norm
from ktransformers.kernels.types import Activation, ActivationSpec
from ktransformers.operators.attention.mla import rotate
from tests.support.triton_kernels.comparing import close, normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 48, 2880, 7168])
def test_rms_norm(width, dtype, device):
    x = normal(3, width + 8, dtype=dtype, device=device)[:, :width]
    weight = normal(width, dtype=dtype, device=device, seed=1)
    out = rms_norm(x, weight, 1e-5)
    close(out, reference.rms_norm(x.cpu(), weight.cpu(), 1e-5))
    assert rms_norm(x[:0], weight, 1e-5).shape == (0, width)
    assert rms_norm(x, weight, 1e-5, out=x) is x
    close(x, out)  # other strides may be summed in another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_add_rms_norm(dtype, device):
    x, residual = (normal(3, 96, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = normal(96, dtype=dtype, device=device, seed=2)
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    close(out, reference.rms_norm(total.cpu(), weight.cpu(), 1e-6))
    again, same = add_rms_norm(x, residual, weight, 1e-6, out=x, residual_out=residual)
    assert again is x
    assert same is residual
    assert torch.equal(x, out)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("is_gated", [False, True])
def test_add_rms_norm_of_three(is_gated, device):
    x, residual, more = (normal(3, 96, device=device, seed=seed) for seed in (0, 1, 2))
    gate = normal(3, 1, device=device, seed=3) if is_gated else None
    weight = normal(96, device=device, seed=4)
    out, total = add_rms_norm(x, residual, weight, 1e-6, more=more, gate=gate)
    share = more.double() * (1 if gate is None else torch.sigmoid(gate.double()))
    close(total, x.double() + share + residual.double())
    close(out, reference.rms_norm(total.cpu(), weight.cpu(), 1e-6))
    with pytest.raises(ValueError, match="more, which is None"):
        add_rms_norm(x, residual, weight, 1e-6, gate=normal(3, 1, device=device))


def oracle(kind, x):
    return {
        Activation.SILU: functional.silu,
        Activation.GELU: functional.gelu,
        Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
        Activation.RELU: functional.relu,
        Activation.RELU2: lambda x: functional.relu(x) ** 2,
        Activation.SIGMOID: torch.sigmoid,
    }[kind](x)


@pytest.mark.parametrize("kind", list(Activation), ids=lambda k: k.name)
def test_activations(kind, device):
    fused = 4 * normal(3, 2 * 1100, device=device)
    gate, up = fused[:, :1100], fused[:, 1100:]
    spec = ActivationSpec(kind)
    wide_gate, wide_up = gate.double().cpu(), up.double().cpu()
    if kind.is_clamped:
        clamped, clamped_up = wide_gate.clamp(max=7.0), wide_up.clamp(-7.0, 7.0)
        is_oai = kind is Activation.SWIGLU_OAI
        alpha, more = (1.702, 1.0) if is_oai else (1.0, 0.0)
        want = clamped * torch.sigmoid(alpha * clamped) * (clamped_up + more)
        with pytest.raises(ValueError, match="needs a gate"):
            activate(spec, None, up)
    else:
        want = oracle(kind, wide_gate) * wide_up
        close(activate(spec, None, up), oracle(kind, wide_up))
    # The tanh form loses relative precision where 1 + tanh is near 0: 2^-24 times |x * up| absolute.
    close(activate(spec, gate, up), want, absolute=2e-5)


def test_an_activation_without_a_formula_is_an_error(device):
    """As one would be that the kernels forget."""
    kind = SimpleNamespace(name="OTHER", is_clamped=False)
    x = normal(2, 96, device=device)
    with pytest.raises(Exception, match="no formula for this activation"):
        activate(SimpleNamespace(kind=kind, alpha=1.0, limit=1.0), x, x)


def test_silu_mul_in_half_precision_and_in_place(device):
    gate, up = (normal(2, 96, dtype=torch.bfloat16, device=device, seed=seed) for seed in (0, 1))
    want = functional.silu(gate.double()) * up.double()
    assert activate(ActivationSpec(), gate, up, out=gate) is gate
    close(gate, want)
    assert activate(ActivationSpec(), gate[:0], up[:0]).shape == (0, 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_heads(dtype, device):
    beside = normal(3, 5, 2 * 48, dtype=dtype, device=device, seed=1)  # by head: a query and a gate
    x, gate = normal(3, 5, 48, dtype=dtype, device=device), beside[..., 48:]
    want = x.double() * torch.sigmoid(gate.double())
    close(gate_heads(x, gate), want)
    assert gate_heads(x, gate, out=x) is x
    close(x, want)
    assert gate_heads(x[:0], gate[:0]).shape == (0, 5, 48)
    with pytest.raises(ValueError, match="gate must have shape"):
        gate_heads(x, gate[:, :4])


def head_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def rotated(x, cos, sin, rotary, is_interleaved):
    turned = rotate(x[..., :rotary], cos.double(), sin.double(), is_interleaved)
    return torch.cat((turned, x[..., rotary:]), dim=-1)


def joined(x, rotary, is_interleaved):
    """What `rotated` gives, members of a pair where they were."""
    if not is_interleaved:
        return x
    pairs = torch.stack((x[..., : rotary // 2], x[..., rotary // 2 : rotary]), dim=-1).flatten(-2)
    return torch.cat((pairs, x[..., rotary:]), dim=-1)


def apart(x, rotary, is_interleaved):
    """The other way round."""
    return torch.cat((x[..., :rotary:2], x[..., 1:rotary:2], x[..., rotary:]), dim=-1) if is_interleaved else x


@pytest.mark.every(5)
@pytest.mark.parametrize("norm", ["", "before", "after"])
@pytest.mark.parametrize("is_interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dim_v", "rotary"), [(8, 2, 64, 64, 64), (5, 5, 80, 48, 32), (6, 1, 96, 96, 96)]
)
def test_rope_to_cache(heads, kv_heads, dim, dim_v, rotary, is_interleaved, norm, device):
    rows, eps = 3, 1e-6
    fused = normal(rows, heads + kv_heads, dim, device=device)
    q, k, v = fused[:, :heads], fused[:, heads:], normal(rows, kv_heads, dim_v, device=device, seed=1)
    angles = normal(7, rotary // 2, seed=2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([6, 0, 3])
    slots = torch.tensor([4, -1, 0], dtype=torch.int32)
    weights = (normal(dim, device=device, seed=3), normal(dim, device=device, seed=4)) if norm else None
    # Kernels may turn the cos and sin of a table of [N, P] whose halves repeat.
    tables = (torch.cat((cos, cos), 1).to(device), torch.cat((sin, sin), 1).to(device))
    k_cache = torch.full((6, kv_heads, dim), 9.0, device=device)
    v_cache = torch.full((6, kv_heads, dim_v), 9.0, device=device)
    norms = HeadNorms(*weights, eps, norm == "after") if weights else None
    rotation = Rotation(*tables, is_interleaved, positions.to(device), rotary)
    out = rope_to_cache((q, k, v), rotation, KvSlots(k_cache, v_cache, slots.to(device)), norms)
    cos, sin = cos[positions], sin[positions]

    def wanted(x, weight):
        if norm == "before":
            x = head_norm(x, weight.cpu(), eps)
        x = rotated(x, cos, sin, rotary, is_interleaved)
        if norm == "after":  # as modules have it: weights belong to columns where they were
            x = apart(head_norm(joined(x, rotary, is_interleaved), weight.cpu(), eps), rotary, is_interleaved)
        return x

    wide_q, wide_k = (wanted(x.double().cpu(), w) for x, w in zip((q, k), weights or (None, None), strict=True))
    close(out, wide_q)
    want_k, want_v = torch.full((6, kv_heads, dim), 9.0).double(), torch.full((6, kv_heads, dim_v), 9.0)
    for row in (0, 2):
        want_k[slots[row]] = wide_k[row]
        want_v[slots[row]] = v[row].cpu()
    close(k_cache, want_k)
    assert torch.equal(v_cache.cpu(), want_v)
    # One row of cos and sin per row, half precision caches.
    halves = (k_cache.half(), v_cache.half())
    rotation = Rotation(cos.to(device), sin.to(device), is_interleaved, rotary_dim=rotary)
    again = rope_to_cache((q, k, v), rotation, KvSlots(*halves, slots.to(device).long()), norms)
    close(again, out)
    close(halves[0][slots[0]], k_cache[slots[0]].half())


@pytest.mark.parametrize("is_interleaved", [False, True], ids=["half", "interleaved"])
def test_latent_to_cache(is_interleaved, device):
    rows, heads, rank, rotary, eps = 3, 20, 48, 16, 1e-6
    absorbed = torch.full((rows, heads, rank + rotary), 9.0, device=device)
    q = normal(rows, heads, 8 + rotary, device=device)[..., 8:]
    compressed = normal(rows, rank + rotary, device=device, seed=1)
    weight = normal(rank, device=device, seed=2)
    angles = normal(rows, rotary // 2, device=device, seed=3)
    cos, sin = angles.cos(), angles.sin()
    cache = torch.full((5, 1, rank + rotary), 9.0, device=device)
    slots = torch.tensor([3, -1, 1], device=device)
    rotation, target = Rotation(cos, sin, is_interleaved), LatentSlots(cache, slots)
    latent_to_cache(q, compressed, (weight, eps), rotation, target, q_out=absorbed[..., rank:])
    wide = compressed.double()
    close(absorbed[..., rank:], rotate(q.double(), cos.double(), sin.double(), is_interleaved))
    assert bool((absorbed[..., :rank] == 9.0).all())
    key = rotate(wide[:, None, rank:], cos.double(), sin.double(), is_interleaved)[:, 0]
    want = torch.full((5, 1, rank + rotary), 9.0).double().to(device)
    for row in (0, 2):
        want[slots[row], 0] = torch.cat((head_norm(wide[row, :rank], weight, eps), key[row]))
    close(cache, want)


def test_slots_beyond_the_cache_are_not_written(device):
    rows, heads, dim, rank = 3, 2, 16, 8
    x, angles = normal(rows, heads, dim, device=device), normal(rows, dim // 2, device=device, seed=1)
    slots = torch.tensor([4, 3, 1 << 20], device=device)
    memory = torch.full((2, 6, heads, dim), 9.0, device=device)  # caches of 4 slots, and what comes after them
    rotation = Rotation(angles.cos(), angles.sin())
    rope_to_cache((x, x, x), rotation, KvSlots(memory[0, :4], memory[1, :4], slots))
    assert bool((memory[:, 3] != 9.0).all())
    assert bool((memory[:, 4:] == 9.0).all())
    latents = torch.full((6, 1, rank + dim), 9.0, device=device)
    weight = normal(rank, device=device, seed=2)
    compressed = normal(rows, rank + dim, device=device, seed=3)
    latent_to_cache(x, compressed, (weight, 1e-6), rotation, LatentSlots(latents[:4], slots))
    assert bool((latents[3] != 9.0).all())
    assert bool((latents[4:] == 9.0).all())


def test_bad_arguments_are_named(device):
    x = normal(2, 8, device=device)
    with pytest.raises(ValueError, match="weight must have shape"):
        rms_norm(x, x[0, :4], 1e-6)
    with pytest.raises(TypeError, match="x must be fp16"):
        rms_norm(x.long(), x[0], 1e-6)
    with pytest.raises(ValueError, match="last dimension of x"):
        rms_norm(x.t(), x[0, :2], 1e-6)
    with pytest.raises(ValueError, match="residual must have shape"):
        add_rms_norm(x, x[:1], x[0], 1e-6)
    q, table, ids = normal(2, 1, 8, device=device), normal(2, 4, device=device), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="rotary_dim must be even"):
        rope_to_cache((q, q, q), Rotation(table, table, rotary_dim=3), KvSlots(q, q, ids.to(device)))
    with pytest.raises(ValueError, match=r"cos .* must have 2 rows of 4 angles"):
        rope_to_cache((q, q, q), Rotation(table[:1], table[:1]), KvSlots(q, q, ids.to(device)))
    with pytest.raises(TypeError, match="slot_mapping must be int32"):
        rope_to_cache((q, q, q), Rotation(table, table), KvSlots(q, q, ids.to(device).float()))
