"""The `balance_serve` backend: many requests at once, through a scheduler and an engine process of their own.

This side has the text: it turns tokens into text, finds stop strings, and hands each reader its events. What is
computed when is the scheduler's business; see server/balance/.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Container, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from ktransformers import __version__
from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, GenerationStats, Progress, SamplingParams, TokenEvent
from ktransformers.engine.api.pictures import Pictures
from ktransformers.engine.model.checks import check_tokenizer
from ktransformers.engine.model.opened import ModelDescription, describe_model, open_model
from ktransformers.engine.sequence.output_processor import OutputProcessor
from ktransformers.errors import EngineError, KTransformersError, NotReadyError
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.scheduler.commands import (
    Add,
    EngineTotals,
    Finish,
    News,
    ProfileOff,
    ProfileOn,
    Resume,
    Suspend,
    Traces,
)
from ktransformers.scheduler.records import Request, RequestUpdate, SchedulerStats, counts_in
from ktransformers.server.backend.balance_stats import BalanceStats
from ktransformers.server.backend.base import BackendInterfaceBase, GenerationRequest, ModelInfo, deadline_error
from ktransformers.server.backend.events import MAX_UNREAD_EVENTS, EventBuffer
from ktransformers.server.backend.profiler import ProfileConfig, Profiler
from ktransformers.server.backend.replayed_events import replayed_events
from ktransformers.server.backend.timeline import Chunk
from ktransformers.server.balance.messages import Command, EngineFacts
from ktransformers.server.balance.supervisor import BalanceConfig, Supervisor
from ktransformers.system.restarts import Clock

__all__ = ["BalanceServeInterface"]

logger = logging.getLogger(__name__)


class _Stream:
    """One answer on its way to its reader. suspended_at: seconds; None: it is not suspended."""

    def __init__(self, request: GenerationRequest, model: ModelInfo, buffer: EventBuffer):
        self.buffer, self.timeline, self._request = buffer, request.timeline, request
        self.suspended_at = time.perf_counter() if request.is_suspended() else None
        self._output_processor = OutputProcessor(model.tokenizer, request.params, len(request.prompt_ids))

    @property
    def stats(self) -> GenerationStats:
        return self._output_processor.stats

    def past(self) -> AsyncGenerator[TokenEvent, None]:
        """Yields the events of what another process has sent."""
        return replayed_events(self._output_processor, self._request.past)

    def abort(self) -> None:
        """Send the answer's reader the last event, with ABORT."""
        self.buffer.put(self._output_processor.aborted())
        self.buffer.end()

    def resume(self) -> None:
        """Leave the time since the answer was suspended out of its time of decoding."""
        assert self.suspended_at is not None
        self._output_processor.leave_out(time.perf_counter() - self.suspended_at)
        self.suspended_at = None

    def receive(self, update: RequestUpdate, prefill_seconds: float | None) -> bool:
        """Turn news of the scheduler into an event. True where a stop string ended it, which only text shows."""
        if update.is_expired:
            self.buffer.fail(deadline_error(self._request, is_suspended=self.suspended_at is not None))
            return False
        try:
            event = self._output_processor.receive(update, prefill_seconds)
        except EngineError as error:
            self.buffer.fail(error)
            return False
        if event is None:
            return False
        self.buffer.put(event)
        if event.finish_reason is not None:
            self.buffer.end()
        return event.finish_reason is not None and update.finish_reason is None


