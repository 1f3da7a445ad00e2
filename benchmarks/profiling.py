"""What recording costs: decode steps of one model with and without records, in turns.

Every step computes the same token at the same position, so that the two ways differ in nothing else, and their logits
must be equal. Hooks are put on and records are taken between steps: what is measured is what a step itself pays.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from benchmarks.command import benchmark_parser
from benchmarks.sequence import SequenceRunner
from ktransformers.bench.common.machine import machine_facts, shown_machine
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import SHAPE_NAMES, check_between, check_range
from ktransformers.cli.loading import loading_bar
from ktransformers.cli.parsing.options import (
    add_logging_flag,
    add_model_argument,
    add_model_flags,
    engine_config,
    set_up_logging,
    with_default_model,
)
from ktransformers.config import EngineConfig
from ktransformers.core import Progress
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.model.opened import OpenedModel, open_model, open_synthetic
from ktransformers.engine.step.step_runtime import StepRuntime
from ktransformers.models.synthetic_shapes import find_shape
from ktransformers.profiling.messages import GpuRecord, encode_messages

__all__ = ["ProfilingWork", "bench_profiling", "main"]

_COLUMNS = (
    Column("model", 34),
    Column("off_us", 9, ".1f", "off us"),
    Column("on_us", 9, ".1f", "on us"),
    Column("ratio", 7, ".4f"),
    Column("mean_ratio", 7, ".4f", "of mean"),
    Column("best_ratio", 7, ".4f", "of best"),
    Column("noise", 7, ".4f"),
    Column("record_bytes", 8, ".0f", "bytes"),
)
_WARM = 5
_AT_ONCE = 40  # steps between a start and a stop, with a GPU


@dataclass(frozen=True, slots=True)
class ProfilingWork:
    """The config's model, then random weights in the shape `synthetic` with `layers` of its layers.

    steps: of each way, behind prompt_len tokens.
    """

    config: EngineConfig
    synthetic: str
    layers: int
    steps: int
    prompt_len: int


def bench_profiling(work: ProfilingWork, loading: Callable[[], AbstractContextManager[Progress | None]]) -> Record:
    """Load, measure and print a table. Returns the record. is_failed: whether logits differed."""
    config = replace(work.config, cache_lens=work.config.cache_lens or work.prompt_len + 1)
    shape = find_shape(work.synthetic)
    path, no_files = config.gguf_path or config.model_path, replace(config, model_path=None, gguf_path=None)
    openers: dict[str, Callable[[], OpenedModel]] = {
        "" if path is None else path.name: lambda: open_model(config),
        f"{work.synthetic}, {work.layers} layers": lambda: open_synthetic(no_files, shape.config(work.layers)),
    }
    table: FigureTable | None = None
    machine: Record = {}
    for name, opener in openers.items():
        with loading() as progress:
            opened = opener()
            engine = build_engine(opened.config, progress, opened=opened)
        try:
            if table is None:
                machine = machine_facts(engine.pool)
                print(shown_machine(machine))
                table = FigureTable(_COLUMNS)
            table.add({"model": name} | _measure(engine, work))
        finally:
            engine.close()
    rows = [] if table is None else table.rows
    settings = {key: value for key, value in asdict(work).items() if key != "config"}
    return {"machine": machine, "work": settings, "rows": rows, "is_failed": not all(row["is_equal"] for row in rows)}


def _measure(engine: Engine, work: ProfilingWork) -> Row:
    """Seconds of both ways, in turns that change their order, so that a drift of the machine hits both."""
    runner, vocab = SequenceRunner.of(engine), engine.model.vocab_size
    has_gpu = any(entry.placement.generate_device != "cpu" for entry in engine.plan.entries)
    ids = torch.randint(0, vocab, (work.prompt_len + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    runner.forward(ids[:-1], 0, [0])
    runtime = StepRuntime(runner.steps)
    took: dict[bool, list[float]] = {False: [], True: []}
    num_bytes, is_equal, want = 0, True, runner.forward(ids[-1:], work.prompt_len, [0]).clone()
    at_once = _AT_ONCE if has_gpu else 1  # there a start captures graphs
    for turn in range(-math.ceil(_WARM / at_once), math.ceil(work.steps / at_once)):
        for is_on in (turn % 2 == 0, turn % 2 != 0):
            if is_on or not has_gpu:
                runtime.start()  # both ways, so that the pool's threads have waited as long before either
            if not is_on:
                runtime.stop()
            for step in range(at_once):
                began = time.perf_counter()
                runtime.begin_step(step, 1, [0])
                got = runner.forward(ids[-1:], work.prompt_len, [0])
                made = runtime.end_step()
                seconds = time.perf_counter() - began
                is_equal = is_equal and torch.equal(got, want)
                num_bytes = len(runtime.drain()) + _size(made) if is_on else num_bytes
                if turn >= 0:
                    took[is_on].append(seconds)
            runtime.stop()
    off, on = (1e6 * statistics.median(took[is_on]) for is_on in (False, True))
    mean = statistics.fmean(took[True]) / statistics.fmean(took[False])
    return {
        "off_us": off,
        "on_us": on,
        "ratio": on / off,
        "mean_ratio": mean,
        "best_ratio": _best(took[True]) / _best(took[False]),
        "noise": _noise(took[False]),
        "record_bytes": num_bytes,
        "is_equal": is_equal,
    }


def _best(seconds: Sequence[float]) -> float:
    """The tenth of the steps that were fastest end here: what other programs disturb least."""
    return statistics.quantiles(seconds, n=10)[0]


def _noise(seconds: Sequence[float]) -> float:
    """How far the medians of every other step lie apart, where nothing differs."""
    return abs(statistics.median(seconds[::2]) / statistics.median(seconds[1::2]) - 1)


def _size(gpus: GpuRecord | None) -> int:
    """Bytes of what GPUs did in a step, as it is sent."""
    return 0 if gpus is None else len(encode_messages([gpus]))


def _profiling(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    check_between(args, layers=1 << 10, prompt_len=1 << 20)
    check_range("steps", args.steps, 2, 1 << 24)
    config = with_default_model(engine_config(args)).resolved()
    work = ProfilingWork(config, args.synthetic, args.layers, args.steps, args.prompt_len)
    return print_record("profiling", args.json, partial(bench_profiling, work, partial(loading_bar, sys.stderr)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "What recording costs a decode step: with and without, in turns, of a model (the bundled one without MODEL) "
    text += "and of random weights in a shape."
    parser, group = benchmark_parser("profiling", text, _profiling)
    add_model_argument(parser)
    group.add_argument("--synthetic", metavar="SHAPE", default=SHAPE_NAMES[0], help=f"{', '.join(SHAPE_NAMES)}")
    group.add_argument("--layers", type=int, default=4, help="layers of SHAPE (%(default)s)")
    group.add_argument("--steps", type=int, default=200, help="decode steps of each way (%(default)s)")
    group.add_argument("--prompt_len", type=int, default=64, help="tokens in the cache before them (%(default)s)")
    add_model_flags(parser)
    add_logging_flag(group)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
