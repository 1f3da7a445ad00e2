"""Backends that compute one answer at a time: a lock that waiting requests take in the order of their arrival, and one
worker thread that the model runs on. Knows a Session, not what computes it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from typing_extensions import override

from ktransformers.core import Progress, TokenEvent
from ktransformers.engine.hidden import pooling_of
from ktransformers.engine.outputs import default_sampling_params
from ktransformers.engine.session import Session, SessionEngine
from ktransformers.errors import DeadlineError, EngineError, KTransformersError, NotReadyError
from ktransformers.server.backend.base import Backend, BackendStats, GenerationRequest, ModelInfo
from ktransformers.server.backend.events import EventBuffer
from ktransformers.server.backend.timeline import ChunkClock

__all__ = ["Loaded", "SingleBackend"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model: its facts, what generates, and how to free it."""

    model: ModelInfo
    session: Session
    close: Callable[[], None]

    @classmethod
    def of(cls, engine: SessionEngine, close: Callable[[], None]) -> Loaded:
        """All of it from an engine of one sequence."""
        model = ModelInfo(
            tokenizer=engine.tokenizer,
            max_len=engine.runner.max_len,
            vocab_size=engine.runner.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            default_params=default_sampling_params(engine.generation_defaults, None),
            architecture=engine.facts.architecture,
            description=engine.description,
            is_models_limit=engine.runner.is_models_limit,
            pooling=pooling_of(engine.config.model_path, engine.config.gguf_path),
            card=engine.card,
        )
        return cls(model, Session.of(engine), close)


class SingleBackend(Backend):
    """A subclass says how the model is loaded; that runs on the worker thread too."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()  # wakes its waiters in the order in which they came
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._loaded: Loaded | None = None
        self._num_waiting = 0
        self._is_closed = False
        self._running: set[threading.Event] = set()  # set one to stop its answer
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

        self._loaded = await asyncio.get_running_loop().run_in_executor(self._worker, self._load, watched)

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
            return BackendStats(num_running=len(self._running), num_waiting=self._num_waiting)
        session = self._loaded.session
        used = len(session.cached_ids) / session.max_len
        return BackendStats(len(self._running), self._num_waiting, used, session.max_len)

    def _require(self) -> Loaded:
        if self._loaded is None:
            raise NotReadyError("the model is not loaded yet; ask /ready, or try again in a moment")
        return self._loaded

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """See Backend. The generator holds the lock while it is open."""
        loaded, loop = self._require(), asyncio.get_running_loop()
        deadline = None if request.timeout is None else loop.time() + request.timeout
        await self._take_turn(deadline)
        if request.timeline is not None:
            request.timeline.begin(time.monotonic())
        stop, buffer = threading.Event(), EventBuffer(loop)
        timer = None if deadline is None else loop.call_at(deadline, buffer.fail, _deadline_error(request))
        self._running.add(stop)
        try:
            loop.run_in_executor(self._worker, self._run, loaded.session, request, buffer, stop)
            async for event in buffer:
                yield event
        finally:
            # The worker may be in a step still. The next request's run queues up behind it, on the same thread.
            stop.set()
            self._running.discard(stop)
            self._lock.release()
            if timer is not None:
                timer.cancel()

    async def _take_turn(self, deadline: float | None) -> None:
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineError("the request's time was over before its turn came") from None
        finally:
            self._num_waiting -= 1

    def _run(self, session: Session, request: GenerationRequest, buffer: EventBuffer, stop: threading.Event) -> None:
        """Generate one answer, on the worker thread."""
        try:
            if request.cache_salt != self._cache_salt:
                session.clear()
                self._cache_salt = request.cache_salt
            timeline = request.timeline
            clock = None if timeline is None else ChunkClock(timeline, len(request.prompt_ids))
            for event in session.generate(
                request.prompt_ids, request.params, lambda: stop.is_set() or buffer.is_closed, on_prefill=clock
            ):
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
        for stop in self._running:
            stop.set()
        await asyncio.get_running_loop().run_in_executor(None, self._worker.shutdown)
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None


def _deadline_error(request: GenerationRequest) -> DeadlineError:
    return DeadlineError(f"the answer was not complete within the {request.timeout} s that the request gave it")
