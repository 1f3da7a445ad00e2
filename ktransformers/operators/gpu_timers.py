"""Marks in the work of a GPU: what the device does between a mark and the next one belongs to a part of a step.

A mark is one launch, which writes the device's time to memory; captured in a graph, every replay writes it again. What
the marks of a step were is known when it is launched, or was captured; how long its parts took, when it is over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktransformers.kernels.triton.common.clock import write_time

__all__ = ["END", "GpuTimers", "Label"]

_MOST = 1 << 14
END = "end"
"""The part that begins where a step ends."""


@dataclass(frozen=True, slots=True)
class Label:
    """Name of a part of a step, as profiles have it, and its layer (-1: none)."""

    part: str
    layer: int


class GpuTimers:
    """Times the parts of a step on one device. Steps are timed one at a time: `begin`, the step, `take`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._times: torch.Tensor | None = None
        self._host: torch.Tensor | None = None
        self._fetched: torch.Tensor | None = None
        self._labels: list[Label] = []
        self._layer = -1
        self.is_on = False
        self.num_lost = 0

    def begin(self) -> None:
        """Write marks from now on, from the first place on."""
        if self._times is None:
            with torch.inference_mode(False):
                self._times = torch.zeros(_MOST, dtype=torch.int64, device=self._device)
        self._labels, self._layer, self.is_on = [], -1, True

    def at(self, part: str, layer: int | None = None) -> None:
        """Write a mark: `part` of the step begins here. layer: None for that of the mark before."""
        self._layer = self._layer if layer is None else layer
        label = Label(part, self._layer)
        if self._labels and self._labels[-1] == label:
            return
        if len(self._labels) == _MOST:
            self.num_lost += 1
            return
        assert self._times is not None, "begin comes first"
        write_time(self._times, len(self._labels))
        self._labels.append(label)

    def take(self) -> tuple[Label, ...]:
        """Return the labels since `begin`, the end of the last part marked; no more marks are written."""
        self.at(END, -1)
        self.is_on = False
        labels, self._labels = tuple(self._labels), []
        return labels

    def fetch(self, num_labels: int) -> None:
        """Enqueue a copy of the times of the step that was launched last, in the order of its stream."""
        if self._times is None or not num_labels:
            return
        if self._host is None:
            self._host = torch.empty(_MOST, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._fetched = self._host[:num_labels].copy_(self._times[:num_labels], non_blocking=True)

    def times(self) -> bytes:
        """Return the times that were fetched last: int64 ns on the device's clock."""
        if self._device.type == "cuda":  # whoever has the step's results may have waited for another device
            torch.cuda.current_stream(self._device).synchronize()
        taken: bytes = b"" if self._fetched is None else self._fetched.numpy().tobytes()
        return taken
