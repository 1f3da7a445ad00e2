"""Layers of routed experts in prefill: the CPU alone, PCIe and the GPU alone, both together.

Random weights in the shapes of Qwen3-30B-A3B and DeepSeek-V3, Q4_K and, for down projections, Q6_K; even routing,
another one for each layer. Printed per layer, in milliseconds: all experts on the CPU, all copied, the calibrated
split, and what each side needs at least, by the rates measured for it. Results of the split are compared with the
CPU's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import Qwen3MoeConfig

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.bench.gpu.device import require_gpu
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import (
    add_threads,
    check_range,
    check_threads,
    chosen,
    numbers,
)
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.engine.step.expert_streaming import PrefillStream, PrefillTools, cuda_tools, open_prefill
from ktransformers.errors import KernelError
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.types import ActivationSpec
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.device import Device
from ktransformers.operators.experts.host_experts import HostExperts
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.staging import StagingSize
from ktransformers.operators.experts.streamed import PrefillShape
from ktransformers.operators.linear.packed import pack_experts
from ktransformers.system.cores import usable_cores
from ktransformers.weights.source import ExpertsLayout
from ktransformers.weights.synthetic import SyntheticSource

__all__ = ["SHAPES", "PrefillWork", "bench_gpu_prefill", "main"]

_CLOCK = 1.7e9  # cycles a second, about
_COLUMNS = (
    Column("shape", 12),
    Column("tokens", 6),
    Column("experts", 7),
    Column("cpu_ms", 9, ".2f", "CPU ms"),
    Column("cpu_model_ms", 9, ".2f", "predicted"),
    Column("pcie_ms", 9, ".2f", "PCIe ms"),
    Column("pcie_bound_ms", 9, ".2f", "bound"),
    Column("both_ms", 9, ".2f", "both ms"),
    Column("both_model_ms", 9, ".2f", "predicted"),
    Column("on_gpu", 6, title="on GPU"),
    Column("there", 6, title="ahead"),
    Column("gb_s", 6, ".1f", "GB/s"),
)


@dataclass(frozen=True)
class Shape:
    """E experts, K per token, H hidden, I intermediate. copies: layers with weights of their own; others share them."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    copies: int
    layers: int


SHAPES = {
    "qwen3-30b": Shape(128, 8, 2048, 768, 3, 12),
    "deepseek-v3": Shape(256, 8, 7168, 2048, 1, 3),
}


def make_kernel(shape: Shape, number: int, pool: WorkerPool) -> MoeKernel:
    """A layer of experts with random weights; another number has others."""
    layout = ExpertsLayout(shape.experts, shape.hidden, shape.inner, True, False, False, True)
    weights = SyntheticSource({}, ModelFacts.of(Qwen3MoeConfig())).experts(f"layers.{number}.mlp.experts", layout)
    return MoeKernel(pack_experts(weights, pool), ActivationSpec(), pool)


class Layers:
    """Some layers of one shape, one after another, as a prefill step runs them."""

    def __init__(self, stream: PrefillStream, shape: Shape, tokens: int, device: torch.device) -> None:
        self.prefill, self.shape = stream.prefill, shape
        self.cycles = 0  # that the GPU waits between two layers
        self.x = torch.randn(tokens, shape.hidden, device=device).bfloat16()
        keys = torch.rand(shape.layers, tokens, shape.experts, device=device)
        self.ids = keys.topk(shape.top_k, dim=-1).indices.int()
        self.weights = torch.rand(tokens, shape.top_k, device=device)

    def run(self) -> list[torch.Tensor]:
        """What every layer makes."""
        cuda: Any = torch.cuda
        outs = []
        for layer in range(self.shape.layers):
            if self.cycles:
                cuda._sleep(self.cycles)
            ticket = self.prefill.submit(layer, self.x, self.ids[layer], self.weights)
            outs.append(self.prefill.collect(ticket))
        cuda.synchronize()
        self.prefill.check()
        return outs

    def seconds(self, milliseconds: float) -> float:
        """Of one layer, the mean over enough runs."""
        self.run()
        began, count, spent = time.perf_counter(), 0, 0.0
        while count == 0 or spent < milliseconds / 1e3:
            self.run()
            count += 1
            spent = time.perf_counter() - began
        return spent / count / self.shape.layers


def _one_sided(rates: PrefillRates, on_gpu: bool) -> PrefillRates:
    """Rates that make the chooser take one side."""
    if on_gpu:
        slow = CpuRate((1,), (100.0,))
        return replace(rates, cpu=slow, shared_cpu=slow)
    return replace(rates, copy=900.0)


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """shapes: of SHAPES. between_us: the GPU is busy with something else between two layers, as with attention.

    has_engine_copies: hidden states and results are copied by copy engines rather than kernels.
    """

    shapes: Sequence[str]
    tokens: Sequence[int]
    threads: int
    milliseconds: float = 300.0
    between_us: float = 0.0
    has_engine_copies: bool = False


