"""Latent attention of prefill steps on a GPU: absorbed, on expanded keys, FlashInfer's.

Microseconds a layer for one sequence of DeepSeek-V3's sizes, median of some calls, on scattered pages. `absorbed`,
`expanded` and `flashinfer` are attention alone over what the cache holds, absorbed queries given; `materialization` is
gathering latents and expanding them. `layer` adds what a layer does around it (the query's and the result's
projections, rotation, the cache write): `absorbed layer` and `expanded layer` are what is compared when a step is
planned. `bound` is the time that the products of the absorbed and the expanded form (attention and expansion) take at
the rate of a large matrix product measured here. `error` is the largest difference between the two forms' results,
relative to the largest value: both round to bf16 in between.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import benchmark_parser
from ktransformers.bench.common.report import Column, FigureTable, Record, Row, print_record
from ktransformers.bench.gpu.device import BF16, Gpu, relative_error, shown_gpu
from ktransformers.cli import run_command
from ktransformers.cli.bench.options import check_between, numbers
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.core import Phase
from ktransformers.errors import ConfigError
from ktransformers.kernels import flashinfer
from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.kernels.triton.attention.materialized import (
    MaterializedRun,
    MaterializedTile,
    materialized_attention,
    tiles_of,
)
from ktransformers.kernels.triton.attention.mla import mla_attention
from ktransformers.kernels.triton.attention.rope import Rotation
from ktransformers.kernels.triton.common.runtime import triton
from ktransformers.operators.attention.latent_gpu import GpuLatent, LatentStep
from ktransformers.operators.attention.latent_materialization import (
    EXPANSION_NBYTES,
    LatentDims,
    MaterializationPolicy,
    Rates,
    StepRuns,
)
from ktransformers.operators.context import ForwardContext

__all__ = ["bench_gpu_latent", "main", "tune_gpu_latent"]

PAGE = 64
CASES = ((64, 8192), (128, 8192), (256, 8192), (512, 8192), (512, 512), (2048, 2048), (4096, 4096), (4096, 32768))
SWEPT = ((4096, 4096), (512, 8192))
TILES = [
    MaterializedTile(*sizes)
    for sizes in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 32, 8, 4), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 16, 3),
    )
]  # fmt: skip
_COLUMNS = (
    Column("rows", 5),
    Column("positions", 9),
    Column("absorbed_us", 9, ".0f", "absorbed"),
    Column("absorbed_layer_us", 7, ".0f", "layer"),
    Column("absorbed_bound_us", 7, ".0f", "bound"),
    Column("absorbed_tflops", 6, ".0f", "TF/s"),
    Column("expanded_us", 9, ".0f", "expanded"),
    Column("expansion_us", 10, ".0f", "expansion"),
    Column("expanded_layer_us", 7, ".0f", "layer"),
    Column("expanded_bound_us", 7, ".0f", "bound"),
    Column("expanded_tflops", 6, ".0f", "TF/s"),
    Column("expansion_tflops", 9, ".0f", "exp. TF/s"),
    Column("flashinfer_us", 10, ".0f", "flashinfer"),
    Column("heads_at_once", 5, title="heads"),
    Column("error", 7, ".4f"),
)


@dataclass
class Case:
    """`rows` rows at the end of a sequence of `length` positions: one layer's step, in both forms."""

    gpu: Gpu
    dims: LatentDims
    rows: int
    length: int

    def __post_init__(self) -> None:
        dims, rows, length = self.dims, self.rows, self.length
        pages = -(-length // PAGE)
        table = torch.randperm(pages).to(torch.int32).view(1, -1)
        positions = torch.arange(length - rows, length)
        slots = table[0, positions // PAGE].long() * PAGE + positions % PAGE
        ids, lens = torch.zeros(rows, dtype=torch.int32), (positions + 1).to(torch.int32)
        nobody: Any = None  # neither cache nor pool is asked
        self.context = ForwardContext(nobody, nobody, Phase.PREFILL, PAGE, slots, ids, lens, table)
        self.context = self.context.replicated([self.gpu.device])
        self.here = self.context.on(self.gpu.device)
        self.layer = GpuLatent(
            self.random(dims.num_heads, dims.nope, dims.rank), self.random(dims.num_heads, dims.rank, dims.v_dim)
        )
        self.q = self.random(rows, dims.num_heads, dims.nope + dims.rope)
        self.scale = (dims.nope + dims.rope) ** -0.5
        self.cache = self.random(pages * PAGE, 1, dims.rank + dims.rope)
        angles = torch.rand(rows, dims.rope // 2, device=self.gpu.device)
        norm = (torch.ones(dims.rank, dtype=BF16, device=self.gpu.device), 1e-6)
        compressed = self.random(rows, dims.rank + dims.rope)
        self.step = LatentStep(
            compressed, norm, Rotation(angles.cos(), angles.sin(), True), self.cache, self.here, self.scale
        )

    def random(self, *shape: int) -> Tensor:
        """Numbers in bf16 whose sums of products stay near 1."""
        return self.gpu.randn(*shape).div_(shape[-1] ** 0.25)

    @property
    def pairs(self) -> int:
        """Of rows and positions that they see."""
        return self.rows * self.length - self.rows * (self.rows - 1) // 2

    def expanded_step(self, nbytes: int) -> LatentStep:
        """The step in expanded form, in a workspace of nbytes."""
        choice = MaterializationPolicy(self.dims, BF16, Rates(), is_forced=True, nbytes=nbytes)
        materialization = StepRuns(self.context).materialization(choice, self.gpu.device)
        workspace = torch.empty(choice.room, dtype=BF16, device=self.gpu.device)
        return replace(self.step, materialization=materialization, workspace=workspace)

    def expanded_call(self, heads: int, tile: MaterializedTile) -> Callable[[], None]:
        """Attention alone, `heads` heads at a time."""
        dims, length = self.dims, self.length
        keys, values = self.random(heads, length, dims.nope), self.random(heads, length, dims.v_dim)
        latents, q_rot = self.random(length, dims.rank + dims.rope), self.random(self.rows, dims.num_heads, dims.rope)
        out = torch.empty(self.rows, dims.num_heads, dims.v_dim, dtype=BF16, device=self.gpu.device)
        tiles = tiles_of([MaterializedRun(0, self.rows, 0, length)], tile.block_m).to(self.gpu.device)

        def call() -> None:
            for first in range(0, dims.num_heads, heads):
                part = slice(first, min(first + heads, dims.num_heads))
                count = part.stop - part.start
                cached = keys[:count], latents[:, dims.rank :], values[:count]
                queries = self.q[:, part], q_rot[:, part]
                materialized_attention(queries, cached, tiles, self.scale, out[:, part], tile)

        return call

    def expansion_call(self, heads: int, slots: Tensor) -> Callable[[], None]:
        """Gathering and expanding alone."""
        dims, length = self.dims, self.length
        keys, values = self.random(heads, length, dims.nope), self.random(heads, length, dims.v_dim)

        def call() -> None:
            latent = self.cache[:, 0].index_select(0, slots)[:, : dims.rank]
            for first in range(0, dims.num_heads, heads):
                k_b, v_b = self.layer.k_b[first : first + heads], self.layer.v_b[first : first + heads]
                each = latent.expand(len(k_b), -1, -1)
                torch.bmm(each, k_b.transpose(1, 2), out=keys[: len(k_b)])
                torch.bmm(each, v_b, out=values[: len(k_b)])

        return call

    def absorbed_call(self) -> Callable[[], Tensor]:
        """Attention alone."""
        q, context = self.random(self.rows, self.dims.num_heads, self.dims.rank + self.dims.rope), self.here
        call = AttentionCall(q, self.cache, self.cache[..., : self.dims.rank], context.pages, self.scale)
        return lambda: mla_attention(call)

    def flashinfer_call(self, flash: flashinfer.FlashInfer) -> Callable[[], Tensor]:
        """Attention alone, FlashInfer's."""
        dims, context = self.dims, self.context
        shape = flashinfer.LatentShape(dims.num_heads, dims.rank, dims.rope, BF16, self.scale)
        flash.plan(shape, flashinfer.pages_of(context.seq_ids, context.kv_lens, context.block_table, PAGE))
        q = self.random(self.rows, dims.num_heads, dims.rank + dims.rope)
        return lambda: flash.run(shape, q, self.cache, self.cache[..., : dims.rank])


def _start_flashinfer(gpu: Gpu) -> flashinfer.FlashInfer | None:
    reason = flashinfer.why_not(gpu.device)
    if reason is not None:
        print(f"without FlashInfer: {reason}")
        return None
    return flashinfer.FlashInfer(gpu.device)


def _row(case: Case, rate: float, flash: flashinfer.FlashInfer | None) -> Row:
    """rate: products a microsecond of a large matrix product."""
    gpu, dims, step = case.gpu, case.dims, case.expanded_step(EXPANSION_NBYTES)
    assert step.materialization is not None
    (batch,) = step.materialization.batches
    slots = batch.slots
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop, device=gpu.device)
    projection = case.length * dims.rank * dims.head_numel()
    absorbed, expanded = case.pairs * (2 * dims.rank + dims.rope), case.pairs * (dims.head_numel() + dims.rope)
    found: Row = {
        "rows": case.rows,
        "positions": case.length,
        "absorbed_us": gpu.median_us(case.absorbed_call()),
        "absorbed_layer_us": gpu.median_us(lambda: case.layer.attend(case.q, case.step)),
        "absorbed_bound_us": dims.num_heads * absorbed / rate,
        "expanded_us": gpu.median_us(case.expanded_call(batch.num_heads, batch.tile)),
        "expansion_us": gpu.median_us(case.expansion_call(batch.num_heads, slots)),
        "expanded_layer_us": gpu.median_us(lambda: case.layer.attend(case.q, step)),
        "expanded_bound_us": dims.num_heads * (expanded + projection) / rate,
        "flashinfer_us": None if flash is None else gpu.median_us(case.flashinfer_call(flash)),
        "heads_at_once": batch.num_heads,
        "error": relative_error(case.layer.attend(case.q, step), case.layer.attend(case.q, case.step)),
    }
    for name, products in (("absorbed", absorbed), ("expanded", expanded), ("expansion", projection)):
        found[f"{name}_tflops"] = 2e-6 * dims.num_heads * products / found[f"{name}_us"]
    return found


def bench_gpu_latent(dims: LatentDims, cases: Sequence[tuple[int, int]] = CASES, gpu: Gpu | None = None) -> Record:
    """Print a table, a line per case. cases: rows, positions."""
    gpu = gpu or Gpu()
    facts, flash = gpu.facts(), _start_flashinfer(gpu)
    print(shown_gpu(facts))
    table = FigureTable(_COLUMNS)
    with torch.inference_mode():
        for rows, length in cases:
            table.add(_row(Case(gpu, dims, rows, length), facts["matmul_tflop_s"] / 2e-6, flash))
    return {"machine": facts, "heads": dims.num_heads, "rows": table.rows}


def tune_gpu_latent(dims: LatentDims, gpu: Gpu | None = None) -> Record:
    """Try other tiles for the kernel, attention alone; then other budgets for the workspace, the whole layer."""
    gpu = gpu or Gpu()
    facts = gpu.facts()
    with torch.inference_mode():
        cases = [Case(gpu, dims, rows, length) for rows, length in SWEPT]
        names = [f"{rows} of {length}" for rows, length in SWEPT]
        print(f"{shown_gpu(facts)}\nTFLOP/s of attention alone by tile (rows, positions, warps, stages)")
        tiles = FigureTable([Column("tile", 16), *(Column(name, 14, ".0f") for name in names)])
        for tile in TILES:
            row: Row = {"tile": f"{tile.block_m} {tile.block_n} {tile.num_warps} {tile.num_stages}"}
            try:
                rates = [_tile_rate(case, tile) for case in cases]
            except triton.runtime.errors.OutOfResources:
                rates = []
            tiles.add(row | dict(zip(names, rates, strict=False)))
        print("microseconds of a layer by MiB of workspace")
        budgets = FigureTable([Column("MiB", 5), *(Column(name, 14, ".0f") for name in names)])
        for mib in (32, 64, 128, 256, 512):
            times = [_budget_us(case, mib << 20) for case in cases]
            budgets.add({"MiB": mib} | dict(zip(names, times, strict=True)))
    return {"machine": facts, "heads": dims.num_heads, "tiles": tiles.rows, "budgets": budgets.rows}


def _tile_rate(case: Case, tile: MaterializedTile) -> float:
    dims = case.dims
    products = dims.num_heads * case.pairs * (dims.head_numel() + dims.rope)
    return 2e-6 * products / case.gpu.median_us(case.expanded_call(64, tile), 5)


def _budget_us(case: Case, nbytes: int) -> float:
    step = case.expanded_step(nbytes)
    return case.gpu.median_us(lambda: case.layer.attend(case.q, step), 5)


def _measure_latent(args: argparse.Namespace) -> int:
    set_up_logging("warning")
    check_between(args, heads=1024)
    only = numbers(args.only, "only") if args.only else []
    if only and (len(only) != 2 or only[0] > only[1]):
        raise ConfigError(f"--only must be ROWS,POSITIONS, no more rows than positions, got {args.only!r}")

    dims = LatentDims(args.heads, rank=512, nope=128, rope=64, v_dim=128)
    cases = [(only[0], only[1])] if only else CASES
    measure = partial(tune_gpu_latent, dims) if args.tune else partial(bench_gpu_latent, dims, cases)
    return print_record("gpu_latent", args.json, measure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's). Returns the exit code."""
    text = "Latent attention of prefill steps on a GPU, absorbed, expanded and FlashInfer's: microseconds a layer."
    parser, group = benchmark_parser("gpu.latent", text, _measure_latent)
    group.add_argument("--heads", type=int, default=128, help="of DeepSeek-V3's sizes (%(default)s)")
    group.add_argument("--only", default="", metavar="ROWS,POSITIONS", help="one case")
    group.add_argument("--tune", "--sweep", action="store_true", help="try other tiles and workspaces instead")
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
