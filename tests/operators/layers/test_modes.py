"""What Python a decode step runs between native calls: none of it for each look at a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ktransformers.kernels.untraced import untraced
from ktransformers.operators.exact import NativeMathMode
from tests.support.engines.runners import fused_runner, random_ids
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import tiny_model


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What went through the mode around steps."""
    functions: list[Any] = []
    plain = NativeMathMode.__torch_function__

    def watched(self: NativeMathMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        functions.append(func)
        return plain(self, func, *args, **kwargs)

    monkeypatch.setattr(NativeMathMode, "__torch_function__", watched)
    return functions


def test_a_function_that_is_not_traced(seen: list[Any]) -> None:
    runner, x = fused_runner(tiny_model("llama")), torch.ones(2, 2)
    seen.clear()
    with NativeMathMode(runner.pool):
        assert untraced(lambda: (x + 1).shape)() == (2, 2)
        assert not seen
        assert (x + 1).sum() == 8
    assert seen


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "qwen3_next"])
def test_layers_look_at_tensors_unseen(family: str, seen: list[Any]) -> None:
    """A step of few tokens asks torch for the angles of positions and for the final norm: some dozens of calls.

    Before, a layer's checks alone were 80.
    """
    model = recurrent_model(family) if family == "qwen3_next" else tiny_model(family)
    layers = len(model.model.layers)
    assert layers >= 2
    runner = fused_runner(model)
    ids = random_ids(runner.vocab_size, 8)
    runner.forward(ids[:7], 0, [6])
    seen.clear()
    runner.forward(ids[7:], 7, [0])
    assert len(seen) <= 40 + 4 * layers
