"""What latent attention reads of a module: which columns of a head are turned together, by any function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ktransformers.errors import UnsupportedError
from ktransformers.operators.attention import latent_spec
from ktransformers.operators.attention.latent_spec import Gate

Turn = Callable[[torch.Tensor], torch.Tensor]


def halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def attention_that_turns(turn: Turn, name: str) -> nn.Module:
    """A module whose forward calls `name` of its own module, as those of transformers do."""

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    space: dict[str, object] = {name: rotate}
    exec(f"def forward(self, q, k, cos, sin):\n    return {name}(q, k, cos, sin)", space)
    module: nn.Module = type("Attention", (nn.Module,), {"forward": space["forward"]})()
    return module


@pytest.mark.parametrize(
    ("turn", "name", "are_halves"),
    [
        (halves, "apply_rotary_pos_emb", True),
        (neighbours, "apply_rotary_pos_emb", False),
        (neighbours, "apply_rotary_pos_emb_interleave", False),
    ],
)
def test_which_columns_are_turned_together(turn: Turn, name: str, are_halves: bool) -> None:
    assert latent_spec._rotates_halves(attention_that_turns(turn, name)) is are_halves


def attention_with(**widths: int) -> nn.Module:
    """A module of 4 heads with values of 8 columns, and projections of so many columns."""
    module = nn.Module()
    module.num_heads, module.v_head_dim = 4, 8  # type: ignore[assignment]
    for name, width in widths.items():
        module.add_module(name, nn.Linear(2, width))
    return module


@pytest.mark.parametrize(
    ("widths", "gate"),
    [
        ({"o_proj": 32}, Gate.NONE),
        ({"gate_proj": 16}, Gate.NONE),  # of something else
        ({"g_proj": 4}, Gate.HEADS),
        ({"gate_proj": 32}, Gate.ELEMENTS),
        ({"q_gate_proj": 80}, Gate.JOINT),
    ],
)
def test_gates(widths: dict[str, int], gate: Gate) -> None:
    assert Gate.of(attention_with(**widths), "layer") is gate


def test_gates_that_are_not_known_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="not one column for each of 4 heads"):
        Gate.of(attention_with(g_proj=32), "layer")
    with pytest.raises(UnsupportedError, match="several gates, g_proj and gate_proj"):
        Gate.of(attention_with(g_proj=4, gate_proj=32), "layer")
