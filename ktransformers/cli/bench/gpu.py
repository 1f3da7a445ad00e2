"""`ktransformers bench gpu_...`: the command lines of what ktransformers/bench/gpu measures."""

from __future__ import annotations

import argparse
from functools import partial

from ktransformers.bench.common.report import print_record
from ktransformers.cli.bench.options import (
    Kinds,
    add_threads,
    check_between,
    check_range,
    check_threads,
    chosen,
    kind,
    numbers,
)
from ktransformers.cli.parsing.options import add_toggle, set_up_logging
from ktransformers.errors import ConfigError
from ktransformers.system.cores import usable_cores

__all__ = ["add_parsers"]

GPU_LINEARS = ("linear", "fp8", "moe", "types", "align", "relay")
GPU_SHAPES = {"gpu_prefill": ("qwen3-30b", "deepseek-v3"), "gpu_hand_over": ("empty", "qwen3-30b")}


def add_parsers(kinds: Kinds) -> None:
    """Register the commands."""
    for add in (_add_attention, _add_latent, _add_linear, _add_prefill, _add_hand_over):
        add(kinds)


def _add_attention(kinds: Kinds) -> None:
    text = "Attention, norms, rotation and routing of a GPU, in the shapes of several models: microseconds, GB/s, "
    text += "TFLOP/s, the error against torch in fp32, and torch's own attention."
    _, group = kind(kinds, "gpu_attention", "a GPU's attention, norms, routing", text, _measure_attention)
    text = "models whose name holds this; rows: the kernels beside attention; products: prefill by codes"
    group.add_argument("--only", default="", metavar="NAME", help=text)
    add_toggle(group, "check", default=True, help="compare with torch (on)")
    group.add_argument("--tune", action="store_true", help="try other tiles of attention instead")


def _add_latent(kinds: Kinds) -> None:
    text = "Latent attention of prefill steps on a GPU, absorbed, expanded and FlashInfer's: microseconds a layer."
    _, group = kind(kinds, "gpu_latent", "a GPU's latent attention in prefill", text, _measure_latent)
    group.add_argument("--heads", type=int, default=128, help="of DeepSeek-V3's sizes (%(default)s)")
    group.add_argument("--only", default="", metavar="ROWS,POSITIONS", help="one case")
    group.add_argument("--tune", "--sweep", action="store_true", help="try other tiles and workspaces instead")


def _add_linear(kinds: Kinds) -> None:
    text = "Products with quantized weights on a GPU, in the shapes of several models: microseconds, GB/s, TFLOP/s."
    _, group = kind(kinds, "gpu_linear", "a GPU's products with quantized weights", text, _measure_linear)
    text = "some of these (%(default)s)"
    group.add_argument("--only", default=",".join(GPU_LINEARS), metavar="NAMES", help=text)
    text = "of weights that `types` measures, beside Q4_K where that comes first (all that are read)"
    group.add_argument("--types", default="", metavar="NAMES", help=text)
    group.add_argument("--tokens", default="1,2,4,8,16,64,512,2048", help="token counts (%(default)s)")


def _add_prefill(kinds: Kinds) -> None:
    text = "Routed experts of a layer in prefill, in milliseconds: on the CPU alone, all copied to the GPU, and shared "
    text += "between the two as the engine does it, beside what its rates predict."
    _, group = kind(kinds, "gpu_prefill", "experts in prefill on CPU and GPU", text, _measure_prefill)
    shapes = ",".join(GPU_SHAPES["gpu_prefill"])
    group.add_argument("--shapes", default=shapes, help="some of these (%(default)s)")
    group.add_argument("--tokens", default="32,64,128,256,512,1024,2048,4096,8192", help="token counts")
    group.add_argument("--milliseconds", type=float, default=300.0, help="per figure (%(default)s)")
    text = "microseconds that the GPU is busy between two layers, as with attention (%(default)s)"
    group.add_argument("--between_us", type=float, default=0.0, help=text)
    group.add_argument("--engine_copies", action="store_true", help="hidden states pass by copy engines, not kernels")
    add_threads(group)


