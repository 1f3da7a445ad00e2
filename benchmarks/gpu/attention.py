"""The Triton kernels of attention, latent attention, norms, rotation and routing.

Each figure is the time of one call inside a CUDA graph, which also shows that the call can be captured. A graph makes
the call on several sets of inputs in turn, so many that together they exceed the L2 cache, as the layers of a model
do. GB/s counts the bytes that must move once; TFLOP/s the products of the positions that each row sees. `error` is
the largest difference from fp32 torch, relative to the largest value. `torch us` is torch's own fused attention on
contiguous keys and values in bf16. The kernels beside attention are in rows.py. "products" are prefill steps that
multiply the codes of keys with codes of queries, each beside those that widen the same codes and those without codes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from benchmarks.command import benchmark_parser
from benchmarks.gpu.attention_case import CheckedAttention
from benchmarks.gpu.rows import row_figures
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.bench.gpu.attention_case import MODELS, AttentionModel, StepShape
from ktransformers.bench.gpu.device import Gpu, shown_gpu
from ktransformers.cli import run_command
from ktransformers.cli.parsing.options import add_toggle, set_up_logging
from ktransformers.engine.plan.kv_types import KV_DTYPES
from ktransformers.kernels.triton.attention import launch
from ktransformers.kernels.triton.common.runtime import triton

__all__ = ["bench_gpu_attention", "main", "tune_gpu_attention"]

_COLUMNS = (
    Column("name", 35),
    Column("seqs", 5),
    Column("rows", 5),
    Column("size", 7),
    Column("us", 9, ".1f"),
    Column("gb_per_s", 8, ".0f", "GB/s"),
    Column("of_copy", 8, ".0%", "of copy"),
    Column("tflop_per_s", 8, ".1f", "TFLOP/s"),
    Column("error", 8, ".1e"),
    Column("torch_us", 9, ".1f", "torch us"),
)


_COMPARED = [MODELS[0], AttentionModel("heads of 64", 32, 4, 64, 64)]
_CODED = [
    replace(model, kv_type=kv_type, quantized_attention=True) for model in _COMPARED for kv_type in ("int8", "fp8")
]


STEPS = [StepShape(*sizes) for sizes in ((1, 1, 1024), (1, 1, 8192), (1, 1, 32768), (4, 1, 1024), (16, 1, 1024))]
STEPS += [StepShape(16, 1, 8192)]
STEPS += [
    StepShape(*sizes) for sizes in ((1, 128, 128), (1, 512, 512), (1, 2048, 2048), (1, 2048, 16384), (4, 512, 4096))
]
PRODUCT_STEPS = [
    StepShape(1, rows, length) for length in (2048, 8192, 32768) for rows in (512, 2048, 4096) if rows <= length
]
TUNED = [StepShape(*sizes) for sizes in ((1, 1, 1024), (1, 1, 8192), (16, 1, 1024), (1, 512, 512), (1, 2048, 4096))]


def attention_figure(gpu: Gpu, model: AttentionModel, step: StepShape, is_checked: bool) -> Row:
    """Time of a step, and its error where it is checked."""
    row_bytes = KV_DTYPES[model.kv_type].itemsize * model.kv_heads * (model.dim + model.dim_v)
    sets = min(gpu.copies(step.num_seqs * step.length * row_bytes), 64 if step.rows == 1 else 4)
    case = CheckedAttention(gpu, model, step, sets)
    us = gpu.graph_us([partial(case.call, index) for index in range(sets)])
    return {
        "name": f"{model.shown} {'decode' if step.rows == 1 else 'prefill'}",
        "seqs": step.num_seqs,
        "rows": step.rows,
        "size": step.length,
        "us": us,
        "gb_per_s": case.nbytes() / us / 1e3,
        "tflop_per_s": 2 * model.heads * (model.dim + model.dim_v) * case.seen() / us / 1e6,
        "error": case.error() if is_checked else None,
        "torch_us": case.torch_us(),
    }


def _candidates(model: AttentionModel, is_decode: bool, default: launch.Tile) -> Iterator[launch.Tile]:
    yield default
    sizes_m = (default.block_m,) if is_decode else (64,) if model.dim_v > 256 else (64, 128)
    for block_m, block_n, warps, stages in product(sizes_m, (32, 64, 128), (4, 8), (3, 5, 7)):
        yield launch.Tile(block_m, block_n, warps, stages)
    if is_decode:
        yield replace(default, min_chunk=64)
        yield replace(default, min_chunk=256)


def _tuned(gpu: Gpu, model: AttentionModel, step: StepShape) -> Row:
    """The times of the five fastest tiles and of the built-in one, printed too."""
    sets, is_decode = 4, step.rows == 1
    case = CheckedAttention(gpu, model, step, sets)
    default = (launch.decode_tile if is_decode else launch.prefill_tile)(case.record(0))
    times = {}
    for tile in _candidates(model, is_decode, default):
        try:
            times[tile] = gpu.graph_us([partial(case.run, i, tile) for i in range(sets)])
        except triton.runtime.errors.OutOfResources:
            continue
    print(f"{model.shown} {step}: built in {times[default]:.1f} us, {default}")
    best = sorted(times, key=times.__getitem__)[:5]
    for tile in best:
        print(f"    {times[tile]:8.1f} us {tile}", flush=True)
    return {"name": model.shown, "us": times[default], "best": {str(tile): times[tile] for tile in best}}


def tune_gpu_attention(only: str, gpu: Gpu | None = None) -> Record:
    """Try other tiles of attention for the models whose name holds `only`."""
    gpu = gpu or Gpu()
    facts, models = gpu.facts(), [model for model in MODELS + _CODED if only in model.shown]
    print(shown_gpu(facts))
    tried = [(model, step) for model in models for step in TUNED if step.rows > 1 or not model.quantized_attention]
    return {"machine": facts, "rows": [_tuned(gpu, model, step) for model, step in tried]}


def compared_models() -> list[AttentionModel]:
    """For each shape and type of codes: without codes, with codes that are widened, and with products of codes."""
    found = list[AttentionModel]()
    for coded in _CODED:
        widened = replace(coded, quantized_attention=False)
        found += [replace(widened, kv_type="bf16"), widened, coded]
    return list(dict.fromkeys(found))


def bench_gpu_attention(only: str, is_checked: bool, gpu: Gpu | None = None) -> Record:
    """Print a table. only: models whose name holds this; "rows" for the other kernels, "products" for products
    of codes; empty for all."""
    gpu = gpu or Gpu()
    facts, models = gpu.facts(), [model for model in MODELS if only in model.shown]
    print(shown_gpu(facts))
    table = FigureTable(_COLUMNS)
    for model, step in product(models, STEPS):
        _add(table, attention_figure(gpu, model, step, is_checked), facts)
    for step, model in product(PRODUCT_STEPS, compared_models()) if only in "products" else ():
        _add(table, attention_figure(gpu, model, step, is_checked), facts)
    for row in row_figures(gpu) if only in "rows" else ():
        _add(table, row, facts)
    return {"machine": facts, "rows": table.rows}


def _add(table: FigureTable, row: Row, facts: Row) -> None:
    rate = row.get("gb_per_s")
    table.add(row | {"of_copy": None if rate is None else rate / facts["copy_gb_s"]})


def _measure_attention(args: argparse.Namespace) -> int:
    set_up_logging("warning")

    tune = partial(tune_gpu_attention, args.only)
    return print_record(
        "gpu_attention", args.json, tune if args.tune else partial(bench_gpu_attention, args.only, args.check)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "Attention, norms, rotation and routing of a GPU, in the shapes of several models: microseconds, GB/s, "
    text += "TFLOP/s, the error against torch in fp32, and torch's own attention."
    parser, group = benchmark_parser("gpu.attention", text, _measure_attention)
    text = "models whose name holds this; rows: the kernels beside attention; products: prefill by codes"
    group.add_argument("--only", default="", metavar="NAME", help=text)
    add_toggle(group, "check", default=True, help="compare with torch (on)")
    group.add_argument("--tune", action="store_true", help="try other tiles of attention instead")
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
