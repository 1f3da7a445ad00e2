"""What a slow core costs a kernel: the last thread's tasks take 2, 4 or 8 times as long, as on an efficiency core or
beside a neighbour.

"ours" hands out tasks as threads come to them. The bound is the work over the sum of speeds, by the time without a slow
thread; "equal shares" is the time in which a slow thread ends with as many tasks as the others have, which is what a
split in advance takes. Experts and heads are Qwen3-30B's, weights Q4_K and Q6_K; rows are tokens, which attend to those
before them in a sequence of 2,048.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

import torch

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.random_weights import random_raw
from ktransformers.bench.common.report import Column, FigureTable, Record, print_record
from ktransformers.bench.common.timing import best_time
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import add_threads, check_range, check_threads, numbers
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.errors import ConfigError
from ktransformers.kernels.attention_call import AttentionCall, RowPages
from ktransformers.kernels.cpu import MoeKernel, WorkerPool, attention, linear
from ktransformers.kernels.types import ActivationSpec, ExpertWeights, QuantType
from ktransformers.operators.linear.packed import pack_experts, pack_matrix
from ktransformers.system.cores import usable_cores

__all__ = ["bench_slow_core", "main"]

_COLUMNS = (
    Column("kernel", 10),
    Column("rows", 5),
    Column("times", 5),
    Column("ms", 9, ".3f"),
    Column("bound_ms", 9, ".3f", "bound ms"),
    Column("ratio", 8, ".2f", "x bound"),
    Column("equal_ms", 9, ".3f", "equal ms"),
)
_TIMES = (2, 4, 8)
_HIDDEN, _WIDTH, _EXPERTS, _TOP_K = 2048, 768, 32, 8
_CONTEXT, _PAGE = 2048, 64


def _kernels(pool: WorkerPool, rows: Sequence[int]) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Calls of a layer of experts, of a matrix and of attention, by rows."""
    up, down = random_raw(QuantType.Q4_K, _WIDTH, _HIDDEN), random_raw(QuantType.Q6_K, _HIDDEN, _WIDTH)
    weights = ExpertWeights([up] * _EXPERTS, [up] * _EXPERTS, [down] * _EXPERTS)
    experts = MoeKernel(pack_experts(weights, pool), ActivationSpec(), pool)
    matrix = pack_matrix(random_raw(QuantType.Q4_K, 2 * _HIDDEN, _HIDDEN), pool)
    cache = torch.randn(_CONTEXT, 4, 128).bfloat16()
    table = torch.arange(_CONTEXT // _PAGE, dtype=torch.int32)[None]
    for count in rows:
        x, weight = torch.randn(count, _HIDDEN), torch.full((count, _TOP_K), 1 / _TOP_K)
        ids = torch.rand(count, _EXPERTS).argsort(-1)[:, :_TOP_K].contiguous()
        yield "experts", count, partial(experts.forward, x, ids, weight)
        yield "matrix", count, partial(linear, x, matrix, pool)
        lens = torch.arange(_CONTEXT - count + 1, _CONTEXT + 1)
        pages = RowPages(table, _PAGE, torch.zeros(count, dtype=torch.int32), lens)
        call = AttentionCall(torch.randn(count, 32, 128), cache, cache, pages, 0.1)
        yield "attention", count, partial(attention, call, pool)


def bench_slow_core(threads: int, rows: Sequence[int], seconds: float) -> Record:
    """Print a table, a line per kernel, number of rows and slowness of the last thread. seconds: per figure."""
    torch.manual_seed(0)
    with closing(WorkerPool(threads)) as pool:
        machine = machine_facts(pool)
        print(f"{shown_machine(machine)}; thread {threads - 1} is slow")
        table = FigureTable(_COLUMNS)
        for kernel, count, call in _kernels(pool, rows):
            for times in _TIMES:
                even = best_time(call, seconds)  # beside each, since neighbours come and go
                pool.handle._slow_down(threads - 1, times)
                ours = best_time(call, seconds)
                pool.handle._slow_down(threads - 1, 1)
                bound = even * threads / (threads - 1 + 1 / times)
                row = {"kernel": kernel, "rows": count, "times": times, "ms": ours * 1e3, "bound_ms": bound * 1e3}
                table.add({**row, "equal_ms": even * times * 1e3}, ratio=ours / bound)
    return {"machine": machine, "rows": table.rows}


def _slow_core(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_range("seconds", args.seconds, 0, 3600)
    check_threads(args)
    threads = args.threads or usable_cores()
    if threads < 2:
        raise ConfigError("--threads must be at least 2: one is slow, and others take what it leaves")
    measure = partial(bench_slow_core, threads, numbers(args.rows, "rows", _CONTEXT), args.seconds)
    return print_record("slow_core", args.json, measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "What a slow core costs a kernel, beside the work over the sum of speeds and beside equal shares."
    parser, group = benchmark_parser("slow_core", text, _slow_core)
    group.add_argument("--rows", default="1,8,512", help="tokens of a call (%(default)s)")
    group.add_argument("--seconds", type=float, default=1.0, help="per figure (%(default)s)")
    add_threads(group)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
