"""Cuts a model into stages: which layers a stage has, and a skeleton of these alone, under their own names, with what
lies around them.

The layers keep their numbers in names, by which rules and files know them; in caches they are counted from the stage's
first one. What a model computes between embedding and layers, or hands from layer to layer besides hidden states,
cannot be cut: the first steps of a loaded stage show it (engine/parallel/pipeline/stage_io_check.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any, Self

import torch
from torch import nn
from typing_extensions import override

from ktransformers.config import parse_layers
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.parallel.pipeline.link import Incoming, Outgoing, StageLink
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.layers.traced import layer_list
from ktransformers.operators.partial_sums import PassThrough
from ktransformers.weights.cut_source import CutSource

__all__ = ["cut_stage", "joined_layers", "layer_costs", "stage_bounds", "stage_weights"]

_FACTORS = ("embedding_multiplier",)
"""What families multiply embeddings by in the forward of their model: 1 where hidden states come instead."""

_MERGES = ("hc_head",)
"""What makes one stream of hidden states of several, before the last norm."""

_NORMS = ("norm", "final_layernorm", "norm_f", "ln_f", "final_layer_norm", "final_norm", "embedding_norm")


class _StageLayers(nn.ModuleList):
    """A list of layers whose names begin at another number than their indices.

    num_streams: for models that make several streams of the one that they look up, [1, T, streams, H]. What comes in
    their place is side by side in each, [1, T, streams, streams * H], and is taken apart in front of the first layer
    while the model runs.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), first: int = 0, num_streams: int = 1):
        super().__init__()
        self.first, self._num_streams, self._is_running = first, num_streams, False
        for i, module in enumerate(modules, first):
            self.add_module(str(i), module)

    def run_with(self, model: nn.Module) -> None:
        """Take streams apart in the forward of `model`, whose layers these are."""

        def sets(is_running: bool) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self._is_running = is_running

            return hook

        model.register_forward_pre_hook(sets(True))
        model.register_forward_hook(sets(False), always_call=True)

    def _unfolding(self, layer: nn.Module) -> Callable[..., Any]:
        def unfolded(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            rows = hidden_states[:, :, 0]
            return layer(rows.reshape(*rows.shape[:2], self._num_streams, -1), *args, **kwargs)

        return unfolded

    @override
    def __iter__(self) -> Iterator[Any]:
        for i, layer in enumerate(self._modules.values()):
            yield self._unfolding(layer) if not i and self._is_running else layer

    @override
    def __getitem__(self, idx: Any) -> Any:
        """All of them are this list itself, whose streams are taken apart."""
        is_whole = isinstance(idx, slice) and idx.indices(len(self)) == (0, len(self), 1)
        return self if is_whole else super().__getitem__(idx)

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


def layer_costs(opened: OpenedModel) -> list[int]:
    """Count the parameters of each decoder layer: what a decode step reads of it is in proportion, wherever experts
    are."""
    layers = layer_list(opened.model)
    if layers is None:
        raise UnsupportedError(f"--pipeline: the layers of model type {opened.facts.model_type} are not found")
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]


def joined_layers(opened: OpenedModel) -> frozenset[int]:
    """Find the layers before which no stage can begin: they, or later ones, use what earlier ones have made.

    These are keys and values that layers share, positions that the indexer of another layer has chosen, and whatever
    the layers of a model hand on besides hidden states.
    """
    joined: set[int] = set()
    for index, layer in enumerate(opened.facts.layers):
        if layer.shares is not None:
            joined.update(range(layer.shares + 1, index + 1))
    for index, module in enumerate(layer_list(opened.model) or ()):
        if index and getattr(module, "continues_layers", False):
            joined.add(index)
        if any(getattr(part, "skip_topk", False) for part in module.modules()):
            joined.add(index)
    return frozenset(joined)


def stage_bounds(costs: Sequence[int], size: int, joined: Collection[int] = ()) -> list[tuple[int, int]]:
    """Return the first layer and the end of each stage, so that the most expensive one is as cheap as can be; none
    begins at `joined`.

    Raises ConfigError for more stages than there can be.
    """
    most = len(costs) - len(joined)
    if not 1 <= size <= most:
        together = f" that {len(joined)} more cannot be parted from" if joined else ""
        raise ConfigError(f"--pipeline {size}: the model has {most} layers{together}, and each stage needs one")
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(count: int, end: int) -> tuple[float, int]:
        """Return (the most expensive stage's cost, where the last one begins) of `count` stages for the layers before
        end."""
        if count == 1:
            return sums[end], 0
        firsts = [first for first in range(count - 1, end) if first not in joined]
        parts = ((max(best(count - 1, first)[0], sums[end] - sums[first]), first) for first in firsts)
        return min(parts, default=(math.inf, 0))

    bounds, end = [], len(costs)
    for count in range(size, 0, -1):
        first = best(count, end)[1]
        bounds.append((first, end))
        end = first
    return bounds[::-1]


