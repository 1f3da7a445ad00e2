"""A Gated DeltaNet in one native call: what its kernels give one by one, in both arrangements of projections."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ktransformers.kernels.cpu import WorkerPool, linear, pack, recurrent, rms_norm
from ktransformers.kernels.cpu.layer import DeltaNetWeights, LayerBuffers, Norm, Projection, RecurrentLayer
from ktransformers.kernels.cpu.profile import PoolProfile
from ktransformers.kernels.extension import extension
from ktransformers.kernels.recurrent_call import ConvCall, GatedNormCall, ScanCall
from ktransformers.kernels.types import QuantType, StateStep
from tests.support.checks.native_records import records_in

HIDDEN, KEY_HEADS, HEADS, KEY, VALUE, WIDTH = 64, 2, 4, 24, 32, 4
SHARE = HEADS // KEY_HEADS


def step_of(counts, read, write, saves=()):
    rows = sum(counts)
    slots = torch.full((rows,), -1, dtype=torch.int32)
    for row, slot in saves:
        slots[row] = slot
    bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    numbers = (torch.tensor(x, dtype=torch.int32) for x in (read, write))
    return StateStep(bounds, *numbers, slots, torch.zeros(rows, dtype=torch.int32))


@pytest.fixture(scope="module")
def net() -> DeltaNetWeights:
    generator = torch.Generator().manual_seed(0)
    channels = 2 * KEY_HEADS * KEY + HEADS * VALUE
    taps = torch.randn(channels, WIDTH, generator=generator)
    rate, bias, weight = (torch.rand(n, generator=generator) for n in (HEADS, HEADS, VALUE))
    return DeltaNetWeights(KEY_HEADS, HEADS, KEY, VALUE, taps, -rate, bias, Norm(weight, 1e-6))


def states_of(net):
    generator = torch.Generator().manual_seed(1)
    shapes = ((5, WIDTH - 1, net.channels), (5, HEADS, KEY, VALUE))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def one_by_one(x, norm, weights, o, net, states, step, pool):
    normed = rms_norm(x, norm.weight, norm.eps, pool)
    parts = [linear(normed, weight, pool) for weight in weights]
    if len(parts) == 2:
        sizes = (KEY, KEY, SHARE * VALUE, SHARE * VALUE)
        q, k, v, z = parts[0].unflatten(1, (KEY_HEADS, -1)).split(sizes, -1)
        b, a = (x.flatten(1) for x in parts[1].unflatten(1, (KEY_HEADS, -1)).split(SHARE, -1))
        parts = [torch.cat([x.flatten(1) for x in (q, k, v)], 1), z.flatten(1), b, a]
    qkv, z, b, a = parts
    mixed = recurrent.causal_conv(ConvCall(qkv, net.conv_weight, None, states[0], step, "silu"), pool)
    q, k, v = mixed.split((net.key_width, net.key_width, net.value_width), 1)
    heads = (q.unflatten(1, (-1, KEY)), k.unflatten(1, (-1, KEY)), v.unflatten(1, (-1, VALUE)))
    gates = recurrent.delta_gates(a.contiguous(), b.contiguous(), net.rate, net.dt_bias, pool)
    out = recurrent.scan_heads(ScanCall(*heads, *gates, states[1], step, net.l2norm_eps, KEY**-0.5), pool)
    options = {"group_size": VALUE, "activation": net.gate}
    normed = recurrent.gated_norm(GatedNormCall(out.flatten(1), z, net.norm.weight, net.norm.eps, **options), pool)
    if net.is_tiled:
        normed = normed.unflatten(1, (KEY_HEADS, SHARE, VALUE)).transpose(1, 2).flatten(1).contiguous()
    return x + linear(normed, o, pool)


def weights_of(net, is_interleaved, make_weight, pool):
    kinds = [QuantType.Q8_0, QuantType.F32, QuantType.F32, QuantType.Q8_0]
    weights = [
        make_weight(qtype, rows, HIDDEN, seed=i)
        for i, (qtype, rows) in enumerate(zip(kinds, net.rows(is_interleaved)))  # noqa: B905
    ]
    return [pack(weights[0], pool), *weights[1:]], make_weight(QuantType.Q8_0, HIDDEN, net.value_width, seed=9)


@pytest.mark.parametrize(("is_interleaved", "is_tiled"), [(False, False), (True, False), (False, True)])
def test_one_call_is_its_kernels(is_interleaved, is_tiled, net, make_weight, pools):
    net = replace(net, is_tiled=is_tiled)
    weights, o = weights_of(net, is_interleaved, make_weight, pools[0])
    norm = Norm(torch.linspace(0.5, 1.5, HIDDEN), 1e-6)
    layer = RecurrentLayer(norm, tuple(map(Projection, weights)), Projection(o), net)
    x = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(2))
    step = step_of([1, 20, 3], [3, -1, 1], [3, 0, 2], [(14, 4)])
    want_states, results = states_of(net), []
    want = one_by_one(x, norm, weights, o, net, want_states, step, pools[0])
    for each in (pools[0], *pools[1::3]):
        states, rows = states_of(net), x.clone()
        layer.forward(rows, *states, step, each, LayerBuffers())
        results.append(torch.equal(rows, want) and all(map(torch.equal, states, want_states)))
    assert all(results), results
    states, buffers = states_of(net), LayerBuffers()
    for first, count, read in ((0, 7, -1), (7, 1, 0), (8, 16, 0)):  # the same prompt in three steps and in one
        layer.forward(x[first : first + count], *states, step_of([count], [read], [0]), pools[-1], buffers)
    whole, rest = states_of(net), torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(2))
    layer.forward(rest, *whole, step_of([24], [-1], [0]), pools[0], buffers)
    assert torch.equal(rest, x)
    assert all(map(torch.equal, states, whole))


def test_a_warm_step_takes_no_memory(net, make_weight, pool):
    weights, o = weights_of(net, True, make_weight, pool)
    layer = RecurrentLayer(Norm(torch.ones(HIDDEN), 1e-6), tuple(map(Projection, weights)), Projection(o), net)
    x, states, buffers, step = torch.randn(3, HIDDEN), states_of(net), LayerBuffers(), step_of([3], [0], [0])
    layer.forward(x, *states, step, pool, buffers)
    before = extension.num_allocations()
    layer.forward(x, *states, step, pool, buffers)
    assert extension.num_allocations() == before


def test_a_profile_tells_its_parts_apart(net, make_weight):
    pool = WorkerPool(2)
    weights, o = weights_of(net, True, make_weight, pool)
    layer = RecurrentLayer(Norm(torch.ones(HIDDEN), 1e-6), tuple(map(Projection, weights)), Projection(o), net, 7)
    profile = PoolProfile(pool)
    layer.forward(torch.randn(3, HIDDEN), *states_of(net), step_of([3], [0], [0]), pool, LayerBuffers())
    ops = records_in(profile.drain())
    pool.close()
    parts = ["norm", "linear", *["recurrent"] * 4, "linear", "norm"]  # gates, convolution, scan, norm
    assert [(op.layer, op.part) for op in ops] == [(7, part) for part in parts]
    assert ops[4].bytes == HEADS * KEY * VALUE * 4


def test_what_does_not_fit(net, make_weight, pool):
    weights, o = weights_of(net, False, make_weight, pool)
    norm, parts = Norm(torch.ones(HIDDEN), 1e-6), tuple(map(Projection, weights))
    with pytest.raises(ValueError, match="projections and o must have shapes"):
        RecurrentLayer(norm, parts[:2], Projection(o), net)
    with pytest.raises(ValueError, match="no biases"):
        RecurrentLayer(norm, parts, Projection(o, torch.zeros(HIDDEN)), net)
    layer = RecurrentLayer(norm, parts, Projection(o), net)
    conv, states = states_of(net)
    x, step = torch.zeros(1, HIDDEN), step_of([1], [0], [0])
    with pytest.raises(ValueError, match="conv must have shape"):
        layer.forward(x, conv[:, :2].contiguous(), states, step, pool, LayerBuffers())
    with pytest.raises(ValueError, match="recurrent must have shape"):
        layer.forward(x, conv, states[:4], step, pool, LayerBuffers())
    with pytest.raises(ValueError, match=r"write_slots\[0\] is 7"):
        layer.forward(x, conv, states, step_of([1], [0], [7]), pool, LayerBuffers())
