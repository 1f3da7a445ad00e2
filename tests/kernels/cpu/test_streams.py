"""Residual streams: against the modules of `transformers` in fp64, and equal bits over tiers, threads and batches."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.cpu import (
    MAX_STREAMS,
    collapse_streams,
    gate_streams,
    mix_streams,
    norm_streams,
    split_columns,
)
from ktransformers.kernels.types import HyperSpec

v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

EPS = 2.0**-23
ITERATIONS = 20


def connection(streams: int, hidden: int) -> torch.nn.Module:
    config = v4.DeepseekV4Config(hc_mult=streams, hidden_size=hidden, hc_sinkhorn_iters=ITERATIONS, hc_eps=1e-3)
    made: torch.nn.Module = v4.DeepseekV4HyperConnection(config)
    generator = torch.Generator().manual_seed(streams * hidden)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    made.fn.data /= (streams * hidden) ** 0.5
    return made


def collapse(module: torch.nn.Module, x: torch.Tensor, pool) -> tuple[torch.Tensor, ...]:
    spec = HyperSpec(x.shape[1], ITERATIONS, module.hc_eps, module.input_norm.eps)
    return collapse_streams(x, split_columns(module.fn.data), module.base.data, module.scale.data, spec, pool)


@pytest.mark.parametrize(("streams", "hidden"), [(4, 256), (4, 40), (2, 1100), (3, 7), (1, 16), (MAX_STREAMS, 64)])
@torch.no_grad()
def test_collapsed_as_transformers(streams, hidden, pools, monkeypatch):
    module = connection(streams, hidden)
    x = torch.randn(9, streams, hidden, generator=torch.Generator().manual_seed(1)) * 3
    got = collapse(module, x, pools[0])
    for each in pools:
        for row in (slice(None), slice(4, 5), slice(2, 7)):
            found = collapse(module, x[row].contiguous(), each)
            assert all(torch.equal(a, b[row]) for a, b in zip(found, got, strict=True))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the module's own code, in fp64
    exact = module.double()
    post, comb, collapsed = (part[0] for part in exact(x.double()[None]))
    # Sums over the columns: one rounding per 16 of them and some more, of the sum of what is added at most.
    flat = exact.input_norm(x.double().flatten(1))
    size = float((flat.abs() @ exact.fn.abs().T * exact.scale.abs().max()).max())
    off = (streams * hidden / 16 + 48) * EPS * size
    # A sigmoid's slope is at most 1 / 4. A softmax's relative error is twice that of its exponents; dividing rows and
    # columns by their sums makes no relative error larger, and adds one rounding for each number of a sum.
    torch.testing.assert_close(got[0].double(), post, rtol=4 * EPS, atol=off / 2)
    torch.testing.assert_close(got[1].double(), comb, rtol=2 * off + 2 * ITERATIONS * (streams + 2) * EPS, atol=0)
    most = float(x.abs().sum(1).max())
    torch.testing.assert_close(got[2].double(), collapsed, rtol=0, atol=(off / 4 + (streams + 4) * EPS) * most)


@pytest.mark.parametrize(("streams", "hidden"), [(4, 1100), (2, 16), (3, 7), (MAX_STREAMS, 513)])
def test_mixed_with_a_result(streams, hidden, pools):
    generator = torch.Generator().manual_seed(hidden)
    x, y = torch.randn(5, streams, hidden, generator=generator), torch.randn(5, hidden, generator=generator)
    post, comb = torch.rand(5, streams, generator=generator), torch.rand(5, streams, streams, generator=generator)
    want = post.double()[..., None] * y.double()[:, None] + comb.double().transpose(1, 2) @ x.double()
    mixed = x.clone()
    mix_streams(mixed, y, post, comb, pools[0])
    size = float((y.abs()[:, None] + x.abs().sum(1, keepdim=True)).max())  # factors are at most 1
    torch.testing.assert_close(mixed.double(), want, rtol=0, atol=(streams + 2) * EPS * size)
    for each in pools:
        for row in (slice(None), slice(3, 4)):
            found = x[row].clone()
            mix_streams(found, y[row], post[row].contiguous(), comb[row].contiguous(), each)
            assert torch.equal(found, mixed[row])


@pytest.mark.parametrize(("streams", "hidden"), [(4, 1100), (2, 16), (3, 7)])
def test_streams_with_gates(streams, hidden, pools):
    generator = torch.Generator().manual_seed(hidden)
    x, gates = (torch.randn(5, streams * hidden, generator=generator) for _ in range(2))
    weight = torch.rand(streams * hidden, generator=generator) + 0.5
    parts = x.double().view(5, streams, hidden)
    scaled = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + 1e-6)
    normed = norm_streams(x, weight, 1e-6, streams, pools[0])
    torch.testing.assert_close(
        normed.double(), scaled.flatten(1) * weight.double(), rtol=(hidden / 32 + 8) * EPS, atol=1e-7
    )
    want = (torch.sigmoid(gates.double()) * normed.double()).view(5, streams, hidden).mean(1)
    out = gate_streams(normed, gates.clone(), streams, pools[0])
    torch.testing.assert_close(out.double(), want, rtol=0, atol=(streams + 8) * EPS * float(normed.abs().max()))
    for each in pools:
        for row in (slice(None), slice(3, 4)):
            assert torch.equal(norm_streams(x[row], weight, 1e-6, streams, each), normed[row])
            assert torch.equal(gate_streams(normed[row], gates[row].clone(), streams, each), out[row])


def test_no_rows(pool):
    module, x = connection(2, 16), torch.zeros(0, 2, 16)
    assert [list(part.shape) for part in collapse(module, x, pool)] == [[0, 2], [0, 2, 2], [0, 16]]
    mix_streams(x, torch.zeros(0, 16), torch.zeros(0, 2), torch.zeros(0, 2, 2), pool)


def test_bad_arguments_are_named(pool):
    x, module = torch.zeros(2, 4, 8), connection(4, 8)
    with pytest.raises(ValueError, match="there must be 1 to"):
        collapse(module, torch.zeros(2, MAX_STREAMS + 1, 8), pool)
    with pytest.raises(ValueError, match="streams must be 4 of 32 columns"):
        collapse(module, torch.zeros(2, 4, 16), pool)
    with pytest.raises(ValueError, match="y must have shape"):
        mix_streams(x, torch.zeros(2, 9), torch.zeros(2, 4), torch.zeros(2, 4, 4), pool)
    with pytest.raises(ValueError, match="comb must have shape"):
        mix_streams(x, torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(2, 4, 2), pool)
    with pytest.raises(ValueError, match="7 columns are no 2 streams"):
        norm_streams(torch.zeros(1, 7), torch.ones(7), 1e-6, 2, pool)
    with pytest.raises(ValueError, match="7 columns are no 2 streams"):
        gate_streams(torch.zeros(1, 7), torch.zeros(1, 7), 2, pool)
