"""Hyper-connections on the GPU, against the module of `transformers`."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.triton.attention.hyper import collapse
from ktransformers.kernels.types import HyperSpec
from ktransformers.operators.recognize.hyper import recognize_hyper

v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")


def module(streams: int, width: int, **values: object) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    config = v4.DeepseekV4Config(hc_mult=streams, hidden_size=width, hc_sinkhorn_iters=5, hc_eps=1e-3, **values)
    made: torch.nn.Module = v4.DeepseekV4HyperConnection(config)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made


@pytest.mark.parametrize(("rows", "streams", "width"), [(1, 4, 40), (5, 2, 1100), (66, 4, 16)])
def test_as_transformers(rows: int, streams: int, width: int, device: torch.device) -> None:
    want_of, x = module(streams, width), torch.randn(rows, streams, width, generator=torch.Generator().manual_seed(1))
    spec = recognize_hyper(want_of)
    assert spec == HyperSpec(streams, 5, 1e-3, want_of.input_norm.eps)
    with torch.no_grad():
        want = want_of(x[None])
        weights = [part.detach().to(device) for part in (want_of.fn, want_of.base, want_of.scale)]
    got = collapse(x.to(device), *weights, spec)
    for one, other in zip(got, want, strict=True):  # fp32, sums of some thousand products
        torch.testing.assert_close(one.cpu(), other[0], atol=2e-4, rtol=2e-4)


def test_what_is_something_else_is_not_recognized() -> None:
    assert recognize_hyper(torch.nn.Linear(3, 4)) is None
    assert recognize_hyper(module(3, 16)) is None
    other = module(2, 16)
    other.hc_sinkhorn_iters = 1
    other.forward = lambda streams: (streams, streams, 2 * streams)
    assert recognize_hyper(other) is None


def test_bad_arguments_are_named(device: torch.device) -> None:
    x, spec = torch.zeros(2, 4, 8, device=device), HyperSpec(4, 5, 1e-6, 1e-6)
    with pytest.raises(ValueError, match="fn must have shape"):
        collapse(x, x.new_zeros(24, 8), x.new_zeros(24), x.new_zeros(3), spec)
    with pytest.raises(ValueError, match="weights fp32"):
        collapse(x, x.new_zeros(24, 32).half(), x.new_zeros(24), x.new_zeros(3), spec)