def _add_hand_over(kinds: Kinds) -> None:
    text = "What a layer of CPU experts adds to a stream of a GPU beside the CPU's own time, in microseconds."
    _, group = kind(kinds, "gpu_hand_over", "what the way to CPU experts costs", text, _measure_hand_over)
    shapes = ",".join(GPU_SHAPES["gpu_hand_over"])
    group.add_argument("--shapes", default=shapes, help="some of these (%(default)s)")
    group.add_argument("--tokens", default="1,4,16", help="token counts (%(default)s)")
    group.add_argument("--layers", type=int, default=48, help="of a step (%(default)s)")
    group.add_argument("--checks", type=int, default=200, help="steps that are compared before (%(default)s)")
    group.add_argument("--milliseconds", type=float, default=300.0, help="per figure (%(default)s)")
    add_threads(group)


def _measure_attention(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    from benchmarks.gpu.attention import bench_gpu_attention, tune_gpu_attention

    tune = partial(tune_gpu_attention, args.only)
    return print_record(
        args.what, args.json, tune if args.tune else partial(bench_gpu_attention, args.only, args.check)
    )


def _measure_latent(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, heads=1024)
    only = numbers(args.only, "only") if args.only else []
    if only and (len(only) != 2 or only[0] > only[1]):
        raise ConfigError(f"--only must be ROWS,POSITIONS, no more rows than positions, got {args.only!r}")
    from benchmarks.gpu.latent import CASES, bench_gpu_latent, tune_gpu_latent
    from ktransformers.operators.attention.latent_expansion import LatentDims

    dims = LatentDims(args.heads, rank=512, nope=128, rope=64, v_dim=128)
    cases = [(only[0], only[1])] if only else CASES
    measure = partial(tune_gpu_latent, dims) if args.tune else partial(bench_gpu_latent, dims, cases)
    return print_record(args.what, args.json, measure)


def _measure_linear(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    names, tokens = chosen(args.only, "only", GPU_LINEARS), numbers(args.tokens, "tokens")
    from benchmarks.gpu.linear import COMPARED_TYPES, bench_gpu_linear

    known = {qtype.name: qtype for qtype in COMPARED_TYPES}
    types = [known[name] for name in chosen(args.types.upper() or ",".join(known), "types", list(known))]
    return print_record(args.what, args.json, partial(bench_gpu_linear, names, tokens, types=types))


def _measure_prefill(args: argparse.Namespace) -> int:
    set_up_logging("info")
    shapes, tokens = chosen(args.shapes, "shapes", GPU_SHAPES[args.what]), numbers(args.tokens, "tokens")
    check_range("milliseconds", args.milliseconds, 0, 1 << 20)
    check_range("between_us", args.between_us, 0, 1 << 20)
    check_threads(args)
    from benchmarks.gpu.prefill import PrefillWork, bench_gpu_prefill

    threads = args.threads or usable_cores()
    work = PrefillWork(shapes, tokens, threads, args.milliseconds, args.between_us, args.engine_copies)
    return print_record(args.what, args.json, partial(bench_gpu_prefill, work))


def _measure_hand_over(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    shapes, tokens = chosen(args.shapes, "shapes", GPU_SHAPES[args.what]), numbers(args.tokens, "tokens")
    check_between(args, layers=1024)
    check_range("checks", args.checks, 0, 1 << 20)
    check_range("milliseconds", args.milliseconds, 0, 1 << 20)
    check_threads(args)
    from ktransformers.bench.gpu.hand_over import HandOverWork, bench_gpu_hand_over

    threads = args.threads or usable_cores()
    work = HandOverWork(shapes, tokens, args.layers, threads, args.checks, args.milliseconds)
    return print_record(args.what, args.json, partial(bench_gpu_hand_over, work))
