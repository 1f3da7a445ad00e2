"""Load of a step of any number of rows: what it multiplies, reads and attends to, layer by layer.

Pure: knows plans and facts; `predict.py` gives these numbers times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ktransformers.cache.paged import LayerShape
from ktransformers.models.facts import LayerFacts, LayerKind, ModelFacts
from ktransformers.optimize.decode_bound import is_embedding, is_shared_expert, layer_of, reads_of
from ktransformers.optimize.plan import Plan, PlanEntry
from ktransformers.optimize.streaming import STREAMED_OP

__all__ = ["AttentionLoad", "ExpertLoad", "LayerLoad", "Matrix", "StepLoad", "step_load"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights that every row is multiplied with. types: all that the module holds; its bytes are taken as shared out
    evenly. is_shared: of a shared expert, which runs beside routed ones that are elsewhere."""

    device: str
    types: tuple[str, ...]
    nbytes: float
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Routed experts of a layer on one device: `share` of them. nbytes: of those that are there.

    prefill_device: where a step of many rows may have them copied to; the device itself where they stay.
    """

    device: str
    prefill_device: str
    types: tuple[str, ...]
    nbytes: float
    num_experts: int
    top_k: int
    share: float = 1.0

    def touched(self, rows: int) -> float:
        """Return how many of `num_experts` a step of `rows` touches when all are equally likely, as a mean."""
        return self.num_experts * (1.0 - (1.0 - self.top_k / self.num_experts) ** rows)


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """Attention of a layer as a step's load. device: where the cache is. kind: "grouped" or "latent". width:
    multiplications of a row for each position that it sees. position_bytes: of a position's key and value. window: most
    positions that a row sees; None for all.
    """

    device: str
    kind: str
    width: int
    position_bytes: int
    window: int | None

    def seen(self, first: int, rows: int) -> float:
        """Return the positions that rows first + 1 ... first + rows of a sequence see, as a sum."""
        limit = self.window
        if limit is None:
            return rows * (first + (rows + 1) / 2)
        return float(sum(min(first + i + 1, limit) for i in range(rows)))


@dataclass(slots=True)
class LayerLoad:
    """Load of a decoder layer. steps: the kind under which StepCost knows it. layer_device: the device of its hidden
    states.
    """

    layer_device: str = "cpu"
    steps: str = "grouped"
    matrices: list[Matrix] = field(default_factory=list)
    experts: list[ExpertLoad] = field(default_factory=list)
    attention: AttentionLoad | None = None


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Load of a step. layers: the decoder's. outside: what rows that ask for logits are multiplied with."""

    layers: tuple[LayerLoad, ...]
    outside: tuple[Matrix, ...]

    def devices(self) -> set[str]:
        """Return all devices that take part in a step."""
        found = {matrix.device for matrix in self.outside}
        for layer in self.layers:
            found |= {
                layer.layer_device,
                *(one.device for one in layer.matrices),
                *(one.device for one in layer.experts),
            }
            found |= {one.prefill_device for one in layer.experts}
            found |= set() if layer.attention is None else {layer.attention.device}
        return found


def step_load(
    plan: Plan, experts: Mapping[str, int], top_k: Mapping[str, int], shapes: Sequence[LayerShape], facts: ModelFacts
) -> StepLoad:
    """Return the load of a plan's steps, by the bytes that are resident. experts, top_k: how many each experts module
    has, and how many a token takes.
    """
    layers: dict[int, LayerLoad] = {}
    outside: list[Matrix] = []
    heads = set(plan.shared.values())
    for entry in plan.entries:
        if is_embedding(entry) and entry.key not in heads:
            continue
        number = layer_of(entry)
        layer = layers.setdefault(number, LayerLoad()) if number >= 0 else None
        if layer is not None and entry.key in experts:
            layer.experts += _experts(entry, experts[entry.key], top_k[entry.key], plan.slots.get(entry.key))
        else:
            (outside if layer is None else layer.matrices).extend(_matrices(entry))
        if layer is not None:
            layer.layer_device = entry.placement.layer_device or layer.layer_device
            if any(name.endswith(".sinks") for name in entry.stored_names):
                layer.steps = "sinks"
    for number, (shape, fact) in enumerate(zip(shapes, facts.layers, strict=True)):
        layer = layers.setdefault(number, LayerLoad())
        layer.attention = _attention(shape, fact, facts)
        if layer.attention is not None and layer.attention.kind == "latent":
            layer.steps = "latent"
    return StepLoad(tuple(layers[number] for number in sorted(layers)), tuple(outside))


def _types(entry: PlanEntry) -> tuple[str, ...]:
    """Resident ones: of "Q3_K>Q6_K" the second."""
    return tuple(dict.fromkeys(name.rpartition(">")[2] for name in entry.quant_types)) or ("F32",)


def _matrices(entry: PlanEntry) -> list[Matrix]:
    is_shared = is_shared_expert(entry)
    return [Matrix(device, _types(entry), float(n), is_shared) for device, n in entry.nbytes.items() if n]


def _experts(entry: PlanEntry, count: int, top_k: int, slots: tuple[str, float] | None) -> list[ExpertLoad]:
    """slots: a GPU, and the share of the experts that has a slot there: as often used as others are."""
    total = sum(entry.nbytes.values()) + entry.stored_experts
    found = []
    for device, nbytes in reads_of(entry, slots).items():
        if nbytes:
            is_streamed = device == "cpu" and entry.prefill_op == STREAMED_OP
            streams_to = entry.placement.prefill_device if is_streamed else device
            found.append(
                ExpertLoad(device, streams_to, _types(entry), float(nbytes), count, top_k, share=nbytes / total)
            )
    return found


def _attention(shape: LayerShape, layer: LayerFacts, facts: ModelFacts) -> AttentionLoad | None:
    """None for layers whose state does not grow with the sequence."""
    if layer.kind is LayerKind.RECURRENT or not shape.read_nbytes(1):
        return None
    kind = "latent" if shape.is_latent else "grouped"
    width = layer.num_heads * (shape.key_dim + shape.value_dim)
    return AttentionLoad(shape.place, kind, width, shape.read_nbytes(1), layer.window)
