"""The time that a layer of CPU experts adds to a stream of a GPU: enqueueing, copies, waking up.

A CUDA graph of `layers` layers is timed with and without experts; between two layers is one small kernel. Shape "empty"
has one expert of width 16, so that nearly all of its time is hand-over. Printed per layer, in microseconds: all that
the experts add, the time that the CPU spent in forwards (which the stream waits for anyway), and the difference, which
is the hand-over's cost; the target is under 20. Before that, replays with new inputs are compared with the kernel's own
results bit by bit, and the steps of a padded batch too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from ktransformers.bench.common.random_weights import random_raw
from ktransformers.bench.common.report import Row
from ktransformers.errors import KernelError
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.cpu.expert_counts import ExpertCounts
from ktransformers.kernels.transfer.async_cpu_experts import AsyncCpuExperts, EnqueueMethod, StreamShape
from ktransformers.kernels.transfer.cuda import CudaDriver
from ktransformers.kernels.types import ActivationSpec, ExpertWeight, ExpertWeights, QuantType
from ktransformers.operators.linear.packed import pack_experts

__all__ = ["SHAPES", "HandOverCase", "HandOverWork", "make_kernel", "measure_hand_over"]


@dataclass(frozen=True)
class ExpertsShape:
    """The shape of E experts, K per token, H hidden, I intermediate; `copies` layers have own weights, others share."""

    experts: int
    top_k: int
    hidden: int
    width: int
    types: tuple[QuantType, QuantType]
    copies: int


SHAPES = {
    "empty": ExpertsShape(1, 1, 2048, 16, (QuantType.F32, QuantType.F32), 1),
    "qwen3-30b": ExpertsShape(128, 8, 2048, 768, (QuantType.Q4_K, QuantType.Q6_K), 4),
}


@dataclass(frozen=True, slots=True)
class HandOverWork:
    """The cases to measure, of `shapes` of SHAPES.

    checks: replays that are compared before each measurement, which takes `milliseconds`.
    """

    shapes: Sequence[str]
    tokens: Sequence[int]
    layers: int
    threads: int
    checks: int = 200
    milliseconds: float = 300.0


def make_kernel(shape: ExpertsShape, pool: WorkerPool) -> MoeKernel:
    """Make a layer of experts with random weights, repacked where they can be."""

    def some(qtype: QuantType, rows: int, cols: int) -> list[ExpertWeight]:
        return [random_raw(qtype, rows, cols) for _ in range(shape.experts)]

    first, last = shape.types
    gate, up = some(first, shape.width, shape.hidden), some(first, shape.width, shape.hidden)
    weights = pack_experts(ExpertWeights(gate, up, some(last, shape.hidden, shape.width)), pool)
    return MoeKernel(weights, ActivationSpec(), pool)


class ExpertsStep:
    """A step of `layers` layers on static tensors, as a CUDA graph; without `experts` only the kernels between them."""

    def __init__(self, shape: ExpertsShape, tokens: int, layers: int, experts: AsyncCpuExperts | None = None):
        cuda: Any = torch.cuda
        self.experts = experts
        self.hidden = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
        self.shape = shape
        self.ids = torch.zeros(layers, tokens, shape.top_k, dtype=torch.int32, device="cuda")
        self.route()
        self.weights = torch.rand(tokens, shape.top_k, device="cuda")
        self.outs = [torch.zeros_like(self.hidden) for _ in range(layers)]
        self.other = torch.zeros_like(self.hidden)
        self._layers = [layer % shape.copies for layer in range(layers)]
        stream = cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            self.run()
            stream.synchronize()
            self.graph = cuda.CUDAGraph()
            with cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.run()
        self.count = 0 if experts is None else experts.captured()

    def route(self) -> None:
        """Draw an even routing, another one for each layer, so that weights come from memory."""
        layers, tokens, top_k = self.ids.shape
        keys = torch.rand(layers, tokens, self.shape.experts, device="cuda")
        self.ids.copy_(keys.argsort(-1)[..., :top_k].int())

    def run(self) -> None:
        """Run the step once, without the graph."""
        for layer, ids, out in zip(self._layers, self.ids, self.outs, strict=True):
            self.other.add_(1.0)  # what else a layer does
            if self.experts is not None:
                self.experts.submit(layer, self.hidden, ids, self.weights)
                self.experts.collect(out)

    def replay(self, tokens: int | None = None) -> None:
        """Replay the graph, with the first `tokens` rows."""
        if self.experts is not None:
            self.experts.expect(self.count)
            self.experts.set_rows(len(self.hidden) if tokens is None else tokens)
        self.graph.replay()


def _check(step: ExpertsStep, kernels: list[MoeKernel], rounds: int) -> None:
    """Replays with other inputs and numbers of tokens against the kernel itself. Raises KernelError for another bit."""
    rows, experts = step.hidden.shape[0], kernels[0].num_experts
    for number in range(rounds):
        tokens = rows - number % (rows + 1)
        step.hidden.copy_(torch.randn_like(step.hidden))
        step.ids.copy_(torch.randint_like(step.ids, 0, experts + 1))
        step.replay(tokens)
        torch.cuda.synchronize()
        x, ids, weights = step.hidden.float().cpu()[:tokens], step.ids.cpu()[:, :tokens], step.weights.cpu()[:tokens]
        for layer, out in enumerate(step.outs):
            want = kernels[layer % len(kernels)].forward(x.contiguous(), ids[layer].contiguous(), weights).bfloat16()
            got = out.cpu()
            if not torch.equal(got[:tokens], want) or got[tokens:].any():
                raise KernelError(f"round {number}, layer {layer}: the result is not the kernel's")
    assert step.experts is not None
    step.experts.check()
    step.route()


def _time_replays(replay: Callable[[], None], milliseconds: float) -> float:
    """Seconds per replay, each waited for as a decoder waits for its token."""
    cuda: Any = torch.cuda
    for _ in range(5):
        replay()
        torch.cuda.synchronize()
    start = cuda.Event(enable_timing=True)
    stop = cuda.Event(enable_timing=True, blocking=True)  # spinning would take a core from the workers
    total, count = 0.0, 0
    while total < milliseconds:
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        total += start.elapsed_time(stop)
        count += 1
    return total / 1e3 / count


@dataclass(frozen=True, slots=True)
class HandOverCase:
    """A case to measure: a shape of SHAPES, a number of tokens, a method, copies by kernels or by engines."""

    shape: str
    tokens: int
    method: EnqueueMethod
    uses_kernels: bool

    def row(self, kernels: list[MoeKernel], pool: WorkerPool, work: HandOverWork) -> Row:
        """Check the results of the case, then measure it; return its row of the table."""
        shape = SHAPES[self.shape]
        driver = CudaDriver("cuda", self.uses_kernels)
        dims = StreamShape(max(self.tokens, 16), shape.top_k, shape.hidden)
        with closing(AsyncCpuExperts(pool, dims, driver, self.method)) as experts:
            for kernel in kernels:
                experts.add_layer(kernel)
            step = ExpertsStep(shape, self.tokens, work.layers, experts)
            _check(step, kernels, work.checks)
            bare = _time_replays(ExpertsStep(shape, self.tokens, work.layers).replay, work.milliseconds)
            full = _time_replays(step.replay, work.milliseconds)
            counts = ExpertCounts()
            for kernel in kernels:
                counts.watch(kernel)
            busy, forwards, touched = experts.busy_seconds, experts.num_forwards, counts.totals()[2]
            _time_replays(step.replay, work.milliseconds)
            forwards = experts.num_forwards - forwards
            forward = (experts.busy_seconds - busy) / forwards
            touched_mean = (counts.totals()[2] - touched) / forwards
            experts.check()
        added = (full - bare) / work.layers
        return {
            "shape": self.shape,
            "tokens": self.tokens,
            "method": self.method.name.lower(),
            "copies": "kernel" if self.uses_kernels else "engine",
            "experts": touched_mean,
            "added_us": added * 1e6,
            "forward_us": forward * 1e6,
            "hand_over_us": (added - forward) * 1e6,
        }


def measure_hand_over(pool: WorkerPool, work: HandOverWork) -> float:
    """Return the seconds that enqueueing a layer costs besides its computation, by the method of models on this GPU."""
    reason = CudaDriver("cuda").memory_operations()
    method = EnqueueMethod.HOST if reason else EnqueueMethod.MEMORY
    shape, tokens = work.shapes[0], work.tokens[0]
    kernels = [make_kernel(SHAPES[shape], pool) for _ in range(SHAPES[shape].copies)]
    microseconds: float = HandOverCase(shape, tokens, method, True).row(kernels, pool, work)["hand_over_us"]
    return max(1e-6 * microseconds, 0.0)
