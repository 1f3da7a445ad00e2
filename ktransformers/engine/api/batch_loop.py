"""Scheduler and paged engine in this process, on one thread of their own: many answers at once, for any other threads.

    readers, any thread            the loop's thread
    submit([request, ...]) ─────> scheduler.add ── schedule ── execute ── commit ─┐
    on_event(event | error) <── OutputProcessor.receive <── news of each request ──┘
    abort([request, ...])  ─────> scheduler.finish: its pages are free before the next step
    suspend, resume(name)   ─────> scheduler.suspend, resume: the same

Everything that the scheduler and the engine hold is touched by that thread alone, so an exception that reaches a reader
(Ctrl-C, a cancelled task) never meets a half-done step. Does not know prompts as text, nor event loops.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ktransformers.core import AnswerEnd, FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.api.home import OwnerProcess
from ktransformers.engine.sampling.constraints import check_rules
from ktransformers.engine.sequence.generate import PartialGeneration
from ktransformers.engine.sequence.output_processor import OutputProcessor
from ktransformers.engine.sequence.profiled import LoopProfile
from ktransformers.engine.sequence.saved_session import SavedSession, read_saved, write_saved
from ktransformers.engine.sequence.session_fetch import take_pages
from ktransformers.engine.sequence.session_store import PageStore
from ktransformers.errors import ConfigError, EngineError, KTransformersError, StageLostError
from ktransformers.profiling.capture import ProfileTarget
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.records import Request, RequestUpdate, SchedulerStats, StepPlan
from ktransformers.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from ktransformers.engine.load.builder import PagedEngine

__all__ = ["BatchLoop", "Build", "EngineRequest", "EventCallback"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

EventCallback = Callable[[TokenEvent | EngineError], None]
"""Callback for one request's events, called on the loop's thread. Must not block; an error is always the last event."""

_CLOSED = "this model is closed: make a new LLM, or keep the `with` block open for as long as it is used"


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A prompt that is to be answered. params.seed is set. The loop sets request_id. name: what its sender calls it.

    answer_ids: tokens of an answer that was begun before; the events are of the tokens that follow.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    on_event: EventCallback
    name: str | None = None
    request_id: str = ""
    answer_ids: Sequence[int] = ()


@dataclass(slots=True)
class _OutputStream:
    """Turns one request's tokens into events. began: when its first step, or the first one of a turn, was planned.

    first_len: length of the answer with the first token that makes an event. suspended_at: seconds.
    """

    on_event: EventCallback
    output_processor: OutputProcessor
    first_len: int = 1
    began: float | None = None
    suspended_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Add:
    requests: Sequence[EngineRequest]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: Sequence[str]


@dataclass(slots=True)
class _Turn:
    """Suspends or resumes a request. answer: whether it is there, and for a resume suspended."""

    request_id: str
    is_resume: bool
    answer: queue.SimpleQueue[bool] = field(default_factory=queue.SimpleQueue)


@dataclass(slots=True)
class _Look:
    """Asks for the scheduler's figures."""

    answer: queue.SimpleQueue[SchedulerStats] = field(default_factory=queue.SimpleQueue)


@dataclass(slots=True)
class _Visit:
    """Something to be done between two steps, by the one who asks. The answer is what it returns or raises."""

    run: Callable[[PageStore], object]
    answer: queue.SimpleQueue[tuple[object, BaseException | None]] = field(default_factory=queue.SimpleQueue)


_Command = _Add | _Abort | _Turn | _Look | _Visit | None  # None: stop

Build = Callable[[Callable[..., None]], "PagedEngine"]
"""Builds the engine on the loop's thread. Given a function to report progress to, which raises when nobody waits."""


