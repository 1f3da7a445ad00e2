"""The cache that each layer of a planned model needs: its shape, its device, its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ktransformers.cache.paged import LayerShape
from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import LayerFacts, LayerKind, ModelFacts
from ktransformers.operators.attention.compressed import KCompressedAttention
from ktransformers.operators.attention.indexer import KIndexer
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.device import CPU, Device
from ktransformers.operators.recurrent.base import RecurrentOperator

__all__ = ["cache_shapes"]

_WITH_STATE = frozenset({LayerKind.RECURRENT, LayerKind.HYBRID})


def cache_shapes(
    model: nn.Module,
    facts: ModelFacts,
    operators: Mapping[str, nn.Module],
    layer_devices: Sequence[Device] | None = None,
) -> list[LayerShape]:
    """Return the cache that each layer needs, in the order of layer_idx. operators: the planned ones, by key.

    layer_devices: where the layers live, in order; the CPU when None.

    Latent shapes are for layers that run our absorbed MLA; any other attention module caches what it hands to the
    attention function. Recurrent layers keep a state, and layers that work row by row nothing.

    Raises UnsupportedError for layers in which nothing is found that could keep what they need.
    """
    shapes: dict[int, LayerShape] = {}
    projecting = set[int]()  # layers that make keys of their own
    for key, module in model.named_modules():
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int) or not hasattr(module, "scaling"):
            continue
        operator = operators.get(key)
        if getattr(module, "k_proj", None) is not None:
            projecting.add(layer_idx)
        if isinstance(operator, KMLAAttention):
            shapes[layer_idx] = LayerShape(1, operator.rank + operator.rope_dim, operator.rank, is_latent=True)
        elif isinstance(operator, KCompressedAttention):
            shapes[layer_idx] = LayerShape(1, operator.cached_dim, operator.head_dim, is_latent=True)
        elif layer_idx < facts.num_layers and facts.layers[layer_idx].kind is LayerKind.COMPRESSED:
            raise UnsupportedError(f"{key} has to be a KCompressedAttention, which alone knows where its keys lie")
        else:
            num_kv_heads = _handed_heads(module, facts.layers[layer_idx]) if layer_idx < facts.num_layers else 0
            shapes[layer_idx] = _expanded_shape(module, key, num_kv_heads)
            if layer_idx < facts.num_layers and facts.layers[layer_idx].kind is LayerKind.CHUNKED:
                shapes[layer_idx] = replace(shapes[layer_idx], chunk=facts.layers[layer_idx].window or 0)
        indexer = operators.get(f"{key}.indexer")
        if isinstance(indexer, KIndexer):
            shapes[layer_idx] = replace(shapes[layer_idx], index_dim=indexer.index_dim, index_pool=indexer.index_pool)
    _add_states(shapes, facts, operators)
    if sorted(shapes) != list(range(facts.num_layers)):
        what = f"of layers {sorted(shapes)} only" if shapes else "in none of its layers"
        raise UnsupportedError(
            f"model type {facts.model_type} attends by code of its own: modules that go through transformers' "
            f"attention interface were found {what}"
        )
    places = [CPU] * len(shapes) if layer_devices is None else layer_devices
    placed = [
        replace(
            shapes[i],
            place=layer_device.name,
            device=layer_device.torch_device,
            dtype=layer_device.dtype,
            row_dtype=layer_device.dtype,
        )
        for i, layer_device in enumerate(places)
    ]
    placed = [replace(one, is_borrowed=facts.layers[i].is_borrowing) for i, one in enumerate(placed)]
    sources = [None if i in projecting else layer.shares for i, layer in enumerate(facts.layers)]
    return [_shared(placed, i, source) for i, source in enumerate(sources)]


def _shared(shapes: Sequence[LayerShape], index: int, source: int | None) -> LayerShape:
    """The shape of a layer that shares an earlier one's cache, if that is of the same shape and on the same device."""
    is_same = source is not None and shapes[source] == shapes[index]
    return replace(shapes[index], shares=source) if is_same else shapes[index]


def _add_states(shapes: dict[int, LayerShape], facts: ModelFacts, operators: Mapping[str, nn.Module]) -> None:
    """The states of recurrent layers, and layers that keep nothing."""
    for operator in operators.values():
        if isinstance(operator, RecurrentOperator):
            shape = shapes.get(operator.layer_idx, LayerShape.without_pages())
            state = operator.state_shape()
            if shape.state is not None:  # a layer with two operators that keep something
                if shape.state.place != state.place:
                    raise UnsupportedError(
                        f"{operator.key} keeps a state on {state.place}, and the layer another one on "
                        f"{shape.state.place}; place both on one device"
                    )
                host = shape.state.host_parts | state.host_parts
                state = replace(state, parts={**shape.state.parts, **state.parts}, host_parts=host)
            shapes[operator.layer_idx] = replace(shape, state=state)
    for index, layer in enumerate(facts.layers):
        has_state = index in shapes and shapes[index].state is not None
        if not has_state and layer.kind in _WITH_STATE and (index not in shapes or layer.kind is LayerKind.HYBRID):
            raise UnsupportedError(
                f"model type {facts.model_type}: layer {index} ({layer.word}) keeps a state, and no operator stands "
                "for it; the rule file needs one that names ktransformers.operators.recurrent.KRecurrent, which knows "
                "Gated DeltaNet, Kimi Delta Attention, Mamba, Mamba-2, RG-LRU, short convolutions and lightning "
                "attention"
            )
        if index not in shapes and layer.kind is LayerKind.ROWWISE:
            shapes[index] = LayerShape.without_pages()


def _handed_heads(module: Any, layer: LayerFacts) -> int:
    """KV heads that the attention function is given: some modules repeat those that they project (JetMoE)."""
    is_repeated = getattr(module, "num_key_value_groups", None) == 1
    return layer.num_heads if is_repeated else layer.num_kv_heads


def _expanded_shape(module: Any, key: str, num_kv_heads: int) -> LayerShape:
    if hasattr(module, "qk_head_dim"):  # latent attention in its expanded form
        return LayerShape(module.num_heads, module.qk_head_dim, module.v_head_dim)
    head_dim = getattr(module, "head_dim", getattr(module, "head_size", None))
    if not isinstance(head_dim, int):
        raise UnsupportedError(f"{key} ({type(module).__name__}) does not say its head_dim")
    k_proj, v_proj = getattr(module, "k_proj", None), getattr(module, "v_proj", None)
    if isinstance(k_proj, nn.Linear):
        kv_heads = k_proj.out_features // head_dim
        value_dim = v_proj.out_features // kv_heads if isinstance(v_proj, nn.Linear) else head_dim
        return LayerShape(kv_heads, head_dim, value_dim)
    return LayerShape(num_kv_heads, head_dim, head_dim)  # projections are fused: the config's words count
