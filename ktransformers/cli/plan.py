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

from ktransformers.config import CPU_QUANT_TYPES, EngineConfig
from ktransformers.errors import ConfigError

if TYPE_CHECKING:
    from ktransformers.optimize.plan import Plan

__all__ = ["add_parser", "engine_config", "plan_command"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command. `run` is set to the function that takes the parsed arguments and returns an exit code."""
    parser = subparsers.add_parser(
        "plan",
        help="show where every module would run and whether the model fits, without loading it",
        description="Show where every module would run, what it would hold, and whether the model fits. "
        "Reads headers only. Exit code 1 when the model does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", type=Path, help="a model's folder, or a GGUF file")
    _add(parser, "model_path", type=Path, help="folder with config.json and tokenizer (when MODEL does not say it)")
    _add(parser, "gguf_path", type=Path, help="a GGUF file, a folder of them, or a folder of safetensors")
    _add(parser, "optimize_config_path", type=Path, help="rule file; by default the one of the architecture")
    _add(parser, "cpu_quant", help=f"quantize BF16/F16/F32/FP8 experts to one of {', '.join(CPU_QUANT_TYPES)}")
    _add(parser, "cache_lens", type=int, default=0, help="tokens in the cache; 0: the model's context, at most 8192")
    _add(parser, "strict", action="store_true", help="a rule that matches nothing is an error")
    _add(parser, "trust_remote_code", action="store_true", help="run the Python files that come with the model")
    parser.add_argument("--full", action="store_true", help="every module on its own line, nothing left out")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=plan_command)


def _add(parser: argparse.ArgumentParser, name: str, **options: object) -> None:
    """Add --some_name; --some-name means the same."""
    flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    parser.add_argument(*flags, dest=name, **options)  # type: ignore[arg-type]


def engine_config(args: argparse.Namespace) -> EngineConfig:
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
        cache_lens=args.cache_lens,
        cpu_quant=args.cpu_quant,
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
    config = engine_config(args)
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
