"""`ktransformers pack MODEL`: the experts of a model in a file beside it, each in one piece, to be read from the disk.

What it does goes to standard error; standard output gets one line, the path of the file. Exit code 130 when Ctrl-C
stopped it, which leaves nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ktransformers.cli.models.pull_progress import Progress, make_progress
from ktransformers.cli.parsing.options import (
    add_logging_flag,
    add_model_argument,
    engine_config,
    set_up_logging,
    with_default_model,
)
from ktransformers.cli.parsing.parser import user_path
from ktransformers.config import CPU_BF16S, CPU_QUANT_TYPES
from ktransformers.core import format_bytes
from ktransformers.errors import ConfigError

__all__ = ["add_parser", "pack_command"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `pack` among the subcommands.

    `run` is set to the function that takes the parsed arguments and returns an exit code.
    """
    parser = subparsers.add_parser(
        "pack",
        help="write a model's experts to a file from which they are read while it runs",
        description="Write a model's experts to a file beside it, each as the CPU's kernels take it and in one piece, "
        "so that a model larger than memory reads them at the disk's full speed. docs/disk.md says when that pays.",
    )
    add_model_argument(parser)
    _add_flags_of_engine(parser)
    text = "the file to write (NAME.experts.kt beside the model)"
    parser.add_argument("--output", "-o", metavar="FILE", type=user_path, help=text)
    text = "write nothing: compare every checksum of the file, and whether it is of this model; MODEL may be the file"
    parser.add_argument("--check", action="store_true", help=text)
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    add_logging_flag(parser)
    parser.set_defaults(run=pack_command, log_level="warning")


def _add_flags_of_engine(parser: argparse.ArgumentParser) -> None:
    """Those that decide how experts lie in memory."""
    parser.add_argument("--model_path", type=user_path, help="folder with config.json and tokenizer (and safetensors)")
    parser.add_argument("--gguf_path", type=user_path, help="a GGUF file, a folder of them, or a folder of safetensors")
    parser.add_argument(
        "--optimize_config_path", type=user_path, help="YAML rule file; default: the architecture's own"
    )
    parser.add_argument("--cpu_quant", metavar="TYPE", help=f"quantize experts to {', '.join(CPU_QUANT_TYPES)}")
    text = "as the model will be run: products of BF16 weights with activations in bf16, or in fp32 (%(default)s)"
    parser.add_argument("--cpu_bf16", choices=CPU_BF16S, default=CPU_BF16S[0], help=text)
    parser.add_argument("--cpu_infer", type=int, default=0, help="threads that pack; 0: one for each core")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python files that come with the model")
    parser.add_argument("--trust_rules", action="store_true", help="import classes of your own that a rule file names")


def pack_command(args: argparse.Namespace) -> int:
    """Write or check the packed file of a model's experts. Raises KTransformersError."""
    set_up_logging(args.log_level)
    if args.check and args.force:
        raise ConfigError("--check writes nothing, so that --force means nothing; leave one out")
    from ktransformers.convert.pack_model import check_packed, pack_model
    from ktransformers.weights.stored_experts.header import is_packed_file

    given = None if args.model is None else Path(args.model).expanduser()
    if given is not None and is_packed_file(given):
        if not args.check:
            raise ConfigError(f"{given} is packed already; name its model, or take --check")
        done = check_packed(given, None, _progress)
    elif args.check:
        done = check_packed(with_default_model(engine_config(args)), args.output, _progress)
    else:
        config = with_default_model(engine_config(args))
        done = pack_model(config, args.output, _progress, force=args.force)
    mix = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in done.types.most_common())
    whole = ("whole, and of this model; " if done.of_model else "whole; ") if args.check else ""
    rate = format_bytes(int(done.nbytes / max(done.seconds, 1e-9)))
    print(
        f"{whole}{format_bytes(done.nbytes)}: {done.num_records} experts in {done.num_layers} layers ({mix}), "
        f"{done.seconds:.1f} s, {rate}/s",
        file=sys.stderr,
    )
    print(done.path)
    return 0


def _progress(name: str, nbytes: int) -> Progress:
    return make_progress(name, nbytes, 0)
