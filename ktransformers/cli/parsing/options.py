"""Shared parts of the commands: the flags of a model and of sampling, the model that they name, logging.

The parser is in parser.py. Imports nothing heavy.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ktransformers import __version__
from ktransformers.cli.parsing.parser import ArgumentParser, add_toggle, user_path
from ktransformers.config import (
    ATTENTION_BACKENDS,
    ATTENTION_PRODUCTS,
    CONTEXT_OVERFLOWS,
    CPU_ACTIVATIONS,
    CPU_BF16S,
    CPU_PREFILLS,
    CPU_QUANT_TYPES,
    EXPERTS_FROM,
    KV_DISK_SIZE_GB,
    KV_TYPES,
    PRECISIONS,
    SPARSE_ATTENTIONS,
    SPECULATIVES,
    TOWER_DEVICES,
    EngineConfig,
    bundled_files,
)
from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError
from ktransformers.hub.locate import locate_model, locate_path
from ktransformers.system.logs import set_up_logging

__all__ = [
    "ArgumentParser",
    "add_disk_size_flag",
    "add_logging_flag",
    "add_model_argument",
    "add_model_flags",
    "add_plan_flags",
    "add_sampling_flags",
    "add_template_flags",
    "add_tier_flags",
    "add_toggle",
    "check_disk_size",
    "engine_config",
    "given_flags",
    "given_sampling",
    "model_files",
    "positive_numbers",
    "sampling_params",
    "set_up_logging",
    "version",
    "with_default_model",
]

_log = logging.getLogger(__name__)


def version() -> str:
    """Return this program's version; another distribution of a like name that is installed does not matter."""
    return __version__


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, which the parser knows by -m and --model too; see engine_config."""
    text = "a GGUF file, a folder of them, or a model's folder; also -m, --model"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)


def add_model_flags(parser: argparse.ArgumentParser, *, bounds_requests: bool = False) -> None:
    """Add EngineConfig's flags. bounds_requests: --max_new_tokens, where it is given, holds for all requests."""
    group = parser.add_argument_group("model")
    config = EngineConfig()
    add_plan_flags(group)
    if bounds_requests:
        text = f"most tokens of any answer; left out: {config.max_new_tokens} for requests that name no limit"
        group.add_argument("--max_new_tokens", type=int, help=text)
    else:
        text = "most tokens of an answer (%(default)s)"
        group.add_argument("--max_new_tokens", type=int, default=config.max_new_tokens, help=text)
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
    group.add_argument(
        "--cpu_activations",
        choices=CPU_ACTIVATIONS,
        default=config.cpu_activations,
        help="what is multiplied with quantized weights is rounded to: int16 is closer to the model by far, costs "
        "little in decode, and half of prefill's speed (%(default)s)",
    )
    group.add_argument(
        "--cpu_bf16",
        choices=CPU_BF16S,
        default=config.cpu_bf16,
        help="products of BF16 weights: with activations rounded to bf16 where the processor can, or with fp32 ones, "
        "slower and the same on every processor (%(default)s)",
    )
    group.add_argument(
        "--sparse_attention",
        choices=SPARSE_ATTENTIONS,
        default=config.sparse_attention,
        help="families that choose the positions that they attend to (DeepSeek-V3.2, GLM-5, MiniMax-M3): off attends "
        "to all of them, which they were not trained for (%(default)s)",
    )
    group.add_argument("--architectures", metavar="CLASS", help="not needed: checked against the model's config.json")
    add_toggle(
        group,
        "self_check",
        default=config.self_check,
        help="compare a model of a family that no test covers with transformers while loading (on)",
    )
    _add_division_flags(group, config)
    add_toggle(group, "use_cuda_graph", default=None, help="on a GPU, replay decode steps as one CUDA graph (on)")


def _add_speculative_flags(group: argparse._ActionsContainer, config: EngineConfig) -> None:
    """What is drafted. config: with the defaults."""
    group.add_argument(
        "--speculative",
        choices=SPECULATIVES,
        default=config.speculative,
        help="speculative decoding: steps run draft tokens, too, and accept those that are sampled anyway, so that "
        "answers are the same; ngram: what followed the last tokens before; draft: from --draft_model; mtp: from the "
        "model's own layers for it; auto: --draft_model if given, else ngram, but on GPUs only where such steps have "
        "CUDA graphs (%(default)s)",
    )
    group.add_argument(
        "--draft_model",
        type=user_path,
        metavar="MODEL",
        help="a smaller model with the same tokens, from which draft tokens come: a GGUF file, a folder, or the name "
        "of a model in the hub's cache; or Gemma 4's assistant, or a GGUF with the model's own layers for it, of which "
        "one beside the model's is found where its name begins with mtp-",
    )
    group.add_argument(
        "--speculative_tokens",
        type=int,
        metavar="N",
        default=config.speculative_tokens,
        help="draft tokens of a sequence in a step at most; as many as pay are taken (%(default)s)",
    )


