"""What the parts of steps take on GPUs, and which experts their rows chose there.

Every step that is launched one by one is timed. Of replayed steps some are: a mark costs about a microsecond of the
GPU's time, so that steps between them keep what marks cost below a hundredth of the whole.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ktransformers.engine.graphs import StepMarks
from ktransformers.operators.device import Device
from ktransformers.operators.marks import Label, Span
from ktransformers.operators.usage import KEPT_ROWS

__all__ = ["GpuProfile", "GpuStep"]

logger = logging.getLogger(__name__)

_MARK_SECONDS = 1.5e-6
_MOST_COST = 0.01  # of the time of all steps
_LONGEST_INTERVAL = 64

_Marked = Mapping[str, tuple[Label, ...]]


@dataclass(frozen=True, slots=True)
class GpuStep:
    """One step. num_rows: with padding, if it was replayed.

    spans: of each device by its name, on this machine's monotonic clock; empty where the step was not timed. ids:
    int32 [rows, K] by layer, of experts that are on GPUs; empty for a step of more than KEPT_ROWS rows. counts: int64
    [layers, experts] of them, of this step.
    """

    num_rows: int
    spans: Mapping[str, Sequence[Span]]
    ids: Mapping[int, npt.NDArray[np.int32]]
    counts: npt.NDArray[np.int64] | None = None


@dataclass(slots=True)
class _Clock:
    """A device's clock against this machine's: what they differ by at most, which the least delay tells best."""

    ahead: int | None = None

    def shift(self, last: int, now: int) -> int:
        """To be added to times of the device. last: of the device, at a moment before `now`, of this machine."""
        ahead = now - last
        self.ahead = ahead if self.ahead is None else min(self.ahead, ahead)
        return self.ahead


@dataclass(slots=True)
class GpuProfile(StepMarks):
    """Of the GPUs among `devices`. Asked by one thread, the one that runs steps."""

    devices: Sequence[Device]
    latest: GpuStep | None = None
    _gpus: list[Device] = field(init=False)
    _launched: _Marked | None = None
    _clocks: dict[str, _Clock] = field(default_factory=dict)
    _counted: npt.NDArray[np.int64] | None = None
    _num_marks: int = 512  # of a replayed step
    _step_seconds: float = 0.0
    _since: int = 0

    def __post_init__(self) -> None:
        self._gpus = [device for device in self.devices if device.is_gpu]
        self._counted = self._counts()

    @override
    def begin(self) -> None:
        for device in self._gpus:
            device.make_marks().begin()

    @override
    def take(self) -> _Marked:
        return {device.name: device.make_marks().take() for device in self._gpus}

    @contextmanager
    def marked(self) -> Iterator[None]:
        """A step that is launched in the block is timed."""
        self.begin()
        try:
            yield
        finally:
            self._launched = self.take()  # how many there are says nothing of replayed steps

    @override
    def is_due(self) -> bool:
        self._since += 1
        interval = (
            math.ceil(self._num_marks * _MARK_SECONDS / (_MOST_COST * self._step_seconds)) if self._step_seconds else 1
        )
        if self._since < min(interval, _LONGEST_INTERVAL):
            return False
        self._since = 0
        return True

    @override
    def launched(self, marks: object | None) -> None:
        self._launched = marks if isinstance(marks, dict) else None
        if self._launched is not None:
            self._num_marks = sum(len(labels) for labels in self._launched.values())

    def finish(self, num_rows: int, seconds: float) -> None:
        """The step is over, its results are here: `latest` says what is known of it. seconds: that it took."""
        now = time.monotonic_ns()
        self._step_seconds = seconds if not self._step_seconds else 0.9 * self._step_seconds + 0.1 * seconds
        spans = {device.name: self._spans(device, now) for device in self._gpus if self._launched}
        ids: dict[int, npt.NDArray[np.int32]] = {}
        if num_rows <= KEPT_ROWS:
            for device in self._gpus:
                ids.update(device.usage.ids(num_rows) if device.usage is not None else {})
        counts, before = self._counts(), self._counted
        self._counted = counts
        made = counts if counts is None or before is None else counts - before
        self._launched = None
        self.latest = GpuStep(num_rows, spans, ids, made)

    def _spans(self, device: Device, now: int) -> list[Span]:
        assert self._launched is not None
        spans = device.make_marks().spans(self._launched.get(device.name, ()))
        if not spans:
            return []
        shift = self._clocks.setdefault(device.name, _Clock()).shift(spans[-1].begin + spans[-1].duration, now)
        return [Span(span.label, span.begin + shift, span.duration) for span in spans]

    def _counts(self) -> npt.NDArray[np.int64] | None:
        usages = [device.usage for device in self._gpus if device.usage is not None]
        return sum(usage.counts() for usage in usages) if usages else None  # type: ignore[return-value]
