"""The command line of `python -m benchmarks.fidelity`: of keys and values in fewer bits, and of quantized weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.command import benchmark_parser
from benchmarks.fidelity.kv import FidelityWork, bench_fidelity
from benchmarks.fidelity.weights import WeightWork, bench_weight_fidelity
from ktransformers.bench.common.report import print_record
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import (
    SHAPE_NAMES,
    add_gguf_path,
    add_threads,
    check_range,
    check_threads,
    chosen,
    model_or_shape,
)
from ktransformers.cli.models.quantize import TYPES
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.cli.parsing.parser import add_toggle, user_path
from ktransformers.config import ATTENTION_PRODUCTS, CPU_ACTIVATIONS, KV_TYPES, EngineConfig
from ktransformers.errors import ConfigError

__all__ = ["main"]

_GIVEN = "given"
_NUM_TEXTS = 2
_TEXTS = ("random", "own")
_DEFAULT_KV_TYPES = "bf16,int8,fp8"


def _fidelity(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_range("tokens", args.tokens, 16, 1 << 16)
    check_threads(args)
    if args.types is not None:
        return _weights(args)
    for flag in ("peer", "texts", "text", "cpu_activations"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag} goes with --types, which measures weights")
    kv_types = chosen(args.kv_types or _DEFAULT_KV_TYPES, "kv_types", KV_TYPES)
    products, default = args.attention_products or ATTENTION_PRODUCTS[0], ATTENTION_PRODUCTS[0]
    config = replace(model_or_shape(args), cpu_infer=args.threads, attention_products=default)
    config = config.resolved(needs_model=args.synthetic is None)
    coded = [name for name in kv_types if name in ("int8", "fp8")]
    if products != default and coded and not config.use_cuda:
        raise ConfigError(
            f"--attention_products {products} of {coded[0]} is of GPUs: add --use_cuda, or --kv_types bf16"
        )
    config = replace(config, attention_products=products)
    work = FidelityWork(config, kv_types, args.tokens, args.synthetic, args.layers)
    return print_record("fidelity", args.json, partial(bench_fidelity, work))


def _weights(args: argparse.Namespace) -> int:
    for flag in ("kv_types", "attention_products"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag} measures keys and values, --types weights; choose one of them")
    if args.synthetic is not None or args.layers is not None:
        raise ConfigError("--types needs a model's files: leave --synthetic and --layers out")
    if args.use_cuda:
        raise ConfigError("--types measures the CPU's products: leave --use_cuda out")
    types = chosen(args.types.lower(), "types", (*TYPES, _GIVEN))
    num_texts = _NUM_TEXTS if args.texts is None else args.texts
    check_range("texts", num_texts, 2, 64)
    activations = args.cpu_activations or CPU_ACTIVATIONS[0]
    config = replace(model_or_shape(args), cpu_infer=args.threads, cpu_activations=activations).resolved()
    if _GIVEN in types and (config.gguf_path is None or not config.gguf_path.is_file()):
        raise ConfigError(f"--types {_GIVEN} needs a GGUF file; name it as MODEL or with --gguf_path")
    is_own, has_peer = args.text == "own", args.peer is not None
    work = WeightWork(config, types, partial(_quantize, config), args.tokens, num_texts, is_own, has_peer)
    return print_record("fidelity", args.json, partial(bench_weight_fidelity, work))


def _quantize(config: EngineConfig, mixture: str, out: Path) -> None:
    from ktransformers.cli.models.pull_progress import LineProgress
    from ktransformers.convert.quantize_model import Task, quantize_model

    model = config.gguf_path or config.model_path
    assert model is not None, "resolved"
    quantize_model(Task(model, out, mixture, num_threads=config.cpu_infer), LineProgress)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "What keys and values in fewer bits change, or with --types what products with quantized weights do: "
    text += "Kullback-Leibler divergence of next-token probabilities from those of fp32, in nats. Without a model, the "
    text += "bundled one."
    parser, group = benchmark_parser("fidelity", text, _fidelity)
    add_gguf_path(parser, group)
    group.add_argument("--model_path", type=user_path, help="folder with config.json, for a GGUF that says too little")
    group.add_argument("--synthetic", metavar="SHAPE", help=f"random weights: {', '.join(SHAPE_NAMES)}")
    group.add_argument("--layers", type=int, help="layers of SHAPE; default: all")
    group.add_argument("--kv_types", help=f"of {', '.join(KV_TYPES)} ({_DEFAULT_KV_TYPES})")
    text = "kv: multiply queries with keys in bf16 on the CPU, of int8 or fp8 in prefill on GPUs (bf16)"
    group.add_argument("--attention_products", choices=ATTENTION_PRODUCTS, help=text)
    text = f"quantize the model to each of these instead, and compute on the CPU: {', '.join(TYPES)}; "
    group.add_argument("--types", help=f"{text}{_GIVEN}: the GGUF file as it is")
    text = "with --types: what activations are rounded to (int8)"
    group.add_argument("--cpu_activations", choices=CPU_ACTIVATIONS, help=text)
    group.add_argument("--peer", choices=("llama.cpp",), help="with --types: measure it too, on the same files")
    group.add_argument("--texts", type=int, help=f"with --types: how many texts ({_NUM_TEXTS})")
    text = "with --types: texts of random tokens, or that the model writes, which differ much more (random). Without "
    group.add_argument("--text", choices=_TEXTS, help=f"{text}--types the model writes it")
    group.add_argument("--tokens", type=int, default=1024, help="of a text (%(default)s)")
    add_threads(group)
    add_toggle(group, "use_cuda", default=False, help="measure modules on GPUs where rules say cuda (off)")
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
