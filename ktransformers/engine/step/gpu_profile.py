"""Times the parts of steps on GPUs, and notes which experts their rows chose there.

Every step that is launched one by one is timed. Of replayed steps some are: a mark costs about a microsecond of the
GPU's time, so that steps between them keep what marks cost below a two-hundredth of the whole. What is known of a step
is handed on as it lies in memory; who reads the profile makes sense of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from typing_extensions import override

from ktransformers.engine.step.cuda_graph_runner import StepTimers
from ktransformers.operators.device import Device
from ktransformers.operators.gpu_timers import Label
from ktransformers.operators.usage import KEPT_ROWS, ExpertUsage
from ktransformers.profiling.messages import GpuExpertCounts, GpuRecord, GpuTimes

__all__ = ["GpuProfile"]

_MARK_SECONDS = 1.5e-6
_MOST_COST = 0.005  # of the time of all steps
_LONGEST_INTERVAL = 64
_LARGE_ROWS = 8192  # of a step of which some rows' experts are told

_Named = tuple[tuple[str, int], ...]
_Marked = Mapping[str, _Named]
"""By device: what GpuTimes.labels has."""


@dataclass(slots=True)
class GpuProfile(StepTimers):
    """The profile of steps on the GPUs among `devices`. Asked by one thread, the one that runs steps."""

    devices: Sequence[Device]
    latest: GpuRecord | None = None
    _gpus: list[Device] = field(init=False)
    _launched: _Marked | None = None
    _launched_ns: int = 0
    _keep: Sequence[int] = ()
    _before: Sequence[torch.Tensor] = ()  # the counts of each usage, where a step's rows do not tell all
    _num_marks: int = 512  # of a replayed step
    _step_seconds: float = 0.0
    _since: int = _LONGEST_INTERVAL

    def __post_init__(self) -> None:
        self._gpus = [device for device in self.devices if device.is_gpu]
        for usage in self._usages():
            usage.keep(_LARGE_ROWS)

    def close(self) -> None:
        """Give back what only the profile needed."""
        for usage in self._usages():
            usage.keep(0)

    def expect(self, num_rows: int, keep: Sequence[int]) -> None:
        """Prepare for a step that comes. keep: its rows whose experts are wanted, should it have too many to tell
        all."""
        self._keep, self.latest = keep, None
        self._before = [usage.counts.clone() for usage in self._usages()] if num_rows > KEPT_ROWS else []

    def rows_of(self, num_rows: int) -> Sequence[int]:
        """Return the rows of a step of num_rows rows whose experts are recorded."""
        return range(num_rows) if num_rows <= KEPT_ROWS else self._keep

    @override
    def begin(self) -> None:
        self._launched_ns = time.monotonic_ns()
        for device in self._gpus:
            device.make_gpu_timers().begin()

    @override
    def take(self) -> _Marked:
        return {device.name: _named(device.make_gpu_timers().take()) for device in self._gpus}

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Time the step that is launched in the block."""
        self.begin()
        try:
            yield
        finally:
            self._launched = self.take()  # how many there are says nothing of replayed steps

    @override
    def is_due(self) -> bool:
        self._launched_ns = time.monotonic_ns()
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

    def fetch(self) -> None:
        """Let the marks of the step that was launched last come to the host behind it."""
        launched = self._launched or {}
        for device in self._gpus:
            device.make_gpu_timers().fetch(len(launched.get(device.name, ())))

    def finish(self, num_rows: int) -> None:
        """End a step whose results, and what was fetched behind it, are here: `latest` says what is known of it."""
        now = time.monotonic_ns()
        seconds = (now - self._launched_ns) / 1e9
        self._step_seconds = seconds if not self._step_seconds else 0.9 * self._step_seconds + 0.1 * seconds
        marked, self._launched = self._launched, None
        self.latest = GpuRecord(
            num_rows=num_rows,
            began_ns=self._launched_ns,
            ended_ns=now,
            devices=[self._times(device, marked) for device in self._gpus],
            rows=list(self.rows_of(num_rows)),
            experts=self._experts(num_rows),
        )

    def _times(self, device: Device, marked: _Marked | None) -> GpuTimes:
        labels = () if marked is None else marked.get(device.name, ())
        number = int(device.name.rpartition(":")[2])
        return GpuTimes(number, labels, device.make_gpu_timers().times() if labels else b"")

    def _experts(self, num_rows: int) -> list[GpuExpertCounts]:
        found = []
        usages = self._usages()
        # Every row is told of small steps, which say by themselves how often an expert was chosen.
        befores = self._before if num_rows > KEPT_ROWS else [None] * len(usages)
        for usage, before in zip(usages, befores, strict=False):
            made = b"" if before is None else (usage.counts - before).numpy().tobytes()
            ids = {top_k: ids.numpy().tobytes() for top_k, ids in usage.ids().items()}
            found.append(GpuExpertCounts(usage.counts.shape[1], usage.layers, ids, made))
        return found

    def _usages(self) -> list[ExpertUsage]:
        return [usage for device in self._gpus for usage in device.usages]


def _named(labels: Sequence[Label]) -> _Named:
    return tuple((label.part, label.layer) for label in labels)
