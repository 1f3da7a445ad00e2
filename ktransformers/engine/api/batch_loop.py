"""Answers as text over an EngineLoop: requests in, their events out, for any number of threads.

    readers, any thread              the loop's thread
    submit([request, ...]) ───────> Add ── steps ─┐
    on_event(event | error) <── OutputProcessor.receive <── updates of each request
    abort([request, ...])  ───────> Finish: its pages are free before the next step
    suspend, resume(name)   ──────> Suspend, Resume: the same

Does not know prompts as text, nor event loops.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from ktransformers.core import AnswerEnd, FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.api.engine_loop import Build, EngineLoop, EngineT
from ktransformers.engine.sampling.constraints import check_rules
from ktransformers.engine.sequence.output_processor import OutputProcessor
from ktransformers.engine.sequence.partial import PartialGeneration
from ktransformers.engine.sequence.prompts import media_of
from ktransformers.engine.sequence.saved_session import SavedSession, read_saved, write_saved
from ktransformers.engine.sequence.session_fetch import take_pages
from ktransformers.engine.sequence.session_store import PageStore
from ktransformers.errors import ConfigError, EngineError
from ktransformers.media.records import MediaItem
from ktransformers.profiling.capture import Capture, ProfileTarget
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.scheduler.commands import Add, Finish, ProfileOff, ProfileOn, Resume, Suspend
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.driver import SchedulerDriver
from ktransformers.scheduler.limits import tokens_beside
from ktransformers.scheduler.records import Request, RequestUpdate, SchedulerStats, StepPlan

__all__ = ["BatchLoop", "EngineRequest", "EventCallback", "PrefillChunk"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Notes that a step begins to compute a part of a prompt, from `position` on: num_done of the num_tokens that the
    cache lacked are computed. Of a request that goes on, the tokens of its answer are part of that."""

    num_done: int
    num_tokens: int
    position: int


EventCallback = Callable[[TokenEvent | PrefillChunk | EngineError], None]
"""Callback for one request's events, called on the loop's thread. Must not block; an error is always the last event."""


def _ignore(said: object) -> None:
    """The callback of a request that is not submitted yet."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request to a loop, with the callback for its events: those of the tokens behind its answer_ids.

    request: what the scheduler is given. Its params.seed is set, its priority and deadline are not looked at; the loop
    gives it a request_id where that is empty. name: what its sender calls it. has_progress: whether its events have
    PrefillChunks.
    """

    request: Request
    on_event: EventCallback = _ignore
    name: str | None = None
    has_progress: bool = False

    @property
    def request_id(self) -> str:
        """The id that the loop and profiles know it by; empty until it is submitted without one."""
        return self.request.request_id


@dataclass(slots=True)
class _OutputStream:
    """Turns one request's tokens into events. suspended_at: seconds; None: it is not suspended."""

    on_event: EventCallback
    output_processor: OutputProcessor
    has_progress: bool = False
    suspended_at: float | None = None


@dataclass(slots=True)
class _Prefill:
    """A run whose known tokens are not all computed. first: the position that it began at."""

    on_event: EventCallback
    known_len: int
    first: int | None = None


