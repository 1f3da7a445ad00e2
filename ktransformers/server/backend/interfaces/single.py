"""Backends that compute one answer at a time: a lock that waiting requests take in the order of their arrival, and one
worker thread that the model runs on. Knows a Session, not what computes it.

    generate ── its turn comes ──> runs on the worker ── end ──> gone
       ^                              │
       └── resume ── suspended <──────┘ suspend: the lock is another one's
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field

from typing_extensions import override

from ktransformers import __version__
from ktransformers.core import Progress, TokenEvent
from ktransformers.engine.sequence.generate import Answer, BegunAnswer, Control
from ktransformers.engine.sequence.output_processor import AnswerAssembler
from ktransformers.engine.sequence.outputs import default_sampling_params
from ktransformers.engine.sequence.session import Session, SessionEngine
from ktransformers.engine.step.hidden import embedding_form
from ktransformers.errors import DeadlineError, EngineError, KTransformersError, NotReadyError, UnsupportedError
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.profiling.recorder import Runtime
from ktransformers.server.backend.base import Backend, BackendStats, GenerationRequest, ModelInfo, deadline_error
from ktransformers.server.backend.events import EventBuffer
from ktransformers.server.backend.profiler import ProfileConfig, Profiler
from ktransformers.server.backend.replayed_events import past_events
from ktransformers.server.backend.timeline import ChunkClock
from ktransformers.tokenizer import Tokenizer

__all__ = ["Loaded", "SingleBackend"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model: its facts, what generates, how to free it, and what profiles say of it."""

    model: ModelInfo
    session: Session
    close: Callable[[], None]
    profiled: ProfileMeta = field(default_factory=lambda: ProfileMeta(backend="", version=__version__))

    @classmethod
    def of(
        cls,
        engine: SessionEngine,
        close: Callable[[], None],
        profiled: ProfileMeta,
        new_runtime: Callable[[], Runtime | None] = lambda: None,
    ) -> Loaded:
        """All of it from an engine of one sequence. new_runtime: what native code records by in profiles."""
        model = ModelInfo(
            tokenizer=engine.tokenizer,
            max_len=engine.runner.max_len,
            vocab_size=engine.runner.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            default_params=default_sampling_params(engine.generation_defaults, None),
            architecture=engine.facts.architecture,
            description=engine.description,
            is_models_limit=engine.runner.is_models_limit,
            embeddings=embedding_form(engine.card.pooling_type, engine.config.model_path, engine.config.gguf_path),
            card=engine.card,
        )
        session = Session.of(engine)
        session.profile.new_runtime = new_runtime
        return cls(model, session, close, profiled)


class _Asked:
    """A generation that is open. Its flags are set on the event loop and read on the worker thread.

    answer: what has become of it, once it has had a turn. stop: nobody wants more of it.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer):
        self.request, self.stop = request, threading.Event()
        self._begun = AnswerAssembler(tokenizer, request.params, len(request.prompt_ids))
        self.answer: Answer | None = None
        self._may_run = asyncio.Event()
        self.is_suspended = False
        (self.suspend if request.is_suspended() else self.resume)()

    def past(self) -> AsyncGenerator[TokenEvent, None]:
        """The events of what another process has told of."""
        return past_events(self._begun, self.request.past)

    def begin(self, session: Session) -> Answer:
        """Its answer, or the rest of it. Raises what is wrong with the request."""
        request, past = self.request, self.request.past
        cached_len = past[-1].cached_len if past else None
        begun = BegunAnswer(request.prompt_ids, request.params, [one.token_id for one in past], cached_len)
        return session.take_up(begun, request.request_id)

    def aborted(self) -> TokenEvent:
        """The last event, where it is ended while it waits or is suspended."""
        return (self._begun if self.answer is None else self.answer.assembler).aborted()

    def suspend(self) -> None:
        """Before its next step."""
        self.is_suspended = True
        self._may_run.clear()

    def resume(self) -> None:
        """Its turn may come."""
        self.is_suspended = False
        if self.answer is not None:
            self.answer.resumed()
        self._may_run.set()

    async def until_resumed(self, deadline: float | None) -> None:
        """Raises DeadlineError."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._may_run.wait()
        except TimeoutError:
            raise deadline_error(self.request, is_suspended=True) from None