def _bounds(opened: OpenedModel, size: int) -> list[tuple[int, int]]:
    costs, given, joined = layer_costs(opened), opened.config.pipeline_layers, joined_layers(opened)
    if not given:
        return stage_bounds(costs, size, joined)
    counts = parse_layers(given)
    if sum(counts) != len(costs):
        raise ConfigError(f"--pipeline_layers {given} are {sum(counts)} layers, and the model has {len(costs)}")
    ends = list(itertools.accumulate(counts))
    for first in ends[:-1]:
        if first in joined:
            raise ConfigError(
                f"--pipeline_layers {given}: a stage cannot begin with layer {first}, which uses what layers before it "
                f"have made; it can with {', '.join(str(i) for i in range(1, len(costs)) if i not in joined) or 'none'}"
            )
    return list(zip([0, *ends[:-1]], ends, strict=True))


def stage_weights(opened: OpenedModel, size: int) -> list[int]:
    """Count the parameters of each of `size` stages of a model that is whole: those of its layers, the embedding, the
    head.

    Raises as `cut_stage`.
    """
    model: Any = opened.model
    costs = layer_costs(opened)
    sums = [sum(costs[first:end]) for first, end in _bounds(opened, size)]
    for stage, module in ((0, model.get_input_embeddings()), (-1, model.get_output_embeddings())):
        if module is not None:
            sums[stage] += sum(parameter.numel() for parameter in module.parameters())
    return sums


def cut_stage(opened: OpenedModel, link: StageLink) -> OpenedModel:
    """The part of `opened` that this stage runs. The skeleton is changed: it must be nobody else's.

    Raises UnsupportedError for a model that cannot be cut there, ConfigError for too many stages.
    """
    model: Any = opened.model
    first, end = _bounds(opened, link.size)[link.stage]
    kind, streams = opened.facts.model_type, opened.facts.num_streams
    layers = layer_list(model)
    assert layers is not None
    if len(layers) != len(opened.facts.layers):
        raise UnsupportedError(f"--pipeline: layers of model type {kind} have several caches each")
    facts = _facts(opened.facts, first, end)
    base = next(module for module in model.modules() if getattr(module, "layers", None) is layers)
    base.layers = _StageLayers(list(layers)[first:end], first, streams)
    for module in base.layers.modules():
        if isinstance(vars(module).get("layer_idx"), int):
            module.layer_number = module.layer_idx  # see layer_number
            module.layer_idx -= first
    _cut_configs(model, base, len(layers), first, end)
    if not link.is_first:
        model.set_input_embeddings(Incoming(link, model.get_input_embeddings(), streams))
        for name in _FACTORS:
            if hasattr(base, name):
                setattr(base, name, 1.0)
        if streams > 1:
            base.layers.run_with(base)
    if not link.is_last:
        norm, merge = (
            next((name for name in names if isinstance(getattr(base, name, None), nn.Module)), None)
            for names in (_NORMS, _MERGES)
        )
        if norm is None or not hasattr(model, "lm_head") or (streams > 1 and merge is None):
            raise UnsupportedError(f"--pipeline: model type {kind} has no norm and head of the usual names")
        model.lm_head = PassThrough()
        setattr(base, norm, PassThrough())
        setattr(base, merge if streams > 1 and merge is not None else norm, Outgoing(link))
    return replace(opened, facts=facts, source=CutSource(opened.source, {}, is_whole=False))


def _cut_configs(model: nn.Module, base: Any, num_layers: int, first: int, end: int) -> None:
    """Let configs speak of a stage's layers, but for what is made for all kinds of layers (rotations)."""
    others = [module for module in base.children() if module is not base.layers and "config" in vars(module)]
    for module in others:
        vars(module)["config"] = copy(vars(module)["config"])
    kept = {id(vars(module)["config"]) for module in others}
    for config in {id(one): one for one in _configs(model) if id(one) not in kept}.values():
        _cut_config(config, num_layers, first, end)


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
    layers = (
        layer if layer.shares is None else replace(layer, shares=layer.shares - first)
        for layer in facts.layers[first:end]
    )
    experts = facts.experts
    if experts is not None:
        experts = replace(experts, top_k=experts.top_k[first:end])
    return replace(facts, layers=tuple(layers), experts=experts, first_layer=first)
