"""Records the requests of a scheduler while a profile is written: which tokens count, when, and how requests fared.

Knows no sockets: `post` takes messages and never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ktransformers.profiling.messages import Message, RequestRecord, TokensRecord
from ktransformers.profiling.pauses import Pauses
from ktransformers.scheduler.records import RequestUpdate, StepPlan

__all__ = ["RequestTracker"]


@dataclass(slots=True)
class _Life:
    """Times are None where they lie before the profile, or have not come."""

    prompt_len: int
    arrived_ns: int | None = None
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    cached_len: int = 0
    completion_len: int = 0
    num_starts: int = 0
    pauses: Pauses = field(default_factory=Pauses)
    was_suspended: bool = False  # since its last start
    num_drafted: int = 0
    num_accepted: int = 0


class RequestTracker:
    """The tracker of the requests that are there, and of no others, for a profile. clock: nanoseconds, monotonic."""

    def __init__(self, post: Callable[[Message], None], clock: Callable[[], int] = time.monotonic_ns):
        self._post, self._clock = post, clock
        self._lives: dict[str, _Life] = {}

    def added(self, request_id: str, prompt_len: int, *, is_suspended: bool = False) -> None:
        """Note that a request came."""
        self._lives[request_id] = _Life(prompt_len, arrived_ns=self._clock())
        if is_suspended:
            self.pause(request_id, True)

    def pause(self, request_id: str, is_suspended: bool) -> None:
        """Note that a request was suspended, or resumed. Nothing is noted of one that was silent since the profile
        began."""
        life = self._lives.get(request_id)
        if life is None:
            return
        if is_suspended:
            life.was_suspended = True
            life.pauses.begin(self._clock())
        else:
            life.pauses.end(self._clock())

    def planned(self, plan: StepPlan) -> None:
        """Note that a step was planned."""
        for start in plan.starts:
            life = self._lives.setdefault(start.request_id, _Life(start.prompt_len))
            life.num_starts += not (life.num_starts and life.was_suspended)  # that is no preemption
            life.was_suspended = False
            if len(start.token_ids) == start.prompt_len and life.admitted_ns is None:
                life.admitted_ns = self._clock()

    def committed(self, step_id: int, updates: Sequence[RequestUpdate], num_waiting: int) -> None:
        """Note that a step's results were taken in, which led to these updates."""
        now = self._clock()
        tokens, arrived, suspended = [], {}, {}
        for update in updates:
            life = self._life(update)
            if update.token_id is None:
                continue
            paused = life.pauses.take()
            if paused:
                suspended[update.request_id] = paused
            index = update.completion_len - 1
            tokens.append((update.request_id, index, update.prompt_len + index, update.token_id))
            if index == 0:
                life.first_token_ns = now
                if life.arrived_ns is not None:
                    arrived[update.request_id] = life.arrived_ns
        self._post(
            TokensRecord(
                step_id=step_id,
                time_ns=now,
                tokens=tokens,
                arrived_ns=arrived,
                waiting=num_waiting,
                suspended_ns=suspended,
            )
        )
        for update in updates:
            if update.finish_reason is not None:
                self._end(update.request_id, update.finish_reason, now)

    def ended(self, update: RequestUpdate, completion_len: int | None = None) -> None:
        """Note that a request ended from outside. completion_len: of what its reader was given, if not all that was
        generated."""
        life = self._life(update)
        if completion_len is not None:
            life.completion_len = completion_len
        self._end(update.request_id, update.finish_reason, self._clock())

    def stop(self) -> None:
        """End the profile; the requests go on."""
        for request_id in list(self._lives):
            self._end(request_id, None, None)

    def _life(self, update: RequestUpdate) -> _Life:
        life = self._lives.setdefault(update.request_id, _Life(update.prompt_len))
        life.cached_len, life.completion_len = update.cached_len, update.completion_len
        life.num_drafted, life.num_accepted = update.num_drafted, update.num_accepted
        return life

    def _end(self, request_id: str, reason: str | None, now: int | None) -> None:
        life = self._lives.pop(request_id)
        self._post(
            RequestRecord(
                request=request_id,
                prompt_len=life.prompt_len,
                cached_len=life.cached_len,
                completion_len=life.completion_len,
                arrived_ns=life.arrived_ns,
                admitted_ns=life.admitted_ns,
                first_token_ns=life.first_token_ns,
                ended_ns=now,
                finish_reason=None if reason is None else str(reason),
                num_starts=life.num_starts,
                suspended=life.pauses.listed(),
                num_drafted=life.num_drafted,
                num_accepted=life.num_accepted,
            )
        )
