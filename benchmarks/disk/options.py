"""The command line of the comparison, which the child that runs ours parses, too."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import benchmark_parser
from benchmarks.peers.work import ModelWork
from ktransformers.cli.bench.options import check_between, check_range, gguf_file, numbers
from ktransformers.cli.parsing.options import add_model_argument, add_model_flags, engine_config
from ktransformers.cli.parsing.parser import ArgumentParser
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError
from ktransformers.system.cores import usable_cores

__all__ = ["OURS", "PEER", "DiskWork", "disk_parser", "disk_work"]

OURS, PEER = "ours", "llama.cpp"


@dataclass(frozen=True, slots=True)
class DiskWork:
    """What is measured: each program under each limit, in bytes, `rounds` rounds of work.

    path: the model's GGUF file; config: of ours. read_ahead: KiB, of the file that llama.cpp maps; 0: its disk's.
    """

    path: Path
    config: EngineConfig
    limits: Sequence[int]
    programs: Sequence[str]
    rounds: int
    read_ahead: int
    work: ModelWork

    @property
    def threads(self) -> int:
        """Worker threads of every program."""
        return self.config.cpu_infer or usable_cores()


def disk_parser(run: Callable[[argparse.Namespace], int]) -> ArgumentParser:
    """Return the parser of `python -m benchmarks.disk`, which calls `run`: the engine's flags, and its own."""
    text = "A model larger than memory: ours and llama.cpp's mapped file, each in a control group of its own."
    parser, group = benchmark_parser("disk", text, run)
    add_model_argument(parser)
    add_model_flags(parser)
    group.add_argument("--limits", default="8,12,16", help="memory of the control groups, GiB (%(default)s)")
    group.add_argument("--prefill", type=int, default=128, help="tokens of the prompt (%(default)s)")
    group.add_argument("--tokens", type=int, default=24, help="tokens that are decoded in a round (%(default)s)")
    text = "rounds of decoding; the first one begins with nothing read (cold), the last one is warm (%(default)s)"
    group.add_argument("--rounds", type=int, default=3, help=text)
    text = "KiB that are read ahead of the file that llama.cpp maps, by way of a loop device; 0: as its disk is set "
    text += "(%(default)s, which most systems have)"
    group.add_argument("--read_ahead", type=int, default=128, metavar="KIB", help=text)
    group.add_argument("--only", choices=(OURS, PEER), help="measure one program alone")
    return parser


def disk_work(args: argparse.Namespace) -> DiskWork:
    """Return what the flags ask for. Raises ConfigError for values that make no sense."""
    check_between(args, prefill=1 << 20, tokens=1 << 20, rounds=1000)
    check_range("read_ahead", args.read_ahead, 0, 1 << 20)
    config = engine_config(args)
    if config.gguf_path is None and config.model_path is None:
        raise ConfigError("name a GGUF file; python -m benchmarks.disk.model_file writes one of random weights")
    programs = (PEER, OURS) if args.only is None else (args.only,)
    limits = [limit << 30 for limit in numbers(args.limits, "limits")]
    work = ModelWork(prefill=[args.prefill], batches=[1], steps=args.tokens, context=1, repeats=1, warm_ups=0)
    return DiskWork(gguf_file(config), config, limits, programs, args.rounds, args.read_ahead, work)
