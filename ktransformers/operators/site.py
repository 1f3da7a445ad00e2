"""Where a loaded operator stands: what it is told when it is attached. Knows what serves operators, not operators."""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.operators.experts.streamed import PrefillLayer

__all__ = ["Site"]


@dataclass(frozen=True, slots=True)
class Site:
    """max_len: no step will hold a position beyond max_len - 1. flash: what takes prefill steps of its attention, None
    for the Triton kernels. prefill: what runs its experts in large steps, on GPU and CPU together; None: nobody.
    """

    max_len: int
    flash: FlashLayer | None = None
    prefill: PrefillLayer | None = None
