"""Keys and values in pages that any sequence can own. Knows shapes and slots, not who owns what.

L layers; per layer (KGQACache): keys [num_pages * page_size, kv_heads, key_dim], values [..., kv_heads, value_dim]
slot of position p of a sequence: block_table[p // page_size] * page_size + p % page_size
latent attention (MLA, KDeepSeekV3Cache): kv_heads is 1, and values is a view of the first value_dim columns of keys
a layer that shares another's keys and values: the same tensors; so does a drafter's layer that attends to its target's
types of 8 bits: a scale beside the codes, fp32 [slots, kv_heads, 1]; of latent keys [slots, 1, 2], for the latent part
and for the rotated one, of which the former is the values' too. A code times its scale is the value.
layers that keep a state instead (cache/state.py), or nothing, have 0 kv_heads; `states` has the former
sparse attention: the keys of a layer's indexer beside them, [num_pages * page_size, index_dim]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ktransformers.cache.state import StateCache, StateShape
from ktransformers.errors import ConfigError

__all__ = [
    "KDeepSeekV3Cache",
    "KGQACache",
    "LayerShape",
    "Lenders",
    "PagedCache",
    "Scales",
    "check_page_size",
    "state_shapes",
]

_CPU = torch.device("cpu")
_SCALE_NBYTES = torch.float32.itemsize

Scales = tuple[torch.Tensor | None, torch.Tensor | None]
"""Of keys, fp32 [slots, kv_heads, parts], and values, fp32 [slots, kv_heads, 1]; None for types that need none."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's cache. is_latent: values are part of the keys and take no bytes of their own.

    index_dim: of the keys that an indexer chooses positions by, 0 without; index_pool: how many it chooses together,
    from multiples of that on, whose slots follow each other.
    place: the device as plans name it; device: where its tensors are. dtype: what keys and values are kept in.
    kept_products: attention multiplies what is kept as it is, with queries rounded to that: codes in prefill steps on a
    GPU, bf16 in all steps on the CPU.
    row_dtype: of the rows that they are made of, and of an indexer's keys.
    shares: the earlier layer whose keys and values these are, which takes no bytes; None for tensors of its own.
    is_borrowed: another model's layer writes these keys and values, which take no bytes here.
    chunk: positions come in chunks of so many, and attention sees those of a row's own; 0: it has no such borders.
    state: what a recurrent layer keeps of a sequence, whose slots are counted apart.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    is_latent: bool = False
    place: str = "cpu"
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    row_dtype: torch.dtype = torch.float32
    shares: int | None = None
    is_borrowed: bool = False
    chunk: int = 0
    state: StateShape | None = None
    index_dim: int = 0
    index_pool: int = 1
    kept_products: bool = False

    @classmethod
    def without_pages(cls, state: StateShape | None = None) -> LayerShape:
        """Return the shape of a layer that keeps no keys and values."""
        return cls(0, 0, 0, state=state)

    @property
    def has_pages(self) -> bool:
        """Whether the layer keeps keys and values."""
        return self.kv_heads > 0

    @property
    def is_own(self) -> bool:
        """Whether the layer's attention writes what it reads."""
        return self.shares is None and not self.is_borrowed

    @property
    def is_scaled(self) -> bool:
        """Whether the layer keeps codes of 8 bits with scales."""
        return self.dtype.itemsize == 1

    @property
    def key_parts(self) -> int:
        """Number of parts of a key with a scale each: latent and rotated, or one."""
        return 2 if self.is_latent else 1

    @property
    def bf16_products(self) -> bool:
        """Whether the CPU's attention multiplies in bf16."""
        return self.kept_products and self.place == "cpu"

    def unrounded(self) -> LayerShape:
        """Return the shape of a cache that keeps rows as they come."""
        return replace(self, dtype=self.row_dtype, kept_products=False)

    def nbytes(self, num_slots: int) -> int:
        """Return the bytes that the layer's own keys and values at `num_slots` positions take."""
        return self.read_nbytes(num_slots) if self.is_own else 0

    def read_nbytes(self, num_slots: int) -> int:
        """Return the bytes of the keys and values that attention reads at `num_slots` positions, of whichever layer,
        and of an indexer's keys.
        """
        values = 0 if self.is_latent else self.value_dim
        position = self.dtype.itemsize * self.kv_heads * (self.key_dim + values)
        if self.is_scaled:
            position += _SCALE_NBYTES * self.kv_heads * (self.key_parts + (not self.is_latent))
        return num_slots * (position + self.row_dtype.itemsize * self.index_dim)