class BatchLoop(Generic[EngineT]):
    """A scheduler and an engine on their own thread; `close` closes and drops the engine. All methods may be
    called on any thread of its own process.

    In one that was forked from it they raise EngineError, as `home.require` does; `close` and `abort` do nothing there.

    build, progress: see EngineLoop, which says how the engine is built. remedy: what errors about prompts that are too
    long say of making the cache larger.
    """

    def __init__(
        self,
        build: Build[EngineT],
        progress: Callable[..., None] | None = None,
        *,
        remedy: str = "make the cache larger with cache_lens",
    ):
        self._remedy = remedy
        self._streams: dict[str, _OutputStream] = {}
        self._ready: list[tuple[EventCallback, TokenEvent | PrefillChunk | EngineError]] = []  # not handed over yet
        self._prefills: dict[int, _Prefill] = {}  # by run, of requests that want to know
        self._ids = itertools.count()
        self._names: dict[str, EngineRequest] = {}  # of requests that have one and are not through
        self._lock = threading.Lock()
        self._capture: Capture | None = None
        self._used_len = 0
        self._loop: EngineLoop[EngineT] = EngineLoop(
            build,
            deliver=self._deliver,
            notify=self._notify,
            planned=self._note_prefills,
            ended=self._on_end,
            progress=progress,
        )
        self.home = self._loop.home

    @property
    def engine(self) -> EngineT:
        """The loaded engine, until `close`."""
        return self._loop.engine

    @property
    def config(self) -> SchedulerConfig:
        """The scheduler's limits."""
        return self._loop.config

    # For readers.

    @property
    def description(self) -> str:
        """A description of the model in words."""
        return self.engine.model.description

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, media: Sequence[MediaItem] = ()) -> None:
        """Raise ConfigError or ContextLengthError for what `submit` could never answer, EngineError when closed."""
        self._loop.require_open()
        model, remedy = self.engine.model, self._remedy
        has_vocabulary, has_head = model.tokenizer.has_vocabulary, model.card.has_head
        limits = replace(self.config.limits, has_vocabulary=has_vocabulary, has_head=has_head, remedy=remedy)
        limits.check(prompt_ids, params, media=media)
        check_rules(model.tokenizer.grammars(model.vocab_size, model.eos_token_ids), params)

    def check_begun(self, request: EngineRequest) -> None:
        """Check an answer that was begun before, as `check` does. Raises ConfigError too when it is over."""
        asked = request.request
        self.check(asked.prompt_ids, asked.params, asked.media)
        self._output_processor(asked)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Answer requests that `check` has passed. They are queued together.

        Who submits must `abort` them in the end, over or not. Raises EngineError when closed, ConfigError for a name
        that is in use.
        """
        self._loop.require_open()
        processors = [self._output_processor(request.request) for request in requests]
        with self._lock:
            for request in requests:
                if request.name is not None and self._names.setdefault(request.name, request) is not request:
                    raise ConfigError(f"request_id {request.name!r} is in use: name each request differently")
        for request, processor in zip(requests, processors, strict=True):
            if not request.request_id:
                request.request = msgspec.structs.replace(request.request, request_id=f"r{next(self._ids)}")
            self._streams[request.request_id] = _OutputStream(
                request.on_event,
                processor,
                request.has_progress,
                time.perf_counter() if request.request.is_suspended else None,
            )
        try:
            self._loop.post(*(Add(request.request) for request in requests))
        except EngineError:
            for request in requests:
                self._streams.pop(request.request_id, None)
            raise

    def abort(self, requests: Sequence[EngineRequest]) -> None:
        """End requests with ABORT, which their callbacks receive, but for those that are over. Their names are free."""
        if not self.home.is_here:
            return
        with self._lock:
            for request in requests:
                if request.name is not None and self._names.get(request.name) is request:
                    del self._names[request.name]
        with contextlib.suppress(EngineError):  # closed meanwhile: they have ended
            self._loop.post(*(Finish(one.request_id, FinishReason.ABORT) for one in requests if one.request_id))

    def suspend(self, name: str) -> bool:
        """Set the request of this name aside before the next step: it holds no pages until `resume`.

        Returns whether it is there. Raises EngineError when closed.
        """
        request = self._named(name)
        return request is not None and self._loop.call(lambda: self._suspend(request))

    def resume(self, name: str) -> bool:
        """Go on with a request that is suspended. Returns whether there was one. Raises EngineError when closed."""
        request = self._named(name)
        return request is not None and self._loop.call(lambda: self._resume(request))

    def suspend_soon(self, request: EngineRequest) -> None:
        """Suspend a request that was submitted, without waiting for the step in between. Raises EngineError when
        closed."""
        self._loop.call_soon(lambda: self._suspend(request))

    def resume_soon(self, request: EngineRequest) -> None:
        """Resume a request, without waiting. Raises EngineError when closed."""
        self._loop.call_soon(lambda: self._resume(request))

    def _named(self, name: str) -> EngineRequest | None:
        self._loop.require_open()
        with self._lock:
            return self._names.get(name)

    def _suspend(self, request: EngineRequest) -> bool:
        """On the loop's thread, as `_resume`."""
        stream = self._streams.get(request.request_id)
        if stream is None:
            return False
        stream.suspended_at = stream.suspended_at or time.perf_counter()
        return self._loop.driver.obey(Suspend(request.request_id))

    def _resume(self, request: EngineRequest) -> bool:
        stream = self._streams.get(request.request_id)
        if stream is None or not self._loop.driver.obey(Resume(request.request_id)):
            return False
        assert stream.suspended_at is not None
        stream.output_processor.leave_out(time.perf_counter() - stream.suspended_at)
        stream.suspended_at = None
        return True

    def write_profile(self, target: ProfileTarget, meta: ProfileMeta) -> None:
        """Record all steps in a profile from now on, until `close`. meta: what it says of the model. Errors as
        Capture."""
        self._capture = target.open(meta)
        self.record(self._capture.endpoint)

    def record(self, endpoint: str | None) -> None:
        """Have requests and steps recorded for the bridge at this endpoint from the next step on, or no more."""
        self._loop.post(ProfileOff() if endpoint is None else ProfileOn(endpoint))
        self._loop.call(lambda: None)  # it has been obeyed

    def stats(self) -> SchedulerStats:
        """The scheduler's figures between two steps. Raises EngineError when closed."""
        return self._loop.call(lambda: self._loop.driver.stats())

    @property
    def used_len(self) -> int:
        """Number of tokens in pages of the cache, of running sequences and kept for others, after the last step."""
        return self._used_len

    def save(
        self, path: Path, session: PartialGeneration | Sequence[int], messages: list[dict[str, Any]] | None
    ) -> SavedSession:
        """Write a session with what pages and tiers keep of it. On the caller's thread, but for copies of pages.

        Raises SessionFileError, ConfigError for ids that the model does not have, EngineError when closed.
        """
        if isinstance(session, PartialGeneration):
            token_ids, media = session.token_ids, session.media
        else:
            token_ids, media = list(session), media_of(session)
        named = tokens_beside(token_ids, media)
        end = self.config.vocab_size + self.config.num_extra_ids
        if named and not 0 <= min(named) <= max(named) < end:
            raise ConfigError(f"token ids must be in [0, {end})")
        kept = take_pages(self.visit, token_ids, path)
        return write_saved(path, self.engine.identity, session, kept, messages)

    def load(self, path: Path, recompute: bool) -> SavedSession:
        """Put what a file keeps into free pages. Errors as `read_saved`; EngineError when closed."""
        saved, file = read_saved(path, self.engine.identity, self.config.limits, recompute)
        if file is None:
            return saved
        cached_len = self.visit(lambda store: store.put(file))
        if cached_len < saved.cached_len:
            logger.info("%d of the session's %d tokens found room in pages", cached_len, saved.cached_len)
        return replace(saved, cached_len=cached_len)

    def visit(self, run: Callable[[PageStore], T]) -> T:
        """Run a function on what pages and tiers keep, between two steps. Raises what it raises."""

        def visited() -> T:
            engine, pages = self.engine, self._loop.driver.scheduler.pages
            if pages.kv_offload is not None and pages.kv_offload.awaits_listing:
                self._loop.step()  # or what files have would be missed
            return run(PageStore(engine.cache, pages, engine.executor.tiers))

        return self._loop.call(visited)

    def close(self) -> None:
        """End requests with an EngineError to their readers, close the engine and drop it. Safe to call twice."""
        self._loop.close()

    # On the loop's thread.

    def _on_end(self) -> None:
        lost = EngineError("the model was closed while it was answering")
        for request_id in list(self._streams):
            self._streams.pop(request_id).on_event(lost)
        if self._capture is not None:
            self._capture.stop()

    def _output_processor(self, request: Request) -> OutputProcessor:
        """Of its events, its answer so far behind it. Raises ConfigError when the answer is over."""
        params, prompt_len = request.params, len(request.prompt_ids)
        output_processor = OutputProcessor(self.engine.model.tokenizer, params, prompt_len)
        end = AnswerEnd.of(params, self.config.eos_token_ids, self.config.max_len - prompt_len)
        output_processor.replay(request.answer_ids, end)
        return output_processor

    def _note_prefills(self, plan: StepPlan) -> None:
        """Send those who want to know how far their prompts are, with the beginning of the step."""
        if not plan.starts and not self._prefills:
            return
        for start in plan.starts:
            stream = self._streams.get(start.request_id)
            if stream is not None and stream.has_progress:
                self._prefills[start.run_id] = _Prefill(stream.on_event, len(start.token_ids))
        for row in plan.rows:
            prefill = self._prefills.get(row.run_id)
            if prefill is None:
                continue
            prefill.first = row.start if prefill.first is None else prefill.first
            first = prefill.first
            chunk = PrefillChunk(row.start - first, prefill.known_len - first, row.start)
            self._ready.append((prefill.on_event, chunk))
            if row.start + row.num_tokens >= prefill.known_len:
                del self._prefills[row.run_id]
        for run_id in plan.ended:
            self._prefills.pop(run_id, None)

    def _deliver(self, driver: SchedulerDriver) -> None:
        pages = driver.scheduler.pages
        self._used_len = pages.num_kept * pages.page_size
        for update in driver.take_updates():
            self._send(driver, update)

    def _send(self, driver: SchedulerDriver, update: RequestUpdate) -> None:
        request_id = update.request_id
        seconds, stream = driver.take_prefill_seconds(request_id), self._streams.get(request_id)
        if stream is None:
            return  # its text has ended already
        event: TokenEvent | EngineError | None
        try:
            event = stream.output_processor.receive(update, seconds)
        except EngineError as error:
            error.__cause__ = self._loop.failure
            event = error
        if event is None:
            return
        if isinstance(event, EngineError) or event.finish_reason is not None:
            del self._streams[request_id]
            if update.finish_reason is None:  # a stop string, which only the text has
                completion_len = stream.output_processor.stats.completion_len  # tokens behind it may be there by now
                driver.obey(Finish(request_id, FinishReason.STOP, completion_len))
        self._ready.append((stream.on_event, event))

    def _notify(self) -> None:
        """Wake the readers of what is ready, when EngineLoop says that it is time."""
        if self._ready:
            ready, self._ready = self._ready, []
            for on_event, event in ready:
                on_event(event)
