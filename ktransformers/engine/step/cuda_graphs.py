"""Captures work on CUDA devices as graphs, and replays it: what a runner of steps asks of a device.

A step may be launched before its inputs are complete: it is held by a latch until the host opens that. Knows no steps.
"""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from ktransformers.kernels.transfer.cuda import CudaDriver, StreamDriver

__all__ = ["CudaGraphs", "GraphBackend", "Replayable", "StepLatch"]

_WARM_UPS = 2


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps Python's garbage collector out of a capture, which ends when a graph is destroyed on its thread.

    Graphs of an engine that was given up may wait in cycles, and any allocation may set the collector off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Replayable(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Launch what was captured, in the current stream."""
        ...


class GraphBackend(Protocol):
    """Captures work as graphs; tests have a backend without a device."""

    def warm_up(self, work: Callable[[], Tensor]) -> None:
        """Run the work as it will be captured, so that compiling and allocating are done."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> tuple[Replayable, Tensor]:
        """Capture the work: return its graph, and the tensor into which each replay writes its result.

        Graphs share one memory pool. Raises RuntimeError when the work cannot be captured.
        """
        ...

    def wait(self) -> None:
        """Wait until all replays so far are done."""
        ...

    def launch(self, graph: Replayable, send: Callable[[], None], *, is_held: bool = False) -> None:
        """Launch the copy of a step's inputs, and its graph behind it. is_held: both wait for `release`, of which
        `can_hold` says whether there is any: nothing that the host waits for may be launched meanwhile."""
        ...

    @property
    def can_hold(self) -> bool: ...

    def release(self) -> None:
        """Let the step go on that was launched held."""
        ...


@dataclass(frozen=True, slots=True)
class _Side:
    """A further device of a graph: its part of the work is captured on `stream`, and allocates in `pool`."""

    device: torch.device
    stream: Any
    pool: Any

    @classmethod
    def of(cls, device: torch.device, cuda: Any) -> _Side:
        with cuda.device(device):
            return cls(device, cuda.Stream(device), cuda.MemPool())


@dataclass(frozen=True, slots=True)
class _OverDevices:
    """A graph that works on several devices. Their streams wait for it, and it for what they were given before."""

    graph: Replayable
    first: torch.device
    others: tuple[torch.device, ...]

    def replay(self) -> None:
        cuda: Any = torch.cuda
        here, streams = cuda.current_stream(self.first), [cuda.current_stream(device) for device in self.others]
        for stream in streams:
            here.wait_stream(stream)
        self.graph.replay()
        for stream in streams:
            stream.wait_stream(here)


class CudaGraphs(GraphBackend):
    """The GraphBackend of CUDA devices: work begins and ends on the first of them.

    A graph spans devices because streams of the others join the capture by waiting for the first one's. torch sends
    only the first device's allocations to the graphs' memory; a pool of its own does so for each of the others.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        cuda: Any = torch.cuda  # parts of it have no types
        self._cuda, self._device = cuda, devices[0]
        driver = CudaDriver(self._device)
        # Of several devices the others would have to wait, too; and a processor that reorders stores may open a latch
        # before the inputs are there.
        is_ordered = platform.machine() in ("x86_64", "AMD64")
        self._latch = StepLatch(driver) if driver.waits_by_kernel and len(devices) == 1 and is_ordered else None
        self._pool, self._stream = cuda.graph_pool_handle(), cuda.Stream(self._device)
        self._sides = [_Side.of(device, cuda) for device in devices[1:]]
        self._done = cuda.Event(blocking=True)  # spinning would take a core from the CPU's experts

    @override
    def warm_up(self, work: Callable[[], Tensor]) -> None:
        for stream in (self._stream, *(side.stream for side in self._sides)):
            stream.wait_stream(self._cuda.current_stream(stream.device))
        with self._cuda.stream(self._stream), self._side_streams():
            for _ in range(_WARM_UPS):
                work()
        for device in (self._device, *(side.device for side in self._sides)):
            self._cuda.synchronize(device)

    @contextmanager
    def _side_streams(self) -> Iterator[None]:
        """The side devices' current streams are those of the sides."""
        with ExitStack() as stack:
            for side in self._sides:
                stack.enter_context(self._cuda.stream(side.stream))
            self._cuda.set_device(self._device)
            yield

    @override
    def capture(self, work: Callable[[], Tensor]) -> tuple[Replayable, Tensor]:
        graph = self._cuda.CUDAGraph()
        with ExitStack() as stack:
            stack.enter_context(_uncollected())
            # Other threads (the server's) may call CUDA meanwhile.
            how = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
            stack.enter_context(self._cuda.graph(graph, **how))
            for side in self._sides:
                stack.enter_context(self._cuda.use_mem_pool(side.pool, side.device))
                side.stream.wait_stream(self._stream)
            with self._side_streams():
                result = work()
            for side in self._sides:
                self._stream.wait_stream(side.stream)
        others = tuple(side.device for side in self._sides)
        return (_OverDevices(graph, self._device, others) if others else graph), result

    @override
    def launch(self, graph: Replayable, send: Callable[[], None], *, is_held: bool = False) -> None:
        if is_held:
            assert self._latch is not None, "nothing can hold a step"
            self._latch.close()
        send()
        graph.replay()
        self._done.record(self._cuda.current_stream(self._device))

    @property
    @override
    def can_hold(self) -> bool:
        return self._latch is not None

    @override
    def release(self) -> None:
        assert self._latch is not None, "nothing was held"
        self._latch.open()

    @override
    def wait(self) -> None:
        self._done.synchronize()


class StepLatch:
    """A latch in a GPU's stream: what is launched behind `close` waits for `open`.

    A word in pinned memory says which of the latches is the last open one; a kernel reads it again and again.
    """

    def __init__(self, driver: StreamDriver) -> None:
        word = driver.pinned((1,), torch.int32)
        self._driver, self._word, self._address = driver, word.numpy(), driver.device_address(word)
        self._keep, self._last = word, 0

    def close(self) -> None:
        """Let the current stream wait."""
        self._last = self._last % (1 << 30) + 1
        self._driver.wait_value(self._address, self._last)

    def open(self) -> None:
        """Let it go on. What the host has written before is seen by all that waited."""
        self._word[0] = self._last
