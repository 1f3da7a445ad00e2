"""`ktransformers quantize IN OUT --type q4_k_m`: a model's weights as a GGUF of fewer bits.

What it does goes to standard error; standard output gets one line, the path of the file. Exit code 130 when Ctrl-C
stopped it; the same command goes on then.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ktransformers.cli.models.pull_progress import make_progress
from ktransformers.cli.parsing.options import add_logging_flag, set_up_logging
from ktransformers.cli.parsing.parser import user_path
from ktransformers.core import format_bytes
from ktransformers.errors import ConfigError, KTransformersError
from ktransformers.hub.locate import locate_path

__all__ = ["add_parser", "quantize_command"]

TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s"),
    *("q2_k", "q2_k_s", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs", "iq3_m", "iq3_s", "iq3_xs", "iq3_xxs"),
    *("iq2_m", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "iq4_k", "iq4_ks", "iq3_k", "iq2_k"),
    *("mxfp4_moe", "tq1_0", "tq2_0", "q1_0"),
)
"""Those of convert/mixtures.py; a test holds them equal."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `quantize` among the subcommands.

    `run` is set to the function that takes the parsed arguments and returns an exit code.
    """
    parser = subparsers.add_parser(
        "quantize",
        help="write a model as a GGUF of fewer bits",
        description="Write a model as a GGUF, its matrices in fewer bits. A run that was stopped goes on where it was. "
        "docs/quantize.md shows what each type takes and costs.",
    )
    parser.add_argument("model", metavar="IN", help="a folder of safetensors, a GGUF file, or a folder of its shards")
    parser.add_argument("out", metavar="OUT", type=user_path, help="the GGUF file to write")
    text = f"what most matrices get: {', '.join(TYPES)} (%(default)s)"
    parser.add_argument("--type", metavar="TYPE", type=str.lower, choices=TYPES, default="q4_k_m", help=text)
    parser.add_argument("--rules", type=user_path, help="YAML: a list of {match: regex, type: q6_k} by tensors' names")
    parser.add_argument("--imatrix", type=user_path, help="what `ktransformers imatrix` or llama.cpp wrote of a text")
    text = "write iq1 and iq2 types without --imatrix, which they lose much by"
    parser.add_argument("--without_imatrix", action="store_true", help=text)
    parser.add_argument("--threads", type=int, default=0, help="how many quantize; 0: one for each core")
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    add_logging_flag(parser)
    parser.set_defaults(run=quantize_command, log_level="warning")


def quantize_command(args: argparse.Namespace) -> int:
    """Write the model's weights as a GGUF of fewer bits. Raises KTransformersError."""
    set_up_logging(args.log_level)
    if args.threads < 0:
        raise ConfigError(f"--threads must be at least 0, got {args.threads}")
    model = locate_path(args.model)
    from ktransformers.convert.imatrix import read_imatrix
    from ktransformers.convert.mixtures import read_rules
    from ktransformers.convert.quantize_model import Task, quantize_model

    rules = [] if args.rules is None else read_rules(args.rules)
    imatrix = None if args.imatrix is None else read_imatrix(args.imatrix)
    out: Path = args.out
    task = Task(model, out, args.type, rules, imatrix, args.threads, args.force, args.without_imatrix)
    try:
        done = quantize_model(task, lambda total, here: make_progress(out.name, total, here))
    except (KeyboardInterrupt, KTransformersError) as error:
        if out.with_name(f"{out.name}.partial").exists():
            _say(f"stopped; the same command goes on from what is in {out}.partial")
        if isinstance(error, KTransformersError):
            raise
        return 130
    mix = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in done.types.most_common())
    _say(f"{format_bytes(done.nbytes)}, {done.bits_per_weight:.2f} bits per weight ({mix}), {done.seconds:.1f} s")
    print(out)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
