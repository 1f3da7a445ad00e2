"""What a layer of CPU experts adds to a stream of a GPU, by shape, tokens and way of handing over.

See bench.gpu.hand_over for what is timed; the target is under 20 microseconds a layer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import product

import torch

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, print_record
from ktransformers.bench.gpu.device import require_gpu
from ktransformers.bench.gpu.hand_over import SHAPES, HandOverCase, HandOverWork, make_kernel
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import (
    add_threads,
    check_between,
    check_range,
    check_threads,
    chosen,
    numbers,
)
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.transfer.async_cpu_experts import EnqueueMethod
from ktransformers.kernels.transfer.cuda import CudaDriver
from ktransformers.system.cores import usable_cores

__all__ = ["bench_gpu_hand_over", "main"]

TARGET = 20.0  # microseconds
_COLUMNS = (
    Column("shape", 10),
    Column("tokens", 6),
    Column("method", 6),
    Column("copies", 6),
    Column("experts", 7, ".1f"),
    Column("added_us", 9, ".2f", "added us"),
    Column("forward_us", 10, ".2f", "forward us"),
    Column("hand_over_us", 12, ".2f", "hand-over us"),
)


def bench_gpu_hand_over(work: HandOverWork) -> Record:
    """Print a table, a line per shape, number of tokens and way of handing over."""
    require_gpu()
    with closing(WorkerPool(work.threads)) as pool:
        machine, reason = machine_facts(pool), CudaDriver("cuda").memory_operations()
        print(f"{shown_machine(machine)}; {torch.cuda.get_device_name()}, memory operations: {reason or 'yes'}")
        methods = [EnqueueMethod.HOST] if reason else [EnqueueMethod.MEMORY, EnqueueMethod.HOST]
        table = FigureTable(_COLUMNS)
        for name in work.shapes:
            kernels = [make_kernel(SHAPES[name], pool) for _ in range(SHAPES[name].copies)]
            for tokens, method, uses_kernels in product(work.tokens, methods, (True, False)):
                table.add(HandOverCase(name, tokens, method, uses_kernels).row(kernels, pool, work))
    least = min(work.tokens)
    best = min(row["hand_over_us"] for row in table.rows if row["tokens"] == least)
    print(f"best at {least} tokens: {best:.2f} us, target {TARGET}")
    return {"machine": machine, "layers": work.layers, "memory_operations": reason, "rows": table.rows}


def _measure_hand_over(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    shapes, tokens = chosen(args.shapes, "shapes", list(SHAPES)), numbers(args.tokens, "tokens")
    check_between(args, layers=1024)
    check_range("checks", args.checks, 0, 1 << 20)
    check_range("milliseconds", args.milliseconds, 0, 1 << 20)
    check_threads(args)
    threads = args.threads or usable_cores()
    work = HandOverWork(shapes, tokens, args.layers, threads, args.checks, args.milliseconds)
    return print_record("gpu_hand_over", args.json, partial(bench_gpu_hand_over, work))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "What a layer of CPU experts adds to a stream of a GPU beside the CPU's own time, in microseconds."
    parser, group = benchmark_parser("gpu.hand_over", text, _measure_hand_over)
    shapes = ",".join(SHAPES)
    group.add_argument("--shapes", default=shapes, help="some of these (%(default)s)")
    group.add_argument("--tokens", default="1,4,16", help="token counts (%(default)s)")
    group.add_argument("--layers", type=int, default=48, help="of a step (%(default)s)")
    group.add_argument("--checks", type=int, default=200, help="steps that are compared before (%(default)s)")
    group.add_argument("--milliseconds", type=float, default=300.0, help="per figure (%(default)s)")
    add_threads(group)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
