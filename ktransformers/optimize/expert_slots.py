"""Plans how many bytes of RAM hold experts that stay in files, and sums up what a token reads of them.

Pure: knows plans, reads nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ktransformers.kernels.cpu.expert_store import least_store_nbytes
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan, PlanEntry, format_bytes

__all__ = [
    "CHUNK_FROM_DISK",
    "EXPERT_SLOTS",
    "FILES",
    "describe_slots",
    "on_gpus",
    "reserve_of",
    "slot_bounds",
    "with_expert_slots",
]

EXPERT_SLOTS = "expert slots"
"""What the plan's table calls the RAM of experts that are read from files."""

FILES = "files"
"""Where a summary says that experts are which have no memory of their own."""

CHUNK_FROM_DISK = 2048
"""Tokens of a prefill step when nothing is said: each reads all experts that no slot has, however few tokens it has."""

_NOTE, _ROWS_NOTE = "on the disk, those used most in RAM", "rows are read from the disk"
_RESERVE, _RESERVED_SHARE = 512 << 20, 1 / 16


def with_expert_slots(plan: Plan, asked_nbytes: int, top_k: int, beside: Sequence[Plan] = ()) -> Plan:
    """Return `plan` with memory for slots of the experts that stay in files. beside: plans of layers whose experts are
    in the same slots.

    asked_nbytes: 0 for what the plan leaves of RAM, less a reserve. top_k: experts that a token takes of a layer.
    Experts that have a slot on a GPU need none in RAM.
    """
    least, most = slot_bounds(plan, top_k, beside)
    if not most:
        return plan
    left = plan.capacity.get("cpu", 0) - plan.total_bytes.get("cpu", 0)
    nbytes = max(min(asked_nbytes or left - reserve_of(plan.capacity.get("cpu", 0)), most), least)
    entries = tuple(_noted(entry) for entry in plan.entries)
    return replace(plan, entries=entries, extra_bytes={**plan.extra_bytes, EXPERT_SLOTS: {"cpu": nbytes}})


def slot_bounds(plan: Plan, top_k: int, beside: Sequence[Plan] = ()) -> tuple[int, int]:
    """Return the least and the most bytes that slots in RAM take; 0 and 0 where no experts stay in files. Arguments as
    of `with_expert_slots`."""
    records = Counter[int]()
    for one in (plan, *beside):
        for entry in one.entries:
            if entry.stored_experts:
                count = _num_experts(one, entry)
                records[entry.stored_experts // count] += count
    stored = sum(nbytes * count for nbytes, count in records.items())
    least = min(least_store_nbytes(records, top_k), stored)
    return least, max(stored - on_gpus(plan), least)


def reserve_of(ram: int) -> int:
    """Return the bytes that slots leave of so much RAM: some memory is needed that no plan knows, and a control group
    that is full ends the process."""
    return _RESERVE + int(_RESERVED_SHARE * ram)


def on_gpus(plan: Plan) -> int:
    """Return the bytes of experts in files that have slots on GPUs."""
    stored = {entry.key: entry.stored_experts for entry in plan.entries}
    return round(sum(share * stored[key] for key, (_, share) in plan.slots.items()))


def _noted(entry: PlanEntry) -> PlanEntry:
    said = _NOTE if entry.stored_experts else _ROWS_NOTE if entry.in_files else ""
    return replace(entry, note="; ".join(part for part in (entry.note, said) if part)) if said else entry


def _num_experts(plan: Plan, entry: PlanEntry) -> int:
    operator = plan.operators[entry.key]
    assert isinstance(operator, KTransformersExperts), "nothing else has experts"
    return operator.num_experts


def describe_slots(plan: Plan, beside_nbytes: int = 0) -> str:
    """Say in one line where experts that stay in files are, and how many of them RAM holds. beside_nbytes: of other
    layers in the same slots."""
    total, slots = plan.stored_experts + beside_nbytes, plan.extra_bytes.get(EXPERT_SLOTS, {}).get("cpu", 0)
    return (
        f"{format_bytes(total)} of experts stay on the disk, and {format_bytes(slots)} of RAM hold those that are used "
        f"most, {slots / max(total, 1):.0%}"
    )
