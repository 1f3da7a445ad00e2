"""Runs a request through a BatchLoop and yields its events: what local_chat, LLM, AsyncLLM and the single backends run.

    prefill_and_generate(loop, request) ──> Generation: iterate over it, or take its events as they come

    positions   0 ........ cached_len ........ prompt_len ........ prompt_len + n
                already in the cache | prefill, in chunks | decode: token n is sampled for this position

The scheduler decides in which steps that happens, together with whatever else the loop answers; the tokens are those
that the request would get alone.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ktransformers.core import TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest, EventCallback, PrefillChunk
from ktransformers.errors import KTransformersError

__all__ = ["Control", "Generation", "PrefillProgress", "prefill_and_generate"]

PrefillProgress = Callable[[int, int], None]
"""Receives how many of the prompt's tokens are computed, and how many have to be: those that were not cached."""

_Events = queue.SimpleQueue[TokenEvent | PrefillChunk | KTransformersError]

_STOP_POLL_SECONDS = 0.05
"""Between two questions to should_stop while nothing comes."""


@dataclass(frozen=True, slots=True)
class Control:
    """The callbacks of whoever iterates over an answer, called on its thread.

    should_stop: asked now and then; when it says yes the answer ends with ABORT. on_prefill: see PrefillProgress; it is
    called at every chunk of the prompt.
    """

    should_stop: Callable[[], bool] | None = None
    on_prefill: PrefillProgress | None = None


class Generation:
    """An answer on its way. `close` it in the end, over or not; whoever iterates over it to its end has done so."""

    def __init__(self, loop: BatchLoop[Any], request: EngineRequest, control: Control):
        self._loop, self.request, self._control = loop, request, control

    def __iter__(self) -> Iterator[TokenEvent]:
        """Yield the events, the last of which carries the finish reason. Raises the error that ended the answer."""
        events = self.queued()
        try:
            self._loop.submit([self.request])
            yield from events
        finally:
            self.close()

    def queued(self) -> Iterator[TokenEvent]:
        """Return the events as `__iter__` yields them, of a request that its caller submits and closes, with others."""
        events: _Events = queue.SimpleQueue()
        self.request.on_event = events.put
        self.request.has_progress = self._control.on_prefill is not None
        return self._read(events)

    def _read(self, events: _Events) -> Iterator[TokenEvent]:
        while True:
            event = self._next(events)
            yield event
            if event.finish_reason is not None:
                return

    def _next(self, events: _Events) -> TokenEvent:
        should_stop, on_prefill = self._control.should_stop, self._control.on_prefill
        self._loop.home.require()
        while True:
            if should_stop is not None and should_stop():
                self.close()  # its last event is on its way
                should_stop = None
            try:
                said = events.get(timeout=None if should_stop is None else _STOP_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(said, KTransformersError):
                raise said
            if isinstance(said, TokenEvent):
                return said
            if on_prefill is not None:
                on_prefill(said.num_done, said.num_tokens)

    def begin(self, on_event: EventCallback) -> None:
        """Have the events go to a callback, see EventCallback, in place of an iterator."""
        self.request.on_event = on_event
        self._loop.submit([self.request])

    def suspend(self) -> None:
        """Set the answer aside before the next step, until `resume`. Does not wait for it."""
        self._loop.suspend_soon(self.request)

    def resume(self) -> None:
        """Let a suspended answer go on. Does not wait for it."""
        self._loop.resume_soon(self.request)

    def close(self) -> None:
        """End the answer, if it is not over: its last event is on its way. Safe to call twice."""
        self._loop.abort([self.request])


def prefill_and_generate(loop: BatchLoop[Any], request: EngineRequest, control: Control | None = None) -> Generation:
    """Compute what the cache lacks of a request's prompt, in chunks, then one token after the other.

    request: one that `BatchLoop.check` has passed; its on_event and has_progress are set here. Nothing is computed
    before the Generation is iterated over, or begun.
    """
    return Generation(loop, request, control or Control())
