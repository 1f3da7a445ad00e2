"""What a layer of CPU experts adds to a stream of a GPU: hand-over, copies, waking up. The last line is JSON.

    python benchmarks/expert_stream.py [--layers 48] [--tokens 1 4 16] [--threads N] [--shapes empty qwen3-30b]
                                       [--checks 200] [--milliseconds 300]

A CUDA graph of `layers` layers is timed with and without experts; between two layers is one small kernel. Shape "empty"
has one expert of width 16, so that nearly all of its time is hand-over. Printed per layer, in microseconds: all that
the experts add, the time that the CPU spent in forwards (which the stream waits for anyway), and the difference, which
is the hand-over's cost; the target is under 20. Before that, replays with new inputs are compared with the kernel's own
results bit by bit, and the steps of a padded batch too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ktransformers.config import physical_cores
from ktransformers.kernels.cpu import MoeKernel, WorkerPool, pack
from ktransformers.kernels.transfer.cuda import CudaDriver
from ktransformers.kernels.transfer.expert_stream import HandOver, StreamedExperts, StreamShape
from ktransformers.kernels.types import (
    ActivationSpec,
    ExpertWeights,
    PackedTensor,
    QuantType,
    RawTensor,
    row_bytes,
    type_size,
)

TARGET = 20.0  # microseconds


@dataclass(frozen=True)
class Shape:
    """E experts, K per token, H hidden, I intermediate; `copies` layers hold weights of their own, the others share."""

    experts: int
    top_k: int
    hidden: int
    width: int
    types: tuple[QuantType, QuantType]
    copies: int


SHAPES = {
    "empty": Shape(1, 1, 2048, 16, (QuantType.F32, QuantType.F32), 1),
    "qwen3-30b": Shape(128, 8, 2048, 768, (QuantType.Q4_K, QuantType.Q6_K), 4),
}


def random_weight(qtype: QuantType, rows: int, cols: int, pool: WorkerPool) -> RawTensor | PackedTensor:
    """Random bits with small scales, re-laid; fp32 as it is."""
    if qtype is QuantType.F32:
        return RawTensor.from_tensor(torch.randn(rows, cols) * 0.05)
    data = torch.randint(0, 256, (rows * row_bytes(qtype, cols),), dtype=torch.uint8)
    blocks = data.view(-1, type_size(qtype))
    for at in (209,) if qtype is QuantType.Q6_K else (1, 3):
        blocks[:, at] = 0x04  # the high byte of an fp16 scale: about 1e-4
    return pack(RawTensor(data, qtype, (rows, cols)), pool)


def make_kernel(shape: Shape, pool: WorkerPool) -> MoeKernel:
    def some(qtype: QuantType, rows: int, cols: int) -> list[RawTensor | PackedTensor]:
        return [random_weight(qtype, rows, cols, pool) for _ in range(shape.experts)]

    first, last = shape.types
    gate, up = some(first, shape.width, shape.hidden), some(first, shape.width, shape.hidden)
    return MoeKernel(ExpertWeights(gate, up, some(last, shape.hidden, shape.width)), ActivationSpec(), pool)


class Step:
    """`layers` layers on static tensors, as a CUDA graph; without `experts` only the kernels between them."""

    def __init__(self, shape: Shape, tokens: int, layers: int, experts: StreamedExperts | None, num_kernels: int):
        cuda: Any = torch.cuda
        self.experts = experts
        self.hidden = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
        self.shape = shape
        self.ids = torch.zeros(layers, tokens, shape.top_k, dtype=torch.int32, device="cuda")
        self.route()
        self.weights = torch.rand(tokens, shape.top_k, device="cuda")
        self.outs = [torch.zeros_like(self.hidden) for _ in range(layers)]
        self.other = torch.zeros_like(self.hidden)
        self._layers = [layer % num_kernels for layer in range(layers)]
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
        """Even routing, another one for each layer, so that weights come from memory."""
        layers, tokens, top_k = self.ids.shape
        keys = torch.rand(layers, tokens, self.shape.experts, device="cuda")
        self.ids.copy_(keys.argsort(-1)[..., :top_k].int())

    def run(self) -> None:
        for layer, ids, out in zip(self._layers, self.ids, self.outs, strict=True):
            self.other.add_(1.0)  # what else a layer does
            if self.experts is not None:
                self.experts.submit(layer, self.hidden, ids, self.weights)
                self.experts.collect(out)

    def replay(self, tokens: int | None = None) -> None:
        if self.experts is not None:
            self.experts.expect(self.count, len(self.hidden) if tokens is None else tokens)
        self.graph.replay()


def check(step: Step, kernels: list[MoeKernel], rounds: int) -> None:
    """Replays with other inputs and other numbers of tokens against the kernel itself. Exits when a bit differs."""
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
                sys.exit(f"round {number}, layer {layer}: the result is not the kernel's")
    assert step.experts is not None
    step.experts.check()
    step.route()


def time_replays(replay: Callable[[], None], milliseconds: float) -> tuple[float, int]:
    """Seconds per replay, each waited for as a decoder waits for its token, and how many there were."""
    for _ in range(5):
        replay()
        torch.cuda.synchronize()
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True, blocking=True)  # spinning would take a core from the workers
    total, count = 0.0, 0
    while total < milliseconds:
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        total += start.elapsed_time(stop)
        count += 1
    return total / 1e3 / count, count


def measure(name: str, tokens: int, method: HandOver, uses_kernels: bool, args: argparse.Namespace) -> dict[str, Any]:
    shape, pool = SHAPES[name], args.pool
    kernels: list[MoeKernel] = args.kernels[name]
    driver = CudaDriver("cuda", uses_kernels)
    dims = StreamShape(max(tokens, 16), shape.top_k, shape.hidden)
    experts = StreamedExperts(pool, dims, driver, method)
    for kernel in kernels:
        experts.add_layer(kernel)
    step = Step(shape, tokens, args.layers, experts, len(kernels))
    check(step, kernels, args.checks)
    bare, _ = time_replays(Step(shape, tokens, args.layers, None, 1).replay, args.milliseconds)
    full, _ = time_replays(step.replay, args.milliseconds)
    busy, forwards, touched = experts.busy_seconds, experts.num_forwards, experts.num_touched
    time_replays(step.replay, args.milliseconds)
    forwards = experts.num_forwards - forwards
    forward, touched_mean = (experts.busy_seconds - busy) / forwards, (experts.num_touched - touched) / forwards
    experts.check()
    experts.close()
    added = (full - bare) / args.layers
    row: dict[str, Any] = {
        "shape": name,
        "tokens": tokens,
        "method": method.name.lower(),
        "copies": "kernel" if uses_kernels else "engine",
        "experts": round(touched_mean, 1),
        "added_us": round(added * 1e6, 2),
        "forward_us": round(forward * 1e6, 2),
        "hand_over_us": round((added - forward) * 1e6, 2),
    }
    print(
        f"{name:10} {tokens:3} tokens  {row['method']:6} {row['copies']:6}  {touched_mean:5.1f} experts  "
        f"adds {row['added_us']:8.2f} us a layer, forward {row['forward_us']:8.2f}, "
        f"hand-over {row['hand_over_us']:6.2f}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--checks", type=int, default=200, help="replays that are compared before each measurement")
    parser.add_argument("--milliseconds", type=float, default=300.0)
    args = parser.parse_args()
    args.pool = WorkerPool(args.threads)
    args.kernels = {
        name: [make_kernel(SHAPES[name], args.pool) for _ in range(SHAPES[name].copies)] for name in args.shapes
    }
    reason = CudaDriver("cuda").memory_operations()
    machine = f"{torch.cuda.get_device_name()}, {args.threads} threads, {args.pool.isa.value}"
    print(f"{machine}, memory operations: {reason or 'yes'}", flush=True)
    methods = [HandOver.HOST] if reason else [HandOver.MEMORY, HandOver.HOST]
    rows = [measure(*case, args) for case in product(args.shapes, args.tokens, methods, (True, False))]
    best = min((row["hand_over_us"] for row in rows if row["tokens"] == min(args.tokens)), default=0.0)
    print(f"best at {min(args.tokens)} tokens: {best} us, target {TARGET}")
    print(
        json.dumps(
            {
                "benchmark": "expert_stream",
                "device": torch.cuda.get_device_name(),
                "threads": args.threads,
                "isa": args.pool.isa.value,
                "layers": args.layers,
                "memory_operations": reason,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
