"""Layers on a GPU whose additions are in the norms behind them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from typing_extensions import override

from ktransformers.operators.device import Device
from ktransformers.operators.experts.block import Addends, KMoEBlock
from ktransformers.operators.layers.gpu import LayerStack, _Part
from ktransformers.operators.norm import KRMSNorm
from ktransformers.operators.recognize.layer import PartKind
from ktransformers.operators.recognize.norm import NormSpec
from tests.support.engines.fake_gpus import fake_hardware

WIDTH = 64


class Norm(KRMSNorm):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.spec = NormSpec(1e-6, 0.0)

    @property
    @override
    def weight(self) -> torch.Tensor:
        return torch.linspace(0.5, 1.5, WIDTH)


class Block(KMoEBlock):
    """has_shared: a shared expert; has_score: and what weighs it."""

    device: Device  # type: ignore[assignment]

    def __init__(self, device: Device, has_shared: bool, has_score: bool) -> None:
        nn.Module.__init__(self)
        self.device, self.has_shared, self.has_score = device, has_shared, has_score

    @override
    def addends(self, hidden_states: torch.Tensor) -> Addends:
        shared = (hidden_states * 0.37).flip(1) if self.has_shared else None
        return Addends((hidden_states * 0.73).roll(1, 1), shared, hidden_states[:, :1] if self.has_score else None)


@pytest.mark.parametrize(("has_shared", "has_score"), [(False, False), (True, False), (True, True)])
def test_where_a_stack_ends_changes_no_bit(has_shared: bool, has_score: bool) -> None:
    """As between stages of a pipeline, in bf16: a sum of three may be rounded once or twice."""
    pytest.importorskip("triton")
    device = fake_hardware().devices["cuda:0"]
    block = Block(device, has_shared, has_score)
    parts = [[_Part(Norm(), block, PartKind.FEED_FORWARD)] for _ in range(3)]
    stack = LayerStack([nn.Identity() for _ in parts], parts, 0, device)
    hidden = torch.randn(1, 16, WIDTH, generator=torch.Generator().manual_seed(0)).to(
        device.torch_device, torch.bfloat16
    )
    want = stack(hidden)
    got = hidden
    for layer in range(3):
        got = stack.part(layer, layer + 1)(got)
    assert torch.equal(got, want)
