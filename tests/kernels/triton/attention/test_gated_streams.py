"""Residual streams with gates on the GPU, against the module of `transformers`."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.triton.attention.gated_streams import collapse_streams, norm_streams, scaled_silu
from ktransformers.operators.recognize.hyper import GatedSpec, recognize_gated

qwen4 = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")


def module(streams: int, width: int, *, use_combine: bool = True) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    config = qwen4.Qwen4ExpTextConfig(hc_count=streams, hidden_size=width, hc_lowrank=24, rms_norm_eps=1e-5)
    made: torch.nn.Module = qwen4.Qwen4ExpTextGatedResidual(config, use_combine=use_combine)
    for parameter in made.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return made


@pytest.mark.parametrize("use_combine", [True, False])
@pytest.mark.parametrize(("rows", "streams", "width"), [(1, 4, 40), (5, 3, 700), (66, 2, 16)])
def test_as_transformers(rows: int, streams: int, width: int, use_combine: bool, device: torch.device) -> None:
    want_of = module(streams, width, use_combine=use_combine)
    assert recognize_gated(want_of) == GatedSpec(streams, 1e-5, 1.0, use_combine)
    x = torch.randn(rows, streams * width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = want_of(x[None])
    own = want_of.to(device)
    with torch.no_grad():
        normed = norm_streams(x.to(device), own.hc_norm.weight + 1, 1e-5, streams)
        mixed = own.input_mix_weight_up(scaled_silu(own.input_mix_weight_down(normed), 1 / streams))
        inject = own.block_inject_weight(normed) if use_combine else None
        collapsed, weights = collapse_streams(normed, mixed, inject, streams)
    torch.testing.assert_close(collapsed.cpu(), (want[0] if use_combine else want)[0], atol=1e-5, rtol=1e-5)
    assert (weights is None) is not use_combine
    if weights is not None:
        torch.testing.assert_close(weights.cpu(), want[2][0], atol=1e-5, rtol=1e-5)


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    wide = torch.randn(4, 96, generator=torch.Generator().manual_seed(2)).to(device)
    part, weight = wide[:, :64], torch.ones(64, device=device)
    assert torch.equal(norm_streams(part, weight, 1e-6, 2), norm_streams(part.contiguous(), weight, 1e-6, 2))
    normed, gates = part.contiguous(), wide[:, 32:]
    got, _ = collapse_streams(part, gates, None, 2)
    assert torch.equal(got, collapse_streams(normed, gates.contiguous(), None, 2)[0])


def test_what_is_something_else_is_not_recognized() -> None:
    assert recognize_gated(torch.nn.Linear(3, 4)) is None
    other = module(2, 16)
    other.hc_norm.group_size = None  # of all streams together
    assert recognize_gated(other) is None
    other = module(2, 16)
    other.input_mix_weight_up = torch.nn.Identity()
    forward = type(other).forward
    other.forward = lambda x: tuple(2 * part for part in forward(other, x))
    assert recognize_gated(other) is None


def test_bad_arguments_are_named(device: torch.device) -> None:
    x, weight = torch.zeros(2, 64, device=device), torch.ones(64, device=device)
    with pytest.raises(ValueError, match="of 3 streams"):
        norm_streams(x, weight, 1e-6, 3)
    with pytest.raises(ValueError, match="no 3 streams"):
        collapse_streams(x, x, None, 3)
    with pytest.raises(ValueError, match="inject must have shape"):
        collapse_streams(x, x, x[:, :3], 2)
