"""`ktransformers bench`: the command lines of what ktransformers/bench measures."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import replace
from functools import partial

from ktransformers.bench.report import print_record
from ktransformers.bench.work import ModelWork
from ktransformers.cli.loading import loading_bar
from ktransformers.cli.options import (
    add_logging_flag,
    add_model_argument,
    add_model_flags,
    engine_config,
    positive_numbers,
    set_up_logging,
    with_default_model,
)
from ktransformers.cli.parser import user_path
from ktransformers.config import CPU_PREFILLS, EngineConfig, check_threads, physical_cores, why_crowded
from ktransformers.errors import CapacityError, ConfigError
from ktransformers.file_kinds import size_of

__all__ = ["SHAPE_NAMES", "add_parser", "run_kernels", "run_model", "run_offline"]

_log = logging.getLogger(__name__)

MODEL_PEERS = ("llama.cpp",)
PEERS = ("kt-kernel", "llama.cpp")
FORMATS = ("amx_int4", "amx_int8", "amx_bf16")
TYPES = ("q4_k_m", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "iq4_xs", "mxfp4", "fp8", "bf16")
SHAPE_NAMES = ("qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "gpt-oss-120b")

_Kinds = argparse._SubParsersAction


def add_parser(subparsers: _Kinds[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "bench", has_settings=False, help="measure this machine", description="Measure this machine."
    )
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    _add_kernels(kinds)
    _add_model(kinds)
    _add_offline(kinds)


def _add_json_flag(parser: argparse._ActionsContainer) -> None:
    text = "only the JSON record on standard output; the table on standard error"
    parser.add_argument("--json", action="store_true", help=text)


def _add_kernels(kinds: _Kinds[argparse.ArgumentParser]) -> None:
    text = "Routed experts of one layer at several token counts: microseconds, GB/s of weights touched, TFLOP/s."
    kernels = kinds.add_parser("kernels", help="the CPU kernels", description=text).add_argument_group("measuring")
    kernels.add_argument("--threads", type=int, default=0, help="worker threads; 0: one per core")
    kernels.add_argument("--types", default="q4_k_m,q8_0", help=f"of {', '.join(TYPES)} (%(default)s)")
    kernels.add_argument("--tokens", default="1,4,16,64,256,1024", help="token counts (%(default)s)")
    kernels.add_argument("--experts", type=int, default=128, help="experts of a layer (%(default)s)")
    kernels.add_argument(
        "--experts_per_token", "--top_k", dest="top_k", type=int, default=8, help="experts per token (%(default)s)"
    )
    kernels.add_argument("--hidden", type=int, default=2048, help="hidden size (%(default)s)")
    kernels.add_argument("--width", type=int, default=768, help="intermediate size of an expert (%(default)s)")
    kernels.add_argument("--layers", type=int, default=3, help="layers in turn, so that caches stay cold (%(default)s)")
    kernels.add_argument("--seconds", type=float, default=0.5, help="per figure (%(default)s)")
    kernels.add_argument("--peer", action="append", choices=PEERS, default=[], help="measure it too; repeatable")
    kernels.add_argument("--peer_format", choices=FORMATS, default="", help="kt-kernel's own format to measure as well")
    text = "bf16: measure products of bf16 as well, and the errors of both (%(default)s)"
    kernels.add_argument("--cpu_prefill", choices=CPU_PREFILLS, default=CPU_PREFILLS[0], help=text)
    _add_json_flag(kernels)
    kernels.set_defaults(run=run_kernels)


def _add_model(kinds: _Kinds[argparse.ArgumentParser]) -> None:
    text = "A whole model on the CPU: tokens/s of prefill and decode, beside what the read bandwidth allows."
    parser = kinds.add_parser("model", help="a whole model", description=text)
    add_model_argument(parser)
    model = parser.add_argument_group("measuring")
    model.add_argument("--model_path", type=user_path, help="folder with config.json, for a GGUF that says too little")
    model.add_argument("--gguf_path", type=user_path, help="a GGUF file; without it and MODEL, the bundled model")
    model.add_argument("--threads", type=int, default=0, help="worker threads; 0: one per core")
    model.add_argument("--prefill", default="128,256,512,2048", help="prompt lengths (%(default)s)")
    model.add_argument("--batches", default="1,4", help="sequences that decode together (%(default)s)")
    model.add_argument("--steps", type=int, default=32, help="decode steps (%(default)s)")
    model.add_argument("--context", type=int, default=64, help="tokens before the first decode step (%(default)s)")
    model.add_argument("--repeats", type=int, default=2, help="rounds per figure, the best counts (%(default)s)")
    model.add_argument("--peer", action="append", choices=MODEL_PEERS, default=[], help="measure it too")
    _add_json_flag(model)
    model.set_defaults(run=run_model)


def _check_range(flag: str, value: float, least: int, most: int) -> None:
    if not value >= least:  # nor is NaN
        raise ConfigError(f"--{flag} must be at least {least}, got {value}")


def _add_offline(kinds: _Kinds[argparse.ArgumentParser]) -> None:
    text = "Prefill and decode of a model: tokens/s, GB/s of weights touched, distinct experts, peaks of memory. "
    text += "--max_new_tokens is the length of a decode pass. Without MODEL and --synthetic, the bundled model."
    parser = kinds.add_parser("offline", help="a model, or random weights in its shape", description=text)
    add_model_argument(parser)
    group = parser.add_argument_group("measuring")
    group.add_argument("--synthetic", metavar="SHAPE", help=f"random weights: {', '.join(SHAPE_NAMES)}")
    group.add_argument("--layers", type=int, help="layers of SHAPE; default: as many as fit into memory")
    group.add_argument("--prefill", default="32,128,512,2048,8192", help="prompt lengths (%(default)s)")
    group.add_argument("--decode", default="1,2,4,8,16", help="sequences at once (%(default)s)")
    group.add_argument("--prompt_len", type=int, default=64, help="tokens in the cache before decode (%(default)s)")
    group.add_argument("--seconds", type=float, default=2.0, help="least time per figure (%(default)s)")
    add_model_flags(parser)
    _add_json_flag(group)
    add_logging_flag(group)
    parser.set_defaults(run=run_offline, max_new_tokens=32)  # here: tokens per sequence in one pass of decode


def _check_range(flag: str, value: float, least: int, most: int) -> None:
    if not value >= least:  # nor is NaN
        raise ConfigError(f"--{flag} must be at least {least}, got {value}")
    if value > most:
        raise ConfigError(f"--{flag} must be at most {most}, got {value}")


def _check_between(args: argparse.Namespace, **most: int) -> None:
    """Each flag must be at least 1 and at most what is given: beyond, a measurement would never end."""
    for flag, limit in most.items():
        _check_range(flag, getattr(args, flag), 1, limit)


def _numbers(text: str, flag: str, most: int = 1 << 20) -> list[int]:
    numbers = positive_numbers(text, flag)
    if max(numbers) > most:
        raise ConfigError(f"--{flag} must be at most {most}, got {max(numbers)}")
    return numbers


def _check_threads(args: argparse.Namespace) -> None:
    check_threads("threads", args.threads)
    crowded = why_crowded(args.threads)
    if crowded is not None:
        _log.warning("%s", crowded)


def _check_memory(nbytes: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        raise CapacityError(
            f"these weights take at least {size_of(nbytes)}, the machine has {size_of(memory)}; choose "
            "fewer --experts or --layers, or a smaller --hidden or --width"
        )


def run_kernels(args: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code."""
    set_up_logging("warning")
    types = args.types.lower().split(",")
    unknown = [name for name in types if name not in TYPES]
    if unknown:
        raise ConfigError(f"--types {unknown[0]} is not one of {', '.join(TYPES)}")
    _check_between(args, experts=4096, hidden=1 << 16, width=1 << 16, layers=1024)
    _check_range("experts_per_token", args.top_k, 1, 4096)
    if args.top_k > args.experts:
        raise ConfigError(f"--experts_per_token {args.top_k} is more than --experts {args.experts}")
    if args.hidden % 256 or args.width % 256:
        raise ConfigError("--hidden and --width must be multiples of 256, the block of the K-quants")
    _check_range("seconds", args.seconds, 0, 3600)
    _check_threads(args)
    _check_memory(3 * args.experts * args.hidden * args.width * args.layers // 2)  # half a byte each is the least
    from ktransformers.bench.kernels import KernelWork, Shape, bench_kernels

    work = KernelWork(
        shape=Shape(args.experts, args.top_k, args.hidden, args.width, args.layers),
        types=types,
        tokens=_numbers(args.tokens, "tokens"),
        threads=args.threads or physical_cores(),
        seconds=args.seconds,
        peers=args.peer,
        peer_format=args.peer_format,
        cpu_prefill=args.cpu_prefill,
    )
    return print_record("kernels", args.json, partial(bench_kernels, work))


def run_model(args: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code."""
    set_up_logging("warning")
    _check_between(args, steps=1 << 20, context=1 << 20, repeats=1000)
    check_threads("threads", args.threads)
    work = ModelWork(
        prefill=_numbers(args.prefill, "prefill"),
        batches=_numbers(args.batches, "batches"),
        steps=args.steps,
        context=args.context,
        repeats=args.repeats,
    )
    config = replace(engine_config(args), cpu_infer=args.threads)
    if config.gguf_path is None and config.model_path is not None:
        raise ConfigError("name the GGUF file too: ktransformers bench model GGUF --model_path FOLDER")
    config = with_default_model(config)
    from ktransformers.bench.model import bench_model

    return print_record("model", args.json, partial(bench_model, config, work, args.peer))


def run_offline(args: argparse.Namespace) -> int:
    """Load, measure and print. Returns the exit code."""
    set_up_logging(args.log_level)
    prefills, batches = positive_numbers(args.prefill, "prefill"), positive_numbers(args.decode, "decode")
    _check_range("prompt_len", args.prompt_len, 1, 1 << 24)
    _check_range("seconds", args.seconds, 0, 3600)
    config = _offline_config(args).resolved(needs_model=args.synthetic is None)  # before the slow imports
    from ktransformers.bench.offline import OfflineWork, bench_offline
    from ktransformers.bench.offline_runs import DecodeCase

    case = DecodeCase(steps=config.max_new_tokens, prompt_len=args.prompt_len)
    work = OfflineWork(config, prefills, batches, case, args.seconds, args.synthetic, args.layers)
    return print_record("offline", args.json, partial(bench_offline, work, partial(loading_bar, sys.stderr)))


def _offline_config(args: argparse.Namespace) -> EngineConfig:
    """What the flags ask for. Raises ConfigError when they contradict each other."""
    config = engine_config(args)
    if args.synthetic is None:
        if args.layers is not None:
            raise ConfigError("--layers cuts a --synthetic shape; a model's files have the layers that they have")
        return with_default_model(config)
    if config.model_path is not None or config.gguf_path is not None:
        raise ConfigError("--synthetic needs no model: its weights are made on the spot; leave the path out")
    return config
