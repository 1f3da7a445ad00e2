"""Plans which experts on the CPU are streamed to a GPU in large prefill steps, what that takes of its memory, and how
many tokens a step should carry.

A layer's experts qualify when its layer device is a GPU, the rule's prefill_device is that GPU (or is not said: then it
is), and GPU kernels read their type. Pure: reads headers only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ktransformers.config import DEFAULT_CHUNK_SIZE
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.staging import StagingSize
from ktransformers.operators.experts.streamed import PrefillShape
from ktransformers.optimize.plan import Plan, format_bytes
from ktransformers.weights.source import WeightSource

__all__ = [
    "STAGING",
    "STREAMED_OP",
    "Streaming",
    "chunk_size_for",
    "plan_streaming",
    "step_nbytes",
    "with_long_steps",
    "with_streaming",
]

logger = logging.getLogger(__name__)

STAGING = "expert staging"
"""What the plan's table calls the memory that streamed experts pass through."""

LONG_PROMPTS = "long prompts"
"""What the plan's table calls the memory of steps longer than chunk_size, beside what slots lend them."""

_LONG_STEPS = (4, 2)  # times chunk_size
_LONG_ROW = 6  # hidden states that a layer holds of each row of a step: total, norm, experts' parts, the CPU's
_SHARE_OF_LONG = 1 / 32  # of what weights, cache and activations leave
_SHARE_OF_SLACK = 0.5  # of what a step of chunk_size leaves of the least that is planned for activations
_CHUNK_SIZES = (4096, 2048, 1024)
_SHARE_OF_STEP = 0.25  # of a GPU's memory, for the activations of a step
_SHARE_OF_STAGING = 0.5  # of what weights, cache and activations leave
STREAMED_OP = "KExpertsMarlin"