class KGQACache:
    """Keys and values of one layer with multi-head or grouped-query attention, at num_slots positions.

    keys: [num_slots, kv_heads, key_dim], values: [num_slots, kv_heads, value_dim], of the shape's dtype, on its device.
    scales: see Scales. Operators write to all of them in place.
    """

    def __init__(self, shape: LayerShape, num_slots: int):
        self._shape, self._num_slots = shape, num_slots
        self.keys = torch.zeros(num_slots, shape.kv_heads, shape.key_dim, device=shape.device, dtype=shape.dtype)
        self.values = self._make_values()
        self.scales: Scales = (None, None)
        if shape.is_scaled and shape.has_pages:
            self.scales = self._make_scales()

    def _make_values(self) -> torch.Tensor:
        shape = self._shape
        size = self._num_slots, shape.kv_heads, shape.value_dim
        return torch.zeros(size, device=shape.device, dtype=shape.dtype)

    def _make_scales(self) -> Scales:
        keys = self._make_key_scales()
        return keys, torch.zeros_like(keys)

    def _make_key_scales(self) -> torch.Tensor:
        shape = self._shape
        return torch.zeros(self._num_slots, shape.kv_heads, shape.key_parts, device=shape.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what is kept by position, by name ("keys"): [num_slots, ...] each, no byte of them twice."""
        key_scales, value_scales = self.scales
        named = {"keys": self.keys, "values": self.values, "key_scales": key_scales, "value_scales": value_scales}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


class KDeepSeekV3Cache(KGQACache):
    """Latents and rotated keys of one layer with multi-head latent attention (MLA), at num_slots positions.

    keys: [num_slots, 1, key_dim], the latent and then the rotated part. values: a view of the latent part,
    [num_slots, 1, value_dim], so that they and their scales take no bytes of their own.
    """

    def _make_values(self) -> torch.Tensor:
        return self.keys[..., : self._shape.value_dim]

    def _make_scales(self) -> Scales:
        keys = self._make_key_scales()
        return keys, keys[..., :1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what is kept by position, by name, as KGQACache does; without the views."""
        return {name: tensor for name, tensor in super().tensors().items() if not name.startswith("value")}


def _layer_cache(shape: LayerShape, num_slots: int) -> KGQACache:
    return (KDeepSeekV3Cache if shape.is_latent else KGQACache)(shape, num_slots)


class PagedCache:
    """Cache of all layers in num_pages pages of page_size positions. Memory is touched when it is written first.

    states: of recurrent layers, num_states slots; None where no layer is recurrent. has_states: layers in other
    processes are, so that sequences have slots all the same. lenders: another cache of as many positions, and which of
    its layers each borrowing layer attends to.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_pages: int,
        page_size: int,
        num_states: int = 1,
        *,
        has_states: bool = False,
        lenders: Lenders | None = None,
    ):
        if lenders is not None:
            shapes = lenders.lent(shapes)
        self.shapes, self.num_pages, self.page_size = tuple(shapes), num_pages, page_size
        self._layers: list[KGQACache] = []
        for index, shape in enumerate(self.shapes):
            if shape.is_borrowed and lenders is not None:
                self._layers.append(lenders.cache._layers[lenders.layers[index]])
            elif shape.shares is None:
                self._layers.append(_layer_cache(shape, self.num_slots))
            else:
                self._layers.append(self._layers[shape.shares])
        states = state_shapes(self.shapes)
        self.states = StateCache(states, num_states) if states or has_states else None
        self._index_keys = [
            torch.zeros(self.num_slots, shape.index_dim, device=shape.device, dtype=shape.row_dtype)
            for shape in self.shapes
        ]

    @staticmethod
    def size(shapes: Sequence[LayerShape], num_slots: int) -> int:
        """Return the bytes that a cache of these shapes takes."""
        return sum(shape.nbytes(num_slots) for shape in shapes)

    @staticmethod
    def size_by_place(shapes: Sequence[LayerShape], num_slots: int) -> dict[str, int]:
        """Return the bytes that a cache of these shapes takes on each device, by its name in plans."""
        sizes: dict[str, int] = {}
        for shape in shapes:
            sizes[shape.place] = sizes.get(shape.place, 0) + shape.nbytes(num_slots)
        return sizes

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def nbytes(self) -> int:
        return self.size(self.shapes, self.num_slots) + (0 if self.states is None else self.states.nbytes)

    @property
    def num_states(self) -> int:
        """Number of slots of states; 0 where no layer is recurrent."""
        return 0 if self.states is None else self.states.num_slots

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (keys, values) of layer `layer_idx`; the attention operator writes to them in place."""
        cache = self._layers[layer_idx]
        return cache.keys, cache.values

    def scales(self, layer_idx: int) -> Scales:
        """Return the scales of layer `layer_idx`'s keys and values, which are written with them."""
        return self._layers[layer_idx].scales

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all that is kept by position, by name ("3.keys"): [num_slots, ...] each, no byte of them twice."""
        found: dict[str, torch.Tensor] = {}
        for index, shape in enumerate(self.shapes):
            if shape.has_pages and shape.is_own:
                found |= {f"{index}.{name}": tensor for name, tensor in self._layers[index].tensors().items()}
            if shape.index_dim:
                found[f"{index}.index_keys"] = self._index_keys[index]
        return found

    def shape(self, layer_idx: int) -> LayerShape:
        """Return what layer `layer_idx` caches."""
        return self.shapes[layer_idx]

    def index_keys(self, layer_idx: int) -> torch.Tensor:
        """Return the keys of layer `layer_idx`'s indexer, [slots, index_dim]; the indexer writes to them in place."""
        return self._index_keys[layer_idx]

    def is_on_gpu(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` lives on a GPU, where other kernels read it."""
        return self.shapes[layer_idx].place != "cpu"


@dataclass(frozen=True, slots=True)
class Lenders:
    """The cache of another model, and by each borrowing layer of this one the layer whose keys and values it reads."""

    cache: PagedCache
    layers: Mapping[int, int]

    def lent(self, shapes: Sequence[LayerShape]) -> list[LayerShape]:
        """Return the shapes as those layers keep them: of their types, on their devices."""
        kept = {index: self.cache.shapes[lender] for index, lender in self.layers.items()}
        borrowed = {index: replace(shape, shares=None, is_borrowed=True) for index, shape in kept.items()}
        return [borrowed.get(index, shape) for index, shape in enumerate(shapes)]


def check_page_size(shapes: Sequence[LayerShape], num_slots: int, page_size: int) -> None:
    """Raise ConfigError for pages whose borders cut what an indexer chooses together."""
    for shape in shapes:
        if num_slots > page_size and page_size % shape.index_pool:
            raise ConfigError(
                f"--page_size {page_size}: the model's indexer chooses {shape.index_pool} tokens together; a page has "
                f"to hold a multiple of {shape.index_pool}"
            )


def state_shapes(shapes: Sequence[LayerShape]) -> dict[int, StateShape]:
    """Return the shapes of the recurrent layers' states, by layer index."""
    return {index: shape.state for index, shape in enumerate(shapes) if shape.state is not None}
