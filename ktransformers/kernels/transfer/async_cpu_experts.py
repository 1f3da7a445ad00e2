"""Routed experts on the CPU in the order of a GPU's stream: `submit`, other kernels, `collect`.

Works eagerly and while a CUDA graph is captured: nothing synchronizes, and no Python runs between the two in a
replay. The protocol between stream and CPU stands above the code of `csrc/ops/experts/stream.h`. Knows kernels, buffers
and streams; not models or steps.

T tokens of a call, K experts per token, H hidden.
"""

from __future__ import annotations

import logging
import os
import weakref
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ktransformers.errors import EngineError
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.extension import extension
from ktransformers.kernels.transfer.cuda import StreamDriver

__all__ = ["AsyncCpuExperts", "EnqueueMethod", "StreamShape", "begin_hold", "choose_enqueue_method", "end_hold"]

logger = logging.getLogger(__name__)

_FLOATS = (torch.bfloat16, torch.float32)


class EnqueueMethod(Enum):
    """How a stream starts the CPU's work and waits for its end."""

    MEMORY = "stream memory operations"
    HOST = "host functions"


def choose_enqueue_method(driver: StreamDriver) -> EnqueueMethod:
    """Choose memory operations where the device has them: they take a fraction of a host function's time."""
    reason = driver.memory_operations()
    method = EnqueueMethod.MEMORY if reason is None else EnqueueMethod.HOST
    logger.info("CPU experts are handed over by %s%s", method.value, "" if reason is None else f" ({reason})")
    return method


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Sizes of the buffers that all layers of a model share. dtype: of hidden states and results, bf16 or fp32."""

    max_tokens: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of hidden states."""
        return self.hidden_size * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory that the buffers take."""
        return self.max_tokens * (2 * self.hidden_size * self.dtype.itemsize + self.top_k * 8) + 128


@dataclass(frozen=True, slots=True)
class _Stream:
    """What functions on a GPU's stream hold addresses of: it must not go before they ran. kept: memory of theirs."""

    handle: extension.ExpertStream
    driver: StreamDriver
    pid: int
    kept: tuple[object, ...]

    def stop(self) -> None:
        try:
            if os.getpid() == self.pid:  # a forked child has neither the device nor the thread
                self.driver.synchronize()
        finally:
            self.handle.close()


_holds = 0
_abandoned: list[_Stream] = []  # while a step is held


def begin_hold() -> None:
    """Note that a GPU is about to hold a step until the host goes on. Experts collected meanwhile must not wait
    for the device, which would take for ever: `end_hold` stops them.
    """
    global _holds
    _holds += 1


def end_hold() -> None:
    """Note that the step of `begin_hold` goes on."""
    global _holds
    _holds -= 1
    while _abandoned and not _holds:
        _abandoned.pop().stop()


def _stop(stream: _Stream) -> None:
    if _holds:
        _abandoned.append(stream)
    else:
        stream.stop()