class BalanceServeInterface(BackendInterfaceBase):
    """Backend that serves many requests at once. Every method runs on the event loop that `start` runs on.

    clock: of waits between restarts.
    """

    name: ClassVar[str] = "balance_serve"
    has_priorities: ClassVar[bool] = True
    can_suspend: ClassVar[bool] = True
    can_go_on: ClassVar[bool] = True

    def __init__(
        self,
        config: BalanceConfig,
        max_unread: int = MAX_UNREAD_EVENTS,
        clock: Clock | None = None,
        profile: ProfileConfig | None = None,
    ):
        self._profiler = Profiler(profile or ProfileConfig(), self._turn_profile, self._profiled)
        self._config, self._max_unread, self._clock = config, max_unread, clock
        self._supervisor: Supervisor | None = None
        self._model: ModelInfo | None = None
        self._pictures: Pictures | None = None
        self._facts: EngineFacts | None = None
        self._experts: dict[int, list[int]] = {}  # rows of each expert, by layer
        self._streams: dict[str, _Stream] = {}
        self._outbox: list[GenerationRequest] = []  # that were not sent to the scheduler yet
        self._scheduler_stats: SchedulerStats | None = None
        self._totals = EngineTotals()
        self._watching: asyncio.Task[None] | None = None
        self._lost: KTransformersError | None = None

    @override
    async def start(self, progress: Progress | None = None) -> None:
        self._pictures = await asyncio.to_thread(Pictures, self._config.engine)
        config = replace(self._config, engine=self._pictures.config)
        described, files = await asyncio.to_thread(_described, config.engine)  # with the tower that will be read
        self._supervisor = Supervisor(config, self._on_news, files, self._clock)
        facts = await self._supervisor.start(progress)
        self._facts = facts
        self._watching = asyncio.create_task(self._watch(self._supervisor))
        await self._profiler.begin()  # before any request is let in
        await asyncio.to_thread(self._pictures.attach, described.tokenizer, has_tower=facts.has_tower)
        self._model = _model_info(described, self._config.engine, facts).with_pictures(self._pictures)

    @override
    @property
    def profiler(self) -> Profiler:
        return self._profiler

    async def _turn_profile(self, endpoint: str | None) -> None:
        await self.supervisor.send(ProfileOff() if endpoint is None else ProfileOn(endpoint))

    def _profiled(self) -> ProfileMeta:
        known = None if self._facts is None else self._facts.profiled
        return known or ProfileMeta(backend=self.name, version=__version__)

    async def _watch(self, supervisor: Supervisor) -> None:
        """Fail all streams once the service cannot go on."""
        self._lost = await asyncio.shield(supervisor.failed)
        for stream in self._streams.values():
            stream.buffer.fail(EngineError(str(self._lost)))

    @override
    async def lost(self) -> KTransformersError:
        assert self._supervisor is not None
        return await asyncio.shield(self._supervisor.failed)

    @property
    def is_ready(self) -> bool:
        return self._model is not None and self._lost is None

    @property
    def pause(self) -> str | None:
        return None if self._supervisor is None else self._supervisor.pause

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise NotReadyError("the model is not loaded yet; ask /ready, or try again in a moment")
        return self._model

    @property
    def max_running(self) -> int:
        return self._config.max_batch_size

    @property
    def supervisor(self) -> Supervisor:
        """The supervisor of the processes, for tests and metrics. Raises NotReadyError before `start`."""
        if self._supervisor is None:
            raise NotReadyError("nothing is started yet")
        return self._supervisor

    @override
    def stats(self) -> BalanceStats:
        stats, facts = self._scheduler_stats, self._facts
        if stats is None or facts is None:
            return BalanceStats(num_running=0, num_waiting=0)
        return BalanceStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_suspended=stats.num_suspended,
            cache_usage=stats.num_used_pages / stats.num_pages,
            cache_len=facts.scheduler.total_len,
            scheduler=stats,
            engine=self._totals,
            num_engine_restarts=0 if self._supervisor is None else self._supervisor.num_restarts,
            experts=self._experts,
            expert_bytes=facts.expert_bytes,
        )

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Generate an answer, as BackendInterfaceBase.inference does.

        stats.prefill_seconds runs from admission to the first token, without the time in the queue.
        """
        model, supervisor = self.model, self.supervisor
        if self._lost is not None:
            raise EngineError(str(self._lost))
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id} is in use")
        stream = _Stream(request, model, EventBuffer(asyncio.get_running_loop(), self._max_unread))
        self._streams[request.request_id] = stream
        try:
            async with aclosing(stream.past()) as past:
                async for event in past:
                    yield event
                    if event.finish_reason is not None:
                        del self._streams[request.request_id]  # it is not sent to the scheduler
                        return
            self._send_soon(request)
            async for event in stream.buffer:
                yield event
        finally:
            if self._streams.pop(request.request_id, None) is not None and self._lost is None:
                supervisor.send_soon(Finish(request.request_id, FinishReason.ABORT))

    @override
    def suspend(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and stream.suspended_at is None:
            stream.suspended_at = time.perf_counter()
            self._send(Suspend(request_id))

    @override
    def resume(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and stream.suspended_at is not None:
            stream.resume()
            self._send(Resume(request_id))

    @override
    def end(self, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.abort()
            self._send(Finish(request_id, FinishReason.ABORT))

    def _send(self, command: Command) -> None:
        """Send a command behind the requests that were not sent yet."""
        if self._outbox:
            self._send_all()
        self.supervisor.send_soon(command)

    def _send_soon(self, request: GenerationRequest) -> None:
        """Hand a request to the scheduler together with the others of this turn of the event loop."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._outbox.append(request)

    def _send_all(self) -> None:
        outbox, self._outbox = self._outbox, []
        suspended = {name for name, stream in self._streams.items() if stream.suspended_at is not None}
        for command in _commands([request for request in outbox if request.request_id in self._streams], suspended):
            self.supervisor.send_soon(command)

    def _on_news(self, news: News) -> None:
        self._scheduler_stats, self._totals = news.stats, news.totals
        self._add_experts(news.expert_counts)
        if news.traces is not None:
            self._note_times(news.traces)
        for update in news.updates:
            stream = self._streams.get(update.request_id)
            if stream is None:
                continue  # its reader has left, or its text has ended already
            has_stopped = stream.receive(update, news.prefill_seconds.get(update.request_id))
            if has_stopped or stream.buffer.is_closed:
                del self._streams[update.request_id]
            if has_stopped or (stream.buffer.is_closed and update.finish_reason is None):
                reason = FinishReason.STOP if has_stopped else FinishReason.ABORT
                completion_len = stream.stats.completion_len if has_stopped else None
                self.supervisor.send_soon(Finish(update.request_id, reason, completion_len))

    def _note_times(self, traces: Traces) -> None:
        """Note times before the events that they led to: whoever receives those looks at the times."""
        for request_id, at in traces.planned:
            stream = self._streams.get(request_id)
            if stream is not None and stream.timeline is not None:
                stream.timeline.begin(at)
        for one in traces.chunks:
            stream = self._streams.get(one.request_id)
            if stream is not None and stream.timeline is not None:
                stream.timeline.add(Chunk(one.began, one.ended, one.position, one.num_tokens, one.num_rows))

    def _add_experts(self, data: bytes) -> None:
        num_experts = 0 if self._facts is None else self._facts.num_experts
        for layer, expert, rows in counts_in(data):
            known = self._experts.setdefault(layer, [0] * num_experts)
            known += [0] * (expert + 1 - len(known))
            known[expert] += rows

    @override
    async def close(self) -> None:
        for stream in self._streams.values():
            stream.abort()
        self._streams.clear()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._profiler.close(self._end_processes)

    async def _end_processes(self) -> None:
        if self._supervisor is not None:
            await self._supervisor.close()
        if self._pictures is not None:
            await asyncio.to_thread(self._pictures.close)


