"""Decoder layers on the CPU one after another in one native call, in steps of few rows.

What Python takes between two native calls runs with cold caches: 30 us each time, of which a step of 48 layers has
96. Layers that are native as a whole (layers/cpu.py) and are handed the same by their model are one module,
`NativeStack`. What it computes is compared with what they compute one by one: it is the same, bit for bit.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.cache.paged import LayerShape
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.layer import LayerKv, RecurrentLayer
from ktransformers.kernels.cpu.stack import NativeLayerStack
from ktransformers.operators.context import ForwardContext, LayerCache
from ktransformers.operators.layers.cpu import FusedLayer
from ktransformers.operators.layers.joined import Done, handed
from ktransformers.operators.layers.traced import (
    PROBE_ROWS,
    LayerCall,
    keep_attention_type,
    layer_list,
    probe_ids,
    probe_logits,
)

__all__ = ["NativeStack", "stack_cpu_layers"]

logger = logging.getLogger(__name__)

MOST_ROWS = 64
"""Of a step whose layers run in one call. Beyond, kernels take so long that nothing is gained, and a step can be
interrupted between layers."""


class NativeStack(nn.Module):
    """Stands in for the first of some neighbouring decoder layers and computes them all: fp32 [1, T, H] in and out.

    first: the place in the model of the first of `layers`.
    """

    def __init__(self, layers: Sequence[FusedLayer], first: int = 0):
        super().__init__()
        self.layers, self.first = nn.ModuleList(layers), first
        self._pool, self._memory_between = layers[0].pool, layers[0].memory
        parts = [(layer.attention, layer.feed_forward) for layer in layers]
        self._native = NativeLayerStack(
            [(mixer, block) for mixer, block in parts if mixer is not None and block is not None]
        )
        self._indices = [layer.layer_idx for layer in layers]
        self._mixers = [mixer for mixer, _ in parts]
        self._attending = [layer for layer in layers if not isinstance(layer.attention, RecurrentLayer)][:1]
        self._bound: weakref.ref[LayerCache] | None = None
        keep_attention_type(self, layers[0])

    @override
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        context: ForwardContext = kwargs["forward_context"]
        pictures = context.pictures
        if hidden_states.shape[-2] > MOST_ROWS or (
            pictures is not None and (pictures.by_layer or pictures.ends is not None)
        ):
            if pictures is not None and not self.first:
                hidden_states = pictures.add_behind(-1, hidden_states)
            for index, layer in enumerate(self.layers, self.first):
                hidden_states = layer(hidden_states, *args, **kwargs)
                if pictures is not None:
                    hidden_states = pictures.add_behind(index, hidden_states)
            return hidden_states
        with torch._C.DisableTorchFunction():  # see kernels/untraced.py
            if self._bound is None or self._bound() is not context.cache:
                self._bind(context.cache)
            rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
            step = self._attending[0].attention_step(context, kwargs) if self._attending else None
            self._native.forward(rows, step, context.states, self._pool, self._memory_between)
            return rows.view(hidden_states.shape)

    def _bind(self, cache: LayerCache) -> None:
        """Its tensors are the same as long as it lives."""
        self._native.bind([self._memory(cache, *one) for one in zip(self._indices, self._mixers, strict=True)])
        self._bound = weakref.ref(cache)

    @staticmethod
    def _memory(cache: LayerCache, index: int, mixer: object) -> LayerKv | tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(mixer, RecurrentLayer):
            return LayerKv(*cache.layer(index), cache.scales(index), cache.shape(index).bf16_products)
        assert cache.states is not None, "a cache without states"
        parts = cache.states.layer(index)
        return parts["conv"], parts["recurrent"]


@torch.inference_mode()
def stack_cpu_layers(model: nn.Module, shapes: list[LayerShape], pool: WorkerPool, calls: Sequence[LayerCall]) -> int:
    """Put NativeStacks in the places of a loaded model's FusedLayers; returns how many layers they compute.

    shapes: of the cache, layer by layer. calls: of the layers in one step; neighbours that are handed different things
    are not joined. Where the model's logits are not the same with stacks, its layers stay as they are.
    """
    layers = layer_list(model)
    if layers is None:
        return 0
    before, alone, same = list(layers), _logits(model, shapes, pool), handed(calls)
    whole = [isinstance(layer, FusedLayer) and layer.is_native for layer in before]
    count, skipped = 0, int(getattr(layers, "first", 0))  # layers that other stages of a pipeline have
    for _, run in groupby(range(len(before)), key=lambda i: (whole[i], same[i])):
        first, *others = run
        joined = [layer for i in (first, *others) if isinstance(layer := before[i], FusedLayer) and whole[i]]
        if len(joined) < min(len(before), 2):
            continue
        try:
            layers[first] = NativeStack(joined, skipped + first)
        except ValueError as error:
            logger.debug("layers %d to %d stay apart: %s", first, first + len(others), error)
            continue
        for i in others:
            layers[i] = Done(before[i])
        count += len(joined)
    if count == len(before) and isinstance(layers[0], NativeStack) and len(layers[0].layers) == count:
        del layers[1:]  # to be asked to do nothing takes time, too
    if count and not torch.equal(_logits(model, shapes, pool), alone):
        logger.info("layers stay apart: the model does something between them")
        del layers[:]
        layers.extend(before)
        return 0
    logger.debug("%d of %d decoder layers run together in native calls", count, len(before))
    return count


def _logits(model: nn.Module, shapes: list[LayerShape], pool: WorkerPool) -> torch.Tensor:
    """Of all rows of a step of different tokens."""
    rows, ids = torch.arange(PROBE_ROWS), probe_ids(int(model.config.vocab_size))  # type: ignore[union-attr, arg-type]
    return probe_logits(model, shapes, pool, ids, rows, rows).clone()