class SingleBackend(Backend):
    """A subclass says how the model is loaded; that runs on the worker thread too."""

    def __init__(self, profile: ProfileConfig | None = None) -> None:
        self._profiler = Profiler(profile or ProfileConfig(), self._turn_profile, self._profiled)
        self._lock = asyncio.Lock()  # wakes its waiters in the order in which they came
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._opened: Loaded | None = None
        self._loaded: Loaded | None = None  # the same, once requests may come
        self._num_waiting = 0
        self._is_closed = False
        self._asked: dict[str, _Asked] = {}
        self._running: set[_Asked] = set()
        self._cache_salt = ""  # of the request whose keys and values are in the cache

    @abstractmethod
    def _load(self, progress: Progress) -> Loaded:
        """Load the model; runs on the worker thread. Raises KTransformersError."""

    @override
    async def start(self, progress: Progress | None = None) -> None:
        def watched(done: int, total: int, name: str) -> None:
            if self._is_closed:  # the only way to end a long load early
                raise NotReadyError("the server was stopped while the model was loading")
            if progress is not None:
                progress(done, total, name)

        self._opened = await asyncio.get_running_loop().run_in_executor(self._worker, self._load, watched)
        await self._profiler.begin()  # before any request is let in
        self._loaded = self._opened

    @override
    @property
    def profiler(self) -> Profiler:
        return self._profiler

    def _profiled(self) -> ProfileMeta:
        assert self._opened is not None, "nothing is profiled before it is loaded"
        return self._opened.profiled

    async def _turn_profile(self, endpoint: str | None) -> None:
        """Takes effect between two steps: of the answer that is being computed, or else at once."""
        assert self._opened is not None, "nothing is profiled before it is loaded"
        slot = self._opened.session.profile
        settled = slot.want(endpoint)
        self._worker.submit(slot.settle)  # not waited for: it stands behind the answer, which settles it as well
        await asyncio.to_thread(settled.wait)

    @property
    def is_ready(self) -> bool:
        return self._loaded is not None

    @property
    def model(self) -> ModelInfo:
        return self._require().model

    @property
    def max_running(self) -> int:
        return 1

    @override
    def stats(self) -> BackendStats:
        if self._loaded is None:
            return BackendStats(len(self._running), self._num_waiting)
        session = self._loaded.session
        used = len(session.cached_ids) / session.max_len
        num_suspended = sum(asked.is_suspended and asked not in self._running for asked in self._asked.values())
        return BackendStats(len(self._running), self._num_waiting, used, session.max_len, num_suspended=num_suspended)

    def _require(self) -> Loaded:
        if self._loaded is None:
            raise NotReadyError("the model is not loaded yet; ask /ready, or try again in a moment")
        return self._loaded

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """See Backend. It has the lock while the worker computes it, whatever its reader does."""
        loaded, loop = self._require(), asyncio.get_running_loop()
        deadline = None if request.timeout is None else loop.time() + request.timeout
        if request.request_id in self._asked:
            raise ValueError(f"request id {request.request_id} is in use")
        asked = self._asked[request.request_id] = _Asked(request, loaded.model.tokenizer)
        is_over = False
        try:
            async with aclosing(asked.past()) as past:
                async for event in past:
                    is_over = event.finish_reason is not None
                    yield event
            while not is_over:
                await asked.until_resumed(deadline)
                await self._take_turn(deadline)
                if asked.stop.is_set() or asked.is_suspended:  # meanwhile
                    self._lock.release()
                    if asked.stop.is_set():
                        yield asked.aborted()
                        return
                    continue
                async with aclosing(self._turn(loaded.session, asked, deadline)) as events:
                    async for event in events:
                        is_over = event.finish_reason is not None
                        yield event
        finally:
            del self._asked[request.request_id]
            if asked.answer is not None and asked.answer.is_suspended and not self._is_closed:
                self._worker.submit(asked.answer.abandon)

    async def _turn(self, session: Session, asked: _Asked, deadline: float | None) -> AsyncGenerator[TokenEvent, None]:
        """The events until the answer ends or is suspended. The lock is held until the worker is through."""
        loop, request = asyncio.get_running_loop(), asked.request
        if request.timeline is not None:
            request.timeline.begin(time.monotonic())
        buffer = EventBuffer(loop)
        timer = None if deadline is None else loop.call_at(deadline, buffer.fail, deadline_error(request))
        self._running.add(asked)
        loop.run_in_executor(self._worker, self._run, session, asked, buffer).add_done_callback(
            lambda _: self._end_turn(asked)
        )
        is_left = True
        try:
            async for event in buffer:
                yield event
            is_left = False
        finally:
            if is_left:
                asked.stop.set()  # before its next step
            if timer is not None:
                timer.cancel()

    def _end_turn(self, asked: _Asked) -> None:
        self._running.discard(asked)
        self._lock.release()

    @override
    def suspend(self, request_id: str) -> None:
        if not self.can_suspend:
            raise UnsupportedError(self.no_suspension)
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.suspend()

    @override
    def resume(self, request_id: str) -> None:
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.resume()

    @override
    def end(self, request_id: str) -> None:
        asked = self._asked.get(request_id)
        if asked is not None:
            asked.stop.set()
            asked.resume()  # to hear that this is the end

    async def _take_turn(self, deadline: float | None) -> None:
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineError("the request's time was over before its turn came") from None
        finally:
            self._num_waiting -= 1

    def _run(self, session: Session, asked: _Asked, buffer: EventBuffer) -> None:
        """Generate one answer until it ends or is suspended, on the worker thread."""
        request = asked.request
        try:
            if request.cache_salt != self._cache_salt:
                session.clear()
                self._cache_salt = request.cache_salt
            if asked.answer is None:
                asked.answer = asked.begin(session)
            timeline = request.timeline
            clock = None if timeline is None else ChunkClock(timeline, len(asked.answer.token_ids))
            control = Control(lambda: asked.stop.is_set() or buffer.is_closed, lambda: asked.is_suspended, clock)
            for event in session.run(asked.answer, control):
                if clock is not None and event.token_id is not None:
                    clock.finish()
                buffer.put(event)
            buffer.end()
        except KTransformersError as error:
            buffer.fail(error)
        except Exception as error:  # whatever a kernel or torch raises must reach the reader, and the log
            logger.exception("request %s: the engine failed", request.request_id)
            buffer.fail(EngineError(f"the engine failed with {type(error).__name__}; the server's log says more"))

    @override
    async def close(self) -> None:
        self._is_closed = True
        for request_id in self._asked:
            self.end(request_id)
        await self._profiler.close(self._end_worker)
        if self._opened is not None:
            self._opened.close()
            self._opened = self._loaded = None

    async def _end_worker(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._worker.shutdown)
