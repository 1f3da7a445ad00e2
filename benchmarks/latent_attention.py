"""Times latent attention of prefill steps on a GPU: absorbed, on expanded keys, FlashInfer's; the last line is JSON.

    python benchmarks/latent_attention.py [--heads 128] [--sweep] [--only ROWS,POSITIONS]

Microseconds a layer for one sequence of DeepSeek-V3's sizes, median of some calls, on scattered pages. `absorbed`,
`expanded` and `flashinfer` are attention alone over what the cache holds, absorbed queries given; `expansion` is
gathering latents and expanding them. `layer` adds what a layer does around it (the query's and the result's
projections, rotation, the cache write): `absorbed layer` and `expanded layer` are what is compared when a step is
planned. `bound` is the time that the products of the absorbed and the expanded form (attention and expansion) take at
the rate of a matrix product of 8192 x 8192 x 8192 measured here. `error` is the largest difference between the two
forms' results, relative to the largest value: both round to bf16 in between.

--sweep tries other tiles for the kernel and other budgets for the workspace instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktransformers.core import Phase
from ktransformers.kernels import flashinfer
from ktransformers.kernels.triton.expanded import ExpandedRun, ExpandedTile, expanded_attention, tiles_of
from ktransformers.kernels.triton.mla import mla_attention
from ktransformers.kernels.triton.runtime import available
from ktransformers.operators.attention.latent_expansion import EXPANSION_NBYTES, Choice, LatentDims, Rates, StepRuns
from ktransformers.operators.attention.latent_gpu import GpuLatent, LatentStep
from ktransformers.operators.context import ForwardContext

PAGE = 64
BF16 = torch.bfloat16
CASES = ((64, 8192), (128, 8192), (256, 8192), (512, 8192), (512, 512), (2048, 2048), (4096, 4096), (4096, 32768))
SWEPT = ((4096, 4096), (512, 8192))
TILES = [
    ExpandedTile(*sizes)
    for sizes in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 32, 8, 4), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 16, 3),
    )
]  # fmt: skip


def microseconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Median time of a call on the GPU, once it is compiled and warm."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop))
    return statistics.median(times)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda") / shape[-1] ** 0.25


@dataclass
class Case:
    """`rows` rows at the end of a sequence of `length` positions: one layer's step, in both forms."""

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
        self.context = ForwardContext(None, None, Phase.PREFILL, PAGE, slots, ids, lens, table)
        self.context = self.context.replicated([torch.device("cuda")])
        self.here = self.context.on(torch.device("cuda"))
        self.gpu = GpuLatent(
            random(dims.num_heads, dims.nope, dims.rank), random(dims.num_heads, dims.rank, dims.v_dim)
        )
        self.q = random(rows, dims.num_heads, dims.nope + dims.rope)
        self.scale = (dims.nope + dims.rope) ** -0.5
        self.cache = random(pages * PAGE, 1, dims.rank + dims.rope)
        angles = torch.rand(rows, dims.rope // 2, device="cuda")
        norm = (torch.ones(dims.rank, dtype=BF16, device="cuda"), 1e-6)
        compressed = random(rows, dims.rank + dims.rope)
        self.step = LatentStep(compressed, norm, (angles.cos(), angles.sin(), True), self.cache, self.here, self.scale)

    @property
    def pairs(self) -> int:
        return self.rows * self.length - self.rows * (self.rows - 1) // 2

    def expanded_step(self, nbytes: int) -> LatentStep:
        choice = Choice(self.dims, BF16, Rates(), is_forced=True, nbytes=nbytes)
        expansion = StepRuns(self.context).expansion(choice, torch.device("cuda"))
        workspace = torch.empty(choice.room, dtype=BF16, device="cuda")
        return replace(self.step, expansion=expansion, workspace=workspace)

    def expanded_call(self, heads: int, tile: ExpandedTile) -> Callable[[], None]:
        """Attention alone, `heads` heads at a time."""
        dims, length = self.dims, self.length
        keys, values = random(heads, length, dims.nope), random(heads, length, dims.v_dim)
        latents, q_rot = random(length, dims.rank + dims.rope), random(self.rows, dims.num_heads, dims.rope)
        out = torch.empty(self.rows, dims.num_heads, dims.v_dim, dtype=BF16, device="cuda")
        tiles = tiles_of([ExpandedRun(0, self.rows, 0, length)], tile.block_m).cuda()

        def call() -> None:
            for first in range(0, dims.num_heads, heads):
                part = slice(first, min(first + heads, dims.num_heads))
                count = part.stop - part.start
                k, v, k_rot = keys[:count], values[:count], latents[:, dims.rank :]
                expanded_attention(self.q[:, part], q_rot[:, part], k, k_rot, v, tiles, self.scale, out[:, part], tile)

        return call

    def expansion_call(self, heads: int, slots: Tensor) -> Callable[[], None]:
        """Gathering and expanding alone."""
        dims, length = self.dims, self.length
        keys, values = random(heads, length, dims.nope), random(heads, length, dims.v_dim)

        def call() -> None:
            latent = self.cache[:, 0].index_select(0, slots)[:, : dims.rank]
            for first in range(0, dims.num_heads, heads):
                k_b, v_b = self.gpu.k_b[first : first + heads], self.gpu.v_b[first : first + heads]
                each = latent.expand(len(k_b), -1, -1)
                torch.bmm(each, k_b.transpose(1, 2), out=keys[: len(k_b)])
                torch.bmm(each, v_b, out=values[: len(k_b)])

        return call

    def absorbed_call(self) -> Callable[[], Tensor]:
        q, context = random(self.rows, self.dims.num_heads, self.dims.rank + self.dims.rope), self.here
        return lambda: mla_attention(
            q, self.cache, self.dims.rank, context.block_table, PAGE, context.seq_ids, context.kv_lens, self.scale
        )

    def flashinfer_call(self, flash: flashinfer.FlashInfer) -> Callable[[], Tensor]:
        dims, context = self.dims, self.context
        shape = flashinfer.LatentShape(dims.num_heads, dims.rank, dims.rope, BF16, self.scale)
        flash.plan(shape, flashinfer.pages_of(context.seq_ids, context.kv_lens, context.block_table, PAGE))
        q = random(self.rows, dims.num_heads, dims.rank + dims.rope)
        return lambda: flash.run(shape, q, self.cache, self.cache[..., : dims.rank])


def matmul_rate() -> float:
    """Products a microsecond of a large matrix product."""
    size = 8192
    a, b = random(size, size), random(size, size)
    return size**3 / microseconds(lambda: a @ b)


def start_flashinfer() -> flashinfer.FlashInfer | None:
    reason = flashinfer.why_not(torch.device("cuda"))
    if reason is not None:
        print(f"without FlashInfer: {reason}")
        return None
    return flashinfer.FlashInfer(torch.device("cuda"))


def measure(dims: LatentDims, rows: int, length: int, rate: float, flash: flashinfer.FlashInfer | None) -> dict:
    case = Case(dims, rows, length)
    step = case.expanded_step(EXPANSION_NBYTES)
    assert step.expansion is not None
    (batch,) = step.expansion.batches
    slots = batch.slots
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop, device="cuda")
    projection = dims.rank * dims.head_numel()
    absorbed, expanded = case.pairs * (2 * dims.rank + dims.rope), case.pairs * (dims.head_numel() + dims.rope)
    want, got = case.gpu.attend(case.q, case.step), case.gpu.attend(case.q, step)
    found = {
        "rows": rows,
        "positions": length,
        "absorbed_us": microseconds(case.absorbed_call()),
        "absorbed_layer_us": microseconds(lambda: case.gpu.attend(case.q, case.step)),
        "absorbed_bound_us": dims.num_heads * absorbed / rate,
        "expanded_us": microseconds(case.expanded_call(batch.num_heads, batch.tile)),
        "expansion_us": microseconds(case.expansion_call(batch.num_heads, slots)),
        "expanded_layer_us": microseconds(lambda: case.gpu.attend(case.q, step)),
        "expanded_bound_us": dims.num_heads * (expanded + length * projection) / rate,
        "flashinfer_us": 0.0 if flash is None else microseconds(case.flashinfer_call(flash)),
        "heads_at_once": batch.num_heads,
        "error": float((got.float() - want.float()).abs().max() / want.float().abs().max()),
    }
    found["absorbed_tflops"] = 2e-6 * dims.num_heads * absorbed / found["absorbed_us"]
    found["expanded_tflops"] = 2e-6 * dims.num_heads * expanded / found["expanded_us"]
    found["expansion_tflops"] = 2e-6 * dims.num_heads * length * projection / found["expansion_us"]
    return {key: round(value, 5) if key == "error" else round(value, 1) for key, value in found.items()}


