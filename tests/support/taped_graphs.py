"""CUDA graphs for machines without a GPU: what is launched goes to a tape, and a replay launches it again.

As in a graph, nothing of Python that stands between the launches runs again, and what they read and write stays where
it was. Operations of torch and Triton's interpreted kernels are launches; what else a device may do is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from tests.support.fake_gpus import FakeGraphs
from tests.support.launches import EMPTY, storages

Launch = Callable[[], None]


class Tape:
    """What was launched. replays: how often it was again."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with _disable_current_modes():  # a test's that counts: a graph is one launch
            for launch in self.launches:
                launch()


class _Recorder(TorchDispatchMode):
    """Runs operations and puts them on the tape. is_paused: while a kernel runs, which computes with torch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tape, self.is_paused = Tape(), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused or func.overloadpacket.__name__ in EMPTY:
            return result
        is_mutable = func._schema.is_mutable
        if not is_mutable and storages(result) <= storages((args, kwargs)):
            return result  # a view stays one

        def launch() -> None:
            again = func(*args, **(kwargs or {}))
            if not is_mutable:
                for target, source in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(target, Tensor):
                        target.copy_(source)

        self.tape.launches.append(launch)
        return result


@contextmanager
def _recorded() -> Iterator[_Recorder]:
    recorder, original = _Recorder(), GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        recorder.is_paused = True
        try:
            original(self, *args, **kwargs)
        finally:
            recorder.is_paused = False
        recorder.tape.launches.append(lambda: original(self, *args, **kwargs))

    with pytest.MonkeyPatch.context() as patch, recorder:
        patch.setattr(GridExecutor, "__call__", call)
        yield recorder


class TapedGraphs(FakeGraphs):
    """A GraphBackend whose steps in pieces are tapes. pieces: of each capture, in order. fails_in: the number of the
    piece in which a capture runs out of memory."""

    def __init__(self, fails_in: int | None = None) -> None:
        super().__init__()
        self.pieces: list[list[Tape]] = []
        self.fails_in = fails_in

    def __call__(self, devices: Sequence[torch.device]) -> TapedGraphs:
        return self

    def capture_pieces(self, work: Callable[[Callable[[], None]], Tensor]) -> tuple[list[Tape], Tensor]:
        tapes: list[Tape] = []
        with _recorded() as recorder:

            def cut() -> None:
                assert recorder.tape.launches, "a graph is empty"
                tapes.append(recorder.tape)
                recorder.tape = Tape()
                if len(tapes) == self.fails_in:
                    raise torch.OutOfMemoryError("CUDA out of memory\nand a hint")

            result = work(cut)
            tapes.append(recorder.tape)
        self.pieces.append(tapes)
        self.captured.append(len(result))
        return tapes, result
