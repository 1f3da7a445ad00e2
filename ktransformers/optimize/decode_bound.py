"""Computes what a decode step reads, and how many tokens a second memory allows at most.

A step of one sequence reads every weight that takes part in it once: what is in a layer but its routed experts, of
those the ones that the router chooses, the LM head, and the keys and values of the tokens before. The embedding table
is looked up, one row of it, and so are tables of n-grams, a few. Layers run one after another, and so do the parts of a
layer, whatever device they are on; only routed and shared experts run beside those that are on another device. Routed
experts of which some have a slot on a GPU are read there as often as even routing has it. So, with B the bytes over the
device's bandwidth,

    seconds = sum over layers (B(attention, dense, cache) + max over devices (B(routed there) + B(shared there)))
              + B(head)

Hand-overs, arithmetic and launches take time too, so this is a bound. Weights that fit into the processor's caches can
be read faster than memory is. Pure: knows plans, measures nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ktransformers.cache.paged import LayerShape
from ktransformers.models.facts import ModelFacts
from ktransformers.optimize.plan import Plan, PlanEntry

__all__ = ["DecodeReads", "LayerReads", "decode_reads", "reads_of"]

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SHARED = re.compile(r"\.shared_(?:expert|mlp)")
_OUTSIDE = -1


@dataclass(slots=True)
class LayerReads:
    """Bytes that a token makes each device read in one layer, by device. alone: all but experts."""

    alone: dict[str, float] = field(default_factory=dict)
    routed: dict[str, float] = field(default_factory=dict)
    shared: dict[str, float] = field(default_factory=dict)

    def seconds(self, bandwidth: Mapping[str, float]) -> float:
        """Return the seconds that the reads take, at bytes a second by device."""
        alone = sum(nbytes / bandwidth[device] for device, nbytes in self.alone.items())
        devices = {*self.routed, *self.shared}
        beside = ((self.routed.get(one, 0.0) + self.shared.get(one, 0.0)) / bandwidth[one] for one in devices)
        return alone + max(beside, default=0.0)


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """Reads of a decoded token. layers: in order, and what is outside of all layers. shapes: of each layer's cache.

    windows: most tokens that each layer looks back, None for all of them.
    """

    layers: tuple[LayerReads, ...]
    shapes: tuple[LayerShape, ...]
    windows: tuple[int | None, ...]

    def cache_bytes(self, context: int) -> dict[str, int]:
        """Return the bytes of keys, values and states by device, with `context` tokens in the cache."""
        total: dict[str, int] = {}
        for shape, window in zip(self.shapes, self.windows, strict=True):
            nbytes = shape.read_nbytes(context if window is None else min(context, window))
            nbytes += 0 if shape.state is None else 2 * shape.state.nbytes  # read and written
            total[shape.place] = total.get(shape.place, 0) + nbytes
        return {place: nbytes for place, nbytes in total.items() if nbytes}

    def bytes_per_token(self, context: int = 0) -> dict[str, int]:
        """Return the bytes that a token makes each device read."""
        total: dict[str, float] = dict(self.cache_bytes(context).items())
        for layer in self.layers:
            for part in (layer.alone, layer.routed, layer.shared):
                for device, nbytes in part.items():
                    total[device] = total.get(device, 0) + nbytes
        return {device: round(nbytes) for device, nbytes in sorted(total.items())}

    def tokens_per_s(self, bandwidth: Mapping[str, float], context: int = 0) -> float | None:
        """Return the most tokens a second of one sequence alone; None where the bandwidth of a device is not known."""
        if not set(self.bytes_per_token(context)) <= set(bandwidth):
            return None
        cache = sum(nbytes / bandwidth[place] for place, nbytes in self.cache_bytes(context).items())
        seconds = cache + sum(layer.seconds(bandwidth) for layer in self.layers)
        return 1 / seconds if seconds else None


def decode_reads(
    plan: Plan, experts: Mapping[str, int], top_k: Mapping[str, int], shapes: Sequence[LayerShape], facts: ModelFacts
) -> DecodeReads:
    """Return what a decoded token reads of a plan, by the bytes that are resident. experts, top_k: how many each
    experts module has, and how many a token takes.
    """
    layers: dict[int, LayerReads] = {}
    heads = set(plan.shared.values())
    for entry in plan.entries:
        layer = layers.setdefault(layer_of(entry), LayerReads())
        if entry.key in experts:
            part, share = layer.routed, top_k[entry.key] / experts[entry.key]
        else:
            part, share = (layer.shared if is_shared_expert(entry) else layer.alone), 1.0
            if is_embedding(entry) and entry.key not in heads:
                continue
        for device, nbytes in reads_of(entry, plan.slots.get(entry.key)).items():
            part[device] = part.get(device, 0.0) + nbytes * share
    return DecodeReads(tuple(layers.values()), tuple(shapes), tuple(layer.window for layer in facts.layers))


def reads_of(entry: PlanEntry, slots: tuple[str, float] | None = None) -> dict[str, float]:
    """Return the bytes of a module by the device on which they are read; those of experts that stay in files are read
    from slots in RAM. slots: a GPU, and the share of a module's experts on the CPU that has a slot there.
    """
    nbytes: dict[str, float] = {
        device: count - entry.looked_up.get(device, 0) for device, count in entry.nbytes.items()
    }
    if entry.stored_experts:
        nbytes["cpu"] = nbytes.get("cpu", 0) + entry.stored_experts
    if slots is not None:
        device, share = slots
        on_cpu = nbytes.get("cpu", 0.0)
        nbytes["cpu"] = on_cpu * (1.0 - share)
        nbytes[device] = nbytes.get(device, 0.0) + on_cpu * share
    return nbytes


def layer_of(entry: PlanEntry) -> int:
    """Return the number of the decoder layer that a module is in, -1 outside of all."""
    found = _LAYER.search(entry.key)
    return _OUTSIDE if found is None else int(found.group())


def is_shared_expert(entry: PlanEntry) -> bool:
    """Whether the module is of an expert that every token takes."""
    return _SHARED.search(entry.key) is not None


def is_embedding(entry: PlanEntry) -> bool:
    """Whether the module is a table of which a token reads one row."""
    return entry.hf_class.endswith("Embedding") and layer_of(entry) == _OUTSIDE
