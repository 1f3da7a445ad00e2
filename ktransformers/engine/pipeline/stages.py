"""Which layers a stage has, and a skeleton of these alone: under their own names, with what lies around them.

The layers keep their numbers in names, by which rules and files know them; in caches they are counted from the stage's
first one. What a model computes between embedding and layers, or hands from layer to layer besides hidden states,
cannot be cut: the first steps of a loaded stage show it (engine/pipeline/borders.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any, Self

import torch
from torch import nn
from typing_extensions import override

from ktransformers.config import parse_layers
from ktransformers.engine.opened import OpenedModel
from ktransformers.engine.pipeline.link import Incoming, Outgoing, StageLink
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.layers.observed import layer_list
from ktransformers.operators.shares import Placeholder
from ktransformers.weights.cut_source import CutSource

__all__ = ["cut_stage", "layer_costs", "stage_bounds"]

_FACTORS = ("embedding_multiplier",)
"""What families multiply embeddings by in the forward of their model: 1 where hidden states come instead."""

_NORMS = ("norm", "final_layernorm", "norm_f", "ln_f", "final_layer_norm", "final_norm", "embedding_norm")


class _StageLayers(nn.ModuleList):
    """A list of layers whose names begin at another number than their indices."""

    def __init__(self, modules: Iterable[nn.Module] = (), first: int = 0):
        super().__init__()
        self.first = first
        for i, module in enumerate(modules, first):
            self.add_module(str(i), module)

    def _get_abs_string_index(self, idx: Any) -> str:
        index = int(idx)
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range")
        return str(self.first + index % len(self))

    @override
    def extend(self, modules: Iterable[nn.Module]) -> Self:
        for module in modules:
            self.add_module(str(self.first + len(self)), module)
        return self

    @override
    def __delitem__(self, idx: int | slice) -> None:
        left = list(self)
        del left[idx]
        self._modules = {str(i): module for i, module in enumerate(left, self.first)}


class _NoHead(Placeholder):
    """In the place of the head: nobody asks this stage for logits. What stands for them shows what its layers give.

    weight: some models ask for its type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0)

    @override
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def layer_costs(opened: OpenedModel) -> list[int]:
    """Parameters of each decoder layer: what a decode step reads of it is in proportion, wherever experts are."""
    layers = layer_list(opened.model)
    if layers is None:
        raise UnsupportedError(f"--pipeline: the layers of model type {opened.facts.model_type} are not found")
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]


def stage_bounds(costs: Sequence[int], size: int) -> list[tuple[int, int]]:
    """First layer and end of each stage, so that the most expensive one is as cheap as can be.

    Raises ConfigError for more stages than layers.
    """
    if not 1 <= size <= len(costs):
        raise ConfigError(f"--pipeline {size}: the model has {len(costs)} layers, and each stage needs one")
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(count: int, end: int) -> tuple[int, int]:
        """(the most expensive stage's cost, where the last one begins) of `count` stages for the layers before end."""
        if count == 1:
            return sums[end], 0
        return min((max(best(count - 1, first)[0], sums[end] - sums[first]), first) for first in range(count - 1, end))

    bounds, end = [], len(costs)
    for count in range(size, 0, -1):
        first = best(count, end)[1]
        bounds.append((first, end))
        end = first
    return bounds[::-1]


def _bounds(opened: OpenedModel, size: int) -> list[tuple[int, int]]:
    costs, given = layer_costs(opened), opened.config.pipeline_layers
    if not given:
        return stage_bounds(costs, size)
    counts = parse_layers(given)
    if sum(counts) != len(costs):
        raise ConfigError(f"--pipeline_layers {given} are {sum(counts)} layers, and the model has {len(costs)}")
    ends = list(itertools.accumulate(counts))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def cut_stage(opened: OpenedModel, link: StageLink) -> OpenedModel:
    """The part of `opened` that this stage runs. The skeleton is changed: it must be nobody else's.

    Raises UnsupportedError for a model that cannot be cut there, ConfigError for too many stages.
    """
    model: Any = opened.model
    first, end = _bounds(opened, link.size)[link.stage]
    layers = layer_list(model)
    assert layers is not None
    if len(layers) != len(opened.facts.layers):
        raise UnsupportedError(f"--pipeline: layers of model type {opened.facts.model_type} have several caches each")
    facts = _facts(opened.facts, first, end)
    base = next(module for module in model.modules() if getattr(module, "layers", None) is layers)
    base.layers = _StageLayers(list(layers)[first:end], first)
    for module in base.layers.modules():
        if isinstance(vars(module).get("layer_idx"), int):
            module.layer_idx -= first
    for module in base.children():
        if module is not base.layers and "config" in vars(module):  # rotations are made for all kinds of layers
            vars(module)["config"] = copy(vars(module)["config"])
    kept = {id(vars(module).get("config")) for module in base.children() if module is not base.layers}
    for config in {id(one): one for one in _configs(model) if id(one) not in kept}.values():
        _cut_config(config, len(layers), first, end)
    if not link.is_first:
        model.set_input_embeddings(Incoming(link, model.get_input_embeddings()))
        for name in _FACTORS:
            if hasattr(base, name):
                setattr(base, name, 1.0)
    if not link.is_last:
        norm = next((name for name in _NORMS if isinstance(getattr(base, name, None), nn.Module)), None)
        if norm is None or not hasattr(model, "lm_head"):
            raise UnsupportedError(
                f"--pipeline: model type {opened.facts.model_type} has no norm and head of the usual names"
            )
        setattr(base, norm, Outgoing(link))
        model.lm_head = _NoHead()
    return replace(opened, facts=facts, source=CutSource(opened.source, {}, is_whole=False))


def _configs(model: nn.Module) -> Iterable[Any]:
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            yield config


def _cut_config(config: Any, num_layers: int, first: int, end: int) -> None:
    """Lists with an entry for each layer, which some models read while they run."""
    if getattr(config, "num_hidden_layers", None) != num_layers:
        return
    lists = {
        name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == num_layers
    }
    for name, value in lists.items():
        vars(config)[name] = value[first:end]
    config.num_hidden_layers = end - first


def _facts(facts: ModelFacts, first: int, end: int) -> ModelFacts:
    layers = []
    for layer in facts.layers[first:end]:
        if layer.shares is not None and layer.shares < first:
            raise UnsupportedError(
                f"--pipeline: layers of model type {facts.model_type} use keys of others, which another stage has"
            )
        layers.append(layer if layer.shares is None else replace(layer, shares=layer.shares - first))
    experts = facts.experts
    if experts is not None:
        experts = replace(experts, top_k=experts.top_k[first:end])
    return replace(facts, layers=tuple(layers), experts=experts)