def _add_division_flags(group: argparse._ActionsContainer, config: EngineConfig) -> None:
    """How a model is divided over processes. config: with the defaults."""
    group.add_argument(
        "--tensor_parallel",
        type=int,
        metavar="N",
        default=config.tensor_parallel,
        help="cut attention, dense parts and experts on GPUs of every layer over N GPUs, a process each; experts in "
        "RAM stay in one (%(default)s)",
    )
    group.add_argument(
        "--pipeline",
        type=int,
        metavar="N",
        default=config.pipeline,
        help="divide the layers over N processes, neighbouring ones together (%(default)s)",
    )
    group.add_argument(
        "--pipeline_layers",
        metavar="N,N,...",
        default=config.pipeline_layers,
        help="layers of each stage; `plan --nodes` finds good ones (by their parameters)",
    )
    group.add_argument(
        "--stage_hosts",
        metavar="HOST:PORT,...",
        default=config.stage_hosts,
        help="all stages but the last one run on these machines, where `ktransformers stage` does",
    )
    group.add_argument(
        "--stage_key_file",
        type=user_path,
        metavar="FILE",
        help="with --stage_hosts: the secret that these machines have, too",
    )


def add_tier_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for where else pages of the cache go: host memory and disk."""
    group.add_argument(
        "--cpu_memory_size_GB",
        type=float,
        metavar="GIB",
        help="host memory for pages that the cache has no room for (0)",
    )
    group.add_argument(
        "--kv_disk_path",
        type=user_path,
        metavar="DIR",
        help="a folder for them, which outlives the process; what is in it stands for users' text",
    )


def add_disk_size_flag(group: argparse._ActionsContainer) -> None:
    """Add --kv_disk_size_GB, which `check_disk_size` checks."""
    group.add_argument(
        "--kv_disk_size_GB", type=float, metavar="GIB", help=f"most bytes in --kv_disk_path ({KV_DISK_SIZE_GB:g})"
    )


def check_disk_size(args: argparse.Namespace) -> None:
    """Raise ConfigError for --kv_disk_size_GB without --kv_disk_path."""
    if args.kv_disk_size_GB is not None and args.kv_disk_path is None:
        raise ConfigError("--kv_disk_size_GB bounds the files in --kv_disk_path; name that folder, too")


def add_plan_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags of EngineConfig that decide which module goes where, and what fits."""
    config = EngineConfig()
    group.add_argument("--model_path", type=user_path, help="folder with config.json and tokenizer (and safetensors)")
    group.add_argument("--gguf_path", type=user_path, help="a GGUF file, a folder of them, or a folder of safetensors")
    group.add_argument("--optimize_config_path", type=user_path, help="YAML rule file; default: the architecture's own")
    group.add_argument(
        "--chunk_size",
        type=int,
        default=config.chunk_size,
        help="most prompt tokens of one step; 0: 512 on the CPU, up to 4096 on a GPU, as memory allows (%(default)s)",
    )
    group.add_argument("--cache_lens", type=int, default=config.cache_lens, help="tokens in the cache; 0: automatic")
    group.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        default=next(iter(PRECISIONS)),
        help="stands for --cpu_activations, --cpu_bf16, --kv_type and --attention_products where they are not given: "
        "exact; fast: attention in bf16 on the CPU; close: the least rounding, prefill at half the speed (%(default)s)",
    )
    group.add_argument(
        "--kv_type",
        choices=KV_TYPES,
        default=config.kv_type,
        help="what keys and values are kept in: bf16 takes half the memory of fp32, int8 and fp8 a quarter; auto: "
        "fp32 on the CPU, bf16 on GPUs (%(default)s)",
    )
    group.add_argument("--cpu_quant", metavar="TYPE", help=f"quantize experts to {', '.join(CPU_QUANT_TYPES)}")
    _add_disk_flags(group, config)
    _add_gpu_flags(group, config)
    group.add_argument("--strict", action="store_true", help="a rule that matches nothing is an error")
    group.add_argument("--trust_remote_code", action="store_true", help="run Python files that come with the model")
    group.add_argument("--trust_rules", action="store_true", help="import classes of your own that a rule file names")
    _add_speculative_flags(group, config)


