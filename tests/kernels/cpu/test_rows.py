"""RMS norm and activations: against torch in fp64, and equal bits over tiers and threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from ktransformers.kernels import reference
from ktransformers.kernels.cpu import activate, rms_norm
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import Activation, ActivationSpec

EPS = 2.0**-23

FUNCTIONS = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.RELU: functional.relu,
    Activation.RELU2: lambda x: functional.relu(x).square(),
}


@pytest.mark.parametrize("cols", [1, 15, 64, 77, 2048])
def test_rms_norm(cols, pools):
    x = torch.randn(9, cols, generator=torch.Generator().manual_seed(cols)) * 3
    weight = torch.linspace(0.5, 2, cols)
    out = rms_norm(x, weight, 1e-6, pools[0])
    # Squares are summed in 16 lanes: their error is at most cols / 16 + 8 roundings, halved by the root, plus 4.
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-6), rtol=(cols / 32 + 8) * EPS, atol=1e-7)
    for each in pools:
        assert torch.equal(rms_norm(x, weight, 1e-6, each), out)
        assert torch.equal(rms_norm(x[4:5], weight, 1e-6, each), out[4:5])
    inplace = x.clone()
    assert torch.equal(rms_norm(inplace, weight, 1e-6, pools[0], out=inplace), out)


@pytest.mark.parametrize("kind", FUNCTIONS, ids=lambda k: k.name)
def test_activations(kind, pools):
    gate = torch.cat(
        [torch.linspace(-30, 30, 4001), torch.linspace(-0.01, 0.01, 101), torch.tensor([0.0, -0.0, 88, -88, 100, -100])]
    )
    up = torch.linspace(-2, 2, gate.numel())
    exact = FUNCTIONS[kind](gate.double())
    out = activate(ActivationSpec(kind), gate, up, pools[0])
    single = activate(ActivationSpec(kind), None, gate, pools[0])
    # A few ulp, and for gelu's far tail (which goes through exp(-x^2 / 2)) an absolute error of a millionth.
    torch.testing.assert_close(single, exact.float(), rtol=8 * EPS, atol=1e-6)
    torch.testing.assert_close(out, (exact * up.double()).float(), rtol=9 * EPS, atol=2e-6)
    for each in pools:
        assert torch.equal(activate(ActivationSpec(kind), gate, up, each), out)
        assert torch.equal(activate(ActivationSpec(kind), None, gate, each), single)


def test_exp_error_through_silu(pools):
    # silu(x) = x / (1 + exp(-x)) is x * exp(x) within half an ulp once exp(-x) is large: that shows exp's own error.
    x = torch.linspace(-80, -20, 20001)
    out = activate(ActivationSpec(Activation.SILU), None, x, pools[-1])
    exact = x.double() / (1 + torch.exp(-x.double()))
    # 1.5 ulp of exp, half an ulp each for the sum and the quotient
    assert float(((out.double() - exact) / exact).abs().max()) < 2.5 * EPS


def test_relative_error_of_silu_and_its_limits(pool):
    x = torch.tensor([-200.0, -100.0, 100.0, 200.0])
    assert torch.equal(activate(ActivationSpec(), x, torch.ones(4), pool), torch.tensor([-0.0, -0.0, 100.0, 200.0]))


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        (Activation.SWIGLU_OAI, lambda g, u: g * torch.sigmoid(1.702 * g) * (u + 1)),
        (Activation.SWIGLU_CLAMPED, lambda g, u: g * torch.sigmoid(g) * u),
    ],
)
def test_clamped_activations(kind, formula, pools):
    gate, up = torch.linspace(-20, 20, 1003), torch.linspace(15, -15, 1003)
    spec = ActivationSpec(kind, alpha=1.702, limit=7.0)
    exact = formula(gate.double().clamp(max=7), up.double().clamp(-7, 7))
    out = activate(spec, gate, up, pools[0])
    torch.testing.assert_close(out, exact.float(), rtol=16 * EPS, atol=1e-6)
    for each in pools:
        assert torch.equal(activate(spec, gate, up, each), out)
    with pytest.raises(ValueError, match="needs a gate"):
        activate(spec, None, up, pools[0])


def test_the_extension_takes_known_kinds_alone(pool):
    """And none of two numbers where there is one."""
    assert {kind.name: kind.value for kind in Activation} == extension.activation_kinds()
    x, out = torch.ones(8), torch.zeros(8)

    def run(kind):
        extension.activate(pool.handle, kind, 1.0, 1.0, 0, x.data_ptr(), 8, out.data_ptr())

    for kind in (-1, len(Activation)):
        with pytest.raises(ValueError, match=f"unknown activation kind {kind}"):
            run(kind)
    for kind in (kind for kind in Activation if kind.is_clamped):
        with pytest.raises(ValueError, match=f"{kind.name} needs a gate"):
            run(int(kind))
    assert not out.any()


def test_not_a_number_passes_through(pools):
    x = torch.tensor([float("nan"), 1.0])
    for kind in Activation:
        gate = x if kind.is_clamped else None
        for each in pools:
            out = activate(ActivationSpec(kind), gate, x, each)
            assert bool(out.isnan()[0])
            assert bool(out.isfinite()[1])
    assert bool(rms_norm(x[None], torch.ones(2), 1e-6, pools[0]).isnan().all())


def test_shapes_and_empty_inputs(pool):
    assert activate(ActivationSpec(), torch.empty(0, 5), torch.empty(0, 5), pool).shape == (0, 5)
    assert rms_norm(torch.empty(0, 5), torch.ones(5), 1e-6, pool).shape == (0, 5)
    gate = torch.randn(2, 3, 5)
    assert activate(ActivationSpec(), gate, gate, pool, out=gate) is gate
    with pytest.raises(ValueError, match="gate must have shape"):
        activate(ActivationSpec(), torch.randn(4), torch.randn(5), pool)
    with pytest.raises(ValueError, match="weight must have shape"):
        rms_norm(torch.randn(2, 5), torch.ones(4), 1e-6, pool)
