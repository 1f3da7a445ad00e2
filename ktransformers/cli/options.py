"""What the commands share: the argument parser, the flags of a model and of sampling, logging.

Flags are spelled with underscores, as users' scripts have them; hyphens are accepted for them everywhere.
Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ktransformers import __version__
from ktransformers.config import ATTENTION_BACKENDS, CPU_PREFILLS, CPU_QUANT_TYPES, DEMO_MODEL_PATH, EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError
from ktransformers.logs import set_up_logging

__all__ = [
    "ArgumentParser",
    "add_logging_flag",
    "add_model_flags",
    "add_plan_flags",
    "add_sampling_flags",
    "add_toggle",
    "engine_config",
    "given_sampling",
    "positive_numbers",
    "sampling_params",
    "set_up_logging",
    "version",
    "with_default_model",
]

_log = logging.getLogger(__name__)


def version() -> str:
    """This program's own version; whatever distribution of a like name is installed beside it does not matter."""
    return __version__


class ArgumentParser(argparse.ArgumentParser):
    """argparse without abbreviations, with hyphens for underscores and with the nearest name for a flag it lacks."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """See argparse. Flags that nobody knows are an error here already, while their neighbours are at hand."""
        given = sys.argv[1:] if args is None else list(args)
        namespace, unknown = super().parse_known_args([_with_underscores(arg) for arg in given], namespace)
        if unknown:
            self.error(self._explain(unknown[0]))
        return namespace, unknown

    def _explain(self, unknown: str) -> str:
        name = unknown.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        return f"unknown argument {name}" + (f"; did you mean {near[0]}?" if near else "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _with_underscores(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class _Toggle(argparse.Action):
    """--flag and --no_flag."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any):
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no_"))


def add_toggle(parser: argparse._ActionsContainer, name: str, *, default: bool | None, help: str) -> None:
    """Add --name and --no_name."""
    parser.add_argument(f"--{name}", f"--no_{name}", dest=name, action=_Toggle, default=default, help=help)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """The flags behind EngineConfig."""
    group = parser.add_argument_group("model")
    config = EngineConfig()
    add_plan_flags(group)
    group.add_argument(
        "--max_new_tokens", type=int, default=config.max_new_tokens, help="most tokens of an answer (%(default)s)"
    )
    group.add_argument(
        "--cpu_infer", type=int, default=config.cpu_infer, help="worker threads; 0: one per core, less one with a GPU"
    )
    group.add_argument(
        "--cpu_prefill",
        choices=CPU_PREFILLS,
        default=config.cpu_prefill,
        help="products of quantized weights with many rows: int8 is the same in every step, bf16 (AMX) more precise "
        "but slower (%(default)s)",
    )
    add_toggle(group, "use_cuda_graph", default=None, help="on a GPU, replay decode steps as one CUDA graph (on)")


def add_plan_flags(group: argparse._ActionsContainer) -> None:
    """Those of them that decide which module goes where, and what fits."""
    config = EngineConfig()
    group.add_argument("--model_path", type=Path, help="folder with config.json and tokenizer (and safetensors)")
    group.add_argument("--gguf_path", type=Path, help="a GGUF file, a folder of them, or a folder of safetensors")
    group.add_argument("--optimize_config_path", type=Path, help="YAML rule file; default: the architecture's own")
    group.add_argument(
        "--chunk_size",
        type=int,
        default=config.chunk_size,
        help="most prompt tokens of one step; 0: 512 on the CPU, up to 4096 on a GPU, as memory allows (%(default)s)",
    )
    group.add_argument("--cache_lens", type=int, default=config.cache_lens, help="tokens in the cache; 0: automatic")
    group.add_argument("--cpu_quant", metavar="TYPE", help=f"quantize experts to {', '.join(CPU_QUANT_TYPES)}")
    group.add_argument(
        "--gpu_memory",
        type=float,
        default=config.gpu_memory,
        metavar="GIB",
        help="most memory to use of each GPU; 0: all that is free (%(default)s)",
    )
    add_toggle(group, "use_cuda", default=None, help="place modules on GPUs where rules say cuda (on if there are any)")
    group.add_argument(
        "--attention_backend",
        choices=ATTENTION_BACKENDS,
        default=config.attention_backend,
        help="attention on a GPU; auto: FlashInfer for prefill where it is installed and can (%(default)s)",
    )
    group.add_argument("--strict", action="store_true", help="a rule that matches nothing is an error")
    group.add_argument("--trust_remote_code", action="store_true", help="run Python files that come with the model")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration that add_model_flags' flags ask for, not resolved yet."""
    return EngineConfig(
        model_path=args.model_path,
        gguf_path=args.gguf_path,
        optimize_config_path=args.optimize_config_path,
        cache_lens=args.cache_lens,
        chunk_size=args.chunk_size,
        max_new_tokens=args.max_new_tokens,
        cpu_infer=args.cpu_infer,
        cpu_quant=args.cpu_quant,
        cpu_prefill=args.cpu_prefill,
        gpu_memory=args.gpu_memory,
        strict=args.strict,
        trust_remote_code=args.trust_remote_code,
        use_cuda=args.use_cuda,
        use_cuda_graph=args.use_cuda_graph,
        attention_backend=args.attention_backend,
    )


def positive_numbers(text: str, flag: str) -> list[int]:
    """The numbers in "1,4,16". Raises ConfigError that names `flag`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--{flag} must be positive numbers with commas between them, got {text!r}")
    return numbers


def with_default_model(config: EngineConfig) -> EngineConfig:
    """`config`, or the bundled model when it names none."""
    if config.model_path is not None or config.gguf_path is not None:
        return config
    found = sorted(DEMO_MODEL_PATH.glob("*.gguf"))
    if not found:
        raise ConfigError(
            f"no model given and the bundled one is missing ({DEMO_MODEL_PATH} holds no *.gguf): "
            "pass --model_path (a folder) or --gguf_path (a file or folder)"
        )
    return replace(config, gguf_path=found[0])


_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "keep the most likely tokens up to this probability"),
    ("top_k", int, "keep this many of the most likely tokens; 0: all"),
    ("min_p", float, "keep tokens at least this likely, relative to the best"),
    ("repetition_penalty", float, "above 1: tokens that occurred become less likely"),
    ("seed", int, "make sampling repeatable"),
)


def add_sampling_flags(parser: argparse.ArgumentParser, *, has_seed: bool = True) -> None:
    """The flags behind SamplingParams."""
    group = parser.add_argument_group("sampling (defaults: the model's generation config, else greedy)")
    for name, kind, text in _SAMPLING:
        if has_seed or name != "seed":
            group.add_argument(f"--{name}", type=kind, help=text)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """What add_sampling_flags' flags say, by the names of SamplingParams' fields."""
    return {name: getattr(args, name) for name, _, _ in _SAMPLING if getattr(args, name, None) is not None}


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with what add_sampling_flags' flags say. Raises ConfigError for values out of range."""
    given = given_sampling(args)
    params = replace(defaults, **given)
    idle = [f"--{name}" for name in ("top_p", "top_k", "min_p", "seed") if name in given]
    if params.is_greedy and idle:
        _log.warning("%s: no effect at temperature 0; pass --temperature to sample", ", ".join(idle))
    return params


def add_logging_flag(parser: argparse._ActionsContainer) -> None:
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log_level", choices=levels, default="info", help="what is logged to standard error")