def _add_disk_flags(group: argparse._ActionsContainer, config: EngineConfig) -> None:
    group.add_argument(
        "--experts_from",
        choices=EXPERTS_FROM,
        default=config.experts_from,
        help="where experts that run on the CPU are: all in RAM; on the disk, in the model's files, with those that "
        "are used most in RAM; auto: there where they do not fit otherwise (%(default)s)",
    )
    group.add_argument(
        "--experts_ram",
        type=float,
        default=config.experts_ram,
        metavar="GIB",
        help="memory for experts where they are read from the disk, a draft model's included; 0: what is free, less a "
        "reserve (%(default)s)",
    )


def _add_gpu_flags(group: argparse._ActionsContainer, config: EngineConfig) -> None:
    group.add_argument(
        "--gpu_memory",
        type=float,
        default=config.gpu_memory,
        metavar="GIB",
        help="most memory to use of each GPU; 0: all that is free (%(default)s)",
    )
    group.add_argument(
        "--hot_experts",
        default=config.hot_experts,
        metavar="auto|off|N",
        help="slots on a GPU for the experts that layers on the CPU use most: N for each layer, or what is left of the "
        "GPU; off: whole layers there (%(default)s)",
    )
    add_toggle(
        group,
        "lend_slots",
        default=config.lend_slots,
        help="these slots lend memory to long prompts, for steps of up to four times --chunk_size (on)",
    )
    add_toggle(group, "use_cuda", default=None, help="place modules on GPUs where rules say cuda (on if there are any)")
    group.add_argument(
        "--attention_backend",
        choices=ATTENTION_BACKENDS,
        default=config.attention_backend,
        help="attention on a GPU; auto: FlashInfer for prefill where it is installed and can (%(default)s)",
    )
    group.add_argument(
        "--mmproj",
        type=user_path,
        metavar="FILE",
        help="the GGUF with the tower for pictures that goes with the model's GGUF (one beside it with mmproj in its "
        "name)",
    )
    group.add_argument(
        "--tower_device",
        choices=TOWER_DEVICES,
        default=config.tower_device,
        help="where the model's tower computes on pictures; cuda: with weights from RAM where it would take room from "
        "experts; auto: on a GPU where one has room; none: the model reads text only (%(default)s)",
    )
    group.add_argument(
        "--attention_products",
        choices=ATTENTION_PRODUCTS,
        default=config.attention_products,
        help="what queries and keys are multiplied in; bf16: the type of activations; kv: that of --kv_type, bf16 on "
        "the CPU, int8 or fp8 in prefill on a GPU (%(default)s)",
    )


def add_template_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags for how a conversation becomes a prompt, and where the reasoning of an answer ends."""
    group.add_argument(
        "--chat_template",
        metavar="FILE",
        help="a chat template in place of the model's own: a Jinja file, or the template itself",
    )
    group.add_argument(
        "--reasoning_format",
        default="auto",
        metavar="NAME",
        help="how the model marks its reasoning (auto: as its chat template does; none: reasoning is part of the text)",
    )


def given_flags(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of the flags of these names, without those that the command lacks or that nobody gave.

    A field of a configuration that has the name of a flag is set by it, and by nothing else.
    """
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the configuration that MODEL and the flags ask for, not resolved yet.

    Flags that a command lacks are defaults.
    Raises ConfigError when they contradict each other, and for a MODEL that there is not.
    """
    model_path, gguf_path = model_files(args)
    config = EngineConfig(**given_flags(args, (one.name for one in fields(EngineConfig))))
    draft_model = _located(args, "draft_model")
    config = replace(config, model_path=model_path, gguf_path=gguf_path, draft_model=draft_model)
    _check_architecture(getattr(args, "architectures", None), model_path)
    return config


def model_files(args: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Return model_path and gguf_path of EngineConfig from MODEL, --model_path and --gguf_path. Raises ConfigError.

    Beside one of the flags, MODEL is what the other one would name.
    """
    model = getattr(args, "model", None)
    model_path, gguf_path = (_located(args, name) for name in ("model_path", "gguf_path"))
    if model is None:
        return model_path, gguf_path
    if model_path is not None and gguf_path is not None:
        raise ConfigError("MODEL, --model_path and --gguf_path together say too much; leave one out")
    found = locate_model(model)
    if model_path is not None:
        return model_path, found.gguf_path or found.model_path
    if gguf_path is not None:
        return found.model_path or found.gguf_path, gguf_path
    return found.model_path, found.gguf_path


