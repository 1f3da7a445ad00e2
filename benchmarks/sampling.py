"""What choosing a token costs, ours beside torch's.

Ours is `sample_batch`, as the engine calls it, one row and 16 rows of fp32 logits at a time. torch's is what
transformers' logits processors do with the same numbers: a division, `topk` and a comparison (top_k), an ascending
sort, softmax and cumulative sum scattered back (top_p), softmax and a comparison (min_p), then softmax and
`multinomial`; `argmax` when greedy. Both have the same threads. Logits: "peaked" is normal with five tokens far above,
as a model's are; "normal" has a standard deviation of 3, a nucleus of hundreds of tokens. The bound is reading the
logits once from memory; one row, and here often 16, come from a cache instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.bench.common.timing import best_time, torch_threads
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import (
    add_threads,
    check_between,
    check_range,
    check_threads,
)
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.core import SamplingParams
from ktransformers.engine.sampling.sampler import RequestSampler, sample_batch
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.system.cores import usable_cores

__all__ = ["bench_sampling", "main"]

_COLUMNS = (
    Column("logits", 7),
    Column("case", 13),
    Column("rows", 4),
    Column("ms", 8, ".3f"),
    Column("torch_ms", 9, ".3f", "torch ms"),
    Column("ratio", 8, ".1f", "x faster"),
    Column("bound_ms", 9, ".3f", "bound ms"),
)
_CASES = {
    "greedy": SamplingParams(temperature=0.0, seed=0),
    "temperature": SamplingParams(temperature=0.6, seed=0),
    "top_p": SamplingParams(temperature=0.6, top_p=0.95, seed=0),
    "top_k, top_p": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=0),
    "min_p": SamplingParams(temperature=0.6, min_p=0.05, seed=0),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5, seed=0),
}


def _make_logits(kind: str, num_rows: int, vocab: int) -> torch.Tensor:
    """fp32 [num_rows, vocab], the same every time."""
    generator = torch.Generator().manual_seed(0)
    if kind == "normal":
        return torch.randn(num_rows, vocab, generator=generator) * 3
    logits = torch.randn(num_rows, vocab, generator=generator) * 2.5 + 2
    best = torch.randint(vocab, (num_rows, 5), generator=generator)
    return logits.scatter(1, best, torch.rand(num_rows, 5, generator=generator) * 10 + 15)


def _torch_choice(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """One token per row [B], as transformers does it."""
    if params.logprobs is not None:
        torch.log_softmax(logits, dim=-1).topk(params.logprobs)
    if params.is_greedy:
        return logits.argmax(dim=-1)
    scores = logits / params.temperature
    if params.top_k > 0:
        scores = scores.masked_fill(scores < scores.topk(params.top_k)[0][..., -1:], -torch.inf)
    if params.top_p < 1.0:
        ordered, order = scores.sort(descending=False)
        removed = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - params.top_p
        removed[..., -1:] = False
        scores = scores.masked_fill(removed.scatter(1, order, removed), -torch.inf)
    if params.min_p > 0.0:
        weights = scores.softmax(dim=-1)
        scores = scores.masked_fill(weights < params.min_p * weights.amax(dim=-1, keepdim=True), -torch.inf)
    return torch.multinomial(scores.softmax(dim=-1), 1)[:, 0]


def bench_sampling(vocab: int, threads: int, seconds: float) -> Record:
    """Print a table, a line per kind of logits, case and number of rows. seconds: per figure."""
    pool = WorkerPool(threads)
    try:
        machine = machine_facts(pool)
        print(f"{shown_machine(machine)}; {vocab} logits a row")
        table = FigureTable(_COLUMNS)
        with torch_threads(threads):
            for kind, name, num_rows in product(("peaked", "normal"), _CASES, (1, 16)):
                logits, params = _make_logits(kind, num_rows, vocab), _CASES[name]
                requests = [RequestSampler(params, [], vocab) for _ in range(num_rows)]
                ours = best_time(partial(sample_batch, logits, requests, list(range(num_rows)), pool), seconds)
                theirs = best_time(partial(_torch_choice, logits, params), seconds)
                row: Row = {"logits": kind, "case": name, "rows": num_rows, "ms": ours * 1e3, "torch_ms": theirs * 1e3}
                row["bound_ms"] = num_rows * vocab * 4 / machine["read_bandwidth_gb_s"] / 1e6
                table.add(row, ratio=theirs / ours)
    finally:
        pool.close()
    return {"machine": machine, "vocab": vocab, "rows": table.rows}


def _sampling(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, vocab=1 << 24)
    check_range("seconds", args.seconds, 0, 3600)
    check_threads(args)
    measure = partial(bench_sampling, args.vocab, args.threads or usable_cores(), args.seconds)
    return print_record("sampling", args.json, measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "What choosing a token costs, beside what transformers' processors take in torch."
    parser, group = benchmark_parser("sampling", text, _sampling)
    group.add_argument("--vocab", type=int, default=151_936, help="logits of a row (%(default)s)")
    group.add_argument("--seconds", type=float, default=1.0, help="per figure (%(default)s)")
    add_threads(group, 1)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
