"""Records the steps of an engine while a profile is written, and describes its model.

A profile is turned on and off by anybody at any time, and takes effect between two steps, on the engine's own thread.
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ktransformers import __version__
from ktransformers.config import EngineConfig, cpu_name
from ktransformers.core import FinishReason
from ktransformers.engine.model.card import ModelCard
from ktransformers.engine.step.step_runtime import StepRuntime
from ktransformers.hub.locate import title_of
from ktransformers.optimize.machine_speed import GpuSpeed, SpeedFile
from ktransformers.profiling.capture import ProfileTarget
from ktransformers.profiling.messages import ProfileMeta, RequestRecord, StepRecord, TokensRecord
from ktransformers.profiling.pauses import Pauses
from ktransformers.profiling.recorder import Recorder, Runtime, open_recorder
from ktransformers.scheduler.profiled import RequestTracker

if TYPE_CHECKING:
    from ktransformers.engine.load.builder import Engine, LoadedModel, PagedEngine
    from ktransformers.engine.sequence.session import Session

__all__ = [
    "AnswerProfile",
    "LoopProfile",
    "ProfileSlot",
    "card_meta",
    "model_meta",
    "profiled_session",
]

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")


class ProfileSlot:
    """The place where an engine's thread finds its recorder, and others ask for one. new_runtime: makes a
    StepRuntime."""

    def __init__(self, new_runtime: Callable[[], Runtime | None] = lambda: None):
        self.current: Recorder | None = None
        self.new_runtime = new_runtime
        self.step_ids = itertools.count(1)
        self._wanted: str | None = None
        self._has: str | None = None
        self._settled = threading.Event()

    def want(self, endpoint: str | None) -> threading.Event:
        """Ask for a recorder that sends to `endpoint`, or for none. What is returned is set when that is so."""
        self._settled = settled = threading.Event()
        self._wanted = endpoint
        return settled

    @property
    def is_changing(self) -> bool:
        """Whether `settle` has something to do."""
        return self._wanted != self._has

    def settle(self) -> Recorder | None:
        """Bring the recorder to what is wanted, and return it. On the engine's thread, between two steps."""
        settled, wanted = self._settled, self._wanted
        try:
            if wanted != self._has:
                self._has, last, self.current = wanted, self.current, None
                if last is not None:
                    last.close()
                if wanted is not None:
                    self.current = open_recorder(wanted, "engine", 0, self.new_runtime())
        finally:
            settled.set()
        return self.current


@contextmanager
def profiled_session(session: Session, engine: Engine, target: ProfileTarget | None, backend: str) -> Iterator[None]:
    """Record what the session answers within, on this thread. Nothing when target is None. Errors as Capture."""
    if target is None:
        yield
        return
    capture = target.open(model_meta(engine, backend))
    session.profile.new_runtime = lambda: StepRuntime(engine.runner)
    session.profile.want(capture.endpoint)
    session.profile.settle()
    try:
        yield
    finally:
        session.profile.want(None)
        session.profile.settle()
        capture.stop()


@dataclass(slots=True)
class _Step:
    step_id: int
    began_ns: int
    num_rows: int
    is_prefill: bool
    is_sampled: bool


@dataclass(slots=True)
class AnswerProfile:
    """The record of one answer on one sequence: its steps, its tokens, its end. One step at a time."""

    slot: ProfileSlot
    request_id: str
    prompt_len: int
    cached_len: int
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    _recorder: Recorder | None = None
    _step: _Step | None = None
    _sampling_ns: int = 0
    _admitted_ns: int | None = None
    _first_token_ns: int | None = None
    _completion_len: int = 0
    _pauses: Pauses = field(default_factory=Pauses)
    _is_known_since_arrival: bool = True

    def begin(self, num_rows: int, *, is_prefill: bool, is_sampled: bool) -> None:
        """Note that a step of num_rows rows begins. is_sampled: the last one chooses the next token."""
        if self.slot.is_changing or self.slot.current is not self._recorder:
            self._settle()
        recorder = self._recorder
        if recorder is None:
            self._step = None
            return
        step = self._step = _Step(next(self.slot.step_ids), time.monotonic_ns(), num_rows, is_prefill, is_sampled)
        self._admitted_ns = self._admitted_ns or step.began_ns
        recorder.begin_step(step.step_id, num_rows, [num_rows - 1] if is_sampled else [])

    def _settle(self) -> None:
        if self.slot.is_changing and self._recorder is not None:
            self._tell_end(None)
        recorder = self.slot.settle()
        if recorder is not self._recorder:
            self._recorder, self._pauses = recorder, Pauses()
            self._is_known_since_arrival = self._admitted_ns is None and not self._completion_len

    def suspended(self) -> None:
        """Note that the answer is left, before a step."""
        self._pauses.begin(time.monotonic_ns())

    def resumed(self) -> None:
        """Note that the answer may go on. Also from another thread, and twice."""
        self._pauses.end(time.monotonic_ns())

    def sampling(self) -> None:
        """Note that the step's forward is over and sampling begins."""
        self._sampling_ns = time.monotonic_ns()

    def end_chunk(self) -> None:
        """Note that the step is over, and brought no token."""
        self._end([])

    def end_token(self, token_id: int, index: int) -> None:
        """Note that the step is over, and brought token `index` of the answer."""
        self._completion_len = index + 1
        self._end([(self.request_id, index, self.prompt_len + index, token_id)])

    def _end(self, tokens: Sequence[tuple[str, int, int, int]]) -> None:
        step, recorder, self._step = self._step, self._recorder, None
        if step is None or recorder is None:
            return
        now = time.monotonic_ns()
        if tokens:
            self._first_token_ns = self._first_token_ns or now
        recorder.end_step(
            StepRecord(
                epoch=recorder.epoch,
                step_id=step.step_id,
                began_ns=step.began_ns,
                ended_ns=now,
                num_rows=step.num_rows,
                prefill_rows=step.num_rows if step.is_prefill else 0,
                num_seqs=1,
                sampled=[(self.request_id, step.num_rows - 1)] if step.is_sampled else [],
                sampling_ns=now - self._sampling_ns if tokens else None,
            )
        )
        is_first = tokens and self._completion_len == 1 and self._is_known_since_arrival
        arrived = {self.request_id: self.arrived_ns} if is_first else {}
        paused = self._pauses.take() if tokens else 0
        suspended = {self.request_id: paused} if paused else {}
        recorder.post(
            TokensRecord(step_id=step.step_id, time_ns=now, tokens=tokens, arrived_ns=arrived, suspended_ns=suspended)
        )

    def ended(self, reason: FinishReason) -> None:
        """Note that the answer is over."""
        if self._recorder is not None and self.slot.current is self._recorder:
            self._tell_end(reason)
            self._recorder = None

    def _tell_end(self, reason: FinishReason | None) -> None:
        assert self._recorder is not None
        is_known = self._is_known_since_arrival
        self._recorder.post(
            RequestRecord(
                request=self.request_id,
                prompt_len=self.prompt_len,
                cached_len=self.cached_len,
                completion_len=self._completion_len,
                arrived_ns=self.arrived_ns if is_known else None,
                admitted_ns=self._admitted_ns if is_known else None,
                first_token_ns=self._first_token_ns if is_known else None,
                ended_ns=None if reason is None else time.monotonic_ns(),
                finish_reason=None if reason is None else str(reason),
                num_starts=1,
                suspended=self._pauses.listed(),
            )
        )


