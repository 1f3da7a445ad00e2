"""The plan of a model with all that it holds, and of the one that drafts for it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from ktransformers.cache.paged import LayerShape
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.plan.cache_plan import CachePlan
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.plan.tower_plan import PlannedTower
from ktransformers.operators.device import Device
from ktransformers.operators.expert_files import ExpertFiles
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.expert_slots import EXPERT_SLOTS, describe_slots, slot_bounds
from ktransformers.optimize.fill import Filling
from ktransformers.optimize.hot_slots import HotSlots
from ktransformers.optimize.machine import detect_machine
from ktransformers.optimize.plan import Plan, format_bytes
from ktransformers.optimize.streaming import Streaming

__all__ = ["Planned", "PlannedDraft"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with all that it holds. chunk_size: tokens of a prefill step. shapes, num_slots, num_states: of the cache.

    filling: the experts that fill GPUs. transfer: where layers go by themselves, see `spread_layers`. hots: the slots
    for experts on GPUs. draft: the plan of the model that drafts; None without one. tower: likewise, for pictures.
    expert_files: what experts are read from while the model runs; None where none are.
    """

    plan: Plan
    chunk_size: int
    streamings: tuple[Streaming, ...]
    shapes: list[LayerShape]
    num_slots: int
    num_states: int
    filling: Filling
    transfer: Mapping[int, str] = field(default_factory=dict)
    hots: tuple[HotSlots, ...] = ()
    draft: PlannedDraft | None = None
    tower: PlannedTower | None = None
    expert_files: ExpertFiles | None = None

    def filled_nbytes(self, device: str) -> int:
        """Return the bytes of experts on a GPU: of whole layers, and in slots."""
        whole = sum(entry.nbytes.get(device, 0) for entry in self.plan.entries if entry.key in self.filling.moved)
        return whole + sum(hot.nbytes for hot in self.hots if hot.device == device)

    @property
    def beside(self) -> list[Plan]:
        """The plans of layers that draft, and whose experts are in the slots of this model's."""
        drafts = [] if self.draft is None else self.draft.chain
        return [one.planned.plan for one in drafts if one.shares_slots]

    def expert_ram(self, top_k: int) -> tuple[int, int, int]:
        """Return the bytes of RAM that experts have where they stay in files, as planned, at least and at most: what
        --experts_ram says, of this model and of the one that drafts. top_k: experts that a token takes of a layer.
        Zeros where none stay in files."""
        slots = self.plan.extra_bytes.get(EXPERT_SLOTS, {}).get("cpu", 0)
        if not slots:
            return 0, 0, 0
        least, most = slot_bounds(self.plan, top_k, self.beside)
        for one in [] if self.draft is None else self.draft.chain:
            low, high = (
                slot_bounds(one.planned.plan, one.opened.facts.top_k()) if one.has_slots else (one.expert_ram,) * 2
            )
            slots, least, most = slots + one.expert_ram, least + low, most + high
        return slots, least, most

    def report(self, *, with_experts: bool = True) -> None:
        """Log one line for each thing that was decided without being asked for. with_experts: say where experts are
        that stay in files."""
        if self.transfer:
            begins = ", ".join(f"{device} from layer {layer} on" for layer, device in self.transfer.items())
            logger.info("layers are spread over the GPUs (CUDA_VISIBLE_DEVICES says which are used): %s", begins)
        if self.filling.moved:
            logger.info("%s", self.filling)
        for hot in self.hots:
            logger.info("%s", hot)
        if self.expert_files is not None and with_experts:
            on_gpus = any(device.is_gpu for device in self.layer_devices)
            some = "those without a slot on a GPU, in long prompts all" if self.hots else "them, in prompts, too"
            how = f", and the CPU computes {some}" if on_gpus else ""
            beside = sum(plan.stored_experts for plan in self.beside)
            logger.info("%s%s (docs/disk.md)", describe_slots(self.plan, beside), how)
        if self.draft is not None and any(device.is_gpu for device in self.layer_devices):
            logger.info("%s", self.draft)
        if self.draft is not None and self.draft.experts is not None:
            logger.info("%s", self.draft.experts)

    @property
    def long_rows(self) -> int:
        """Most tokens of a step that memory is lent to; 0: there is none."""
        return max((each.shape.long_rows for each in self.streamings), default=0)

    @property
    def layer_devices(self) -> list[Device]:
        """The devices of the decoder layers, in order."""
        return [self.plan.devices[layer_device.device] for layer_device in self.plan.layer_devices]

    @property
    def expert_bytes_on_cpu(self) -> int:
        """Bytes of routed experts on the CPU that have no slot on a GPU, which decode steps read slowly."""
        entries = (e for e in self.plan.entries if isinstance(self.plan.operators.get(e.key), KTransformersExperts))
        on_cpu = sum(entry.nbytes.get("cpu", 0) + entry.stored_experts for entry in entries)
        return on_cpu - sum(hot.slots_nbytes for hot in self.hots)


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """The plan of a model that drafts, on the GPU of its target's last layer or on the CPU, beside what the target
    holds. opened: it, with a configuration that is settled. cache_plan: of its cache, in pages of the target's.
    hardware: what it was planned on: the bytes of a GPU are those that the target leaves to it at most. experts: where
    its experts are and why, while the target's are in files; None: nothing is to be said."""

    opened: OpenedModel
    cache_plan: CachePlan
    hardware: Hardware
    planned: Planned
    experts: str | None = None

    @property
    def chain(self) -> list[PlannedDraft]:
        """Return it, and those that draft behind it: one for each layer for multi-token prediction."""
        behind = self.planned.draft
        return [self] if behind is None else [self, *behind.chain]

    @property
    def shares_slots(self) -> bool:
        """Whether its experts are in the slots of its target's."""
        return self.planned.expert_files is not None and self.planned.expert_files.owner is not None

    @property
    def has_slots(self) -> bool:
        """Whether its experts stay in files, and have slots of their own."""
        return bool(self.planned.plan.extra_bytes.get(EXPERT_SLOTS))

    @property
    def expert_ram(self) -> int:
        """Bytes of RAM that its own experts have: slots, or all of them; 0 where they are in its target's slots."""
        if self.shares_slots:
            return 0
        slots = self.planned.plan.extra_bytes.get(EXPERT_SLOTS, {}).get("cpu", 0)
        return slots if self.has_slots else self.planned.expert_bytes_on_cpu

    @property
    def nbytes(self) -> dict[str, int]:
        """All bytes by device."""
        return {device: nbytes for device, nbytes in self.planned.plan.total_bytes.items() if nbytes}

    def hardware_now(self) -> Hardware:
        """Return `hardware` with what RAM is left by now, so that it is planned again as it was."""
        return self.hardware.within({**self.hardware.machine.devices, "cpu": detect_machine(gpus=dict).devices["cpu"]})

    def __str__(self) -> str:
        places = " and ".join(f"{format_bytes(nbytes)} on {device}" for device, nbytes in self.nbytes.items())
        place = " and ".join(sorted({device.name for device in self.planned.layer_devices})) or "cpu"
        why = ": the GPU of the last layer has no room for it" if place == "cpu" else ""
        return f"draft tokens are computed on {place}{why}; that takes {places}"
