"""The command line of `python -m benchmarks.roofline`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.command import benchmark_parser
from benchmarks.kernels.options import MEASURED, add_work_flags, kernel_work
from benchmarks.roofline.draw import bench_roofline, draw_recorded
from benchmarks.roofline.picture import MAX_TYPES
from ktransformers.bench.common.report import print_record
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import check_range
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.cli.parsing.parser import check_place, user_path
from ktransformers.errors import ConfigError

__all__ = ["main"]


def _roofline(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_place(args.output)
    if args.files:
        given = [name for name, default in MEASURED.items() if getattr(args, name) != default]
        if given:
            raise ConfigError(f"--from draws what was measured: leave --{given[0]} out")
        return print_record("roofline", args.json, partial(draw_recorded, args.files, args.output))
    work = kernel_work(args, has_all_peaks=True)
    check_range("types", len(set(work.types)) + bool(work.peer_format), 1, MAX_TYPES)  # before minutes of measuring
    return print_record("roofline", args.json, partial(bench_roofline, work, args.output))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "A picture of the routed experts, and the peers', against the bandwidth and the products that this machine "
    text += "does at best; with a GPU, its products as well in a second part."
    parser, group = benchmark_parser("roofline", text, _roofline)
    text = "the SVG to write (%(default)s)"
    group.add_argument("-o", "--output", type=user_path, default=Path("roofline.svg"), help=text)
    text = "draw the last records of benchmarks.roofline, kernels or gpu.linear in this file instead of measuring; "
    text += "repeatable"
    group.add_argument("--from", dest="files", type=user_path, action="append", metavar="FILE.jsonl", help=text)
    add_work_flags(parser, group)
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