def model_meta(engine: LoadedModel, backend: str) -> ProfileMeta:
    """Describe a loaded model and where it runs, for a profile."""
    from ktransformers.operators.experts.routed import KTransformersExperts  # late: it imports every kernel

    card = engine.model.card
    expert_bytes, on_gpu = [0] * card.num_layers, [0] * card.num_layers
    types: set[str] = set()
    for entry in engine.plan.entries:
        operator, found = engine.plan.operators.get(entry.key), _LAYER.search(entry.key)
        if not isinstance(operator, KTransformersExperts) or found is None or int(found.group(1)) >= card.num_layers:
            continue
        layer = int(found.group(1))
        expert_bytes[layer] = entry.total_bytes // operator.num_experts
        on_gpu[layer] = operator.num_experts if operator.device.is_gpu else 0
        types.update(entry.quant_types)
    model = _model(card, engine.config, engine.model.architecture)
    model |= {"expert_bytes": expert_bytes, "types": {"experts": sorted(types)}}
    gpus = [name for name in engine.plan.weight_bytes if name != "cpu"]
    machine = _machine(engine.pool.num_threads, engine.pool.isa.value, gpus)
    return ProfileMeta(
        backend=backend, version=__version__, model=model, placement={"experts_on_gpu": on_gpu}, machine=machine
    )


def card_meta(card: ModelCard, config: EngineConfig, backend: str) -> ProfileMeta:
    """Describe a model that runs without our operators, for a profile."""
    placement = {"experts_on_gpu": [0] * card.num_layers}
    machine = _machine(config.cpu_infer or None, None, [])
    return ProfileMeta(
        backend=backend, version=__version__, model=_model(card, config, None), placement=placement, machine=machine
    )


def _model(card: ModelCard, config: EngineConfig, architecture: str | None) -> dict[str, Any]:
    path = config.gguf_path or config.model_path
    return {
        "name": card.family if path is None else title_of(path),
        "architecture": architecture or card.family,
        "num_layers": card.num_layers,
        "num_experts": card.num_experts,
        "top_k": card.num_used_experts,
        "expert_bytes": [0] * card.num_layers,
        "types": {"files": card.quantization},
    }


def _machine(num_threads: int | None, isa: str | None, gpus: Sequence[str]) -> dict[str, Any]:
    """GB/s as doctor measured them on this machine; null where it did not. gpus: names of devices."""
    speed = SpeedFile().read()
    known = {} if speed is None else speed.gpus
    return {
        "cpu": cpu_name(),
        "num_threads": num_threads,
        "isa": isa,
        "memory_gbps": None if speed is None else round(speed.cpu.best_read / 1e9, 1),
        "gpus": [_gpu(name, known.get(name)) for name in gpus],
    }


def _gpu(device: str, speed: GpuSpeed | None) -> dict[str, Any]:
    if speed is None:
        return {"name": device, "memory_gbps": None}
    return {"name": speed.name, "memory_gbps": round(speed.read / 1e9, 1)}


class LoopProfile:
    """The record of a BatchLoop, from its first step to its last."""

    def __init__(self, target: ProfileTarget, engine: PagedEngine):
        self._executor = engine.executor
        self._capture = target.open(model_meta(engine, "offline"))
        recorder = open_recorder(self._capture.endpoint, "engine", 0, self._executor.new_runtime())
        self._recorder = self._executor.recorder = recorder
        self.tracker = RequestTracker(recorder.post)

    def close(self) -> None:
        """End the profile at the loop's end, on its thread."""
        self.tracker.stop()
        self._executor.recorder = None
        self._recorder.close()
        self._capture.stop()
