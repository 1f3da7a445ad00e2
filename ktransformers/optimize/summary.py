"""Sums a plan up in a few numbers: the model, its parameters and bytes, where its parts go, what decoding reads.

Pure: facts of a plan and of a model on meta, in plain types. `ktransformers plan` prints them
(cli/models/plan_screen.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ktransformers.cache.paged import LayerShape
from ktransformers.models.facts import ModelFacts
from ktransformers.models.registry import routed_experts
from ktransformers.optimize.decode_bound import DecodeReads, decode_reads, is_embedding, layer_of
from ktransformers.optimize.expert_slots import EXPERT_SLOTS, FILES
from ktransformers.optimize.plan import Plan, PlanEntry
from ktransformers.optimize.step_load import StepLoad, step_load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["EXTRA_PARTS", "PARTS", "ModelSize", "Summary", "SummaryPart", "parts_of", "size_of", "summarize"]

PARTS = ("experts", "attention", "dense and shared", "embeddings and head")
"""What weights are for, in the order in which they are shown. Routers and norms are with the dense parts."""

EXTRA_PARTS = ("cache", "draft model", "tower", "pictures", "work space", "hot experts", EXPERT_SLOTS)
"""What there is beside weights."""

_ATTENTION = re.compile(r"\.(?:self_attn|attention|attn)(?:\.|$)")
_CACHE = ("kv cache", "states", "kv tiers")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a model in parameters: what is trained, tied ones once, buffers not.

    active: those that a token is multiplied with: of routed experts the ones chosen, and no table of embeddings, of
    which it reads a row; an LM head counts, also where it is the table. experts, top_k: of the layer with the most.
    """

    parameters: int
    active: int
    layers: int
    experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class SummaryPart:
    """A part of the model on one device, or on GPUs, which are shown together. types: by bytes, the most first."""

    name: str
    devices: tuple[str, ...]
    nbytes: int
    types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a model on a machine. disk_bytes: of the files, None without files. context_len: None where the model
    does not say. cache_tokens: what the cache will hold. chunk_size: tokens of a prefill step. resident: parameters
    that take memory, all but those of tables that stay in files. stored_bytes: of experts that stay in files. top_k:
    experts that a token takes of a module, and of how many.
    """

    name: str
    family: str
    size: ModelSize
    resident: int
    disk_bytes: int | None
    memory_bytes: int
    stored_bytes: int
    context_len: int | None
    cache_tokens: int
    chunk_size: int
    parts: tuple[SummaryPart, ...]
    reads: DecodeReads
    load: StepLoad
    top_k: Mapping[str, tuple[int, int]]

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of what is resident, and of experts that stay in files."""
        return 8 * (self.memory_bytes + self.stored_bytes) / max(self.resident, 1)


def summarize(
    plan: Plan,
    model: PreTrainedModel,
    *,
    facts: ModelFacts,
    name: str,
    shapes: Sequence[LayerShape],
    cache_tokens: int,
    chunk_size: int,
    disk_bytes: int | None,
) -> Summary:
    """Sum a plan up. model: the one that was planned, on meta. shapes: of each layer's cache."""
    experts = routed_experts(model)
    top_k = _top_k(experts, plan.entries, facts)
    size = size_of(model, facts, experts, top_k)
    return Summary(
        name=name,
        family=plan.model_type,
        size=size,
        resident=size.parameters - sum(entry.in_files for entry in plan.entries),
        disk_bytes=disk_bytes,
        memory_bytes=sum(plan.weight_bytes.values()),
        stored_bytes=plan.stored_experts,
        context_len=facts.context_len,
        cache_tokens=cache_tokens,
        chunk_size=chunk_size,
        parts=parts_of(plan, experts),
        reads=decode_reads(plan, experts, top_k, shapes, facts),
        load=step_load(plan, experts, top_k, shapes, facts),
        top_k={key: (top_k[key], count) for key, count in experts.items()},
    )


def _top_k(experts: Mapping[str, int], entries: Iterable[PlanEntry], facts: ModelFacts) -> dict[str, int]:
    """Experts of a token by experts module; all of them where the config does not say, which is never too few."""
    numbers = {entry.key: layer_of(entry) for entry in entries if entry.key in experts}
    asked = {key: facts.top_k(layer) for key, layer in numbers.items()}
    return {key: asked.get(key, 0) or count for key, count in experts.items()}


def size_of(
    model: PreTrainedModel, facts: ModelFacts, experts: Mapping[str, int], top_k: Mapping[str, int]
) -> ModelSize:
    """Count the model's parameters on its modules; see ModelSize."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters() if name not in tied}
    total, active = sum(sizes.values()), 0.0
    table = {f"{key}.weight" for key, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, count in sizes.items():
        key = name.rpartition(".")[0]
        if key in experts:
            active += count * top_k[key] / experts[key]
        elif name not in table or tied:
            active += count
    return ModelSize(
        parameters=total,
        active=round(active),
        layers=facts.num_layers,
        experts=max(experts.values(), default=0),
        top_k=max(top_k.values(), default=0),
    )


def parts_of(plan: Plan, experts: Mapping[str, int]) -> tuple[SummaryPart, ...]:
    """Return the weights by what they are for and where they are, then what is beside them."""
    nbytes: Counter[tuple[str, str]] = Counter()
    types: dict[tuple[str, str], Counter[str]] = {}
    for entry in plan.entries:
        name = _part_of(entry, experts)
        places = {**entry.nbytes, FILES: entry.stored_experts} if entry.stored_experts else entry.nbytes
        for device, count in places.items():
            nbytes[name, device] += count
            held = types.setdefault((name, device), Counter())
            held.update(dict.fromkeys(entry.quant_types, count))
    for what, by_device in plan.extra_bytes.items():
        for device, count in by_device.items():
            part = what if what in EXTRA_PARTS else EXTRA_PARTS[0] if what in _CACHE else "work space"
            nbytes[part, device] += count
    found = []
    for name in (*PARTS, *EXTRA_PARTS):
        for devices in _places(sorted(device for part, device in nbytes if part == name)):
            total = sum(nbytes[name, device] for device in devices)
            kinds = sum((types.get((name, device), Counter()) for device in devices), Counter[str]())
            if total:
                found.append(SummaryPart(name, devices, total, tuple(kind for kind, _ in kinds.most_common())))
    return tuple(found)


def _part_of(entry: PlanEntry, experts: Mapping[str, int]) -> str:
    if entry.key in experts:
        return PARTS[0]
    if layer_of(entry) < 0:
        return PARTS[3] if is_embedding(entry) or entry.key.endswith(("lm_head", "embed_out")) else PARTS[2]
    return PARTS[1] if _ATTENTION.search(entry.key) else PARTS[2]


def _places(devices: Sequence[str]) -> list[tuple[str, ...]]:
    """Files, the CPU, and all GPUs together."""
    gpus = tuple(device for device in devices if device not in ("cpu", FILES))
    return [(FILES,)] * (FILES in devices) + [("cpu",)] * ("cpu" in devices) + [gpus] * bool(gpus)
