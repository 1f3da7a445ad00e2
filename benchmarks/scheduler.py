"""What the scheduler costs per step: no model, no processes, only the Python of planning.

Each case is timed over steps with N sequences decoding: schedule() and commit() alone, then with the plan encoded as
msgpack, as the engine process gets it. "mixed" keeps prefill chunks coming: every eighth step one sequence is aborted
and a new prompt takes its place. The first tokens of prompts are shared, so that the prefix tree has work too.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product

import msgspec

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import check_between, check_range
from ktransformers.core import FinishReason, SamplingParams
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.records import Request, RowResult, StepResult
from ktransformers.scheduler.scheduler import Scheduler
from ktransformers.system.cpu_names import cpu_name

__all__ = ["bench_scheduler", "main"]

_COLUMNS = (
    Column("load", 7),
    Column("page_size", 9),
    Column("us_median", 10, ".1f", "us median"),
    Column("us_p99", 8, ".1f", "us p99"),
    Column("encode_us_median", 10, ".1f", "encode us"),
)
_LONGEST = 3000
_VOCAB_SIZE = 32_000


class _Load:
    """N sequences with prompts of 1 to 3,000 tokens, and answers that never end."""

    def __init__(self, num_sequences: int, page_size: int):
        self.rng = random.Random(0)
        self.prefix = [self.rng.randrange(_VOCAB_SIZE) for _ in range(_LONGEST)]
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_pages=num_sequences * 2 * _LONGEST // page_size,
                page_size=page_size,
                chunk_size=512,
                max_batch_size=num_sequences,
                vocab_size=_VOCAB_SIZE,
            )
        )
        self.names: list[str] = []
        for _ in range(num_sequences):
            self.add()

    def add(self) -> None:
        length = self.rng.randrange(1, _LONGEST + 1)
        shared = self.rng.randrange(length)
        prompt = self.prefix[:shared] + [self.rng.randrange(_VOCAB_SIZE) for _ in range(length - shared)]
        self.names.append(f"r{time.perf_counter_ns()}")
        self.scheduler.add(Request(request_id=self.names[-1], prompt_ids=prompt, params=SamplingParams()))

    def step(self, encoder: msgspec.msgpack.Encoder) -> tuple[float, float, bool]:
        """(seconds to schedule and commit, seconds to encode, whether every row was a decode) of one step."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        if plan is None:
            raise RuntimeError("nothing to run: the load is over")
        encoder.encode(plan)
        results = [RowResult(self.rng.randrange(_VOCAB_SIZE)) for row in plan.rows if row.is_sampled]
        encoded = time.perf_counter()
        self.scheduler.commit(StepResult(step_id=plan.step_id, results=results))
        done = time.perf_counter()
        return planned - began + done - encoded, encoded - planned, all(row.num_tokens == 1 for row in plan.rows)


def bench_scheduler(num_sequences: int, num_steps: int) -> Record:
    """Print a table, a line per page size and load."""
    machine = {"cpu": cpu_name(), "python": platform.python_version()}
    print(f"{machine['cpu']}, Python {machine['python']}; {num_sequences} sequences, {num_steps} steps")
    table = FigureTable(_COLUMNS)
    for page_size, load in product((16, 256), ("decode", "mixed")):
        own, wire = _step_times(_Load(num_sequences, page_size), num_steps, is_mixed=load == "mixed")
        row: Row = {"load": load, "page_size": page_size, "us_median": statistics.median(own)}
        row |= {"us_p99": statistics.quantiles(own, n=100)[98], "encode_us_median": statistics.median(wire)}
        table.add(row)
    return {"machine": machine, "sequences": num_sequences, "steps": num_steps, "rows": table.rows}


def _step_times(load: _Load, num_steps: int, is_mixed: bool) -> tuple[list[float], list[float]]:
    """Microseconds of each step: to schedule and commit, and to encode the plan."""
    encoder = msgspec.msgpack.Encoder()
    while not load.step(encoder)[2] or load.scheduler.stats().num_waiting:
        pass  # until everyone decodes
    own, wire = [], []
    for i in range(num_steps):
        if is_mixed and i % 8 == 0:
            load.scheduler.finish(load.names.pop(0), FinishReason.ABORT)
            load.add()
        seconds, encode_seconds, _ = load.step(encoder)
        own.append(seconds * 1e6)
        wire.append(encode_seconds * 1e6)
    return own, wire


def _scheduler(args: argparse.Namespace) -> int:
    check_between(args, sequences=1 << 14)
    check_range("steps", args.steps, 2, 1 << 24)
    return print_record("scheduler", args.json, partial(bench_scheduler, args.sequences, args.steps))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "What planning a step costs with many sequences, without a model."
    parser, group = benchmark_parser("scheduler", text, _scheduler)
    group.add_argument("--sequences", type=int, default=64, help="that decode (%(default)s)")
    group.add_argument("--steps", type=int, default=1000, help="per figure (%(default)s)")
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
