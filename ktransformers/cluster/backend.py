"""A backend whose answers are computed by replicas elsewhere. One that is lost loses nothing of them. Knows no Ray.

    ask a replica ── Told, Told, ... ── its last event ──> end
         ^                │ the replica is gone
         └── past: all tokens so far; the next one tells what comes behind them

An answer depends on prompt, parameters and (seed, position) alone, so it does not matter who goes on with it. Replicas
are no child processes of this one: Ray starts and replaces them, and only the losses of a request are counted here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import ClassVar

from typing_extensions import override

from ktransformers.cluster.records import Ask, Began, Facts, Message, Order, ReplicaReport, RequestFailed, Told
from ktransformers.cluster.stats import ClusterFigures
from ktransformers.core import FinishReason, GenerationStats, PastToken, Progress, TokenEvent
from ktransformers.engine.model.card import ModelCard
from ktransformers.errors import EngineError, KTransformersError, NotReadyError
from ktransformers.server.backend.balance_stats import ClusterStats
from ktransformers.server.backend.base import BackendInterfaceBase, GenerationRequest, ModelInfo, deadline_error
from ktransformers.server.backend.events import MAX_UNREAD_EVENTS, EventBuffer
from ktransformers.system.child import reported_error
from ktransformers.system.restart_policy import Strikes
from ktransformers.tokenizer import Tokenizer

__all__ = ["MAX_LOSSES", "ReplicaInterface", "ReplicaLostError", "Replicas"]

logger = logging.getLogger("ktransformers.server")

MAX_LOSSES = 16
"""Replicas that it may lose at all."""

REPORT_SECONDS = 1.0
"""Between two looks at what the replicas do."""

_SLACK_SECONDS = 2.0
"""The replica knows a deadline, too, and says better what happened; this side waits so much longer for it."""


class ReplicaLostError(Exception):
    """The error for a replica that was asked and is gone, or cannot be reached: nobody will say how the answer goes
    on."""


class Replicas(ABC):
    """The interface that finds replicas and exchanges messages with them. All methods are called on one event loop."""

    @abstractmethod
    def ask(self, ask: Ask) -> AsyncGenerator[Message, None]:
        """Yield the messages with which one replica answers `ask`, once there is one; closing it ends the answer.
        Raises ReplicaLostError."""

    @abstractmethod
    async def facts(self) -> Facts:
        """Return the facts of the model, as one replica has it. Waits until one is there."""

    @abstractmethod
    async def reports(self) -> list[ReplicaReport]:
        """Return the reports of all replicas that answer."""

    @abstractmethod
    async def send(self, order: Order) -> None:
        """Send an order to all replicas; the one that has the request obeys."""


class _Run:
    """One answer. replica: who has it now; None: nobody yet. is_suspended: as is wanted; told_: as it knows."""

    def __init__(self, request: GenerationRequest, buffer: EventBuffer, now: float):
        self.request, self.buffer = request, buffer
        self.stats = GenerationStats(prompt_len=len(request.prompt_ids))
        self.past: list[PastToken] = list(request.past)
        self.deadline = None if request.timeout is None else now + request.timeout
        self.is_suspended = self.told_suspended = request.is_suspended()
        self.is_ended = False
        self.replica: str | None = None
        self.ask_id = ""
        self._nonce = secrets.token_hex(4)  # what a request of this name left at a replica is not heard for this one
        self.ordering = asyncio.Lock()
        self.num_asked, self.strikes = 0, Strikes(MAX_LOSSES)
        self.first_seconds = self.later_seconds = 0.0  # of prefill and decode, at replicas that are gone
        self.num_drafted = self.num_accepted = 0  # there, too

    def ask(self, now: float) -> Ask:
        """Make the next try's message."""
        self.num_asked += 1
        request, self.replica, self.told_suspended = self.request, None, self.is_suspended
        if self.past:
            self.first_seconds, self.later_seconds = self.stats.prefill_seconds, self.stats.decode_seconds
            self.num_drafted, self.num_accepted = self.stats.num_drafted, self.stats.num_accepted
        self.ask_id = f"{request.request_id}.{self._nonce}.{self.num_asked}"
        return Ask(
            request_id=self.ask_id,
            prompt_ids=tuple(request.prompt_ids),
            params=request.params,
            priority=request.priority,
            timeout=None if self.deadline is None else max(self.deadline - now, 0.001),
            cache_salt=request.cache_salt,
            past=list(self.past),
            is_suspended=self.is_suspended,
            prediction_ids=request.prediction_ids,
        )

    def receive(self, told: Told) -> None:
        """Hand events to the reader, and keep what another replica would need."""
        ours, theirs = self.stats, told.stats
        ours.cached_len, ours.completion_len = theirs.cached_len, theirs.completion_len
        ours.prefill_seconds = self.first_seconds or theirs.prefill_seconds
        ours.decode_seconds = self.later_seconds + theirs.decode_seconds
        ours.num_drafted = self.num_drafted + theirs.num_drafted
        ours.num_accepted = self.num_accepted + theirs.num_accepted
        for one in told.events:
            event = one.told(self.stats)
            token = PastToken.of(0, event)
            if token is not None:
                self.past.append(token)
            self.buffer.put(event)
            if event.finish_reason is not None:
                self.buffer.end()

    def abort(self) -> None:
        """End the answer for its reader with ABORT."""
        self.buffer.put(TokenEvent(None, "", self.stats, finish_reason=FinishReason.ABORT))
        self.buffer.end()


