"""Admission of requests: counts the answers that are being computed or wait, refuses beyond the queue's limit and while
draining. An answer is one choice of one prompt: a request with n 128 counts as 128.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ktransformers.errors import NotReadyError, QueueFullError
from ktransformers.server.http.keys import KeyUse

__all__ = ["Admission"]


class Admission:
    """Counts the admitted requests and their answers, within limits; all calls on one event loop.

    max_queue: answers that may wait beyond those that are computed. max_per_key: of those of one API key together with
    those that are computed for it; None: no limit of its own. watch: called when somebody is in, and
    when nobody is any more.
    """

    def __init__(self, max_queue: int, max_per_key: int | None = None):
        self.watch: Callable[[bool], None] | None = None
        self._max_queue, self._max_per_key = max_queue, max_per_key
        self._num_requests = 0
        self._num_answers = 0
        self._nobody = KeyUse()  # of requests without a key
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """Number of requests that were admitted and have not left."""
        return self._num_requests

    @property
    def num_answers(self) -> int:
        """Number of answers that the admitted requests ask for."""
        return self._num_answers

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def enter(self, max_running: int, num_answers: int = 1, key: KeyUse | None = None) -> None:
        """Count a request in, or raise NotReadyError, QueueFullError or what KeyUse.check does.

        Each one entered must `leave` once, likewise.

        A request alone is taken in however many answers it wants.
        """
        if self._is_draining:
            raise NotReadyError("the server is shutting down; send the request to another one, or again in a moment")
        use = key or self._nobody
        use.check(num_answers)
        if self._num_answers and self._num_answers + num_answers > max_running + self._max_queue:
            raise QueueFullError(
                f"{self._num_answers} answers are running or waiting, and {num_answers} more are not taken in "
                f"(--max_queue {self._max_queue}); try again in a moment"
            )
        of_key, limit = use.num_answers, self._max_per_key
        if limit is not None and of_key and of_key + num_answers > limit:
            raise QueueFullError(
                f"{of_key} answers for this API key are running or waiting, and {num_answers} more are not taken in "
                f"(--max_queue_per_key {limit}); try again in a moment"
            )
        self._num_requests += 1
        self._num_answers += num_answers
        use.num_answers += num_answers
        use.note()
        self._idle.clear()
        if self._num_requests == 1 and self.watch is not None:
            self.watch(True)

    def leave(self, num_answers: int = 1, key: KeyUse | None = None) -> None:
        """Count out a request that `enter` has counted in."""
        self._num_requests -= 1
        self._num_answers -= num_answers
        (key or self._nobody).num_answers -= num_answers
        if not self._num_requests:
            self._idle.set()
            if self.watch is not None:
                self.watch(False)

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the admitted ones; return whether they all left in time."""
        self._is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