def _commands(requests: Sequence[GenerationRequest], suspended: Container[str] = ()) -> Iterator[Add]:
    """One command for each run of requests that share their prompt (the same object) and differ in their seeds only.

    suspended: ids of those that are.
    """

    def shared(request: GenerationRequest) -> tuple[object, ...]:
        bare = replace(request, request_id="", prompt_ids=(), params=SamplingParams(), timeline=None, is_suspended=bool)
        return id(request.prompt_ids), bare, request.request_id in suspended

    for _, group in itertools.groupby(requests, shared):
        first, *others = group
        is_suspended = first.request_id in suspended
        twins: list[tuple[str, int]] = []
        for other in others:
            if other.params.seed is not None and replace(other.params, seed=first.params.seed) == first.params:
                twins.append((other.request_id, other.params.seed))
            else:
                yield Add(_record(other, is_suspended))
        yield Add(_record(first, is_suspended), twins)


def _described(config: EngineConfig) -> tuple[ModelDescription, tuple[Path, ...]]:
    """The model, and the files of its weights."""
    check_tokenizer(config)
    opened = open_model(config)
    return describe_model(opened), opened.files


def _record(request: GenerationRequest, is_suspended: bool) -> Request:
    return Request(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        params=replace(request.params, stop=()),  # stop strings are found here, where the text is
        priority=request.priority,
        deadline=None if request.timeout is None else time.monotonic() + request.timeout,
        cache_salt=request.cache_salt,
        answer_ids=[past.token_id for past in request.past],
        cached_len=request.past[-1].cached_len if request.past else None,
        is_suspended=is_suspended,
        prediction_ids=request.prediction_ids,
        media=request.media,
    )


def _model_info(described: ModelDescription, config: EngineConfig, facts: EngineFacts) -> ModelInfo:
    return ModelInfo.loaded(
        described,
        config,
        facts.scheduler,
        description=f"{described.description}; {facts.scheduler.total_len} tokens of cache for all requests",
        vocab_size=facts.scheduler.vocab_size,
        eos_token_ids=facts.scheduler.eos_token_ids,
        card=replace(described.card, gpu_bytes=facts.gpu_bytes),
        digest=facts.digest,
        weights=facts.weights,
    )