HEAD = (
    " rows positions | absorbed  layer  bound TF/s | expanded expansion  layer  bound TF/s TF/s(expansion) |"
    " flashinfer | heads  error"
)


def line(found: dict) -> str:
    return (
        f"{found['rows']:5} {found['positions']:9} | {found['absorbed_us']:8.0f} {found['absorbed_layer_us']:6.0f} "
        f"{found['absorbed_bound_us']:6.0f} {found['absorbed_tflops']:4.0f} | {found['expanded_us']:8.0f} "
        f"{found['expansion_us']:9.0f} {found['expanded_layer_us']:6.0f} {found['expanded_bound_us']:6.0f} "
        f"{found['expanded_tflops']:4.0f} {found['expansion_tflops']:15.0f} | {found['flashinfer_us']:10.0f} | "
        f"{found['heads_at_once']:5} {found['error']:6.4f}"
    )


def sweep(dims: LatentDims) -> dict:
    """Tiles for the kernel, attention alone; then budgets, the whole layer."""
    found: dict[str, dict[str, float]] = {}
    cases = [Case(dims, rows, length) for rows, length in SWEPT]
    print(
        "tile (rows, positions, warps, stages): TFLOP/s of attention at " + ", ".join(f"{r} of {n}" for r, n in SWEPT)
    )
    for tile in TILES:
        name = f"{tile.block_m} {tile.block_n} {tile.num_warps} {tile.num_stages}"
        try:
            times = [microseconds(case.expanded_call(64, tile), 5) for case in cases]
        except Exception as error:  # noqa: BLE001 - a tile may need more than there is
            print(f"{name:16}  {type(error).__name__}", flush=True)
            continue
        rates = [
            2e-6 * dims.num_heads * case.pairs * (dims.head_numel() + dims.rope) / time
            for case, time in zip(cases, times, strict=True)
        ]
        found[name] = {f"{r}/{n}": round(rate, 1) for (r, n), rate in zip(SWEPT, rates, strict=True)}
        print(f"{name:16}  " + "  ".join(f"{rate:6.0f}" for rate in rates), flush=True)
    print("workspace MiB: us a layer")
    for mib in (32, 64, 128, 256, 512):
        steps = [case.expanded_step(mib << 20) for case in cases]
        times = [
            microseconds(lambda case=case, step=step: case.gpu.attend(case.q, step), 5)
            for case, step in zip(cases, steps, strict=True)
        ]
        found[f"{mib} MiB"] = {f"{r}/{n}": round(time, 1) for (r, n), time in zip(SWEPT, times, strict=True)}
        print(f"{mib:5}  " + "  ".join(f"{time:6.0f}" for time in times), flush=True)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", default="", help="one case, as ROWS,POSITIONS")
    args = parser.parse_args()
    if not torch.cuda.is_available() or available() is not None:
        raise SystemExit("this measures a GPU, and there is none that Triton can use")
    dims = LatentDims(args.heads, rank=512, nope=128, rope=64, v_dim=128)
    summary: dict = {"device": torch.cuda.get_device_name(), "heads": args.heads}
    if args.sweep:
        print(json.dumps(summary | {"sweep": sweep(dims)}))
        return
    cases = [tuple(int(part) for part in args.only.split(","))] if args.only else CASES
    rate, flash = matmul_rate(), start_flashinfer()
    print(f"{summary['device']}: a matrix product runs at {2e-6 * rate:.0f} TFLOP/s\n{HEAD}")
    found = []
    for rows, length in cases:
        found.append(measure(dims, rows, length, rate, flash))
        print(line(found[-1]), flush=True)
    print(json.dumps(summary | {"matmul_tflops": round(2e-6 * rate, 1), "cases": found}))


if __name__ == "__main__":
    main()
