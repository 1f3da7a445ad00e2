"""`ktransformers plan MODEL`: whether a model fits, what would help, how fast it can be, and what goes where.

Reads headers only. Exit code 0 when the model fits, 1 with one line on standard error when it does not. Warnings go to
standard error, so that `--json` leaves one JSON document on standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.options import add_logging_flag, add_plan_flags, set_up_logging
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError
from ktransformers.hub.locate import locate_model

if TYPE_CHECKING:
    from ktransformers.engine.opened import OpenedModel
    from ktransformers.engine.outlook import Outlook

__all__ = ["add_parser", "plan_command", "plan_config"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command. `run` is set to the function that takes the parsed arguments and returns an exit code."""
    parser = subparsers.add_parser(
        "plan",
        help="show whether a model fits, how fast it can be and what would run where, without loading it",
        description="Show whether a model fits into this machine and what would make it fit, how fast it can be at "
        "most, and where its parts would run. Reads headers only. Exit code 1 when the model does not fit.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", type=Path, help="a model's folder, or a GGUF file")
    add_plan_flags(parser)
    parser.add_argument("--synthetic", metavar="NAME", help="a published model's shape instead of its files")
    parser.add_argument("--full", action="store_true", help="the modules as well, equal layers on one line")
    parser.add_argument("--modules", action="store_true", help="every module on its own line, nothing left out")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    add_logging_flag(parser)
    parser.set_defaults(run=plan_command, log_level="warning")  # what goes where is on the screen


def plan_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the arguments ask for. Raises ConfigError."""
    model_path, gguf_path = args.model_path, args.gguf_path
    if args.model is not None:
        if model_path is not None and gguf_path is not None:
            raise ConfigError("MODEL, --model_path and --gguf_path together say too much; leave one out")
        model_path, gguf_path = _place_model(args.model, model_path, gguf_path)
    if args.synthetic is not None and (model_path is not None or gguf_path is not None):
        raise ConfigError("--synthetic needs no model: it is a shape without files; leave the path out")
    return EngineConfig(
        model_path=model_path,
        gguf_path=gguf_path,
        optimize_config_path=args.optimize_config_path,
        chunk_size=args.chunk_size,
        cache_lens=args.cache_lens,
        cpu_quant=args.cpu_quant,
        gpu_memory=args.gpu_memory,
        attention_backend=args.attention_backend,
        use_cuda=args.use_cuda,
        strict=args.strict,
        trust_remote_code=args.trust_remote_code,
    )


def _place_model(model: Path, model_path: Path | None, gguf_path: Path | None) -> tuple[Path | None, Path | None]:
    """Whether MODEL is the folder of the config or the weights, given what the flags say already."""
    found = locate_model(model)
    if model_path is not None:
        return model_path, found.gguf_path or found.model_path
    if gguf_path is not None:
        return found.model_path or found.gguf_path, gguf_path
    return found.model_path, found.gguf_path


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan; 0 when the model fits, 1 when it does not. Raises KTransformersError for everything else."""
    set_up_logging(args.log_level)
    config = plan_config(args).resolved(needs_model=args.synthetic is None)  # before the slow imports
    from ktransformers.engine.bandwidth import bandwidths
    from ktransformers.engine.outlook import look_ahead

    outlook = look_ahead(_open(config, args.synthetic), name=args.synthetic)
    rates = bandwidths(outlook.summary.reads.bytes_per_token(), outlook.num_threads)
    _show(outlook, rates, as_json=args.json, is_full=args.full, modules=args.modules)
    if outlook.remedies is None:
        return 0
    print("error: the model does not fit into this machine", file=sys.stderr)
    return 1


def _open(config: EngineConfig, synthetic: str | None) -> OpenedModel:
    from ktransformers.engine.opened import open_model, open_synthetic

    if synthetic is None:
        return open_model(config)
    from ktransformers.models.synthetic_shapes import find_shape

    return open_synthetic(config, find_shape(synthetic).config())


def _show(outlook: Outlook, rates: Mapping[str, float], *, as_json: bool, is_full: bool, modules: bool) -> None:
    from ktransformers.cli.plan_screen import screen, summary_json
    from ktransformers.optimize.report import print_plan, to_json

    if as_json:
        print(json.dumps({**to_json(outlook.plan), "summary": summary_json(outlook, rates)}, indent=2))
        return
    print("\n".join(screen(outlook, rates)))
    if is_full or modules:
        from rich.console import Console

        print()
        print_plan(outlook.plan, Console(), modules=modules)
