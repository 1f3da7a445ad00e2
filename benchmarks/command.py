"""What the command lines of benchmarks share: flags, records and errors are those of `ktransformers bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ktransformers.cli.bench.options import measuring_group
from ktransformers.cli.parsing.parser import ArgumentParser

__all__ = ["benchmark_parser"]


def benchmark_parser(
    module: str, text: str, run: Callable[[argparse.Namespace], int]
) -> tuple[ArgumentParser, argparse._ArgumentGroup]:
    """The parser of `python -m benchmarks.MODULE`, which calls `run`, and the group of its own flags."""
    parser = ArgumentParser(prog=f"python -m benchmarks.{module}", description=text)
    return parser, measuring_group(parser, run)
