"""The `transformers` backend, which the `ktransformers` one inherits from: one answer at a time, on one worker thread.

    inference ── its turn comes ──> prefill ── generate ── decode_one_tokens, ... ── end ──> gone
       ^        (the event loop)    (the worker thread)    │
       └── resume ── suspended <───────────────────────────┘ suspend: the lock is another one's

Waiting requests take the lock in the order of their arrival. The worker runs a Session; what computes it is a
subclass's: here it is plain Hugging Face, as the reference to compare with.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from ktransformers import __version__
from ktransformers.config import EngineConfig
from ktransformers.core import Progress, TokenEvent
from ktransformers.engine.load.reference import build_reference_engine
from ktransformers.engine.model.checks import check_tokenizer
from ktransformers.engine.sequence.generate import Control, Generation, PartialGeneration
from ktransformers.engine.sequence.output_processor import OutputProcessor
from ktransformers.engine.sequence.outputs import default_sampling_params
from ktransformers.engine.sequence.profiled import card_meta
from ktransformers.engine.sequence.session import Session, SessionEngine
from ktransformers.engine.step.hidden import embedding_form
from ktransformers.errors import DeadlineError, EngineError, KTransformersError, NotReadyError, UnsupportedError
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.profiling.recorder import Runtime
from ktransformers.server.backend.base import (
    BackendInterfaceBase,
    BackendStats,
    GenerationRequest,
    ModelInfo,
    deadline_error,
)
from ktransformers.server.backend.events import EventBuffer
from ktransformers.server.backend.profiler import ProfileConfig, Profiler
from ktransformers.server.backend.replayed_events import replayed_events
from ktransformers.server.backend.timeline import ChunkClock
from ktransformers.tokenizer import Tokenizer

__all__ = ["LoadedSession", "TransformersInterface"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedSession:
    """A loaded model: its facts, the session that generates, how to free it, and the facts for profiles."""

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
    ) -> LoadedSession:
        """Return the loaded session of an engine of one sequence. new_runtime: what native code records by in
        profiles.
        """
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


class _RequestState:
    """A generation that is open. Its flags are set on the event loop and read on the worker thread.

    generation: what has become of it, once it has had a turn. events: what its present turn yields. stop: nobody wants
    more of it.
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer):
        self.request, self.stop = request, threading.Event()
        self._replayed = OutputProcessor(tokenizer, request.params, len(request.prompt_ids))
        self.generation: Generation | None = None
        self.events: Iterator[TokenEvent] = iter(())
        self._may_run = asyncio.Event()
        self.is_suspended = False
        (self.suspend if request.is_suspended() else self.resume)()

    def past(self) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of what another process has sent."""
        return replayed_events(self._replayed, self.request.past)

    def begin(self, session: Session) -> Generation:
        """Begin the generation of the answer, or of the rest of it. Raises what is wrong with the request."""
        request, past = self.request, self.request.past
        cached_len = past[-1].cached_len if past else None
        partial = PartialGeneration(request.prompt_ids, request.params, [one.token_id for one in past], cached_len)
        return session.resume(partial, request.request_id)

    def aborted(self) -> TokenEvent:
        """Return the last event of an answer that is ended while it waits or is suspended."""
        return (self._replayed if self.generation is None else self.generation.output_processor).aborted()

    def suspend(self) -> None:
        """Suspend the answer before its next step."""
        self.is_suspended = True
        self._may_run.clear()

    def resume(self) -> None:
        """Let the answer go on when its turn comes."""
        self.is_suspended = False
        if self.generation is not None:
            self.generation.resumed()
        self._may_run.set()

    async def until_resumed(self, deadline: float | None) -> None:
        """Wait until the answer is not suspended. Raises DeadlineError."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._may_run.wait()
        except TimeoutError:
            raise deadline_error(self.request, is_suspended=True) from None


