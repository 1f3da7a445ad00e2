"""The command line of `python -m benchmarks.kernels`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.command import benchmark_parser
from benchmarks.kernels.measure import bench_kernels
from benchmarks.kernels.options import add_work_flags, kernel_work
from ktransformers.bench.common.report import print_record
from ktransformers.cli import run_command
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.config import CPU_ACTIVATIONS

__all__ = ["main"]


def _kernels(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    work = replace(kernel_work(args), cpu_activations=args.cpu_activations)
    return print_record("kernels", args.json, partial(bench_kernels, work))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "Routed experts of one layer at several token counts: microseconds, GB/s of weights touched, TFLOP/s."
    parser, group = benchmark_parser("kernels", text, _kernels)
    add_work_flags(parser, group)
    text = "int16: measure products with activations of 16 bits as well (%(default)s)"
    group.add_argument("--cpu_activations", choices=CPU_ACTIVATIONS, default=CPU_ACTIVATIONS[0], help=text)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
