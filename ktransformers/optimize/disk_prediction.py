"""Predicts tokens a second of a plan whose experts stay in files in part, from bytes, slots and measured rates.

    decode     a token reads its experts from slots on GPUs and in RAM, and those that none holds from the disk before
    prefill    a step of many rows reads all experts that no slot in RAM holds, once

How many a slot holds depends on routing, so that all comes as a range. Its ends: all experts are used alike, so that as
many are found as there are slots, and reads wait for products; and a quarter of the experts has SKEWED_SHARE of the
picks, as `bench offline --routing skewed` has them (or what was learned of this model's), and reads run beside
products. Pure: measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ktransformers.optimize.expert_slots import EXPERT_SLOTS, on_gpus
from ktransformers.optimize.hot_slots import LearnedPicks
from ktransformers.optimize.plan import Plan
from ktransformers.weights.synthetic import SKEWED_SHARE

__all__ = ["SLOW", "DiskPrediction", "predict_from_disk", "skewed_hits"]

SLOW = 0.5
"""Tokens a second below which a plan says that it is slow."""

_EXPONENT = math.log(SKEWED_SHARE) / math.log(0.25)


@dataclass(frozen=True, slots=True)
class DiskPrediction:
    """Predicted use of experts in files. stored_bytes: of all; slot_bytes: of those that RAM holds. token_bytes: of
    those that a token uses. disk_rate: bytes a second. hits: share of a token's that RAM and GPUs have, least and most;
    gpu_hits: that GPUs have, which hold those that are used most.

    decode, prefill: tokens a second of one sequence, least and most. is_measured: whether what products take is in
    them.
    """

    stored_bytes: int
    slot_bytes: int
    token_bytes: float
    disk_rate: float
    hits: tuple[float, float]
    decode: tuple[float, float]
    prefill: tuple[float, float]
    is_measured: bool = True
    gpu_hits: tuple[float, float] = (0.0, 0.0)

    @property
    def is_slow(self) -> bool:
        """Whether even the most tokens a second are few."""
        return self.decode[1] < SLOW


def skewed_hits(share: float) -> float:
    """Return the share of picks that slots for `share` of all experts serve where routing is skewed."""
    return float(min(max(share, 0.0), 1.0) ** _EXPONENT)


def predict_from_disk(
    plan: Plan,
    top_k: Mapping[str, tuple[int, int]],
    chunk_size: int,
    disk_rate: float,
    token_seconds: float = 0.0,
    row_seconds: float = 0.0,
    learned: LearnedPicks | None = None,
) -> DiskPrediction:
    """Predict with a disk of so many bytes a second. top_k: experts that a token takes of a module, and of how many.

    token_seconds, row_seconds: what a token of an answer, and of a prompt, takes with all experts in RAM. learned: the
    picks of this model's experts at earlier starts.
    """
    stored = plan.stored_experts
    slots = min(plan.extra_bytes.get(EXPERT_SLOTS, {}).get("cpu", 0), stored)  # a layer that drafts may have the others
    token = sum(
        entry.stored_experts * top_k[entry.key][0] / top_k[entry.key][1]
        for entry in plan.entries
        if entry.stored_experts
    )
    served = skewed_hits if learned is None else learned.hits

    def found(nbytes: int) -> tuple[float, float]:
        share = min(nbytes / max(stored, 1), 1.0)
        return share, max(served(share), share)

    hits = found(on_gpus(plan) + slots)
    slow, fast = ((1.0 - hit) * token / disk_rate for hit in hits)
    # A chunk passes by what decode needs: slots keep what they hold, and all else is read.
    chunk = (stored - slots) / disk_rate / chunk_size
    return DiskPrediction(
        stored,
        slots,
        token,
        disk_rate,
        hits,
        (1.0 / max(token_seconds + slow, 1e-9), 1.0 / max(token_seconds, fast, 1e-9)),
        (1.0 / max(row_seconds + chunk, 1e-9), 1.0 / max(row_seconds, chunk, 1e-9)),
        gpu_hits=found(on_gpus(plan)),
    )
