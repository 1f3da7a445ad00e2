"""The processes beside the driver, and those that replace them.

Deaths are noticed by threads of the workers. The process that takes the place of one begins to load at once, beside
what the driver does; the driver takes it in when a step has failed or is to be told (`recovered`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ktransformers.engine.parallel.ranks.worker_handles import OnDeath, WorkerHandle
from ktransformers.errors import EngineError, KTransformersError, StageLostError
from ktransformers.system.restart_policy import RestartPolicy

__all__ = ["WorkerGroup"]

logger = logging.getLogger(__name__)

_NOTICE_SECONDS = 10.0
"""How long to wait for the end of a process to be noticed, once its neighbour has noticed it."""


class WorkerGroup:
    """The driver's workers: starts them, notices when one ends, and loads another in its place.

    begun: starts a process by its rank, and is given what to call when it ends. check_loaded: waits until one is ready;
    raises KTransformersError. on_death: as `Driver` has it. is_recoverable: whether a worker may be replaced.
    """

    def __init__(
        self,
        begun: Callable[[int, OnDeath], WorkerHandle],
        check_loaded: Callable[[WorkerHandle], None],
        on_death: OnDeath,
    ):
        self._begun, self._check_loaded, self._on_death = begun, check_loaded, on_death
        self.is_recoverable = False
        self._by_rank: dict[int, WorkerHandle] = {}
        self._changed = threading.Condition()  # guards what follows
        self._missing: set[int] = set()
        self._coming: dict[int, WorkerHandle] = {}  # loaded
        self._loading: dict[int, WorkerHandle] = {}
        # More deaths than it allows are the end of all, whose ends those who start the driver count.
        self._policy = RestartPolicy()
        self._keeper: threading.Thread | None = None
        self._lost: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._failure: str | None = None  # why there is no process in a place, and will be none
        self._is_closing = False

    @property
    def workers(self) -> list[WorkerHandle]:
        """The workers in the order of their ranks."""
        return list(self._by_rank.values())

    @property
    def address(self) -> str | None:
        """The address of this machine as remote workers see it; None where all workers are here."""
        return next((worker.address for worker in self.workers if worker.address is not None), None)

    def start(self, rank: int) -> None:
        """Start the process of this rank. Raises EngineError."""
        self._by_rank[rank] = self._begun(rank, partial(self._ended, rank))

    def wait(self) -> None:
        """Wait until all workers have loaded. Raises KTransformersError."""
        for worker in self.workers:
            self._check_loaded(worker)

    def send(self, data: bytes) -> None:
        """Send a frame to all workers. Raises StageLostError where another one is coming, EngineError where one is gone
        for good."""
        if self._missing:
            raise StageLostError(f"stage {min(self._missing)} is gone")
        for worker in self.workers:
            try:
                worker.send(data)
            except EngineError as error:
                if not self.is_recoverable:
                    raise
                raise StageLostError(str(error)) from error

    def check(self) -> None:
        """Raise EngineError where a worker has ended in whose place there can be no other."""
        if self._failure is not None:
            raise EngineError(self._failure)

    def _ended(self, rank: int, message: str) -> None:
        """On a thread of the worker."""
        with self._changed:
            if self._is_closing:
                return
            self._policy.count(object(), time.monotonic())
            is_replaced = self.is_recoverable and not self._policy.is_exceeded
            if is_replaced:
                self._missing.add(rank)
            else:
                self._failure = message
            self._changed.notify_all()
            if is_replaced and self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name="stages", daemon=True)
                self._keeper.start()
        if is_replaced:
            logger.warning("%s: another one is started, running requests will go on", message)
            self._lost.put((rank, message))
        else:
            self._on_death(message)

    def _keep(self) -> None:
        """Replace one after the other, on a thread of their own: those that report an end are not to wait."""
        while (lost := self._lost.get()) is not None:
            self._replace(*lost)

    def _replace(self, rank: int, message: str) -> None:
        began = time.monotonic()
        try:
            self._load(rank)
            logger.info("another one has loaded after %.1f s", time.monotonic() - began)
        except KTransformersError as error:
            if self._is_closing:
                return
            with self._changed:
                self._failure = f"{message}, and no other one can start: {error}"
                self._changed.notify_all()
            self._on_death(self._failure)

    def _load(self, rank: int) -> None:
        """Raises KTransformersError."""
        worker = self._begun(rank, partial(self._ended, rank))
        with self._changed:
            self._loading[rank] = worker
            if self._is_closing:
                worker.close()
        self._check_loaded(worker)
        with self._changed:
            self._coming[rank] = self._loading.pop(rank)
            self._changed.notify_all()

    @contextmanager
    def recovered(self) -> Iterator[list[WorkerHandle]]:
        """Wait until every worker that ended is replaced, and yield the new ones. Deaths in the block are the end of
        all.

        Raises EngineError for a place that stays empty, and where nobody may take places.
        """
        if not self.is_recoverable:
            raise EngineError("hidden states were lost, and these processes cannot meet again")
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._missing), _NOTICE_SECONDS):
                logger.warning("no stage has ended, and hidden states did not come: all meet anew")
            self._changed.wait_for(lambda: self._missing == set(self._coming) or self._failure is not None)
            if self._failure is not None:
                raise EngineError(self._failure)
            new, self._coming = self._coming, {}
            self._missing.clear()
            self.is_recoverable = False
        for rank, worker in new.items():
            self._by_rank[rank].close()
            self._by_rank[rank] = worker
        yield list(new.values())
        self.is_recoverable = True

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            self._is_closing = True
            late = [*self._loading.values(), *self._coming.values()]
        self._lost.put(None)
        for worker in (*self.workers, *late):
            worker.close()
