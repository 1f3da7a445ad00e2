"""The recorder that engine and scheduler call: sends records to the bridge without ever waiting for it.

    engine's thread ── post ──> deque ──┐
    native code ── records ──> ring ────┴── drain thread, ten times a second ── ZMQ PUSH ──> bridge

Everything is bounded. What does not fit is dropped and counted, and the counts are recorded.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from ktransformers.errors import KTransformersError
from ktransformers.profiling.messages import (
    DropsRecord,
    Farewell,
    GpuRecord,
    Message,
    NativeRecords,
    StepRecord,
    encode_messages,
)

__all__ = ["Recorded", "Recorder", "Runtime", "record_steps"]

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.1
LINGER_SECONDS = 1.0
"""How long the last messages of a recorder that is closed are tried to be sent."""

_MAX_WAITING = 1 << 14  # messages between two drains
_HIGH_WATER = 16  # drains that the socket holds


class Runtime(Protocol):
    """The part of an engine that switches recording by native code on and off, and gives its records.

    profiling.runtime.CpuProfilingRuntime is the one of a CPU, and StepRuntime of engine/step, made of it, that of a
    model's steps.
    """

    @property
    def dropped(self) -> int:
        """The number of records that were lost since the start, because the ring was full."""
        ...

    def start(self) -> None:
        """Start recording by native code."""
        ...

    def stop(self) -> None:
        """Stop recording by native code."""
        ...

    def begin_step(self, step_id: int, num_rows: int, keep: Sequence[int]) -> None:
        """Tell native code that a step begins. keep: flattened rows whose experts are wanted."""
        ...

    def end_step(self) -> GpuRecord | None:
        """Tell native code that the step that was begun last is over. Returns what GPUs did in it."""
        ...

    def drain(self) -> bytes:
        """Take the records that are complete out of the ring."""
        ...


class Recorder:
    """Sends the records of one process, or one engine, to the bridge. Made, used and closed by one thread.

    source: who sends, unique among the senders of a profile. runtime: None for those who run no native code.
    """

    def __init__(self, endpoint: str, source: str, epoch: int = 0, runtime: Runtime | None = None):
        self.source, self.epoch, self._runtime = source, epoch, runtime
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, int(1000 * LINGER_SECONDS))
        self._socket.connect(endpoint)
        self._waiting: deque[Message] = deque()
        self._num_dropped = 0  # by whoever posts
        self._num_unsent = 0  # by the drain thread
        self._is_closing = threading.Event()
        self._draining = threading.Lock()
        if runtime is not None:
            runtime.start()
        self._thread = threading.Thread(target=self._drain_until_closed, name="profile-drain", daemon=True)
        self._thread.start()

    def begin_step(self, step_id: int, num_rows: int, keep: Sequence[int]) -> None:
        """Note that a step begins. keep: see Runtime."""
        if self._runtime is not None:
            self._runtime.begin_step(step_id, num_rows, keep)

    def end_step(self, record: StepRecord) -> None:
        """Note that the step that was begun last is over, and send its record."""
        gpus = None if self._runtime is None else self._runtime.end_step()
        if gpus is not None:
            self.post(msgspec.structs.replace(gpus, epoch=record.epoch, step_id=record.step_id))
        self.post(record)

    def post(self, message: Message) -> None:
        """Send a message soon. Never blocks."""
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(message)
        else:
            self._num_dropped += 1

    def close(self) -> None:
        """Stop recording and take the records that are left; they are sent in the background. Safe to call twice."""
        if self._is_closing.is_set():
            return
        if self._runtime is not None:
            self._runtime.stop()
        with self._draining:
            self._drain([Farewell(self.source)])
            self._socket.close()
            self._is_closing.set()

    def join(self) -> None:
        """Wait, after `close`, until all messages are sent, or cannot be."""
        self._thread.join()

    def _drain_until_closed(self) -> None:
        while not self._is_closing.wait(DRAIN_SECONDS):
            with self._draining:
                if not self._is_closing.is_set():
                    self._drain([])
        self._context.term()  # waits as long as sockets linger

    def _drain(self, last: Sequence[Message]) -> None:
        """A step that is sent has its native records sent before it, as they were complete when it ended."""
        messages: list[Message] = [self._waiting.popleft() for _ in range(len(self._waiting))]
        num_records = 0
        if self._runtime is not None:
            data = self._runtime.drain()
            if data:
                messages.insert(0, NativeRecords(self.epoch, data))
            num_records = self._runtime.dropped
        drops = DropsRecord(self.source, num_records, self._num_dropped + self._num_unsent)
        try:
            self._socket.send(encode_messages([*messages, drops, *last]), zmq.NOBLOCK)
        except zmq.Again:  # the bridge is too slow, or gone
            self._num_unsent += len(messages)


class Recorded(Protocol):
    """An executor of steps that can be recorded."""

    recorder: Recorder | None

    def new_runtime(self) -> Runtime | None:
        """Return the runtime by which native code records in profiles; None without any."""
        ...


def record_steps(executor: Recorded, endpoint: str | None, source: str, epoch: int) -> None:
    """Have the executor's next steps sent to the bridge at this endpoint; None: nowhere. What took them before ends.

    source: what the profile calls the sender. Where native code cannot record, it does without.
    """
    if executor.recorder is not None:
        executor.recorder.close()
    executor.recorder = None
    if endpoint is None:
        return
    try:
        executor.recorder = Recorder(endpoint, source, epoch, executor.new_runtime())
    except KTransformersError as error:
        logger.warning("a profile has steps and tokens only: %s", error)
        executor.recorder = Recorder(endpoint, source, epoch)