def _located(args: argparse.Namespace, name: str) -> Path | None:
    given = getattr(args, name, None)
    return None if given is None else locate_path(given, f"--{name}")


def _check_architecture(named: str | None, model_path: Path | None) -> None:
    """--architectures chooses nothing here: the model's own config does. A contradiction is an error."""
    if named is None:
        return
    try:
        config = json.loads((model_path / "config.json").read_text(encoding="utf-8")) if model_path else {}
        known = config.get("architectures") or []
    except (OSError, ValueError, AttributeError):
        known = []  # whoever opens the model says what is wrong with its config
    if known and named not in known:
        raise ConfigError(f"--architectures {named}: {model_path}/config.json says {', '.join(known)}; leave it out")
    _log.info("--architectures %s: not needed, the model's config says it", named)


def positive_numbers(text: str, flag: str) -> list[int]:
    """Return the numbers in "1,4,16". Raises ConfigError that names `flag`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--{flag} must be positive numbers with commas between them, got {text!r}")
    return numbers


def with_default_model(config: EngineConfig) -> EngineConfig:
    """Return `config`, or the bundled model's when it names none."""
    if config.model_path is not None or config.gguf_path is not None:
        return config
    gguf, folder = bundled_files("pass --model_path (a folder) or --gguf_path (a file or folder)")
    return replace(config, model_path=folder, gguf_path=gguf)


_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "keep the most likely tokens up to this probability"),
    ("top_k", int, "keep this many of the most likely tokens; 0: all"),
    ("min_p", float, "keep tokens at least this likely, relative to the best"),
    ("repetition_penalty", float, "above 1: tokens that occurred become less likely"),
    ("seed", int, "make sampling repeatable"),
)
IDLE_WHEN_GREEDY = ("top_p", "top_k", "min_p", "seed")
"""Fields of SamplingParams that mean nothing at temperature 0."""


def add_sampling_flags(parser: argparse.ArgumentParser, *, has_seed: bool = True) -> None:
    """Add the flags behind SamplingParams."""
    group = parser.add_argument_group("sampling (defaults: the model's generation config, else greedy)")
    for name, kind, text in _SAMPLING:
        if has_seed or name != "seed":
            group.add_argument(f"--{name}", type=kind, help=text)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the given sampling flags, by the names of SamplingParams' fields."""
    return {name: getattr(args, name) for name, _, _ in _SAMPLING if getattr(args, name, None) is not None}


def sampling_params(args: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Return `defaults` with the values of the given sampling flags. Raises ConfigError for values out of range."""
    given = given_sampling(args)
    params = replace(defaults, **given)
    idle = [f"--{name}" for name in IDLE_WHEN_GREEDY if name in given]
    if params.is_greedy and idle:
        _log.warning("%s: no effect at temperature 0; pass --temperature to sample", ", ".join(idle))
    return params


def add_overflow_flag(parser: argparse._ActionsContainer, *, default: str) -> None:
    """Add the flag --context_overflow."""
    parser.add_argument(
        "--context_overflow",
        choices=CONTEXT_OVERFLOWS,
        default=default,
        help="a conversation longer than the context loses its oldest turns, or is refused (%(default)s)",
    )


def add_profile_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags --profile and --profile_max_bytes."""
    parser.add_argument(
        "--profile", type=user_path, metavar="DIR", help="record where the time of every step and token goes in DIR"
    )
    parser.add_argument(
        "--profile_max_bytes",
        type=int,
        default=8 << 30,
        metavar="BYTES",
        help="most bytes of a profile; then its oldest files go (%(default)s)",
    )


def add_logging_flag(parser: argparse._ActionsContainer) -> None:
    """Add the flag --log_level."""
    levels = ("debug", "info", "warning", "error")
    parser.add_argument(
        "--log_level", type=str.lower, choices=levels, default="info", help="what is logged to standard error"
    )
