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
from ktransformers.operators.usage import KEPT_ROWS, ExpertUsage

__all__ = ["GpuProfile", "GpuStep"]

logger = logging.getLogger(__name__)

_MARK_SECONDS = 1.5e-6
_MOST_COST = 0.01  # of the time of all steps
_LONGEST_INTERVAL = 64

_Marked = Mapping[str, tuple[Label, ...]]


@dataclass(frozen=True, slots=True)
class GpuStep:
    """One step. num_rows: without padding.

    spans: of each device by its name, on this machine's monotonic clock; empty where the step was not timed. ids:
    int32 [rows, K] by layer, of experts that are on GPUs; empty for a step of more than KEPT_ROWS rows. counts: int64
    [layers, experts] of them, of this step.
    """

    num_rows: int
    spans: Mapping[str, Sequence[Span]]
    ids: Mapping[int, npt.NDArray[np.int32]]
    counts: npt.NDArray[np.int64] | None = None


@dataclass(slots=True)
class GpuProfile(StepMarks):
    """Of the GPUs among `devices`. Asked by one thread, the one that runs steps."""

    devices: Sequence[Device]
    latest: GpuStep | None = None
    _gpus: list[Device] = field(init=False)
    _launched: _Marked | None = None
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
        wanted = self._num_marks * _MARK_SECONDS / (_MOST_COST * self._step_seconds) if self._step_seconds else 1.0
        if self._since < min(math.ceil(wanted), _LONGEST_INTERVAL):
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
        spans = self._spans(self._launched, now) if self._launched else {}
        self._launched = None
        ids: dict[int, npt.NDArray[np.int32]] = {}
        if num_rows <= KEPT_ROWS:
            for usage in self._usages():
                ids.update(usage.ids(num_rows))
        counts = self._counts()
        made = counts if counts is None or self._counted is None else counts - self._counted
        self._counted = counts
        self.latest = GpuStep(num_rows, spans, ids, made)

    def _spans(self, marked: _Marked, now: int) -> dict[str, list[Span]]:
        """On this machine's clock: the last mark of all GPUs is taken for `now`. Their clocks are one, nearly."""
        found = {device.name: device.make_marks().spans(marked.get(device.name, ())) for device in self._gpus}
        last = max((spans[-1].begin + spans[-1].duration for spans in found.values() if spans), default=now)
        return {
            name: [Span(span.label, span.begin + now - last, span.duration) for span in spans]
            for name, spans in found.items()
        }

    def _usages(self) -> list[ExpertUsage]:
        return [device.usage for device in self._gpus if device.usage is not None]

    def _counts(self) -> npt.NDArray[np.int64] | None:
        return sum(usage.counts() for usage in usages) if (usages := self._usages()) else None  # type: ignore[return-value]
