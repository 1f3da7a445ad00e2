"""Prompts with slots of experts lent to long steps and without, in turns, on one loaded model of a GPU.

python -m benchmarks.gpu.lending --synthetic qwen3.6-35b-a3b --routing skewed --gpu_memory 11 --cache_lens 34816 \\
    --prefill 512,8192,32768 --decode 1

A long step is taken from the length on that the engine's log names. Each prompt is followed by steps of one sequence,
which fill the slots again and show what these cost.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.report import Record, print_record
from ktransformers.bench.offline.measure import OfflineWork, load_work
from ktransformers.cli import run_command
from ktransformers.cli.bench.offline import add_offline_flags, offline_work
from ktransformers.cli.parsing.options import set_up_logging

__all__ = ["main"]

ROUNDS = 2
"""Of each length: the first figure of a process is often another one."""


def _measure(work: OfflineWork) -> Record:
    runs, rows = load_work(work), list[Record]()
    for length in work.prefills:
        for lends in (False, True) * ROUNDS:
            runs.lends = lends
            prefill = runs.prefill(length)
            row: Record = {"tokens": length, "lends": lends, "prefill_tokens_per_s": prefill.tokens_per_s}
            for batch in work.batches:
                decode = runs.decode(batch, work.cases[0])
                row |= {f"decode_{batch}_tokens_per_s": decode.tokens_per_s, f"hot_{batch}_percent": decode.hot_percent}
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            rows.append(row)
    return {"rows": rows}


def _lending(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    return print_record("lending", args.json, partial(_measure, offline_work(args)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    parser, group = benchmark_parser("gpu.lending", (__doc__ or "").partition("\n")[0], _lending)
    add_offline_flags(parser, group)
    parser.set_defaults(lend_slots=True)
    return run_command(parser, sys.argv[1:] if argv is None else list(argv))


if __name__ == "__main__":
    sys.exit(main())
