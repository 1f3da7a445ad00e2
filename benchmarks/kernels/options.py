"""The flags that benchmarks.kernels and benchmarks.roofline share: which experts are measured, and how."""

from __future__ import annotations

import argparse
import os

from benchmarks.kernels.measure import KernelWork, Shape
from ktransformers.cli.bench.options import (
    add_threads,
    check_between,
    check_range,
    check_threads,
    chosen,
    numbers,
)
from ktransformers.config import CPU_PREFILLS
from ktransformers.errors import CapacityError, ConfigError
from ktransformers.kernels.formats import FORMATS as TABLE
from ktransformers.system.cores import usable_cores
from ktransformers.system.file_kinds import size_of

__all__ = ["MEASURED", "add_work_flags", "kernel_work"]

PEERS = ("kt-kernel", "llama.cpp")
FORMATS = ("amx_int4", "amx_int8", "amx_bf16")
TYPES = (
    "q4_k_m",
    *(record.name.lower() for record in TABLE.values() if record.is_packed),
    *("fp8", "bf16", "i4_32_bf16", "i4_128_f16_z", "i8_128_bf16", "f8_128_bf16", "mxfp8", "nvfp4_f32"),
)
MEASURED = {
    "types": "q4_k_m,q8_0",
    "tokens": "1,4,16,64,256,1024",
    "experts": 128,
    "top_k": 8,
    "hidden": 2048,
    "width": 768,
    "layers": 3,
    "seconds": 0.5,
    "peer": [],
    "peer_format": "",
    "cpu_prefill": CPU_PREFILLS[0],
    "threads": 0,
}
"""Defaults of what says how to measure."""


def add_work_flags(parser: argparse.ArgumentParser, group: argparse._ActionsContainer) -> None:
    """Add the flags that `kernel_work` reads to `group`, with their defaults."""
    add_threads(group)
    group.add_argument("--types", help=f"of {', '.join(TYPES)} (%(default)s)")
    group.add_argument("--tokens", help="token counts (%(default)s)")
    group.add_argument("--experts", type=int, help="experts of a layer (%(default)s)")
    group.add_argument("--experts_per_token", "--top_k", dest="top_k", type=int, help="experts per token (%(default)s)")
    group.add_argument("--hidden", type=int, help="hidden size (%(default)s)")
    group.add_argument("--width", type=int, help="intermediate size of an expert (%(default)s)")
    group.add_argument("--layers", type=int, help="layers in turn, so that caches stay cold (%(default)s)")
    group.add_argument("--seconds", type=float, help="per figure (%(default)s)")
    group.add_argument("--peer", action="append", choices=PEERS, help="measure it too; repeatable")
    group.add_argument("--peer_format", choices=FORMATS, help="kt-kernel's own format to measure as well")
    text = "bf16: measure products of bf16 as well, and the errors of both (%(default)s)"
    group.add_argument("--cpu_prefill", choices=CPU_PREFILLS, help=text)
    parser.set_defaults(**MEASURED)


def _check_memory(nbytes: int) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes > memory:
        raise CapacityError(
            f"these weights take at least {size_of(nbytes)}, the machine has {size_of(memory)}; choose "
            "fewer --experts or --layers, or a smaller --hidden or --width"
        )


def kernel_work(args: argparse.Namespace, has_all_peaks: bool = False) -> KernelWork:
    """The work that the flags describe. Raises ConfigError or CapacityError for values that make no sense."""
    types = chosen(args.types.lower(), "types", TYPES)
    check_between(args, experts=4096, hidden=1 << 16, width=1 << 16, layers=1024)
    check_range("experts_per_token", args.top_k, 1, 4096)
    if args.top_k > args.experts:
        raise ConfigError(f"--experts_per_token {args.top_k} is more than --experts {args.experts}")
    if args.hidden % 256 or args.width % 256:
        raise ConfigError("--hidden and --width must be multiples of 256, the block of the K-quants")
    check_range("seconds", args.seconds, 0, 3600)
    check_threads(args)
    _check_memory(3 * args.experts * args.hidden * args.width * args.layers // 2)  # half a byte each is the least
    return KernelWork(
        shape=Shape(args.experts, args.top_k, args.hidden, args.width, args.layers),
        types=types,
        tokens=numbers(args.tokens, "tokens"),
        threads=args.threads or usable_cores(),
        seconds=args.seconds,
        peers=args.peer,
        peer_format=args.peer_format,
        cpu_prefill=args.cpu_prefill,
        has_all_peaks=has_all_peaks,
    )