class ReplicaInterface(BackendInterfaceBase):
    """The backend whose answers replicas compute, see BackendInterfaceBase. open_tokenizer: of the same model as the
    replicas have, called on a thread.
    """

    name: ClassVar[str] = "cluster"
    has_priorities: ClassVar[bool] = True
    can_suspend: ClassVar[bool] = True

    def __init__(
        self,
        replicas: Replicas,
        open_tokenizer: Callable[[], Tokenizer],
        max_unread: int = MAX_UNREAD_EVENTS,
    ):
        self._replicas, self._open_tokenizer = replicas, open_tokenizer
        self._max_unread = max_unread
        self._figures = ClusterFigures()
        self._model: ModelInfo | None = None
        self._max_running = 1
        self._runs: dict[str, _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @override
    async def start(self, progress: Progress | None = None) -> None:
        """Learn from the first replica that is there what the model is."""
        tokenizer = await asyncio.to_thread(self._open_tokenizer)
        facts = await self._replicas.facts()
        self._model, self._max_running = _model_info(facts, tokenizer), facts.max_running
        await self._look()
        self._spawn(self._keep_looking())

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await self._look()

    async def _look(self) -> None:
        self._figures.update(await self._replicas.reports(), time.monotonic())

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("a task of the ingress failed")

    @property
    def is_ready(self) -> bool:
        return self._model is not None and not self._is_closed

    @property
    def pause(self) -> str | None:
        """Why nothing is computed at the moment: without any replica requests wait for one."""
        reports = self._figures.reports
        if not reports:
            return "no replica is there at the moment; requests wait for one"
        return None if any(one.pause is None for one in reports) else reports[0].pause

    @property
    def model(self) -> ModelInfo:
        if self._model is None:
            raise NotReadyError("no replica has loaded the model yet; ask /ready, or try again in a moment")
        return self._model

    @property
    def max_running(self) -> int:
        return self._max_running * max(len(self._figures.reports), 1)

    @override
    def stats(self) -> ClusterStats:
        return self._figures.stats()

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Answer a request, see BackendInterfaceBase."""
        self.model  # noqa: B018 - raises while nothing is ready
        if request.request_id in self._runs:
            raise ValueError(f"request id {request.request_id} is in use")
        run = _Run(request, EventBuffer(asyncio.get_running_loop(), self._max_unread), time.monotonic())
        self._runs[request.request_id] = run
        carrying = asyncio.create_task(self._carry(run))
        try:
            async for event in run.buffer:
                yield event
        finally:
            self._runs.pop(request.request_id, None)
            carrying.cancel()
            await asyncio.gather(carrying, return_exceptions=True)

    async def _carry(self, run: _Run) -> None:
        """Bring the answer from replicas to its reader, whatever becomes of them."""
        seconds = None if run.deadline is None else run.deadline - time.monotonic() + _SLACK_SECONDS
        try:
            async with asyncio.timeout(seconds):
                while not run.buffer.is_closed:
                    await self._ask_one(run)
        except TimeoutError:
            run.buffer.fail(deadline_error(run.request, is_suspended=run.is_suspended))
        except KTransformersError as error:
            run.buffer.fail(error)
        except Exception as error:
            logger.exception("an answer could not be brought from its replica")
            run.buffer.fail(EngineError(f"the replicas cannot be asked: {type(error).__name__}"))

    async def _ask_one(self, run: _Run) -> None:
        num_past = len(run.past)
        try:
            async with aclosing(self._replicas.ask(run.ask(time.monotonic()))) as messages:
                async for message in messages:
                    self._receive(run, message)
                    if run.buffer.is_closed:
                        return
            raise ReplicaLostError("it ended its stream before the answer was complete")
        except ReplicaLostError as error:
            self._lose(run, error, has_moved=len(run.past) > num_past)

    def _receive(self, run: _Run, message: Message) -> None:
        """Raises ReplicaLostError for a replica that cannot go on, and what the answer itself ends with."""
        match message:
            case Began(replica):
                run.replica = replica
                if run.num_asked > 1:
                    self._figures.num_taken_over += 1
                    logger.info("%s goes on at %s behind %d tokens", run.request.request_id, replica, len(run.past))
                self._sync(run)
            case Told():
                run.receive(message)
            case RequestFailed(error, text, is_lost):
                if is_lost:
                    raise ReplicaLostError(text)
                raise reported_error(error, text)

    def _lose(self, run: _Run, error: ReplicaLostError, *, has_moved: bool) -> None:
        """Raises EngineError when there may be no other try."""
        name = run.request.request_id
        run.replica = None
        run.strikes.count(has_moved=has_moved)
        logger.warning("%s has lost its replica behind %d tokens: %s", name, len(run.past), error)
        if run.is_ended:
            run.abort()
        elif run.strikes.is_exceeded:
            raise EngineError(
                f"{run.strikes.num_losses} replicas were lost while they computed this answer, the last "
                f"{run.strikes.num_in_a_row} of them before it had another token; it is not tried again"
            )

    @override
    def suspend(self, request_id: str) -> None:
        self._set_suspended(request_id, True)

    @override
    def resume(self, request_id: str) -> None:
        self._set_suspended(request_id, False)

    def _set_suspended(self, request_id: str, is_suspended: bool) -> None:
        run = self._runs.get(request_id)
        if run is not None:
            run.is_suspended = is_suspended
            self._sync(run)

    def _sync(self, run: _Run) -> None:
        """Tell its replica what it does not know yet; one that is still to come hears it then."""
        if run.replica is not None and run.is_suspended != run.told_suspended:
            run.told_suspended = run.is_suspended
            what = "suspend" if run.is_suspended else "resume"
            self._spawn(self._order(run, Order(run.ask_id, what)))

    async def _order(self, run: _Run, order: Order) -> None:
        """Orders about one answer arrive in the order in which they were given."""
        async with run.ordering:
            await self._replicas.send(order)

    @override
    def end(self, request_id: str) -> None:
        run = self._runs.get(request_id)
        if run is None or run.is_ended:
            return
        run.is_ended = True
        if run.replica is None:
            run.abort()
        else:
            self._spawn(self._order(run, Order(run.ask_id, "end")))

    @override
    async def close(self) -> None:
        self._is_closed = True
        for run in self._runs.values():
            run.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _model_info(facts: Facts, tokenizer: Tokenizer) -> ModelInfo:
    return ModelInfo(
        tokenizer=tokenizer,
        max_len=facts.max_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        default_params=facts.default_params,
        architecture=facts.architecture,
        description=f"{facts.description}, on each replica",
        is_models_limit=facts.is_models_limit,
        embeddings=facts.embeddings,
        card=ModelCard(**facts.card),
        digest=facts.digest,
        max_drafts=facts.max_drafts,
        drafter=facts.drafter,
        no_pictures="replicas on other machines are sent none",
    )
