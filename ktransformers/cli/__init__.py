"""The `ktransformers` command: parses flags, calls the layers below, turns their errors into one line.

Importing it must stay cheap: torch and transformers are imported by the commands that need them, when they run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from ktransformers.cli import bench, chat, doctor, plan, serve
from ktransformers.cli.options import ArgumentParser, version
from ktransformers.errors import KTransformersError, reason_of

__all__ = ["guarded", "main"]


def build_parser() -> ArgumentParser:
    """The parser of the whole command, one subparser per file of this package."""
    parser = ArgumentParser(
        prog="ktransformers",
        description="Run Mixture-of-Experts language models that do not fit into the GPU's memory.",
    )
    parser.add_argument("--version", action="version", version=f"ktransformers {version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (chat, serve, plan, bench, doctor):
        command.add_parser(subparsers)
    return parser


def guarded(run: Callable[[], int]) -> int:
    """The exit code of `run`; this program's own errors become one line on standard error and 1."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: see engine/threads.py
    try:
        return run()
    except KTransformersError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output left. Python would complain once more while it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a file, a folder or a device that the system refuses
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{reason_of(error)}", file=sys.stderr)
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code; wrong usage exits with 2."""
    args = build_parser().parse_args(argv)
    return guarded(lambda: int(args.run(args)))
