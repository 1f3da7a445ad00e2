"""Steps as CUDA graphs: captured once per size, replayed with one copy of the step's inputs.

Knows no models, caches or requests. What is captured is a function from a step's inputs on the device to logits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ktransformers.engine.step.cuda_graphs import GraphBackend, Replayable
from ktransformers.engine.step.decode_inputs import DecodeInputs, StaticInputs, StepSize
from ktransformers.kernels.transfer.async_cpu_experts import begin_hold, end_hold

__all__ = ["CUDAGraphRunner", "ReplayedWork", "StepTimers"]

logger = logging.getLogger(__name__)

_MOST_SUITED = 1024
"""Kinds of steps whose graphs are remembered: with cold caches it takes 0.1 ms to look at all graphs."""


class ReplayedWork(Protocol):
    """Work beside the GPU's that a graph sets off: kernels.transfer.async_cpu_experts.AsyncCpuExperts."""

    def captured(self) -> int:
        """Count the pieces of work captured since the last call."""
        ...

    def expect(self, count: int) -> None:
        """Prepare for a replay with `count` pieces, maybe behind another one."""
        ...

    def set_rows(self, num_tokens: int) -> None:
        """Set how many rows of the replay that follows hold tokens. No other one may be under way."""
        ...


@dataclass(frozen=True, slots=True)
class _Captured:
    """graph, logits: None for a step that is run anew. counts: pieces of each ReplayedWork that a replay sets off.

    marks: what a replay of the graph that times its parts writes, see StepTimers.
    """

    graph: Replayable | None
    logits: Tensor | None
    static: StaticInputs
    counts: tuple[tuple[ReplayedWork, int], ...]
    marks: object | None = None


class StepTimers(Protocol):
    """Times the parts of a step on its devices (engine.step.gpu_profile.GpuProfile)."""

    def begin(self) -> None:
        """Give marks to the step that is launched, or captured, from now on."""
        ...

    def take(self) -> object:
        """Return the marks of the step that was launched, or captured, since `begin`."""
        ...

    def is_due(self) -> bool:
        """Whether the next step is to be timed."""
        ...

    def launched(self, marks: object | None) -> None:
        """Note that a step with these marks was launched, or one without any."""
        ...


