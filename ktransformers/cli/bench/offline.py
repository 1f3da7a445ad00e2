"""The command line of `ktransformers bench offline`, whose flags `python -m benchmarks.offline` has too."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from ktransformers.bench.common.report import print_record
from ktransformers.cli.bench.moved import benchmark_hint
from ktransformers.cli.bench.options import SHAPE_NAMES, Kinds, check_range, kind, model_or_shape, numbers
from ktransformers.cli.loading import loading_bar
from ktransformers.cli.parsing.options import (
    add_logging_flag,
    add_model_argument,
    add_model_flags,
    positive_numbers,
    set_up_logging,
)
from ktransformers.errors import ConfigError
from ktransformers.scheduler.config import MAX_ITL_RATIO, check_itl_ratio

if TYPE_CHECKING:
    from ktransformers.bench.offline.measure import OfflineWork

__all__ = ["TEXT", "add_offline", "add_offline_flags", "offline_work"]

TEXT = (
    "Prefill and decode of a model: tokens/s, GB/s of weights touched, distinct experts, peaks of memory. "
    "--max_new_tokens is the length of a decode pass. Without MODEL and --synthetic, the bundled model."
)


def add_offline(kinds: Kinds) -> None:
    """Register `bench offline` among the `kinds` of `bench`."""
    parser, group = kind(kinds, "offline", "a model, or random weights in its shape", TEXT, _offline)
    group.add_argument("--peer", help=argparse.SUPPRESS)  # former commands have it
    add_offline_flags(parser, group)


def add_offline_flags(parser: argparse.ArgumentParser, group: argparse._ActionsContainer) -> None:
    """Add the flags that `offline_work` reads; `group` has those of the measurement."""
    add_model_argument(parser)
    group.add_argument("--synthetic", metavar="SHAPE", help=f"random weights: {', '.join(SHAPE_NAMES)}")
    group.add_argument("--layers", type=int, help="layers of SHAPE; default: as many as fit into memory")
    text = "how tokens of SHAPE choose experts; skewed: a quarter of them has 70 %% of the picks (even)"
    group.add_argument("--routing", choices=("even", "skewed"), help=text)
    group.add_argument("--prefill", default="17,32,128,512,2048,8192", help="prompt lengths (%(default)s)")
    group.add_argument("--decode", default="1,2,4,8,16", help="sequences at once (%(default)s)")
    text = "tokens of a prompt that arrives while a stream runs; 0: leave that out (%(default)s)"
    group.add_argument("--beside", type=int, default=2000, metavar="TOKENS", help=text)
    text = "of that stream, as `serve` has it; 0: --chunk_size alone decides (%(default)s)"
    group.add_argument("--max_itl_ratio", type=float, default=MAX_ITL_RATIO, metavar="X", help=text)
    text = "tokens in the cache before decode; several: one figure each (%(default)s)"
    group.add_argument("--prompt_len", default="64", help=text)
    group.add_argument("--seconds", type=float, default=2.0, help="least time per figure (%(default)s)")
    add_model_flags(parser)
    add_logging_flag(group)
    parser.set_defaults(max_new_tokens=32)  # here: tokens per sequence in one pass of decode


def offline_work(args: argparse.Namespace) -> OfflineWork:
    """Return the work that the flags of `bench offline` describe. Raises ConfigError for values that make no sense."""
    prefills, batches = positive_numbers(args.prefill, "prefill"), positive_numbers(args.decode, "decode")
    prompt_lens = numbers(args.prompt_len, "prompt_len", 1 << 24)
    check_range("seconds", args.seconds, 0, 3600)
    check_range("beside", args.beside, 0, 1 << 24)
    check_itl_ratio(args.max_itl_ratio)
    config = model_or_shape(args).resolved(needs_model=args.synthetic is None)  # before the slow imports
    from ktransformers.bench.offline.measure import OfflineWork
    from ktransformers.bench.offline.runs import DecodeCase
    from ktransformers.bench.offline.streams import StreamWork

    cases = [DecodeCase(steps=config.max_new_tokens, prompt_len=prompt_len) for prompt_len in prompt_lens]
    if args.routing is not None and args.synthetic is None:
        raise ConfigError("--routing makes the routers of a --synthetic shape; a model's files have their own")
    routing = args.routing or "even"
    stream = StreamWork(args.beside, args.max_itl_ratio, prompt_lens[0]) if args.beside else None
    return OfflineWork(config, prefills, batches, cases, args.seconds, args.synthetic, args.layers, routing, stream)


def _offline(args: argparse.Namespace) -> int:
    set_up_logging(args.log_level)
    if args.peer is not None:
        raise ConfigError(f"--peer moved: {benchmark_hint('offline')} measures {args.peer} in the same run")
    work = offline_work(args)
    from ktransformers.bench.offline.measure import bench_offline

    return print_record("offline", args.json, partial(bench_offline, work, partial(loading_bar, sys.stderr)))
