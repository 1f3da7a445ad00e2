"""A stream without a device: work runs in order on a thread of its own, or is recorded into a graph and replayed."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

Work = Callable[[], None]
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
PATIENCE = 60.0


class FakeDriver:
    """A StreamDriver over CPU tensors. `memory_reason`: why it has no memory operations."""

    def __init__(self, memory_reason: str | None = None) -> None:
        self.memory_reason = memory_reason
        self.errors: list[BaseException] = []
        self._graph: list[Work] | None = None
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - handed to the test by synchronize
                self.errors.append(error)

    def enqueue(self, work: Work) -> None:
        if self._graph is None:
            self._queue.put(work)
        else:
            self._graph.append(work)

    @contextmanager
    def capture(self) -> Iterator[list[Work]]:
        graph: list[Work] = []
        self._graph = graph
        try:
            yield graph
        finally:
            self._graph = None

    def replay(self, graph: Sequence[Work]) -> None:
        for work in graph:
            self._queue.put(work)

    def is_capturing(self) -> bool:
        return self._graph is not None

    def launch_host_func(self, function: int, argument: int) -> None:
        call = HostFunction(function)
        self.enqueue(lambda: call(argument))

    def write_value(self, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)

        def write() -> None:
            word.value = value

        self.enqueue(write)

    def wait_value(self, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)

        def wait() -> None:
            end = time.monotonic() + PATIENCE
            while word.value != value:
                if time.monotonic() > end:
                    raise TimeoutError(f"the word stays {word.value}")
                os.sched_yield()

        self.enqueue(wait)

    def memory_operations(self) -> str | None:
        return self.memory_reason

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def device_address(self, tensor: torch.Tensor) -> int:
        return int(tensor.data_ptr())

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        self.enqueue(copy)

    def copy_and_signal(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], address: int, value: int
    ) -> None:
        self.copy(targets, sources)
        self.write_value(address, value)

    def synchronize(self) -> None:
        done = threading.Event()
        self._queue.put(done.set)
        assert done.wait(PATIENCE), "the stream hangs"
        if self.errors:
            raise self.errors.pop()

    def stop(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


class InstantDriver(FakeDriver):
    """Work is done when a method returns: for engines whose other GPU work is done at once too."""

    def enqueue(self, work: Work) -> None:
        work()
