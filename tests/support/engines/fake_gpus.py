"""GPUs for machines without one: "cuda:N" is torch's CPU, and Triton kernels run in Triton's interpreter.

tests/conftest.py chooses the interpreter. With a GPU there is none, and "cuda:N" is the GPU, whatever N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ktransformers.engine.load.builder import Hardware
from ktransformers.engine.step.cuda_graphs import CudaGraphs
from ktransformers.kernels.transfer.cuda import CudaDriver
from ktransformers.operators.device import Device, Devices
from ktransformers.optimize.machine import Machine
from tests.support.engines.fake_stream import InstantDriver

GIB = 1 << 30


class _Again:
    """Work that is run again into the tensor of its first result."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work, self.result = work, work().clone()

    def replay(self) -> None:
        self.result.copy_(self.work())


class FakeGraphs:
    """A GraphBackend without a device; notes what was captured and replayed, by number of rows."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.replays = self.num_held = 0
        self._held: Callable[[], None] | None = None

    def __call__(self, devices: Sequence[torch.device]) -> FakeGraphs:
        return self

    def warm_up(self, work: Callable[[], Tensor]) -> None:
        work()

    def capture(self, work: Callable[[], Tensor]) -> tuple[_Again, Tensor]:
        graph = _Again(work)
        self.captured.append(len(graph.result))
        return graph, graph.result

    def wait(self) -> None:
        assert self._held is None, "the host waits for a step that waits for the host"

    def launch(self, graph: _Again, send: Callable[[], None], *, is_held: bool = False) -> None:
        assert self._held is None, "something is launched behind a step that is held"

        def run() -> None:
            send()
            graph.replay()

        self.replays += 1
        if is_held:
            self._held, self.num_held = run, self.num_held + 1
        else:
            run()

    can_hold = True

    def release(self) -> None:
        assert self._held is not None, "nothing was held"
        held, self._held = self._held, None
        held()


def fake_hardware(
    num_gpus: int = 1,
    dtype: torch.dtype = torch.float32,
    gpu_bytes: int = 4 * GIB,
    graphs: FakeGraphs | None = None,
    graph_rows: Sequence[int] = (),
    draft_rows: Sequence[int] = (),
) -> Hardware:
    """A machine with GPUs that compute in `dtype`. graph_rows, draft_rows: see Hardware; the interpreter takes long for
    many."""
    names = [f"cuda:{i}" for i in range(num_gpus)]
    machine = Machine(8 * GIB, 4 * GIB, {"cpu": 4 * GIB, **dict.fromkeys(names, gpu_bytes)})
    if torch.cuda.is_available():
        devices = Devices(lambda name: Device(name, torch.device("cuda:0"), dtype, True, CudaDriver))
        return Hardware(machine, devices, graphs or CudaGraphs, graph_rows=graph_rows, draft_rows=draft_rows)
    where = torch.device("cpu")
    devices = Devices(lambda name: Device(name, where, dtype, True, lambda device: InstantDriver()))
    return Hardware(machine, devices, graphs or FakeGraphs(), graph_rows=graph_rows, draft_rows=draft_rows)
