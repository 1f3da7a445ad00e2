"""`ktransformers profile`: shows what --profile recorded, as a page, as a trace, beside another run.

Imports neither torch nor, before a command runs, numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ktransformers.cli.parsing.parser import check_place, user_path

if TYPE_CHECKING:
    from ktransformers.profiling.compare import ComparedFigure, Comparison

__all__ = ["add_parser"]

Kinds: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_parser(subparsers: Kinds) -> None:
    """Register `profile` among the subcommands."""
    text = "show where the time of a recorded run went"
    description = "Show what --profile DIR recorded: where the time of every step went."
    parser = subparsers.add_parser("profile", has_settings=False, help=text, description=description)
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    _add_report(kinds)
    _add_trace(kinds)
    _add_compare(kinds)


def _add_report(kinds: Kinds) -> None:
    text = "Writes one HTML file with pictures and their numbers. It loads nothing: it can be mailed, and read offline."
    parser = kinds.add_parser("report", help="a profile as a page with pictures", description=text)
    parser.add_argument("dir", metavar="DIR", type=user_path, help="the folder that --profile was given")
    parser.add_argument(
        "-o", "--output", type=user_path, default=Path("report.html"), help="the page to write (%(default)s)"
    )
    parser.add_argument("--trace", type=user_path, help="write a trace for ui.perfetto.dev too")
    parser.set_defaults(run=_report)


def _add_trace(kinds: Kinds) -> None:
    text = "Writes a trace that ui.perfetto.dev and chrome://tracing open: requests, steps, parts, layers."
    parser = kinds.add_parser("trace", help="a profile as a trace for Perfetto", description=text)
    parser.add_argument("dir", metavar="DIR", type=user_path, help="the folder that --profile was given")
    parser.add_argument(
        "-o", "--output", type=user_path, default=Path("trace.json"), help="the file to write (%(default)s)"
    )
    parser.set_defaults(run=_trace)


def _add_compare(kinds: Kinds) -> None:
    text = "Medians of two profiles, their ratios, and the 95 % intervals of the ratios. Says where machines or models "
    text += "differ."
    parser = kinds.add_parser("compare", help="two profiles side by side", description=text)
    parser.add_argument("a", metavar="A", type=user_path, help="the folder of one run")
    parser.add_argument("b", metavar="B", type=user_path, help="the folder of another")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("-o", "--output", type=user_path, help="write a page with pictures too")
    parser.set_defaults(run=_compare)


def _report(args: argparse.Namespace) -> int:
    from ktransformers.profiling import load
    from ktransformers.profiling.report import write_report

    for path in filter(None, (args.output, args.trace)):
        check_place(path)
    profile = load(args.dir)
    write_report(profile, args.output)
    print(f"{args.output}: open it in a browser", file=sys.stderr)
    if args.trace is not None:
        _write_trace(args.dir, args.trace)
    return 0


def _trace(args: argparse.Namespace) -> int:
    check_place(args.output)
    _write_trace(args.dir, args.output)
    return 0


def _write_trace(folder: Path, path: Path) -> None:
    from ktransformers.profiling import load
    from ktransformers.profiling.trace import MAX_LAYERED_STEPS, write_trace

    profile = load(folder)
    count = write_trace(profile, path)
    if len(profile.steps) > MAX_LAYERED_STEPS:
        print(f"{path}: layers are those of the last {MAX_LAYERED_STEPS:,} steps", file=sys.stderr)
    print(f"{path}: {count:,} events; open it at ui.perfetto.dev", file=sys.stderr)


def _compare(args: argparse.Namespace) -> int:
    from ktransformers.profiling import load
    from ktransformers.profiling.compare import compare
    from ktransformers.profiling.report import write_comparison

    if args.output is not None:
        check_place(args.output)
    a, b = load(args.a), load(args.b)
    found = compare(a, b)
    if args.output is not None:
        write_comparison(a, b, found, args.output)
        print(f"{args.output}: open it in a browser", file=sys.stderr)
    if args.json:
        print(json.dumps(_document(found), indent=2, allow_nan=False))
    else:
        _print_table(found)
    return 0


def _document(found: Comparison) -> dict[str, object]:
    def known(value: object) -> object:
        return None if isinstance(value, float) and math.isnan(value) else value

    rows = [
        {**{name: known(value) for name, value in asdict(row).items()}, "is_sure": row.is_sure} for row in found.rows
    ]
    return {"differences": list(found.differences), "rows": rows}


def _print_table(found: Comparison) -> None:
    for text in found.differences:
        print(f"note: {text}", file=sys.stderr)
    if not found.rows:
        print("neither profile has a step or a token", file=sys.stderr)
        return
    table = [("MEDIAN OF", "A", "B", "B/A", "95 % INTERVAL", ""), *map(_row, found.rows)]
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    for name, *cells, mark in table:
        shown = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        print("  ".join([f"{name:{widths[0]}}", *shown, mark]).rstrip())


def _row(row: ComparedFigure) -> tuple[str, ...]:
    from ktransformers.profiling.report.comparison import interval
    from ktransformers.profiling.report.pictures import number

    medians = [number(value, row.unit).replace("\u00a0", " ") for value in (row.a, row.b)]
    return (row.name, *medians, number(row.ratio), interval(row), "*" if row.is_sure else "")
