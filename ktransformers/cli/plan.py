"""`ktransformers plan MODEL`: which operator would run where, what it would hold, and whether it fits.

Reads headers only. Exit code 0 when the model fits, 1 with the reason on standard error when it does not. Warnings go
to standard error, so that `--json` leaves one JSON document on standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.options import add_logging_flag, add_plan_flags, set_up_logging
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError

if TYPE_CHECKING:
    from ktransformers.optimize.plan import Plan

__all__ = ["add_parser", "plan_command", "plan_config"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command. `run` is set to the function that takes the parsed arguments and returns an exit code."""
    parser = subparsers.add_parser(
        "plan",
        help="show where every module would run and whether the model fits, without loading it",
        description="Show where every module would run, what it would hold, and whether the model fits. "
        "Reads headers only. Exit code 1 when the model does not fit.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", type=Path, help="a model's folder, or a GGUF file")
    add_plan_flags(parser)
    parser.add_argument("--full", action="store_true", help="every module on its own line, nothing left out")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_logging_flag(parser)
    parser.set_defaults(run=plan_command)


def plan_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the arguments ask for. Raises ConfigError."""
    model_path, gguf_path = args.model_path, args.gguf_path
    if args.model is not None:
        if model_path is not None and gguf_path is not None:
            raise ConfigError("MODEL, --model_path and --gguf_path together say too much; leave one out")
        if not args.model.exists():
            raise ConfigError(f"{args.model} does not exist; MODEL must be a local folder or a GGUF file")
        model_path, gguf_path = _place_model(args.model, model_path, gguf_path)
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
    if model_path is not None:
        return model_path, model
    if gguf_path is not None:
        return model, gguf_path
    is_config_folder = model.is_dir() and (model / "config.json").is_file()
    return (model, None) if is_config_folder else (None, model)


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan; 0 when the model fits, 1 when it does not. Raises KTransformersError for everything else."""
    set_up_logging(args.log_level)
    config = plan_config(args)
    from ktransformers.engine.builder import plan_model

    plan = plan_model(config)
    _show(plan, as_json=args.json, full=args.full)
    reason = plan.misfit()
    if reason is None:
        return 0
    print(f"error: {reason}", file=sys.stderr)
    return 1


def _show(plan: Plan, *, as_json: bool, full: bool) -> None:
    if as_json:
        from ktransformers.optimize.report import to_json

        print(json.dumps(to_json(plan), indent=2))
        return
    from rich.console import Console

    from ktransformers.optimize.report import print_plan

    print_plan(plan, Console(), full=full)
