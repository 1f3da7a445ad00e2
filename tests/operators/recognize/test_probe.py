"""Norms, activations and what refuses to be asked: a spec, or None and one line in the log for a class of modules."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from ktransformers.kernels.types import Activation, ActivationSpec
from ktransformers.operators.recognize.activation import recognize_activation
from ktransformers.operators.recognize.norm import NormSpec, recognize_norm, recognize_weightless_norm


class Norm(nn.Module):
    """RMSNorm, or what some families make of it."""

    def __init__(self, offset: float = 0.0, *, centers: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48, device="meta"))
        self.variance_epsilon, self.offset, self.centers = 1e-6, offset, centers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if self.centers else x
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x * scale * (self.weight + self.offset)


class Weightless(nn.Module):
    def __init__(self, power: float):
        super().__init__()
        self.eps, self.power = 1e-3, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.abs().pow(2).mean(-1, keepdim=True) + self.eps) ** (-self.power / 2)


class Refusing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("not so")


def test_norms() -> None:
    assert recognize_norm(Norm()) == NormSpec(1e-6)
    assert recognize_norm(Norm(1.0)) == NormSpec(1e-6, 1.0)
    assert recognize_norm(Norm(0.5)) is None
    assert recognize_norm(Norm(centers=True)) is None
    assert recognize_weightless_norm(Norm()) is None
    assert recognize_weightless_norm(Weightless(1.0)) == 1e-3
    assert recognize_weightless_norm(Weightless(2.0)) is None
    assert recognize_norm(nn.LayerNorm(48, bias=False)) is None
    assert Norm().weight.is_meta  # asking needs no weights


def test_activations() -> None:
    assert recognize_activation(nn.GELU(approximate="tanh")) == ActivationSpec(Activation.GELU_TANH)
    assert recognize_activation(nn.SiLU()) == ActivationSpec(Activation.SILU)
    assert recognize_activation(nn.Hardtanh(-20, 20)) is None
    assert recognize_activation(nn.Identity()) is None
    assert recognize_activation(nn.Linear(32, 32)) is None


def test_a_reason_is_logged_once_for_a_class(caplog: pytest.LogCaptureFixture) -> None:
    class Unseen(Norm):
        pass

    with caplog.at_level(logging.INFO, "ktransformers"):
        assert [recognize_norm(Unseen(0.5)) for _ in range(3)] == [None] * 3
        assert recognize_norm(Unseen()) == NormSpec(1e-6)  # modules of one class may differ
    assert [record.getMessage() for record in caplog.records] == [
        "Unseen is not RMSNorm, so its own forward runs: no formula that kernels know gives its numbers"
    ]


def test_a_module_that_raises_is_not_what_is_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "ktransformers"):
        assert recognize_activation(Refusing()) is None
    assert "asked, it raises KeyError: 'not so'" in caplog.text
