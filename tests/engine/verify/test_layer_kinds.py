"""Which layers a warm-up runs: each kind behind each kind that is before it somewhere, in stacks and alone."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from ktransformers.engine.verify.layer_kinds import one_of_each
from ktransformers.operators.device import Device
from ktransformers.operators.layers.gpu import LayerStack

GPU = Device("cuda:0", torch.device("cpu"), torch.float32, is_gpu=True)


class Layer(nn.Module):
    """Says that it ran; its output is a pair, as those of some families are."""

    def __init__(self, number: int, kind: int, ran: list[int]):
        super().__init__()
        self.number, self.kind, self.ran = number, kind, ran

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.ran.append(self.number)
        return hidden, self.kind


def model_of(layers: list[nn.Module]) -> Any:
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList(layers)
    return model


def some_kinds(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(rng.randint(1, 4)) for _ in range(rng.randint(1, 24))]


def neighbours(kinds: list[int]) -> set[tuple[int, int]]:
    return set(pairwise([-1, *kinds]))


@pytest.mark.parametrize("seed", range(40))
def test_layers_of_a_stack(seed: int) -> None:
    kinds = some_kinds(seed)
    layers = [Layer(i, kind, []) for i, kind in enumerate(kinds)]
    stack = LayerStack(list(layers), [[] for _ in layers], 0, GPU)
    with one_of_each(model_of([stack]), kinds) as run:
        chosen = list(run)
        stack(torch.ones(1, 2, 3))
    assert neighbours([kinds[i] for i in chosen]) == neighbours(kinds)
    assert "forward" not in vars(stack)
    again = LayerStack(list(layers * 3), [[] for _ in layers * 3], 0, GPU)
    with one_of_each(model_of([again]), kinds * 3) as run:
        assert len(run) <= len(chosen) + len(kinds)  # where one repetition follows another there may be new neighbours
    other = LayerStack(list(layers), [[] for _ in layers], len(kinds), GPU)
    hidden = torch.ones(1, 2, 3)
    with one_of_each(model_of([stack, *[Layer(0, 0, []) for _ in kinds[1:]], other]), kinds * 2) as run:
        assert list(run) == chosen
        assert other(hidden) is hidden


@pytest.mark.parametrize("seed", range(40))
def test_layers_one_by_one(seed: int) -> None:
    """Those that do not run give what the last one of their kind gave."""
    kinds, ran = some_kinds(seed), list[int]()
    layers: list[nn.Module] = [Layer(i, kind, ran) for i, kind in enumerate(kinds)]
    hidden = torch.ones(2)
    with one_of_each(model_of(layers), kinds) as run:
        assert [layer(hidden)[1] for layer in layers] == kinds
        assert ran == list(run)
    pairs = list(pairwise([-1, *kinds]))
    assert sorted(pairs[i] for i in ran) == sorted(set(pairs))
    assert [layer(hidden)[1] for layer in layers] == kinds
    assert ran[len(run) :] == list(range(len(kinds)))


def test_all_layers_run_when_kinds_cannot_be_told() -> None:
    ran = list[int]()
    layers: list[nn.Module] = [Layer(i, 0, ran) for i in range(3)]
    with one_of_each(model_of(layers), []) as run:
        for layer in layers:
            layer(torch.ones(1))
    assert ran == list(run) == [0, 1, 2]
