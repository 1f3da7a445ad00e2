"""The `transformers` backend, which the `ktransformers` one inherits from: one answer at a time, in this process.

    inference ── submitted ──> prefill ── generate ── decode_one_tokens, ... ── end ──> gone
                                  ^          │
                      resume ─────┘          └── suspend: another one's turn

Requests wait in the queue of a scheduler that runs one sequence at a time (engine/api/batch_loop.py), on a thread of
its own; what computes its steps is a subclass's: here it is plain Hugging Face, as the reference to compare with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
from typing_extensions import override

from ktransformers import __version__
from ktransformers.config import EngineConfig
from ktransformers.core import Progress, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest, PrefillChunk
from ktransformers.engine.api.generate import Generation, prefill_and_generate
from ktransformers.engine.api.pictures import Pictures
from ktransformers.engine.load.loaded import LoadedModel
from ktransformers.engine.load.reference import build_reference_engine
from ktransformers.engine.model.checks import check_tokenizer
from ktransformers.engine.sequence.output_processor import OutputProcessor
from ktransformers.engine.sequence.profiled import card_meta
from ktransformers.errors import (
    DeadlineError,
    EngineError,
    KTransformersError,
    NotReadyError,
    UnsupportedError,
)
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.scheduler.records import Request
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

__all__ = ["LoadedLoop", "TransformersInterface"]

_STOPPED = "the server was stopped while the model was loading"


@dataclass(frozen=True, slots=True)
class LoadedLoop:
    """A loaded model: its facts, the loop that answers, the facts for profiles, and what its pictures need."""

    model: ModelInfo
    loop: BatchLoop[LoadedModel]
    profiled: ProfileMeta = field(default_factory=lambda: ProfileMeta(backend="", version=__version__))
    pictures: Pictures | None = None

    @classmethod
    def of(cls, loop: BatchLoop[LoadedModel], profiled: ProfileMeta) -> LoadedLoop:
        """Describe the model of a loop."""
        no_pictures = "the transformers backend runs the text model alone, balance_serve reads them"
        engine = loop.engine
        model = ModelInfo.loaded(
            engine.model, engine.config, loop.config, description=engine.description, no_pictures=no_pictures
        )
        return cls(model, loop, profiled)


class _RequestState:
    """An answer that is open. All but `receive` is called on the event loop. has_begun: it has its turn."""

    def __init__(self, request: GenerationRequest, loaded: LoadedLoop, buffer: EventBuffer):
        self.request, self.buffer, self.is_suspended = request, buffer, request.is_suspended()
        self.events = aiter(buffer)
        self.has_begun, self.is_submitted = False, False
        tokenizer: Tokenizer = loaded.model.tokenizer
        self._replayed = OutputProcessor(tokenizer, request.params, len(request.prompt_ids))
        past = request.past
        record = Request(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            params=request.params,
            answer_ids=[one.token_id for one in past],
            cache_salt=request.cache_salt,
            cached_len=past[-1].cached_len if past else None,
            is_suspended=self.is_suspended,
            prediction_ids=request.prediction_ids,
            media=request.media,
        )
        self._generation: Generation = prefill_and_generate(loaded.loop, EngineRequest(record, has_progress=True))
        self._clock: ChunkClock | None = None  # of a run of which traces are wanted

    @property
    def engine_request(self) -> EngineRequest:
        """The request as the loop has it, or will have it once it is submitted."""
        return self._generation.request

    def past(self) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of what another process has sent."""
        return replayed_events(self._replayed, self.request.past)

    def begin(self) -> None:
        """Submit the request. Raises what is wrong with it."""
        self.is_submitted = True
        asked = self._generation.request
        asked.request = msgspec.structs.replace(asked.request, is_suspended=self.is_suspended)
        self._generation.begin(self.receive)

    def receive(self, said: TokenEvent | PrefillChunk | EngineError) -> None:
        """Pass an event on, on the loop's thread."""
        if isinstance(said, PrefillChunk):
            self._note_chunk(said)
        elif isinstance(said, TokenEvent):
            if self._clock is not None and said.token_id is not None:
                self._clock.finish()
            self.buffer.put(said)
            if said.finish_reason is not None:
                self.buffer.end()
            elif self.buffer.is_closed:  # nobody reads it, or too slowly
                self._generation.close()
        else:
            self.buffer.fail(_shown(said))

    def _note_chunk(self, chunk: PrefillChunk) -> None:
        self.has_begun, timeline = True, self.request.timeline
        if timeline is None:
            return
        timeline.begin(time.monotonic())
        if self._clock is None or not chunk.num_done:  # a run, the first or another one after a suspension
            self._clock = ChunkClock(timeline, chunk.position - chunk.num_done + chunk.num_tokens)
        self._clock(chunk.num_done, chunk.num_tokens)

    def suspend(self) -> None:
        """Suspend the answer before its next step."""
        self.is_suspended = True
        if self.is_submitted:
            self._generation.suspend()

    def resume(self) -> None:
        """Let the answer go on when its turn comes."""
        if self.is_suspended:
            self.is_suspended = self.has_begun = False
        if self.is_submitted:
            self._generation.resume()

    def end(self) -> None:
        """End the answer: its reader gets a last event with ABORT."""
        if self.is_submitted:
            self._generation.close()
        else:
            self.buffer.put(self._replayed.aborted())
            self.buffer.end()

    def expire(self) -> None:
        """End the answer, whose time is over."""
        if self.has_begun or self.is_suspended:
            self.buffer.fail(deadline_error(self.request, is_suspended=self.is_suspended))
        else:
            self.buffer.fail(DeadlineError("the request's time was over before its turn came"))
        self.close()

    def close(self) -> None:
        """End the computation, if there is one."""
        if self.is_submitted:
            self._generation.close()