class AsyncCpuExperts:
    """The routed experts of all layers of one model that run on the CPU for one device.

    One set of buffers serves all layers: a layer's copies to it come after the previous layer's wait on the stream,
    when the CPU has read its inputs, and its result is copied out before the next layer's result can exist. So all
    calls must be made on one stream (or on streams ordered by events), which a decoder is.

    Rows of a captured call are padding from `set_rows`' number on: they cost nothing, and their results are zero.
    Errors of a forward are kept until `check`; the rows of its results are zero.
    method: asked from the driver when None.
    """

    def __init__(
        self, pool: WorkerPool, shape: StreamShape, driver: StreamDriver, method: EnqueueMethod | None = None
    ) -> None:
        if shape.dtype not in _FLOATS:
            raise TypeError(f"experts take bf16 or fp32, got {shape.dtype}")
        self.shape, self.method = shape, method or choose_enqueue_method(driver)
        self._driver, self._pool = driver, pool
        with torch.inference_mode(False):  # which may be on in the first step, but not where they are written later
            self._hidden = driver.pinned((shape.max_tokens, shape.hidden_size), shape.dtype)
            self._out = driver.pinned((shape.max_tokens, shape.hidden_size), shape.dtype)
            self._ids = driver.pinned((shape.max_tokens, shape.top_k), torch.int32)
            self._weights = driver.pinned((shape.max_tokens, shape.top_k), torch.float32)
            self._num_tokens = driver.pinned((1,), torch.int32)
            self._num_tokens_memory = self._num_tokens.numpy()
            self._word = driver.pinned((1,), torch.int32)
        self._word_address = driver.device_address(self._word) if self.method is EnqueueMethod.MEMORY else 0
        buffers = (self._hidden, self._ids, self._weights, self._out, self._num_tokens)
        is_bf16 = shape.dtype == torch.bfloat16
        self._handle = extension.ExpertStream(
            pool.handle,
            [*(buffer.data_ptr() for buffer in buffers), self._word.data_ptr() if self._word_address else 0],
            [shape.max_tokens, shape.top_k, shape.hidden_size],
            [is_bf16, False, is_bf16],
        )
        self._kernels: list[MoeKernel] = []
        self._pending: tuple[int, int] | None = None  # word and rows of the call that is not collected
        self._num_captured = 0
        stream = _Stream(self._handle, driver, os.getpid(), (*buffers, self._word, self._kernels))
        self._finalizer = weakref.finalize(self, _stop, stream)

    @property
    def num_forwards(self) -> int:
        """Number of forwards that the CPU has run."""
        return int(self._handle.num_forwards)

    @property
    def busy_seconds(self) -> float:
        """Seconds that the CPU has spent in forwards."""
        return float(self._handle.busy_seconds)

    def add_layer(self, kernel: MoeKernel) -> int:
        """Add a layer; return the number under which `submit` knows it. Raises ValueError when it does not fit the
        buffers.
        """
        if kernel.pool is not self._pool:
            raise ValueError("the layer was made for another WorkerPool")
        self._kernels.append(kernel)
        return int(self._handle.add_layer(kernel.handle))

    def submit(self, layer: int, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """Issue a layer's forward on the current stream. The inputs may change as soon as this returns, in its order.

        hidden_states: [T, H]. topk_ids: int32 or int64 [T, K]; an id equal to the number of experts is skipped.
        topk_weights: [T, K]. On the driver's device, T at most max_tokens. Raises ValueError for other shapes.
        """
        rows = self._check(hidden_states, topk_ids, topk_weights)
        self._give_up()
        buffers = [buffer[:rows] for buffer in (self._hidden, self._ids, self._weights)]
        sources = [hidden_states, topk_ids, topk_weights]
        if self._word_address:
            self._driver.copy_and_signal(buffers, sources, self._word_address, self._announced(layer, rows))
            return
        self._driver.copy(buffers, sources)
        self._begin(layer, rows)

    def stage(self, hidden_states: Tensor, topk_weights: Tensor) -> None:
        """Copy a layer's rows to the CPU while the host does not know yet which experts the CPU gets: `submit_staged`
        says so, or nothing does and the rows are dropped. Shapes as for `submit`; not while a graph is captured.
        """
        rows = self._check(hidden_states, None, topk_weights)
        self._give_up()
        self._driver.copy([self._hidden[:rows], self._weights[:rows]], [hidden_states, topk_weights])

    def submit_staged(self, layer: int, topk_ids: npt.NDArray[np.int32]) -> None:
        """Issue the forward of the rows that were staged last. topk_ids: [T, K], on the host, as for `submit`; read
        before this returns. Call it behind a wait for the device, so that no earlier forward reads its ids any more.
        """
        rows = len(topk_ids)
        self._ids[:rows].numpy()[...] = topk_ids
        self._begin(layer, rows)

    def _give_up(self) -> None:
        """Somebody failed between submit and collect. The CPU may still be at it: wait before its inputs change."""
        if self._pending is not None:
            self._wait(self._pending[0])
            self._pending = None

    def _begin(self, layer: int, rows: int) -> None:
        """Tell the CPU, in the stream's order, that a layer's inputs are there."""
        word = self._announced(layer, rows)
        if self._word_address:
            self._driver.write_value(self._word_address, word)
        else:
            self._driver.launch_host_func(extension.ExpertStream.submit_address, self._handle.call_of(word))

    def _announced(self, layer: int, rows: int) -> int:
        """The word of a forward that will be asked for in the stream's order: the CPU's threads stay awake for it."""
        is_captured = self._driver.is_capturing()
        word = int(self._handle.word_of(layer, rows, is_captured))
        if is_captured:
            self._num_captured += 1
        else:
            self._handle.expect(1)
        self._pending = (word, rows)
        return word

    def collect(self, out: Tensor) -> Tensor:
        """Let the stream wait for the last submitted forward and copy its result to out [T, H]; returns out."""
        if self._pending is None:
            raise RuntimeError("collect without submit")
        word, rows = self._pending
        if tuple(out.shape) != (rows, self.shape.hidden_size) or out.dtype != self.shape.dtype:
            raise ValueError(
                f"out must be {self.shape.dtype} {[rows, self.shape.hidden_size]}, got {out.dtype} {list(out.shape)}"
            )
        self._wait(word)
        self._pending = None
        self._driver.copy([out], [self._out[:rows]])
        return out

    def _wait(self, word: int) -> None:
        if self._word_address:
            self._driver.wait_value(self._word_address, 0)
        else:
            self._driver.launch_host_func(extension.ExpertStream.wait_address, self._handle.call_of(word))

    def _check(self, hidden_states: Tensor, topk_ids: Tensor | None, topk_weights: Tensor) -> int:
        shape = self.shape
        if hidden_states.dim() != 2 or hidden_states.shape[1] != shape.hidden_size:
            raise ValueError(f"hidden_states must be [T, {shape.hidden_size}], got {list(hidden_states.shape)}")
        rows = int(hidden_states.shape[0])
        if rows > shape.max_tokens:
            raise ValueError(f"{rows} tokens do not fit into buffers for {shape.max_tokens}: raise max_tokens")
        for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if tensor is not None and tuple(tensor.shape) != (rows, shape.top_k):
                raise ValueError(f"{name} must be [{rows}, {shape.top_k}], got {list(tensor.shape)}")
        return rows

    def captured(self) -> int:
        """Return the number of forwards captured since the last call: what `expect` takes before a replay of a
        graph.
        """
        count, self._num_captured = self._num_captured, 0
        return count

    def expect(self, count: int) -> None:
        """Expect the forwards of a replay that follows, maybe behind another one.

        Wakes the CPU's threads, which stay awake until they are through.
        """
        self._handle.expect(count)

    def set_rows(self, num_tokens: int) -> None:
        """Set how many rows of the replay that follows hold tokens. No step may be under way."""
        self._num_tokens_memory[0] = num_tokens

    def check(self) -> None:
        """Raise EngineError for the first forward that failed since the last check, ReadError where experts cannot be
        read. See a step's end first."""
        if not self._handle.has_error:
            return
        layer = self._handle.failed_layer
        try:
            self._handle.check()
        except ReadError:
            raise  # of a file: the next forward may find what it needs
        except (IndexError, RuntimeError, ValueError, MemoryError) as error:
            raise EngineError(f"the CPU's experts failed in layer {layer} of those on the CPU: {error}") from error

    def close(self) -> None:
        """Wait for the device, then stop the thread. Graphs that captured this must not be replayed any more."""
        self._finalizer()