class TransformersInterface(BackendInterfaceBase):
    """Backend that serves one request at a time, on transformers' own modules and cache, unless a subclass loads
    another model.

    config: the model, and what it runs with. profile: where profiles are written.
    """

    name: ClassVar[str] = "transformers"
    no_suspension: ClassVar[str] = (
        "the transformers backend does not suspend requests: what it would compute again depends, in the last bits, on "
        "how many tokens are computed at once; balance_serve and ktransformers do"
    )

    def __init__(self, config: EngineConfig, profile: ProfileConfig | None = None) -> None:
        self._config = config
        self._profiler = Profiler(profile or ProfileConfig(), self._turn_profile, self._profiled)
        self._infer_lock = asyncio.Lock()  # wakes its waiters in the order in which they came
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._opened: LoadedSession | None = None
        self._loaded: LoadedSession | None = None  # the same, once requests may come
        self._num_waiting = 0
        self._is_closed = False
        self._requests: dict[str, _RequestState] = {}
        self._running: set[_RequestState] = set()
        self._cache_salt = ""  # of the request whose keys and values are in the cache

    def _load(self, progress: Progress) -> LoadedSession:
        """Load the model, on the worker thread. Raises KTransformersError."""
        check_tokenizer(self._config)
        engine = build_reference_engine(self._config, progress)
        return LoadedSession.of(engine, lambda: None, card_meta(engine.card, engine.config, self.name))

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
        num_suspended = sum(state.is_suspended and state not in self._running for state in self._requests.values())
        return BackendStats(len(self._running), self._num_waiting, used, session.max_len, num_suspended=num_suspended)

    def _require(self) -> LoadedSession:
        if self._loaded is None:
            raise NotReadyError("the model is not loaded yet; ask /ready, or try again in a moment")
        return self._loaded

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Generate an answer, as BackendInterfaceBase.inference does. A request has the lock while the worker computes
        it, whatever its reader does.
        """
        loaded, loop = self._require(), asyncio.get_running_loop()
        deadline = None if request.timeout is None else loop.time() + request.timeout
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        state = self._requests[request.request_id] = _RequestState(request, loaded.model.tokenizer)
        is_over = False
        try:
            async with aclosing(state.past()) as past:
                async for event in past:
                    is_over = event.finish_reason is not None
                    yield event
            while not is_over:
                await state.until_resumed(deadline)
                await self._take_turn(deadline)
                if state.stop.is_set() or state.is_suspended:  # meanwhile
                    self._infer_lock.release()
                    if state.stop.is_set():
                        yield state.aborted()
                        return
                    continue
                async with aclosing(self._turn(loaded.session, state, deadline)) as events:
                    async for event in events:
                        is_over = event.finish_reason is not None
                        yield event
        finally:
            del self._requests[request.request_id]
            if state.generation is not None and state.generation.is_suspended and not self._is_closed:
                self._worker.submit(state.generation.abandon)

    async def _turn(
        self, session: Session, state: _RequestState, deadline: float | None
    ) -> AsyncGenerator[TokenEvent, None]:
        """The events until the answer ends or is suspended. The lock is held until the worker is through."""
        loop, request = asyncio.get_running_loop(), state.request
        if request.timeline is not None:
            request.timeline.begin(time.monotonic())
        buffer = EventBuffer(loop)
        timer = None if deadline is None else loop.call_at(deadline, buffer.fail, deadline_error(request))
        self._running.add(state)
        loop.run_in_executor(self._worker, self._run, session, state, buffer).add_done_callback(
            lambda _: self._end_turn(state)
        )
        is_left = True
        try:
            async for event in buffer:
                yield event
            is_left = False
        finally:
            if is_left:
                state.stop.set()  # before its next step
            if timer is not None:
                timer.cancel()

    def _end_turn(self, state: _RequestState) -> None:
        self._running.discard(state)
        self._infer_lock.release()

    @override
    def suspend(self, request_id: str) -> None:
        if not self.can_suspend:
            raise UnsupportedError(self.no_suspension)
        state = self._requests.get(request_id)
        if state is not None:
            state.suspend()

    @override
    def resume(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        if state is not None:
            state.resume()

    @override
    def end(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        if state is not None:
            state.stop.set()
            state.resume()  # to receive that this is the end

    async def _take_turn(self, deadline: float | None) -> None:
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._infer_lock.acquire()
        except TimeoutError:
            raise DeadlineError("the request's time was over before its turn came") from None
        finally:
            self._num_waiting -= 1

    def prefill(self, session: Session, state: _RequestState, control: Control) -> Iterator[TokenEvent]:
        """Compute what the cache lacks of the prompt, and of an answer that was suspended. On the worker thread.

        Yields the event of the token that follows; nothing when `control` suspends the answer before that.
        """
        assert state.generation is not None, "it has had no turn"
        state.events = session.run(state.generation, control)
        yield from itertools.islice(state.events, 1)

    def generate(self, state: _RequestState) -> Iterator[TokenEvent]:
        """Yield the events of the tokens after `prefill`'s until the answer ends or is suspended. On the worker."""
        while (event := self.decode_one_tokens(state)) is not None:
            yield event

    def decode_one_tokens(self, state: _RequestState) -> TokenEvent | None:
        """Run the model for one more token. Returns its event; None once the answer has ended or is suspended."""
        return next(state.events, None)

    def _run(self, session: Session, state: _RequestState, buffer: EventBuffer) -> None:
        """Generate one answer until it ends or is suspended, on the worker thread."""
        request = state.request
        try:
            if request.cache_salt != self._cache_salt:
                session.clear()
                self._cache_salt = request.cache_salt
            if state.generation is None:
                state.generation = state.begin(session)
            timeline = request.timeline
            clock = None if timeline is None else ChunkClock(timeline, len(state.generation.token_ids))
            control = Control(lambda: state.stop.is_set() or buffer.is_closed, lambda: state.is_suspended, clock)
            for event in itertools.chain(self.prefill(session, state, control), self.generate(state)):
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
        for request_id in self._requests:
            self.end(request_id)
        await self._profiler.close(self._end_worker)
        if self._opened is not None:
            self._opened.close()
            self._opened = self._loaded = None

    async def _end_worker(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._worker.shutdown)