class BatchLoop:
    """A scheduler and a paged engine on their own thread; `close` closes and drops the engine. All methods may be
    called on any thread of its own process.

    In one that was forked from it they raise EngineError, as `home.require` does; `close` and `abort` do nothing there.

    The engine is built where it runs, on the loop's thread (some of what GPUs need belongs to a thread). The
    constructor waits for it and raises what that raises; an interrupt meanwhile gives the loading up. max_batch_size:
    most sequences of one step; the engine must be built for as many. progress: called on the loop's thread. profile:
    where all steps are recorded, until `close`.
    """

    engine: PagedEngine
    config: SchedulerConfig
    _scheduler: Scheduler
    _profile: LoopProfile | None = None

    def __init__(
        self,
        build: Build,
        max_batch_size: int,
        progress: Callable[..., None] | None = None,
        profile: ProfileTarget | None = None,
    ):
        self.home = OwnerProcess()
        self._profile_target = profile
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, _OutputStream] = {}
        self._ids = itertools.count()
        self._names: dict[str, EngineRequest] = {}  # of requests that have one and are not through
        self._lock = threading.Lock()  # between a submit and a close: nobody is left waiting for a thread that is gone
        self._is_closed = False
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def report(*done: object) -> None:
            if self._is_closed:  # the only way to end a long load early
                raise EngineError("loading was given up")
            if progress is not None:
                progress(*done)

        def run() -> None:
            try:
                self._prepare(build(report), max_batch_size)
            except BaseException as error:  # noqa: BLE001 - the constructor raises it
                started.put(error)
                return
            started.put(None)
            self._run()

        self._thread = threading.Thread(target=run, name="ktransformers-engine", daemon=True)
        self._thread.start()
        try:
            error = started.get()
        except BaseException:
            self.close()
            raise
        if error is not None:
            raise error

    def _prepare(self, engine: PagedEngine, max_batch_size: int) -> None:
        self.engine = engine
        try:
            self.config = SchedulerConfig(
                num_pages=engine.cache.num_pages,
                page_size=engine.cache.page_size,
                chunk_size=engine.config.chunk_size,
                max_batch_size=max_batch_size,
                vocab_size=engine.model.vocab_size,
                eos_token_ids=engine.model.eos_token_ids,
                max_model_len=engine.model.context_len,
                has_prefix_cache=engine.config.prefix_cache,
                num_states=engine.cache.num_states,
                snapshot_interval=engine.snapshot_interval,
                tiers=engine.tiers,
            )
            if self._profile_target is not None:
                self._profile = LoopProfile(self._profile_target, engine)
        except KTransformersError:
            engine.close()
            raise
        self._scheduler = Scheduler(self.config)

    # For readers.

    @property
    def description(self) -> str:
        """A description of the model in words."""
        return self.engine.model.description

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise ConfigError or ContextLengthError for what `submit` could never answer, EngineError when closed."""
        self.home.require()
        if self._is_closed:
            raise EngineError(_CLOSED)
        model, remedy = self.engine.model, "make the cache larger with cache_lens"
        has_vocabulary, has_head = model.tokenizer.has_vocabulary, model.card.has_head
        limits = replace(self.config.limits, has_vocabulary=has_vocabulary, has_head=has_head, remedy=remedy)
        limits.check(prompt_ids, params)
        check_rules(model.tokenizer.grammars(model.vocab_size, model.eos_token_ids), params)

    def check_begun(self, request: EngineRequest) -> None:
        """Check an answer that was begun before, as `check` does. Raises ConfigError too when it is over."""
        self.check(request.prompt_ids, request.params)
        self._output_processor(request)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Answer requests that `check` has passed. They are queued together.

        Who submits must `abort` them in the end, over or not. Raises EngineError when closed, ConfigError for a name
        that is in use.
        """
        self.home.require()
        with self._lock:
            for request in requests:
                if request.name is not None and self._names.setdefault(request.name, request) is not request:
                    raise ConfigError(f"request_id {request.name!r} is in use: name each request differently")
        for request in requests:
            request.request_id = f"r{next(self._ids)}"
        self._post(_Add(tuple(requests)))

    def abort(self, requests: Sequence[EngineRequest]) -> None:
        """End requests with ABORT, which their callbacks receive, but for those that are over. Their names are free."""
        if not self.home.is_here:
            return
        with self._lock:
            for request in requests:
                if request.name is not None and self._names.get(request.name) is request:
                    del self._names[request.name]
            if not self._is_closed:
                self._inbox.put(_Abort([request.request_id for request in requests]))

    def suspend(self, name: str) -> bool:
        """Set the request of this name aside before the next step: it holds no pages until `resume`.

        Returns whether it is there. Raises EngineError when closed.
        """
        return self._turn(name, is_resume=False)

    def resume(self, name: str) -> bool:
        """Go on with a request that is suspended. Returns whether there was one. Raises EngineError when closed."""
        return self._turn(name, is_resume=True)

    def _turn(self, name: str, is_resume: bool) -> bool:
        self.home.require()
        with self._lock:
            request = self._names.get(name)
        if request is None:
            return False
        turn = _Turn(request.request_id, is_resume)
        self._post(turn)
        return turn.answer.get()

    def stats(self) -> SchedulerStats:
        """The scheduler's figures between two steps. Raises EngineError when closed."""
        look = _Look()
        self._post(look)
        return look.answer.get()

    def save(
        self, path: Path, session: PartialGeneration | Sequence[int], messages: list[dict[str, Any]] | None
    ) -> SavedSession:
        """Write a session with what pages and tiers keep of it. On the caller's thread, but for copies of pages.

        Raises SessionFileError, ConfigError for ids that the model does not have, EngineError when closed.
        """
        token_ids = session.token_ids if isinstance(session, PartialGeneration) else list(session)
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.config.vocab_size:
            raise ConfigError(f"token ids must be in [0, {self.config.vocab_size})")
        kept = take_pages(self._visit, token_ids, path)
        return write_saved(path, self.engine.identity, session, kept, messages)

    def load(self, path: Path, recompute: bool) -> SavedSession:
        """Put what a file keeps into free pages. Errors as `read_saved`; EngineError when closed."""
        saved, file = read_saved(path, self.engine.identity, self.config.limits, recompute)
        if file is None:
            return saved
        cached_len = self._visit(lambda store: store.put(file))
        if cached_len < saved.cached_len:
            logger.info("%d of the session's %d tokens found room in pages", cached_len, saved.cached_len)
        return replace(saved, cached_len=cached_len)

    def _visit(self, run: Callable[[PageStore], T]) -> T:
        visit = _Visit(run)
        self._post(visit)
        made, error = visit.answer.get()
        if error is not None:
            raise error
        return cast("T", made)

    def _post(self, command: _Add | _Turn | _Look | _Visit) -> None:
        self.home.require()
        with self._lock:
            if self._is_closed:
                raise EngineError(_CLOSED)
            self._inbox.put(command)

    def close(self) -> None:
        """End requests with an EngineError to their readers, close the engine and drop it. Safe to call twice."""
        if not self.home.is_here:
            return  # the thread and the engine are the parent's
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put(None)
        if threading.current_thread() is not self._thread:  # a garbage collection may run anywhere
            self._thread.join()

    # On the loop's thread.

    def _run(self) -> None:
        try:
            while self._obey_all():
                self._step()
        finally:
            self._end()

    def _end(self) -> None:
        """Nobody is left waiting, also when the thread ends by an error of its own."""
        with self._lock:
            self._is_closed = True
        lost = EngineError("the model was closed while it was answering")
        for stream in self._streams.values():
            stream.on_event(lost)
        self._streams.clear()
        while not self._inbox.empty():
            match self._inbox.get():
                case _Add(requests):
                    for request in requests:
                        request.on_event(lost)
                case _Turn(_, _, turned):
                    turned.put(False)
                case _Look(answer):
                    answer.put(self._scheduler.stats())
                case _Visit(_, visited):
                    visited.put((None, EngineError(_CLOSED)))
        if self._profile is not None:
            self._profile.close()
        self.engine.close()
        del self.engine, self._scheduler  # weights and cache are free, though the loop has a name still
        self._profile = None

    def _obey_all(self) -> bool:
        """Take in commands; wait for one when there is nothing else to do. False when told to stop."""
        while True:
            try:
                command = self._inbox.get(block=not self._scheduler.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._obey(command)

    def _obey(self, command: _Add | _Abort | _Turn | _Look | _Visit) -> None:
        match command:
            case _Add(requests):
                for request in requests:
                    self._add(request)
            case _Abort(request_ids):
                for request_id in request_ids:
                    update = self._scheduler.abort(request_id)
                    if update is not None:
                        self._note_end(update)
                        self._send(update)
            case _Turn():
                command.answer.put(self._obey_turn(command))
            case _Look(answer):
                answer.put(self._scheduler.stats())
            case _Visit(run, visited):
                engine, tiers = self.engine, self._scheduler.pages.kv_offload
                if tiers is not None and tiers.awaits_listing:
                    self._step()  # or what files have would be missed
                try:
                    store = PageStore(engine.cache, self._scheduler.pages, engine.executor.tiers)
                    visited.put((run(store), None))
                except Exception as error:  # noqa: BLE001 - the one who asked raises it
                    visited.put((None, error))

    def _obey_turn(self, turn: _Turn) -> bool:
        stream = self._streams.get(turn.request_id)
        if stream is None:
            return False
        now = time.perf_counter()
        if self._profile is not None:
            self._profile.tracker.pause(turn.request_id, not turn.is_resume)
        if turn.is_resume:
            if not self._scheduler.resume(turn.request_id):
                return False
            assert stream.suspended_at is not None
            stream.output_processor.leave_out(now - stream.suspended_at)
            stream.suspended_at = None
            return True
        if not self._scheduler.is_suspended(turn.request_id):
            stream.suspended_at, stream.began = now, None
        return self._scheduler.suspend(turn.request_id)

    def _add(self, request: EngineRequest) -> None:
        name, params = request.request_id, request.params
        answer_ids = request.answer_ids
        self._streams[name] = _OutputStream(request.on_event, self._output_processor(request), len(answer_ids) + 1)
        self._scheduler.add(
            Request(request_id=name, prompt_ids=request.prompt_ids, params=params, answer_ids=answer_ids)
        )
        if self._profile is not None:
            self._profile.tracker.added(name, len(request.prompt_ids))

    def _output_processor(self, request: EngineRequest) -> OutputProcessor:
        """Of its events, its answer so far behind it. Raises ConfigError when the answer is over."""
        params, prompt_len = request.params, len(request.prompt_ids)
        output_processor = OutputProcessor(self.engine.model.tokenizer, params, prompt_len)
        end = AnswerEnd.of(params, self.config.eos_token_ids, self.config.max_len - prompt_len)
        output_processor.replay(request.answer_ids, end)
        return output_processor

    def _note_end(self, update: RequestUpdate | None) -> None:
        """Of a request that was ended from outside."""
        if self._profile is not None and update is not None:
            self._profile.tracker.ended(update)

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        if plan is None:
            stats = self._scheduler.stats()
            assert not stats.num_running + stats.num_waiting, "requests wait and nothing is planned"
            return  # nothing was left to copy
        if self._profile is not None:
            self._profile.tracker.planned(plan)
        now = time.perf_counter()
        for start in plan.starts:
            stream = self._streams.get(start.request_id)
            if stream is not None and stream.began is None:
                stream.began = now
        try:
            result = self.engine.executor.execute(plan)
        except StageLostError as error:
            logger.warning("%s; answers go on once another one is there", error)
            self.engine.executor.recover()
            self._scheduler.engine_lost()
            return
        except Exception as error:  # whatever a kernel or torch raises must reach the readers, and the log
            logger.exception("a step failed: the answers that were in it end here, all others go on")
            self._lose(plan, error)
            return
        updates = self._scheduler.commit(result.step_id, result.results, result.prompt_logprobs, result.tiers)
        if self._profile is not None and result.had_rows:
            self._profile.tracker.committed(result.step_id, updates, self._scheduler.stats().num_waiting)
        for update in updates:
            self._send(update)

    def _lose(self, plan: StepPlan, error: Exception) -> None:
        """A step that failed may have left anything in the cache: it is forgotten, and those that were in it end."""
        suspects = self._scheduler.in_flight_ids(plan.step_id)
        self._scheduler.engine_lost()
        self.engine.executor.reset()
        for request_id in suspects:
            self._note_end(self._scheduler.abort(request_id))
            lost = EngineError(f"the engine failed with {type(error).__name__}: {error}")
            lost.__cause__ = error
            self._streams.pop(request_id).on_event(lost)

    def _send(self, update: RequestUpdate) -> None:
        stream = self._streams[update.request_id]
        seconds = None
        if update.completion_len == stream.first_len and update.token_id is not None and stream.began is not None:
            seconds = time.perf_counter() - stream.began
        event: TokenEvent | EngineError | None
        try:
            event = stream.output_processor.receive(update, seconds)
        except EngineError as error:
            event = error
        if event is None:
            return
        is_over = isinstance(event, EngineError) or event.finish_reason is not None
        if is_over:
            del self._streams[update.request_id]
            if update.finish_reason is None:  # a stop string, which only the text has
                self._note_end(self._scheduler.finish(update.request_id, FinishReason.STOP))
        stream.on_event(event)