def _row(name: str, layers: Layers, work: PrefillWork, nbytes: int) -> Row:
    """nbytes: of an expert."""
    prefill, shape, tokens = layers.prefill, SHAPES[name], len(layers.x)
    rates = prefill.rates
    assert rates is not None
    times, outs = {}, {}
    for mode, used in (("cpu", _one_sided(rates, False)), ("pcie", _one_sided(rates, True)), ("both", rates)):
        prefill.rates = used
        outs[mode] = layers.run()[-1]
        times[mode] = layers.seconds(work.milliseconds)
    split = prefill.last_split
    assert split is not None
    errors = {
        mode: float((out - outs["cpu"]).float().norm() / outs["cpu"].float().norm()) for mode, out in outs.items()
    }
    if max(errors.values()) > 0.05:
        raise KernelError(f"{name}, {tokens} tokens: results differ from the CPU's by {errors}")
    counts = torch.bincount(layers.ids[-1].flatten().long(), minlength=shape.experts)
    touched = int((counts > 0).sum())
    return {
        "shape": name,
        "tokens": tokens,
        "experts": touched,
        "cpu_ms": 1e3 * times["cpu"],
        "pcie_ms": 1e3 * times["pcie"],
        "both_ms": 1e3 * times["both"],
        "pcie_bound_ms": 1e3 * touched * rates.copy,
        "cpu_model_ms": 1e3 * float(rates.cpu.of(counts.cpu().numpy()).sum()),
        "both_model_ms": 1e3 * split.seconds,
        "on_gpu": len(split.on_gpu),
        "there": len(split.there),
        "gb_s": len(split.on_gpu) * nbytes / times["both"] / 1e9,
        "error": errors["both"],
    }


def _gpu(has_engine_copies: bool) -> tuple[Device, PrefillTools]:
    """The first one. Raises UnsupportedError when there is none."""
    require_gpu()
    device = Device("cuda:0", torch.device("cuda:0"), torch.bfloat16, is_gpu=True)
    tools = cuda_tools(device, 0) if has_engine_copies else cuda_tools(device)
    assert tools is not None, "a CUDA device that has no driver"
    return device, tools


def bench_gpu_prefill(work: PrefillWork) -> Record:
    """Print a table, a line per shape and number of tokens."""
    device, tools = _gpu(work.has_engine_copies)
    with closing(WorkerPool(work.threads)) as pool, torch.no_grad():
        machine = machine_facts(pool)
        print(f"{shown_machine(machine)}; {tools.name}")
        rows: list[Row] = []
        rates: dict[str, Any] = {}
        for name in work.shapes:
            shape, began = SHAPES[name], time.perf_counter()
            kernels = [make_kernel(shape, number, pool) for number in range(shape.copies)]
            nbytes = HostExperts(kernels[0].weights).expert_nbytes
            size = StagingSize.of(nbytes, shape.experts, 1 << 30)
            assert size is not None
            made = time.perf_counter()
            prefill_shape = PrefillShape(shape.experts, shape.top_k, shape.hidden, shape.inner, max(work.tokens))
            used = [kernels[layer % shape.copies] for layer in range(shape.layers)]
            stream = open_prefill(device, used, prefill_shape, size, tools, remembers=False)
            assert stream is not None
            print(
                f"{name}: {shape.copies} layers of {shape.experts * nbytes / 1e6:.0f} MB made in {made - began:.1f} s, "
                f"{stream.pinned.nbytes / 1e9:.1f} GB pinned and calibrated in {time.perf_counter() - made:.1f} s, "
                f"{size.num_buffers} buffers of {size.nbytes >> 20} MiB"
            )
            with closing(stream):
                rates[name] = _shown_rates(stream)
                table = FigureTable(_COLUMNS)
                for tokens in work.tokens:
                    layers = Layers(stream, shape, tokens, device.torch_device)
                    layers.cycles = int(work.between_us * 1e-6 * _CLOCK)
                    table.add(_row(name, layers, work, nbytes))
            rows += table.rows
    return {"machine": machine, "work": asdict(work), "rates": rates, "rows": rows}


def _shown_rates(stream: PrefillStream) -> Row:
    found = stream.prefill.rates
    assert found is not None
    return {
        "copy": found.copy,
        "gpu_row": found.gpu_row,
        "threshold": stream.prefill.threshold,
        "rows": found.cpu.rows,
        "cpu": found.cpu.seconds,
        "shared_cpu": found.shared_cpu.seconds,
    }


def _measure_prefill(args: argparse.Namespace) -> int:
    set_up_logging("info")
    shapes, tokens = chosen(args.shapes, "shapes", list(SHAPES)), numbers(args.tokens, "tokens")
    check_range("milliseconds", args.milliseconds, 0, 1 << 20)
    check_range("between_us", args.between_us, 0, 1 << 20)
    check_threads(args)
    threads = args.threads or usable_cores()
    work = PrefillWork(shapes, tokens, threads, args.milliseconds, args.between_us, args.engine_copies)
    return print_record("gpu_prefill", args.json, partial(bench_gpu_prefill, work))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "Routed experts of a layer in prefill, in milliseconds: on the CPU alone, all copied to the GPU, and shared "
    text += "between the two as the engine does it, beside what its rates predict."
    parser, group = benchmark_parser("gpu.prefill", text, _measure_prefill)
    shapes = ",".join(SHAPES)
    group.add_argument("--shapes", default=shapes, help="some of these (%(default)s)")
    group.add_argument("--tokens", default="32,64,128,256,512,1024,2048,4096,8192", help="token counts")
    group.add_argument("--milliseconds", type=float, default=300.0, help="per figure (%(default)s)")
    text = "microseconds that the GPU is busy between two layers, as with attention (%(default)s)"
    group.add_argument("--between_us", type=float, default=0.0, help=text)
    group.add_argument("--engine_copies", action="store_true", help="hidden states pass by copy engines, not kernels")
    add_threads(group)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
