"""MoeKernel: against one token and one expert at a time, and equal bits over tiers, threads and batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from ktransformers.kernels import reference
from ktransformers.kernels.cpu import MoeKernel, WorkerPool, activate, linear
from ktransformers.kernels.types import Activation, ActivationSpec, ExpertWeights, QuantType

# (gate and up, down, hidden, width): widths that are no multiple of 16, of 32, of 256.
CASES = [
    (QuantType.F32, QuantType.F32, 65, 33),
    (QuantType.BF16, QuantType.F16, 48, 100),
    (QuantType.Q8_0, QuantType.Q4_0, 96, 32),
    (QuantType.Q4_K, QuantType.Q8_0, 256, 96),
    (QuantType.Q5_K, QuantType.Q6_K, 256, 256),
    (QuantType.Q6_K, QuantType.Q4_K, 512, 256),
]
EXPERTS = 6


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].name}-{case[1].name}-{case[3]}")
def layer(request, make_weight):
    first, last, hidden, width = request.param
    gate = [make_weight(first, width, hidden, seed=e) for e in range(EXPERTS)]
    up = [make_weight(first, width, hidden, seed=100 + e) for e in range(EXPERTS)]
    down = [make_weight(last, hidden, width, seed=200 + e) for e in range(EXPERTS)]
    return ExpertWeights(gate, up, down)


def routing(tokens, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, EXPERTS + 1, (tokens, top_k), generator=generator)
    return ids, torch.rand(tokens, top_k, generator=generator)


def composed(layer, x, ids, weights, pool):
    """The same sums out of the other kernels: what MoeKernel must give bit for bit."""
    out = torch.zeros(x.shape)
    for t in range(x.shape[0]):
        total = None
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if e == EXPERTS:
                continue
            row = x[t : t + 1]
            gate = linear(row, layer.gate[e], pool)
            hidden = activate(ActivationSpec(), gate, linear(row, layer.up[e], pool), pool)
            term = weights[t, k] * linear(hidden, layer.down[e], pool)[0]
            total = term if total is None else total + term
        if total is not None:
            out[t] = total
    return out


def test_equals_the_composition_for_all_tiers_threads_and_batches(layer, pools):
    hidden = layer.up[0].cols
    x = torch.randn(29, hidden, generator=torch.Generator().manual_seed(1))
    ids, weights = routing(29, 3)
    ids[4] = EXPERTS  # a token without experts
    ids[5] = 2  # one expert three times
    expected = composed(layer, x, ids, weights, pools[0])
    for each in pools:
        kernel = MoeKernel(layer, ActivationSpec(), each)
        assert torch.equal(kernel.forward(x, ids, weights), expected), each
        assert torch.equal(kernel.forward(x, ids.to(torch.int32), weights), expected)
        for start, stop in ((0, 1), (3, 6), (6, 20)):
            part = kernel.forward(x[start:stop], ids[start:stop], weights[start:stop])
            assert torch.equal(part, expected[start:stop]), (each, start)


def test_close_to_dequantized_experts(layer, pool):
    hidden = layer.up[0].cols
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(2))
    ids, weights = routing(5, 2, seed=3)
    ours = MoeKernel(layer, ActivationSpec(), pool).forward(x, ids, weights)
    oracle = reference.moe(x, ids, weights, layer.gate, layer.up, layer.down)
    # int8 steps of the activations, once before gate and up and once before down: test_linear bounds each; here the
    # sum over a row keeps it within 3 % of the largest output.
    exact = layer.up[0].qtype in (QuantType.F32, QuantType.BF16)
    assert float((ours - oracle).abs().max()) <= (1e-5 if exact else 0.03) * float(oracle.abs().max())


def test_biases_no_gate_and_clamped_activation(make_weight, pools):
    hidden, width = 64, 40
    up = [make_weight(QuantType.F32, width, hidden, seed=e) for e in range(EXPERTS)]
    gate = [make_weight(QuantType.F32, width, hidden, seed=50 + e) for e in range(EXPERTS)]
    down = [make_weight(QuantType.F32, hidden, width, seed=90 + e) for e in range(EXPERTS)]
    generator = torch.Generator().manual_seed(5)
    biases = [torch.randn(EXPERTS, n, generator=generator) for n in (width, width, hidden)]
    x = torch.randn(4, hidden, generator=generator) * 3
    ids, weights = torch.randint(0, EXPERTS, (4, 2), generator=generator), torch.rand(4, 2, generator=generator)

    def dense(e, t, with_gate):
        u = functional.linear(x[t], reference.dequantize(up[e]), biases[1][e])
        if not with_gate:
            h = functional.relu(u).square()
        else:
            g = functional.linear(x[t], reference.dequantize(gate[e]), biases[0][e]).clamp(max=7)
            h = g * torch.sigmoid(1.702 * g) * (u.clamp(-7, 7) + 1)
        return functional.linear(h, reference.dequantize(down[e]), biases[2][e])

    for with_gate in (True, False):
        spec = ActivationSpec(Activation.SWIGLU_OAI) if with_gate else ActivationSpec(Activation.RELU2)
        layer = ExpertWeights(
            gate if with_gate else None, up, down, biases[0] if with_gate else None, biases[1], biases[2]
        )
        oracle = torch.stack(
            [sum(weights[t, k] * dense(int(ids[t, k]), t, with_gate) for k in range(2)) for t in range(4)]
        )
        outs = [MoeKernel(layer, spec, each).forward(x, ids, weights) for each in pools]
        torch.testing.assert_close(outs[0], oracle, rtol=1e-5, atol=1e-4 * float(oracle.abs().max()))
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_many_tokens_for_one_expert(make_weight, pools):
    layer = ExpertWeights(
        [make_weight(QuantType.Q8_0, 32, 64)],
        [make_weight(QuantType.Q8_0, 32, 64)],
        [make_weight(QuantType.Q8_0, 64, 32)],
    )
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(7))
    ids, weights = torch.zeros(300, 1, dtype=torch.int64), torch.ones(300, 1)
    outs = [MoeKernel(layer, ActivationSpec(), each).forward(x, ids, weights) for each in pools]
    assert all(torch.equal(out, outs[0]) for out in outs)
    one = MoeKernel(layer, ActivationSpec(), pools[-1]).forward(x[280:281], ids[:1], weights[:1])
    assert torch.equal(one[0], outs[0][280])


def test_bad_arguments_are_named(make_weight, pool):
    up = [make_weight(QuantType.F32, 8, 16, seed=e) for e in range(2)]
    down = [make_weight(QuantType.F32, 16, 8, seed=e) for e in range(2)]
    kernel = MoeKernel(ExpertWeights(up, up, down), ActivationSpec(), pool)
    x, weights = torch.randn(1, 16), torch.ones(1, 2)
    with pytest.raises(IndexError, match=r"topk_ids\[0, 1\] is 3"):
        kernel.forward(x, torch.tensor([[0, 3]]), weights)
    with pytest.raises(IndexError, match="-1"):
        kernel.forward(x, torch.tensor([[-1, 0]]), weights)
    with pytest.raises(ValueError, match="hidden_states must have shape"):
        kernel.forward(torch.randn(1, 15), torch.tensor([[0, 1]]), weights)
    with pytest.raises(ValueError, match="topk_weights must have shape"):
        kernel.forward(x, torch.tensor([[0, 1]]), torch.ones(1, 3))
    with pytest.raises(TypeError, match="topk_ids must be int64 or int32"):
        kernel.forward(x, torch.tensor([[0.0, 1.0]]), weights)
    assert kernel.forward(x[:0], torch.empty(0, 2, dtype=torch.int64), weights[:0]).shape == (0, 16)
    with pytest.raises(ValueError, match="down has 1 experts, up has 2"):
        MoeKernel(ExpertWeights(up, up, down[:1]), ActivationSpec(), pool)
    with pytest.raises(ValueError, match=r"down\[0\] must have shape \[16, 8\]"):
        MoeKernel(ExpertWeights(up, up, up), ActivationSpec(), pool)
    mixed = [up[0], make_weight(QuantType.F16, 8, 16)]
    with pytest.raises(ValueError, match=r"up\[1\] is F16"):
        MoeKernel(ExpertWeights(None, mixed, down), ActivationSpec(), pool)
    with pytest.raises(ValueError, match="at least one expert"):
        MoeKernel(ExpertWeights(None, [], []), ActivationSpec(), pool)
    with pytest.raises(ValueError, match="there is no gate"):
        MoeKernel(ExpertWeights(None, up, down, gate_bias=torch.zeros(2, 8)), ActivationSpec(), pool)


@pytest.mark.parametrize("tokens", [1, 5])
def test_few_tokens_take_one_job(make_weight, tokens):
    """Quantizing between gate and down, and combining behind down, are done within it."""
    gate, up, down = (
        [make_weight(QuantType.Q4_K, 256, 256, seed=100 * part + e) for e in range(EXPERTS)] for part in range(3)
    )
    pool, alone = WorkerPool(4), WorkerPool(1)
    x, (ids, weights) = torch.randn(tokens, 256), routing(tokens, 3, seed=5)
    want = MoeKernel(ExpertWeights(gate, up, down), ActivationSpec(), alone).forward(x, ids, weights)
    kernel = MoeKernel(ExpertWeights(gate, up, down), ActivationSpec(), pool)
    for _ in range(50):  # another thread may be the last every time
        before = pool.handle.num_jobs
        assert torch.equal(kernel.forward(x, ids, weights), want)
        assert pool.handle.num_jobs - before == 1
    pool.close()
    alone.close()