class CUDAGraphRunner:
    """Runs decode steps of up to max(batch_sizes) rows, each of its own sequence, and steps of the sizes in `mixed`.

    run: from inputs on the device to logits [N, V] of the rows that are kept, the same computation for every size.
    make_static_inputs: StaticInputs of a size, largest first. backend: None runs the same padded steps without
    capturing them. works: gives what the graphs set off on the CPU, as far as it is known once a step has run.
    progress: called with (done, all) while capturing. A size that cannot be captured, and those of its kind after it,
    are left out: their steps run in the next larger graph, or eagerly when there is none. The reason is logged once.
    Errors of a step that is merely run are raised.
    """

    def __init__(
        self,
        run: Callable[[DecodeInputs], Tensor],
        batch_sizes: Sequence[int],
        make_static_inputs: Callable[[StepSize], StaticInputs],
        backend: GraphBackend | None,
        works: Callable[[], Sequence[ReplayedWork]] = lambda: (),
        progress: Callable[[int, int], None] | None = None,
        mixed: Sequence[StepSize] = (),
    ) -> None:
        self._run, self._make, self._backend, self._works = run, make_static_inputs, backend, works
        self._captured: dict[StepSize, _Captured] = {}
        self._timed: dict[StepSize, _Captured] = {}  # the same with marks, while somebody wants them
        self._held: tuple[_Captured, DecodeInputs] | None = None
        self._marks: StepTimers | None = None
        self._most_timed: int | None = None
        self.reason: str | None = None  # why not all sizes were captured
        self._suited: dict[tuple[int, ...], StepSize | None] = {}  # what `size_of` has found
        self._failed: set[StepSize] = set()  # of steps with pictures
        decode = {StepSize(size, size) for size in batch_sizes}
        if not decode or min(decode).rows < 1:
            raise ValueError(f"batch sizes must be at least one and positive, got {list(batch_sizes)}")
        sizes = sorted({*decode, *mixed}, reverse=True)  # the largest first: the others then fit into its memory
        self._device = torch.device("cpu")
        if backend is None:
            self._captured = {size: _Captured(None, None, make_static_inputs(size), ()) for size in sizes}
            self._device = self._captured[sizes[0]].static.device
        else:
            self.capture(sizes, backend, progress or (lambda done, total: None))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sizes of decode steps that were captured, or that they are padded to."""
        return tuple(size.rows for size in sorted(self._captured) if size.is_decode)

    @property
    def mixed_sizes(self) -> tuple[StepSize, ...]:
        """Sizes of steps of several rows a sequence that were captured, or that they are padded to, draft tokens or
        prompts."""
        return tuple(size for size in sorted(self._captured) if not size.is_decode and size.is_plain)

    def capture(self, sizes: Sequence[StepSize], backend: GraphBackend, progress: Callable[[int, int], None]) -> None:
        """Capture steps of these sizes, in this order, until one cannot be captured. The constructor calls this."""
        began, left = time.perf_counter(), list(sizes)
        self._suited.clear()
        progress(0, len(sizes))
        while left:
            size = left.pop(0)
            static = self._make(size)
            self._device = static.device
            backend.warm_up(lambda inputs=static.inputs: self._run(inputs))  # type: ignore[misc]
            try:
                self._captured[size] = self._capture(static, backend)
            except RuntimeError as error:
                self.reason = f"batch size {size}: {_first_line(error)}"
                logger.warning("%s steps are not replayed as CUDA graphs from %s", size.kind, self.reason)
                left = [other for other in left if other.kind != size.kind and not size.is_decode]
            progress(len(sizes) - len(left), len(sizes))
        if self._captured:
            names = ", ".join(str(size) for size in sorted(self._captured))
            logger.info("captured CUDA graphs for batch sizes %s in %.1f s", names, time.perf_counter() - began)

    def _capture(self, static: StaticInputs, backend: GraphBackend) -> _Captured:
        works = self._works()
        for work in works:
            work.captured()  # forget what a failed capture left
        graph, logits = backend.capture(lambda: self._run(static.inputs))
        return _Captured(graph, logits, static, tuple((work, work.captured()) for work in works))

    def _capture_late(self, size: StepSize) -> bool:
        """Capture steps of a size with pictures when the first of them comes: few models get any, and what their
        pictures bring is known by then. Whether that could be done."""
        if size in self._failed:
            return False
        began, plain = time.perf_counter(), self._captured[replace(size, axes=1, layers=())]
        if self._backend is not None:
            self._backend.wait()  # the step before may still read its inputs, whose memory is the same
        static = self._make(size)
        if self._backend is None or plain.graph is None:
            self._captured[size] = _Captured(None, None, static, ())
            return True
        self._backend.warm_up(lambda: self._run(static.inputs))
        try:
            self._captured[size] = self._capture(static, self._backend)
        except RuntimeError as error:
            self._failed.add(size)
            logger.warning("steps with pictures of up to %s run without CUDA graphs: %s", size, _first_line(error))
            return False
        logger.info("captured a CUDA graph for %s in %.1f s", size, time.perf_counter() - began)
        return True

    def time_steps(self, marks: StepTimers | None, most_rows: int | None = None) -> None:
        """Time the steps that are due with `marks`, from the next step on; None: none. Captures the sizes again, with
        marks.

        most_rows: graphs of more rows are not replayed meanwhile; their steps run anew.
        """
        self._timed, self._marks, self._most_timed = {}, marks, None if marks is None else most_rows
        self._suited.clear()
        if marks is None or self._backend is None:
            return
        began = time.perf_counter()
        for size in sorted(filter(self._is_replayed, self._captured), reverse=True):
            static = self._captured[size].static
            self._backend.wait()
            static.pad()
            marks.begin()
            self._backend.warm_up(lambda inputs=static.inputs: self._run(inputs))  # type: ignore[misc]
            marks.begin()
            try:
                captured = self._capture(static, self._backend)
            except RuntimeError as error:
                marks.take()
                logger.warning("steps of up to %s rows are not timed: %s", size, _first_line(error))
                break
            self._timed[size] = replace(captured, marks=marks.take())
        logger.info("captured %d CUDA graphs with marks in %.1f s", len(self._timed), time.perf_counter() - began)

    def _is_replayed(self, size: StepSize) -> bool:
        return self._most_timed is None or size.rows <= self._most_timed

    def size_of(
        self, rows: int, kept: int, seqs: int, pages: int, *, axes: int = 1, layers: tuple[int, ...] = ()
    ) -> StepSize | None:
        """Return the size that a step of so many rows runs in, which keeps the logits of so many; None: it fits
        none. axes, layers: see StepSize; what is not plain takes the sizes of steps with prompts."""
        kind = rows, kept, seqs, pages, axes, *layers
        if kind not in self._suited:
            if len(self._suited) >= _MOST_SUITED:
                self._suited.clear()
            is_plain = axes == 1 and not layers
            fitting = (
                size
                for size, captured in self._captured.items()
                if size.is_plain and size.rows >= rows and size.seqs >= seqs and size.kept >= kept
                if pages <= captured.static.num_pages and (is_plain or size.kind == "other")
            )
            suiting = filter(self._is_replayed, fitting)
            found = min(suiting, key=lambda size: size.waste(rows, seqs, kept), default=None)
            self._suited[kind] = None if found is None else replace(found, axes=axes, layers=layers)
        return self._suited[kind]

    def _find(self, inputs: DecodeInputs) -> _Captured | None:
        rows, table = inputs.num_rows, inputs.block_table
        size = self.size_of(rows, inputs.num_kept, *table.shape, axes=inputs.axes, layers=inputs.layers)
        if size is None or (size not in self._captured and not self._capture_late(size)):
            return None
        is_due = self._marks is not None and self._marks.is_due()
        return (self._timed.get(size) if is_due else None) or self._captured[size]

    def is_shared(self, rows: int, kept: int, seqs: int, pages: int) -> bool:
        """Whether a step's inputs can be published for other processes, as `forward` does when it is told to."""
        size = self.size_of(rows, kept, seqs, pages)
        return size is not None and self._captured[size].static.is_shared

    def forward(self, inputs: DecodeInputs, *, is_shared: bool = False) -> Tensor:
        """Run one step, whose inputs are on the CPU. Returns logits [N, V], which are valid until the next step.

        The inputs are copied to where the graph was captured with them, then the graph is replayed: the smallest one
        that suits the step. It runs eagerly when none does, which is what a longer block table or a failed capture
        leave. is_shared: whether other processes get the inputs, and `follow`.
        """
        captured = self._find(inputs)
        if captured is None:
            return self._run_marked(inputs.to(self._device))
        static = captured.static
        send = partial(static.publish if is_shared else static.fill, inputs)
        return self._launch(captured, inputs.num_rows, send)[: inputs.num_kept]

    def follow(self, size: StepSize, slot: int, num_rows: int) -> None:
        """Run a step of another process that has published its inputs in a slot. Returns once nothing reads the slot,
        and, of a step that is replayed, at its end: the next one does not come before."""
        captured, backend = self._captured[size], self._backend
        self._launch(captured, num_rows, partial(captured.static.take, slot, non_blocking=backend is not None))
        if backend is not None:
            backend.wait()

    def _launch(self, captured: _Captured, num_rows: int, send: Callable[[], None]) -> Tensor:
        """Run a step of num_rows rows with tokens, whose inputs `send` brings. Returns logits of all rows that it may
        keep."""
        if self._backend is None or captured.graph is None or captured.logits is None:
            send()
            return self._run_marked(captured.static.inputs)
        self._backend.wait()  # the step before may still read its inputs and the number of its tokens
        for work, count in captured.counts:
            work.expect(count)
            work.set_rows(num_rows)
        self._backend.launch(captured.graph, send)
        if self._marks is not None:
            self._marks.launched(captured.marks)
        return captured.logits

    def launch_held(self, inputs: DecodeInputs) -> bool:
        """Launch a step while the one before it runs, to go on once `release` brings its tokens: `forward` is not
        called for it. Whether that can be; nothing was done where not.

        inputs: on the CPU, but hidden states anywhere, which are not read, as token_ids are not.
        """
        captured, backend = self._find(inputs), self._backend
        if captured is None or captured.graph is None or backend is None or not backend.can_hold:
            return False
        if self._marks is not None:
            return False  # its parts are timed
        captured.static.stage(inputs)
        for work, count in captured.counts:
            work.expect(count)
        begin_hold()
        try:
            backend.launch(captured.graph, captured.static.send, is_held=True)
        except BaseException:
            backend.release()  # whatever was launched by then: nobody else would
            end_hold()
            raise
        self._held = captured, inputs
        return True

    def release(self, token_ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Let the step go on that was launched held, once the one before it is over, with its tokens int64 [T].
        look_up: from them to hidden states [T, H] on the CPU. Returns logits as `forward` does. Raises what look_up
        does; the step goes on all the same."""
        assert self._held is not None, "no step is held"
        assert self._backend is not None, "steps are held by a backend"
        (captured, inputs), self._held = self._held, None
        try:
            captured.static.complete(look_up(token_ids), token_ids)
        finally:  # a GPU that waits for ever ends nothing
            for work, _ in captured.counts:
                work.set_rows(inputs.num_rows)
            self._backend.release()
            end_hold()
        assert captured.logits is not None, "steps that are held are replayed"
        return captured.logits[: inputs.num_kept]

    def _run_marked(self, inputs: DecodeInputs) -> Tensor:
        """Run a step anew, with marks where it is to be timed."""
        if self._marks is None:
            return self._run(inputs)
        self._marks.begin()
        logits = self._run(inputs)
        self._marks.launched(self._marks.take())
        return logits


def _first_line(error: BaseException) -> str:
    """What went wrong first: leaving a broken capture raises a second error on top of it."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0] or type(error).__name__
