"""`ktransformers plan MODEL`: whether a model fits, what would help, how fast it can be, and what goes where.

Reads headers only. Of a models file: what each of its models takes, and which share of RAM those have whose experts
stay on the disk. Exit code 0 when the model fits, 1 with one line on standard error when it does not. Warnings go to
standard error, so that `--json` leaves one JSON document on standard output.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.models.plan_nodes import nodes_command
from ktransformers.cli.parsing.options import (
    add_logging_flag,
    add_model_argument,
    add_plan_flags,
    add_tier_flags,
    engine_config,
    set_up_logging,
    with_default_model,
)
from ktransformers.cli.parsing.parser import user_path
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError

if TYPE_CHECKING:
    from ktransformers.engine.model.opened import OpenedModel
    from ktransformers.engine.plan.dry_run import DryRun
    from ktransformers.optimize.disk_prediction import DiskPrediction
    from ktransformers.optimize.machine_speed import MachineSpeed
    from ktransformers.optimize.predict import Expected

__all__ = ["add_parser", "expect", "expect_of_disk", "open_planned", "plan_command", "plan_config"]

logger = logging.getLogger(__name__)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `plan` among the subcommands.

    `run` is set to the function that takes the parsed arguments and returns an exit code.
    """
    parser = subparsers.add_parser(
        "plan",
        help="show whether a model fits, how fast it can be and what would run where, without loading it",
        description="Show whether a model fits into this machine and what would make it fit, how fast it can be at "
        "most, and where its parts would run. Reads headers only. Exit code 1 when the model does not fit.",
    )
    add_model_argument(parser)
    add_plan_flags(parser)
    add_tier_flags(parser)
    parser.add_argument("--synthetic", metavar="NAME", help="a published model's shape instead of its files")
    parser.add_argument(
        "--context",
        type=int,
        default=512,
        help="tokens of the predicted prompt, and before decode (%(default)s)",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences that decode together, predicted (%(default)s)")
    parser.add_argument(
        "--nodes",
        metavar="NODES",
        help="divide the layers over machines: their free GiB in the order of the stages, such as "
        '"ram=64,vram=24 ram=128,gbs=200"; gbs and vram_gbs are GB/s that are read (50, 1000)',
    )
    parser.add_argument("--full", action="store_true", help="the modules as well, equal layers on one line")
    parser.add_argument("--modules", action="store_true", help="every module on its own line, nothing left out")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    add_logging_flag(parser)
    parser.set_defaults(run=plan_command, log_level="warning")  # what goes where is on the screen


def plan_config(args: argparse.Namespace) -> EngineConfig:
    """Return the configuration that the arguments ask for, the bundled model's by default. Raises ConfigError."""
    config = engine_config(args)
    if args.synthetic is None:
        return with_default_model(config)
    if config.model_path is not None or config.gguf_path is not None:
        raise ConfigError("--synthetic needs no model: it is a shape without files; leave the path out")
    return config


def plan_command(args: argparse.Namespace) -> int:
    """Print the plan; return 0 when the model fits, else 1. Raises KTransformersError for everything else."""
    set_up_logging(args.log_level)
    if args.model and user_path(args.model).suffix in (".yaml", ".yml"):
        return _plan_models(args, user_path(args.model))
    config = plan_config(args).resolved(needs_model=args.synthetic is None)  # before the slow imports
    _check_case(args)
    if args.nodes is not None:
        return nodes_command(config, args.synthetic, args.nodes, as_json=args.json)
    from ktransformers.bench.common.bandwidth import bandwidths
    from ktransformers.engine.plan.dry_run import dry_run
    from ktransformers.optimize.machine_speed import SpeedFile

    opened = open_planned(config, args.synthetic)
    preview = dry_run(opened, name=args.synthetic)
    rates = bandwidths(preview.summary.reads.bytes_per_token(), preview.num_threads)
    expected = expect(preview, SpeedFile().read(), args.batch, args.context)
    disk = expect_of_disk(preview, rates, expected, opened)
    shown = None if preview.plan.stored_experts else expected  # which has all experts in RAM
    _show(preview, rates, shown, disk, as_json=args.json, is_full=args.full, modules=args.modules)
    if preview.fit_suggestions is None:
        return 0
    print("error: the model does not fit into this machine", file=sys.stderr)
    return 1


def _plan_models(args: argparse.Namespace, path: Path) -> int:
    """Those of a models file, as `serve` loads them, which reads it."""
    given = sorted(args.value_sources.keys() - {"model", "log_level"})
    if given:
        raise ConfigError(f"--{given[0]} is for one model: flags of those that {path} lists stand there")
    plan_models: Callable[[Path], int] = args.plan_models
    return plan_models(path)


def _check_case(args: argparse.Namespace) -> None:
    for flag, value, most in (("context", args.context, 1 << 24), ("batch", args.batch, 1 << 12)):
        if not 1 <= value <= most:
            raise ConfigError(f"--{flag} must be between 1 and {most}, got {value}")


def expect(preview: DryRun, speed: MachineSpeed | None, batch: int, context: int) -> Expected:
    """Predict what a machine of this speed will do with the plan, or say why that cannot be predicted."""
    from ktransformers.optimize.predict import Expected, predict_decode, predict_prefill

    load, chunk_size = preview.summary.load, preview.summary.chunk_size
    if speed is None:
        return Expected((), "ktransformers doctor measures this machine first")
    missing = sorted(load.devices() - {"cpu", *speed.gpus})
    if missing:
        return Expected((), f"{', '.join(missing)} was not measured: ktransformers doctor --measure")
    if speed.cpu.threads != preview.num_threads:
        return Expected((), f"{speed.cpu.threads} threads were measured, and the plan has {preview.num_threads}")
    prefill = predict_prefill(load, speed, context, chunk_size, preview.long_rows)
    return Expected((prefill, predict_decode(load, speed, batch, context)))


def expect_of_disk(
    preview: DryRun, rates: Mapping[str, float], expected: Expected, opened: OpenedModel
) -> DiskPrediction | None:
    """Predict what a plan will do whose experts stay in files, by reading some of these for a moment; None for others,
    and where nothing can be read.
    """
    from ktransformers.engine.model.fingerprint import ModelDigests
    from ktransformers.engine.model.hot_file import HotFile
    from ktransformers.optimize.disk_prediction import predict_from_disk
    from ktransformers.optimize.hot_slots import LearnedPicks
    from ktransformers.system.disk_speed import measure_disk

    summary = preview.summary
    if not preview.expert_paths:
        return None
    try:
        speed = measure_disk(max(preview.expert_paths, key=lambda path: path.stat().st_size))
    except OSError as error:
        logger.warning("the disk cannot be measured: %s", error)
        return None
    if speed.why_cached is not None:
        logger.warning("%s", speed)
    bound = summary.reads.tokens_per_s(rates)
    seconds = {one.phase: one.seconds / one.tokens for one in expected.predictions}
    seconds.setdefault("decode", 0.0 if bound is None else 1.0 / bound)
    times = seconds["decode"], seconds.get("prefill", 0.0)
    learned = LearnedPicks.of(HotFile(ModelDigests.of(opened)).read().values()) if HotFile.has_any() else None
    found = predict_from_disk(preview.plan, summary.top_k, summary.chunk_size, speed.bytes_per_s, *times, learned)
    return replace(found, is_measured=bool(expected.predictions))


def open_planned(config: EngineConfig, synthetic: str | None) -> OpenedModel:
    """Open the model of the configuration's files, or the published shape called `synthetic`."""
    from ktransformers.engine.api.pictures import as_served
    from ktransformers.engine.model.opened import open_model, open_synthetic

    if synthetic is None:
        return open_model(as_served(config))
    from ktransformers.models.synthetic_shapes import find_shape

    return open_synthetic(config, find_shape(synthetic).config(), stands_for_files=True)


def _show(
    preview: DryRun,
    rates: Mapping[str, float],
    expected: Expected | None,
    disk: DiskPrediction | None,
    *,
    as_json: bool,
    is_full: bool,
    modules: bool,
) -> None:
    from ktransformers.cli.models.plan_screen import screen, summary_json
    from ktransformers.optimize.report import print_plan, to_json

    if as_json:
        print(json.dumps({**to_json(preview.plan), "summary": summary_json(preview, rates, expected, disk)}, indent=2))
        return
    print("\n".join(screen(preview, rates, expected, disk)))
    if is_full or modules:
        from rich.console import Console

        print()
        print_plan(preview.plan, Console(), modules=modules)
