"""`ktransformers imatrix MODEL TEXT -o FILE`: activation statistics of a model, which make `quantize` round better.

What it does goes to standard error; standard output gets one line, the path of the file. Ctrl-C keeps what was seen.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ktransformers.cli.parsing.options import add_logging_flag, set_up_logging
from ktransformers.cli.parsing.parser import user_path
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError
from ktransformers.hub.locate import locate_model

__all__ = ["add_parser", "imatrix_command"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `imatrix` among the subcommands.

    `run` is set to the function that takes the parsed arguments and returns an exit code.
    """
    parser = subparsers.add_parser(
        "imatrix",
        help="collect activation statistics of a model over a text, for `quantize --imatrix`",
        description="Run a model over a text and write how large what each of its matrices' columns is multiplied with "
        "is: `quantize --imatrix` rounds better with it. The file is llama.cpp's. Weights are read from the model's "
        "files as they are wanted, in fp32; take its BF16 or Q8_0 ones.",
    )
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, a folder of safetensors, or a name of the hub")
    parser.add_argument("text", metavar="TEXT", type=user_path, help="a file of text such as the model will see")
    text = "the file to write (%(default)s)"
    parser.add_argument("-o", "--out", type=user_path, default=Path("imatrix.gguf"), help=text)
    parser.add_argument("--chunk", type=int, default=512, help="tokens that are seen together (%(default)s)")
    parser.add_argument("--chunks", type=int, default=0, help="most of them; 0: the whole text")
    parser.add_argument("--threads", type=int, default=0, help="threads of large products; 0: one for each core")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    add_logging_flag(parser)
    parser.set_defaults(run=imatrix_command, log_level="warning")


def imatrix_command(args: argparse.Namespace) -> int:
    """Write the file of activation statistics; return 130 when Ctrl-C ended it early. Raises KTransformersError."""
    set_up_logging(args.log_level)
    out: Path = args.out
    if not args.text.is_file():
        raise ConfigError(f"{args.text} is no file; TEXT is one that holds text")
    if out.exists() and not args.force:
        raise ConfigError(f"{out} exists; --force overwrites it")
    if args.chunk < 1 or args.chunks < 0:
        raise ConfigError(f"--chunk must be at least 1 and --chunks at least 0, got {args.chunk} and {args.chunks}")
    files = locate_model(args.model)
    config = EngineConfig(model_path=files.model_path, gguf_path=files.gguf_path, cpu_infer=args.threads)
    from ktransformers.convert.collect import collect
    from ktransformers.convert.imatrix import Imatrix, write_imatrix

    found: Imatrix | None = None
    partial, code = out.with_name(f"{out.name}.partial"), 0
    collecting = collect(config, args.text, partial, chunk_size=args.chunk, most_chunks=args.chunks, shown=_show)
    try:
        while (more := next(collecting, None)) is not None:
            found = more
    except KeyboardInterrupt:
        code = 130
    if found is None:
        return code
    write_imatrix(found)
    os.replace(partial, out)
    print(f"{found.chunk_count} chunks of {args.chunk} tokens, {len(found.tensors)} matrices", file=sys.stderr)
    print(out)
    return code


def _show(done: int, total: int) -> None:
    print(f"{done} of {total} chunks", file=sys.stderr, flush=True)
