"""How often routed experts are used. Knows ids and the streams that experts on the CPU run in; no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ktransformers.operators.device import Devices

__all__ = ["ExpertStats"]


@dataclass(slots=True)
class ExpertStats:
    """How the routed experts of a model are used, counted as they run.

    num_rows: (token, expert) pairs computed. Every sample_every-th call of any layer is looked at closely:
    num_samples of them, which touched num_touched distinct experts together. `totals` adds what runs in the order of a
    GPU's stream, where every call is looked at.
    """

    SAMPLE_EVERY: ClassVar[int] = 61  # prime, so that all layers get their turn

    num_rows: int = 0
    num_samples: int = 0
    num_touched: int = 0
    sample_every: int = SAMPLE_EVERY
    _num_calls: int = 0

    def count(self, num_rows: int) -> None:
        """A layer's call whose ids are on a GPU: looking at them would make the host wait."""
        self.num_rows += num_rows

    def totals(self, devices: Devices) -> tuple[int, int, int]:
        """(num_rows, num_samples, num_touched) with those of the devices' expert streams."""
        rows, samples, touched = self.num_rows, self.num_samples, self.num_touched
        for stream in devices.expert_streams():
            rows, samples, touched = (
                rows + stream.num_pairs,
                samples + stream.num_forwards,
                touched + stream.num_touched,
            )
        return rows, samples, touched

    def note(self, topk_ids: torch.Tensor) -> None:
        """topk_ids int64 [T, K] of one layer's call."""
        self.num_rows += topk_ids.numel()
        self._num_calls += 1
        if self._num_calls % self.sample_every == 0:
            self.num_samples += 1
            self.num_touched += len(set(topk_ids.flatten().tolist()))
