"""Shared parts of the command lines of `bench`: the parser of one, the flags of several, checks of values."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from ktransformers.cli.parsing.options import add_model_argument, engine_config, positive_numbers, with_default_model
from ktransformers.cli.parsing.parser import ArgumentParser, user_path
from ktransformers.config import EngineConfig, why_crowded
from ktransformers.config import check_threads as check_number_of_threads
from ktransformers.errors import ConfigError

__all__ = [
    "SHAPE_NAMES",
    "Kinds",
    "add_gguf_path",
    "add_threads",
    "check_between",
    "check_range",
    "check_threads",
    "chosen",
    "gguf_file",
    "kind",
    "measuring_group",
    "model_or_shape",
    "numbers",
]

_log = logging.getLogger(__name__)

SHAPE_NAMES = (
    *("qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "deepseek-v4-flash", "glm-5.3-flash"),
    *("gpt-oss-20b", "gpt-oss-120b"),
    *("qwen3.6-35b-a3b", "qwen3-coder-next", "qwen3.8-flash-next", "qwen3-32b"),
)

Kinds: TypeAlias = "argparse._SubParsersAction[ArgumentParser]"


def kind(
    kinds: Kinds, name: str, help: str, text: str, run: Callable[[argparse.Namespace], int]
) -> tuple[argparse.ArgumentParser, argparse._ArgumentGroup]:
    """Add `bench NAME`; return its parser and the group of its own flags."""
    parser = kinds.add_parser(name, help=help, description=text)
    return parser, measuring_group(parser, run)


def measuring_group(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]
) -> argparse._ArgumentGroup:
    """Add the group of a measurement's own flags to `parser`, which is made to call `run`."""
    parser.set_defaults(run=run)
    group = parser.add_argument_group("measuring")
    text = "only the JSON record on standard output; the table on standard error"
    group.add_argument("--json", action="store_true", help=text)
    return group


def add_threads(group: argparse._ActionsContainer, default: int = 0) -> None:
    """Add the flag --threads to a group."""
    text = "worker threads; 0: one per core" + (" (%(default)s)" if default else "")
    group.add_argument("--threads", type=int, default=default, help=text)


def add_gguf_path(parser: argparse.ArgumentParser, group: argparse._ActionsContainer) -> None:
    """Add the argument MODEL and the flag --gguf_path."""
    add_model_argument(parser)
    text = "a GGUF file; without it and MODEL, the bundled model"
    group.add_argument("--gguf_path", type=user_path, help=text)


def check_range(flag: str, value: float, least: float, most: float) -> None:
    """Raise ConfigError, which names the flag, unless `value` is from `least` to `most`."""
    if not value >= least:  # nor is NaN
        raise ConfigError(f"--{flag} must be at least {least}, got {value}")
    if value > most:
        raise ConfigError(f"--{flag} must be at most {most}, got {value}")


def check_between(args: argparse.Namespace, **most: int) -> None:
    """Raise ConfigError unless each flag is from 1 to the limit given for it: beyond, a measurement would never end."""
    for flag, limit in most.items():
        check_range(flag, getattr(args, flag), 1, limit)


def numbers(text: str, flag: str, most: int = 1 << 20) -> list[int]:
    """Return the numbers in "1,4,16", at least 1 each and at most `most`. Raises ConfigError that names `flag`."""
    found = positive_numbers(text, flag)
    check_range(flag, max(found), 1, most)
    return found


def check_threads(args: argparse.Namespace) -> None:
    """Raise ConfigError for far too many --threads; log one line where they are more than there are cores."""
    check_number_of_threads("threads", args.threads)
    crowded = why_crowded(args.threads)
    if crowded is not None:
        _log.warning("%s", crowded)


def chosen(text: str, flag: str, names: Sequence[str]) -> list[str]:
    """Split "a,b" into its words, each of which must be one of `names`. Raises ConfigError that names `flag`."""
    found = text.split(",")
    unknown = [name for name in found if name not in names]
    if unknown:
        raise ConfigError(f"--{flag} {unknown[0]} is not one of {', '.join(names)}")
    return found


def gguf_file(config: EngineConfig) -> Path:
    """Return the one GGUF file that the flags name. Raises ConfigError when they name none, or a folder."""
    if config.gguf_path is None or not config.gguf_path.is_file():
        raise ConfigError("this measures one GGUF file: name it as MODEL or with --gguf_path")
    return config.gguf_path


def model_or_shape(args: argparse.Namespace) -> EngineConfig:
    """Return the configuration of the model, or of the --synthetic shape, that the flags ask for.

    Raises ConfigError when they contradict each other.
    """
    config = engine_config(args)
    if args.synthetic is None:
        if args.layers is not None:
            raise ConfigError("--layers cuts a --synthetic shape; a model's files have the layers that they have")
        return with_default_model(config)
    if config.model_path is not None or config.gguf_path is not None:
        raise ConfigError("--synthetic needs no model: its weights are made on the spot; leave the path out")
    return config