def _shown(error: KTransformersError) -> KTransformersError:
    """What a client sees of an error: of one that a kernel or torch raised no more than its kind."""
    if error.__cause__ is None:
        return error
    return EngineError(f"the engine failed with {type(error.__cause__).__name__}; the server's log says more")


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
        self._loading: asyncio.Future[LoadedLoop] | None = None
        self._opened: LoadedLoop | None = None
        self._loaded: LoadedLoop | None = None  # the same, once requests may come
        self._is_closed = False
        self._requests: dict[str, _RequestState] = {}

    def _load(self, progress: Progress) -> LoadedLoop:
        """Load the model, on another thread. Raises KTransformersError."""
        check_tokenizer(self._config)
        loop = BatchLoop(lambda report: build_reference_engine(self._config, report), progress)
        return LoadedLoop.of(loop, card_meta(loop.engine.model.card, loop.engine.config, self.name))

    @override
    async def start(self, progress: Progress | None = None) -> None:
        def watched(done: int, total: int, name: str) -> None:
            if self._is_closed:  # the only way to end a long load early
                raise NotReadyError(_STOPPED)
            if progress is not None:
                progress(done, total, name)

        self._loading = asyncio.ensure_future(asyncio.to_thread(self._load, watched))
        opened = await asyncio.shield(self._loading)  # a thread is not cancelled: `close` waits for it
        if self._is_closed:
            raise NotReadyError(_STOPPED)
        self._opened = opened
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
        """Takes effect between two steps."""
        assert self._opened is not None, "nothing is profiled before it is loaded"
        await asyncio.to_thread(self._opened.loop.record, endpoint)

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
            return BackendStats(0, 0)
        loop, states = self._loaded.loop, self._requests.values()
        num_suspended = sum(state.is_suspended for state in states)
        num_running = sum(state.has_begun and not state.is_suspended for state in states)
        num_waiting = len(states) - num_suspended - num_running
        cache_len = loop.config.max_len
        used = min(loop.used_len / cache_len, 1.0)
        return BackendStats(num_running, num_waiting, used, cache_len, num_suspended=num_suspended)

    def _require(self) -> LoadedLoop:
        if self._loaded is None:
            raise NotReadyError("the model is not loaded yet; ask /ready, or try again in a moment")
        return self._loaded

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Generate an answer, as BackendInterfaceBase.inference does."""
        loaded, loop = self._require(), asyncio.get_running_loop()
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        state = _RequestState(request, loaded, EventBuffer(loop))
        self._requests[request.request_id] = state
        timer = None if request.timeout is None else loop.call_later(request.timeout, state.expire)
        try:
            async with aclosing(state.past()) as past:
                async for event in past:
                    yield event
                    if event.finish_reason is not None:
                        return
            if not state.buffer.is_closed:  # it was not ended meanwhile
                state.begin()
            for part in (self.prefill, self.generate):
                async with aclosing(part(state)) as events:
                    async for event in events:
                        yield event
        finally:
            del self._requests[request.request_id]
            if timer is not None:
                timer.cancel()
            state.close()

    async def prefill(self, state: _RequestState) -> AsyncGenerator[TokenEvent, None]:
        """Yield the event of the first token that is new: the known tokens, as far as the cache lacks them, are
        computed before it."""
        event = await self.decode_one_tokens(state)
        if event is not None:
            yield event

    async def generate(self, state: _RequestState) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of the tokens after `prefill`'s until the answer ends."""
        while (event := await self.decode_one_tokens(state)) is not None:
            yield event

    async def decode_one_tokens(self, state: _RequestState) -> TokenEvent | None:
        """Wait for one more token. Returns its event; None once the answer has ended."""
        return await anext(state.events, None)

    @override
    def suspend(self, request_id: str) -> None:
        if not self.can_suspend:
            raise UnsupportedError(self.no_suspension)
        self._on_open(request_id, _RequestState.suspend)

    @override
    def resume(self, request_id: str) -> None:
        self._on_open(request_id, _RequestState.resume)

    @override
    def end(self, request_id: str) -> None:
        self._on_open(request_id, _RequestState.end)

    def _on_open(self, request_id: str, do: Callable[[_RequestState], None]) -> None:
        state = self._requests.get(request_id)
        if state is not None:
            do(state)

    @override
    async def close(self) -> None:
        self._is_closed = True
        begun = [state for state in self._requests.values() if state.is_submitted]
        if self._loaded is not None:  # together, or one that waits would have the turn of one that has just ended
            self._loaded.loop.abort([state.engine_request for state in begun])
        for state in self._requests.values():
            if not state.is_submitted:
                state.end()
        await self._profiler.close(self._end_loop)
        self._opened = self._loaded = None

    async def _end_loop(self) -> None:
        if self._loading is None:
            return
        await asyncio.wait([self._loading])
        if not self._loading.cancelled() and self._loading.exception() is None:
            loaded = self._loading.result()
            await asyncio.to_thread(loaded.loop.close)
            if loaded.pictures is not None:
                await asyncio.to_thread(loaded.pictures.close)
