"""`ktransformers bench`: what the CPU kernels and whole models do on this machine, beside its limits and peers.

`ktransformers bench offline` is in bench_offline.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from dataclasses import replace

from ktransformers.cli import bench_offline
from ktransformers.cli.bench_json import add_json_flag, table_beside_json
from ktransformers.cli.bench_work import ModelWork
from ktransformers.cli.options import (
    add_model_argument,
    engine_config,
    positive_numbers,
    set_up_logging,
    with_default_model,
)
from ktransformers.cli.parser import user_path
from ktransformers.config import CPU_PREFILLS, check_threads, physical_cores, why_crowded
from ktransformers.errors import CapacityError, ConfigError
from ktransformers.file_kinds import size_of

__all__ = ["add_parser", "run_kernels", "run_model"]

_log = logging.getLogger(__name__)

MODEL_PEERS = ("llama.cpp",)
PEERS = ("kt-kernel", "llama.cpp")
FORMATS = ("amx_int4", "amx_int8", "amx_bf16")
TYPES = ("q4_k_m", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "iq4_xs", "mxfp4", "fp8", "bf16")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "bench", has_settings=False, help="measure this machine", description="Measure this machine."
    )
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    _add_kernels(kinds)
    _add_model(kinds)
    bench_offline.add_parser(kinds)


def _add_kernels(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    add_json_flag(kernels)
    kernels.set_defaults(run=run_kernels)


def _add_model(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    add_json_flag(model)
    model.set_defaults(run=run_model)


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
    from ktransformers.cli.bench_kernels import Shape, bench_kernels

    shape = Shape(args.experts, args.top_k, args.hidden, args.width, args.layers)
    threads = args.threads or physical_cores()
    tokens = _numbers(args.tokens, "tokens")
    with table_beside_json(args.json):
        record = bench_kernels(
            shape, types, tokens, threads, args.seconds, args.peer, args.peer_format, args.cpu_prefill
        )
    print(json.dumps(record))
    return 0


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
    from ktransformers.cli.bench_model import bench_model

    with table_beside_json(args.json):
        record = bench_model(config, work, args.peer)
    print(json.dumps(record))
    return 0
