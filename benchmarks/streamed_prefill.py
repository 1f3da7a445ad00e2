"""Layers of routed experts in prefill: the CPU alone, PCIe and the GPU alone, both together. The last line is JSON.

    python benchmarks/streamed_prefill.py [--shapes qwen3-30b deepseek-v3] [--tokens 32 128 ...] [--threads N]
                                          [--milliseconds 300] [--between_us 0] [--engine_copies]

Random weights in the shapes of Qwen3-30B-A3B and DeepSeek-V3, Q4_K and, for down projections, Q6_K; even routing,
another one for each layer. Printed per layer, in milliseconds: all experts on the CPU, all copied, the calibrated
split, and what each side needs at least, by the rates measured for it. between_us: how long the GPU is busy with
something else between two layers, as with attention. engine_copies: hidden states and results are copied by copy
engines rather than kernels. Results of the split are compared with the CPU's.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig

from ktransformers.config import physical_cores
from ktransformers.engine.prefill import PrefillStream, cuda_tools, open_prefill
from ktransformers.kernels.cpu import MoeKernel, WorkerPool
from ktransformers.kernels.types import ActivationSpec
from ktransformers.operators.device import Device
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.staging import HostExperts, StagingSize
from ktransformers.operators.experts.streamed import PrefillShape
from ktransformers.operators.linear.relaid import relaid_experts
from ktransformers.weights.source import ExpertsLayout
from ktransformers.weights.synthetic import SyntheticSource


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
    layout = ExpertsLayout(shape.experts, shape.hidden, shape.inner, True, False, False, True)
    weights = SyntheticSource({}, PretrainedConfig()).experts(f"layers.{number}.mlp.experts", layout)
    return MoeKernel(relaid_experts(weights, pool), ActivationSpec(), pool)


class Layers:
    """Some layers of one shape, one after another, as a prefill step runs them."""

    def __init__(self, stream: PrefillStream, shape: Shape, tokens: int, between_us: float) -> None:
        self.prefill, self.shape, self.tokens = stream.prefill, shape, tokens
        self._cycles = int(between_us * 1e-6 * 1.7e9)
        self.x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
        keys = torch.rand(shape.layers, tokens, shape.experts, device="cuda")
        self.ids = keys.topk(shape.top_k, dim=-1).indices.int()
        self.weights = torch.rand(tokens, shape.top_k, device="cuda")

    def run(self) -> list[torch.Tensor]:
        cuda: Any = torch.cuda
        outs = []
        for layer in range(self.shape.layers):
            if self._cycles:
                cuda._sleep(self._cycles)
            ticket = self.prefill.submit(layer, self.x, self.ids[layer], self.weights)
            outs.append(self.prefill.collect(ticket))
        cuda.synchronize()
        self.prefill.check()
        return outs

    def seconds(self, milliseconds: float) -> float:
        """Of one layer, the mean over enough runs."""
        self.run()
        began, count, spent = time.perf_counter(), 0, 0.0
        while spent < milliseconds / 1e3:
            self.run()
            count += 1
            spent = time.perf_counter() - began
        return spent / count / self.shape.layers


def one_sided(rates: PrefillRates, on_gpu: bool) -> PrefillRates:
    """Rates that make the chooser take one side."""
    if on_gpu:
        slow = CpuRate((1,), (100.0,))
        return replace(rates, cpu=slow, shared_cpu=slow)
    return replace(rates, copy=900.0)


def measure(name: str, stream: PrefillStream, tokens: int, args: argparse.Namespace, nbytes: int) -> dict[str, Any]:
    shape, rates = SHAPES[name], stream.prefill.rates
    assert rates is not None
    layers = Layers(stream, shape, tokens, args.between_us)
    times, outs, splits = {}, {}, {}
    for mode, used in (("cpu", one_sided(rates, False)), ("pcie", one_sided(rates, True)), ("both", rates)):
        stream.prefill.rates = used
        outs[mode] = layers.run()[-1]
        times[mode] = layers.seconds(args.milliseconds)
        splits[mode] = stream.prefill.last_split
    stream.prefill.rates = rates
    errors = {
        mode: float((out - outs["cpu"]).float().norm() / outs["cpu"].float().norm()) for mode, out in outs.items()
    }
    if max(errors.values()) > 0.05:
        sys.exit(f"{name}, {tokens} tokens: results differ from the CPU's by {errors}")
    counts = torch.bincount(layers.ids[-1].flatten().long(), minlength=shape.experts)
    touched = int((counts > 0).sum())
    split = splits["both"]
    assert split is not None
    row: dict[str, Any] = {
        "shape": name,
        "tokens": tokens,
        "experts": touched,
        "cpu_ms": round(1e3 * times["cpu"], 3),
        "pcie_ms": round(1e3 * times["pcie"], 3),
        "both_ms": round(1e3 * times["both"], 3),
        "pcie_bound_ms": round(1e3 * touched * rates.copy, 3),
        "cpu_model_ms": round(1e3 * float(rates.cpu.of(counts.cpu().numpy()).sum()), 3),
        "both_model_ms": round(1e3 * split.seconds, 3),
        "on_gpu": len(split.on_gpu),
        "there": len(split.there),
        "gb_s": round(len(split.on_gpu) * nbytes / times["both"] / 1e9, 1),
        "error": round(errors["both"], 5),
    }
    print(
        f"{name:12} {tokens:5} tokens {touched:4} experts:"
        f" cpu {row['cpu_ms']:8.2f} (model {row['cpu_model_ms']:8.2f})"
        f" pcie {row['pcie_ms']:8.2f} (bound {row['pcie_bound_ms']:8.2f})"
        f" both {row['both_ms']:8.2f} (model {row['both_model_ms']:8.2f}),"
        f" {row['on_gpu']:3} on the GPU, {row['there']:3} of them ahead, {row['gb_s']:5.1f} GB/s",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--milliseconds", type=float, default=300.0)
    parser.add_argument("--between_us", type=float, default=0.0)
    parser.add_argument("--engine_copies", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.set_grad_enabled(False)
    pool = WorkerPool(args.threads)
    device = Device("cuda:0", torch.device("cuda:0"), torch.bfloat16, is_gpu=True)
    tools = cuda_tools(device, 0) if args.engine_copies else cuda_tools(device)
    assert tools is not None
    rows, rates = [], {}
    for name in args.shapes:
        shape = SHAPES[name]
        began = time.perf_counter()
        kernels = [make_kernel(shape, number, pool) for number in range(shape.copies)]
        nbytes = HostExperts(kernels[0].weights).expert_nbytes
        size = StagingSize.of(nbytes, shape.experts, 1 << 30)
        assert size is not None
        made = time.perf_counter()
        prefill_shape = PrefillShape(shape.experts, shape.top_k, shape.hidden, shape.inner, max(args.tokens))
        used = [kernels[layer % shape.copies] for layer in range(shape.layers)]
        stream = open_prefill(device, used, prefill_shape, size, tools, remembers=False)
        assert stream is not None
        print(
            f"{name}: {shape.copies} layers of {shape.experts * nbytes / 1e6:.0f} MB made in {made - began:.1f} s, "
            f"{stream.pinned.nbytes / 1e9:.1f} GB pinned and calibrated in {time.perf_counter() - made:.1f} s, "
            f"{size.num_buffers} buffers of {size.nbytes >> 20} MiB",
            flush=True,
        )
        found = stream.prefill.rates
        assert found is not None
        rates[name] = {"copy": found.copy, "gpu_row": found.gpu_row, "threshold": stream.prefill.threshold}
        rates[name] |= {"rows": found.cpu.rows, "cpu": found.cpu.seconds, "shared_cpu": found.shared_cpu.seconds}
        rows += [measure(name, stream, tokens, args, nbytes) for tokens in args.tokens]
        stream.close()
    print(
        json.dumps(
            {
                "benchmark": "streamed_prefill",
                "device": tools.name,
                "threads": args.threads,
                "isa": pool.isa.value,
                "between_us": args.between_us,
                "engine_copies": args.engine_copies,
                "rates": rates,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
