"""States of recurrent layers: per layer and sequence a few fp32 tensors of one size. Knows shapes, not who owns what.

    state of layer l, slot s      layer(l)["conv"][s]        [width - 1, channels], the last inputs of its convolution
                                  layer(l)["recurrent"][s]   [heads, key_dim, value_dim]

Slots of running sequences and of snapshots are alike, and nobody copies one to another: kernels read a sequence's
first state from one slot and write to others (kernels.types.StateStep). Who owns which is cache/state_slots.py's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ktransformers.core import SNAPSHOT_ALIGN

__all__ = ["SNAPSHOT_ALIGN", "StateCache", "StateShape"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape of one layer's state, by part ("conv", "recurrent"). place: the device as plans name it. host_parts: those
    that the CPU reads and writes, wherever the layer is.
    """

    parts: Mapping[str, tuple[int, ...]]
    place: str = "cpu"
    device: torch.device = _CPU
    host_parts: frozenset[str] = frozenset()

    def device_of(self, part: str) -> torch.device:
        """Return where a part lies."""
        return _CPU if part in self.host_parts else self.device

    @property
    def nbytes(self) -> int:
        """Bytes of one slot of a layer's state."""
        return sum(self.nbytes_by_place.values())

    @property
    def nbytes_by_place(self) -> dict[str, int]:
        """Bytes of one slot of a layer's state on each device, by its name in plans."""
        sizes: dict[str, int] = {}
        for name, shape in self.parts.items():
            place = "cpu" if name in self.host_parts else self.place
            sizes[place] = sizes.get(place, 0) + torch.float32.itemsize * math.prod(shape)
        return sizes


class StateCache:
    """Cache of recurrent states: num_slots states of each layer in `shapes`, by layer index. Memory is touched when it
    is written first.
    """

    def __init__(self, shapes: Mapping[int, StateShape], num_slots: int):
        if num_slots < 1:
            raise ValueError(f"states need at least one slot, got {num_slots}")
        self.shapes, self.num_slots = dict(shapes), num_slots
        self._layers = {
            index: {
                name: torch.zeros(num_slots, *part, device=shape.device_of(name)) for name, part in shape.parts.items()
            }
            for index, shape in shapes.items()
        }

    @staticmethod
    def size_by_place(shapes: Mapping[int, StateShape], num_slots: int) -> dict[str, int]:
        """Return the bytes of `num_slots` slots on each device, by its name in plans."""
        sizes: dict[str, int] = {}
        for shape in shapes.values():
            for place, nbytes in shape.nbytes_by_place.items():
                sizes[place] = sizes.get(place, 0) + num_slots * nbytes
        return sizes

    @property
    def nbytes(self) -> int:
        return sum(self.size_by_place(self.shapes, self.num_slots).values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all states, by name ("3.conv"): fp32 [num_slots, ...] each."""
        return {f"{index}.{name}": part for index, parts in self._layers.items() for name, part in parts.items()}

    def layer(self, layer_idx: int) -> Mapping[str, torch.Tensor]:
        """Return a layer's states by part: fp32 [num_slots, *shape], which kernels write in place. Raises KeyError for
        layers without.
        """
        return self._layers[layer_idx]