@dataclass(frozen=True, slots=True)
class Streaming:
    """The experts that are streamed to one GPU.

    keys: their modules, in the order of layers. bias_nbytes: of those that have biases, which stay on the GPU.
    """

    device: str
    keys: tuple[str, ...]
    shape: PrefillShape
    size: StagingSize
    bias_nbytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the GPU: staging buffers, workspace and biases."""
        biases = sum(self.bias_nbytes.get(key, 0) for key in self.keys)
        return self.size.total_nbytes + self.shape.workspace_nbytes() + biases

    @property
    def host_nbytes(self) -> int:
        """Bytes of pinned memory, and of that in which the CPU converts: hidden states and results, 2 and 4
        bytes each.
        """
        return self.shape.most_rows * self.shape.hidden_size * 12


def step_nbytes(facts: ModelFacts, num_rows: int) -> int:
    """Return the bytes that the activations of a step of so many rows take on a GPU, generously: values of 2 bytes."""
    of_heads = max(layer.num_heads * 2 * (layer.head_dim + layer.v_head_dim) for layer in facts.layers)
    if facts.latent is not None:  # absorbed: the latent form of queries and results beside
        of_heads += facts.num_heads * (2 * facts.latent.rank + facts.latent.rope_dim)
    of_row = 8 * facts.hidden_size + of_heads + 3 * facts.intermediate_size
    return num_rows * of_row * 2


def chunk_size_for(asked: int, plan: Plan, facts: ModelFacts) -> int:
    """Return the most tokens of a prefill step: what is asked for, or else more on a GPU than on the CPU alone, as far
    as activations leave room; the weights that a step reads, over PCIe perhaps, cost the same for all its tokens.
    """
    gpus = {layer_device.device for layer_device in plan.layer_devices if plan.devices[layer_device.device].is_gpu}
    if asked or not gpus:
        return asked or DEFAULT_CHUNK_SIZE
    free = min(plan.capacity.get(gpu, 0) for gpu in gpus)
    fitting = (size for size in _CHUNK_SIZES if step_nbytes(facts, size) <= _SHARE_OF_STEP * free)
    return next(fitting, DEFAULT_CHUNK_SIZE)


def with_long_steps(
    plan: Plan, source: WeightSource, facts: ModelFacts, chunk_size: int, *, may_move: bool
) -> tuple[Plan, int]:
    """Return `plan` with memory for steps that are longer than chunk_size, and the most rows of one; 0 where all layers
    are not on one GPU, all experts fit there and may go there, or there is too little room.

    may_move: whether experts may. Of such steps slots lend what experts take (operators/experts/lending.py); hidden
    states lie beside.
    """
    places = {layer_device.device for layer_device in plan.layer_devices}
    found = streamed_layers(plan, source)
    if len(places) != 1 or set(found) != places:
        return plan, 0
    ((device, layers),) = found.items()
    left = plan.capacity.get(device, 0) - plan.total_bytes.get(device, 0)
    if may_move and sum(one.nbytes * one.operator.num_experts for one in layers) <= left:
        return plan, 0
    planned = plan.devices[device].workspace_nbytes() - step_nbytes(facts, chunk_size)
    slack = int(_SHARE_OF_SLACK * max(planned, 0))
    for count in _LONG_STEPS:
        nbytes = max((count - 1) * chunk_size * _LONG_ROW * facts.hidden_size * 2 - slack, 0)
        if nbytes <= _SHARE_OF_LONG * left:
            extra = {**plan.extra_bytes, LONG_PROMPTS: {device: nbytes}}
            return replace(plan, extra_bytes=extra), count * chunk_size
    return plan, 0


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """A layer whose experts, on the CPU, can be copied to its GPU: bytes of one expert and of all biases."""

    key: str
    operator: KTransformersExperts
    nbytes: int
    bias_nbytes: int


def streamed_layers(plan: Plan, source: WeightSource) -> Mapping[str, list[StreamedLayer]]:
    """Return, by device, the layers whose experts can be copied there for a step, or have slots there."""
    found: dict[str, list[StreamedLayer]] = {}
    for entry in plan.entries:
        operator, place = plan.operators.get(entry.key), entry.placement
        device = place.layer_device
        if not isinstance(operator, KTransformersExperts) or device is None or not plan.devices[device].is_gpu:
            continue
        nbytes = operator.streamed_nbytes(source)
        if place.generate_device == "cpu" and place.prefill_device == device and nbytes is not None:
            found.setdefault(device, []).append(StreamedLayer(entry.key, operator, *nbytes))
    return found


def plan_streaming(
    plan: Plan, source: WeightSource, facts: ModelFacts, chunk_size: int, *, long_rows: int = 0, is_said: bool = True
) -> tuple[Streaming, ...]:
    """Plan what is streamed to each GPU beside what `plan` holds there; nothing where there is too little room.

    long_rows: most rows of a step that memory is lent to. is_said: whether the log says why nothing is.
    """
    level = logging.INFO if is_said else logging.DEBUG
    top_k, made = facts.top_k(), list[Streaming]()
    for device, found in streamed_layers(plan, source).items() if top_k else ():
        layouts = [one.operator.layout for one in found]
        sizes = layouts[0].num_experts, top_k, layouts[0].hidden_size, layouts[0].intermediate_size
        shape = PrefillShape(*sizes, chunk_size, long_rows=long_rows)
        if any(layout != layouts[0] for layout in layouts):
            logger.log(level, "experts are not streamed to %s: layers have experts of several shapes", device)
            continue
        left = plan.capacity.get(device, 0) - plan.total_bytes.get(device, 0)
        biases = {one.key: one.bias_nbytes for one in found if one.bias_nbytes}
        budget = int(_SHARE_OF_STAGING * left) - shape.workspace_nbytes() - sum(biases.values())
        largest = max(one.nbytes for one in found)
        size = StagingSize.of(largest, shape.num_experts, budget)
        if size is None:
            wanted = format_bytes(3 * largest + shape.workspace_nbytes() + sum(biases.values()))
            logger.log(
                level,
                "experts are not streamed to %s: that takes at least %s there, and %s are left to share",
                device,
                wanted,
                format_bytes(max(left, 0)),
            )
            continue
        made.append(Streaming(device, tuple(one.key for one in found), shape, size, biases))
    return tuple(made)


def with_streaming(plan: Plan, streamings: tuple[Streaming, ...]) -> tuple[Plan, tuple[Streaming, ...]]:
    """Return `plan` with the streaming's memory and with what its table says of prefill; and those that it leaves
    something to do.
    """
    on_cpu = {entry.key for entry in plan.entries if entry.placement.generate_device == "cpu"}
    kept = [replace(each, keys=tuple(key for key in each.keys if key in on_cpu)) for each in streamings]
    kept = [each for each in kept if each.keys]
    extra = {what: nbytes for what, nbytes in plan.extra_bytes.items() if what != STAGING}
    if not kept:
        return replace(plan, extra_bytes=extra), ()
    streamed = {key: each.device for each in kept for key in each.keys}
    entries = tuple(
        replace(entry, prefill_op=STREAMED_OP, note=f"streamed to {streamed[entry.key]} in large steps")
        if entry.key in streamed
        else entry
        for entry in plan.entries
    )
    staging = {each.device: each.nbytes for each in kept}
    staging["cpu"] = sum(each.host_nbytes for each in kept)
    return replace(plan, entries=entries, extra_bytes={**extra, STAGING: staging}), tuple(kept)
