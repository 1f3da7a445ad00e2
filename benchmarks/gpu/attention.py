"""The Triton kernels of attention, latent attention, norms, rotation and routing.

Each figure is the time of one call inside a CUDA graph, which also shows that the call can be captured. A graph makes
the call on several sets of inputs in turn, so many that together they exceed the L2 cache, as the layers of a model
do. GB/s counts the bytes that must move once; TFLOP/s the products of the positions that each row sees. `error` is
the largest difference from fp32 torch, relative to the largest value. `torch us` is torch's own fused attention on
contiguous keys and values in bf16. The kernels beside attention are in rows.py. "products" are prefill steps that
multiply the codes of keys with codes of queries, each beside those that widen the same codes and those without codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks.gpu.rows import row_figures
from ktransformers.bench.common.report import Column, Record, Row, Table
from ktransformers.bench.gpu.device import BF16, Gpu, relative_error, shown_gpu
from ktransformers.engine.plan.kv_types import KV_DTYPES
from ktransformers.kernels.reference import quantize_kv
from ktransformers.kernels.triton.attention import launch
from ktransformers.kernels.triton.attention.kv_codes import KvScales
from ktransformers.kernels.triton.attention.launch import workspace_numel
from ktransformers.kernels.triton.attention.mla import mla_attention
from ktransformers.kernels.triton.attention.paged import attention
from ktransformers.kernels.triton.common.runtime import triton

__all__ = ["bench_gpu_attention", "tune_gpu_attention"]

PAGE = 64
MAX_LEN = 32768
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


@dataclass(frozen=True)
class Model:
    """Attention of one model; rank > 0 for latent attention (dim is then rank + rope)."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    window: int = 0
    has_sinks: bool = False
    is_latent: bool = False
    kv_type: str = "bf16"
    code_products: bool = False

    @property
    def shown(self) -> str:
        name = self.name if self.kv_type == "bf16" else f"{self.name} {self.kv_type}"
        return f"{name} products" if self.code_products else name


_PLAIN = [
    Model("qwen3-30b-a3b", 32, 4, 128, 128),
    Model("glm-4.5-air", 96, 8, 128, 128),
    Model("qwen2-57b-a14b", 28, 4, 128, 128),
    Model("gpt-oss-20b", 64, 8, 64, 64, window=128, has_sinks=True),
    Model("gemma-like", 16, 8, 256, 256),
    Model("deepseek-v2-lite", 16, 1, 576, 512, is_latent=True),
    Model("deepseek-v3", 128, 1, 576, 512, is_latent=True),
]
_COMPARED = [_PLAIN[0], Model("heads of 64", 32, 4, 64, 64)]
_CODED = [replace(model, kv_type=kv_type, code_products=True) for model in _COMPARED for kv_type in ("int8", "fp8")]
MODELS = _PLAIN + [replace(model, kv_type=kv_type) for kv_type in ("int8", "fp8") for model in _PLAIN]


@dataclass(frozen=True, slots=True)
class Step:
    """`num_seqs` sequences whose last `rows` positions, up to `length`, are the rows of a step."""

    num_seqs: int
    rows: int
    length: int


STEPS = [Step(*sizes) for sizes in ((1, 1, 1024), (1, 1, 8192), (1, 1, 32768), (4, 1, 1024), (16, 1, 1024))]
STEPS += [Step(16, 1, 8192)]
STEPS += [Step(*sizes) for sizes in ((1, 128, 128), (1, 512, 512), (1, 2048, 2048), (1, 2048, 16384), (4, 512, 4096))]
PRODUCT_STEPS = [
    Step(1, rows, length) for length in (2048, 8192, 32768) for rows in (512, 2048, 4096) if rows <= length
]
TUNED = [Step(*sizes) for sizes in ((1, 1, 1024), (1, 1, 8192), (16, 1, 1024), (1, 512, 512), (1, 2048, 4096))]


@dataclass(frozen=True, slots=True)
class Kept:
    """A cache as --kv_type has it: keys, values [slots, kv_heads, dim], and the scales of codes."""

    keys: Tensor
    values: Tensor
    scales: KvScales

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, model: Model) -> Kept:
        """What is kept of bf16 ones."""
        dtype = KV_DTYPES[model.kv_type]
        if dtype == BF16:
            return cls(keys, values, (None, None))
        k, k_scales = quantize_kv(keys.float(), dtype, model.dim_v if model.is_latent else 0)
        if model.is_latent:
            return cls(k, k[..., : model.dim_v], (k_scales, None))
        v, v_scales = quantize_kv(values.float(), dtype)
        return cls(k, v, (k_scales, v_scales))

    def numbers(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of some slots, fp32 for codes."""
        k_scales, v_scales = self.scales
        if k_scales is None:
            return self.keys[slots], self.values[slots]
        keys, parts, rank = self.keys[slots].float(), k_scales[slots], self.values.shape[-1]
        if v_scales is None:
            keys = torch.cat((keys[..., :rank] * parts[..., :1], keys[..., rank:] * parts[..., 1:]), dim=-1)
            return keys, keys[..., :rank]
        return keys * parts, self.values[slots].float() * v_scales[slots]


class Case:
    """`sets` caches with a step's sequences in them."""

    def __init__(self, gpu: Gpu, model: Model, step: Step, sets: int):
        num_seqs, rows, length = step.num_seqs, step.rows, step.length
        self.gpu, self.model, self.num_seqs, self.rows, self.length = gpu, model, num_seqs, rows, length
        device = gpu.device
        pages = num_seqs * -(-length // PAGE)
        order = torch.randperm(pages, device=device).to(torch.int32).view(num_seqs, -1)
        self.table = torch.zeros(num_seqs, MAX_LEN // PAGE, dtype=torch.int32, device=device)
        self.table[:, : order.shape[1]] = order
        self.seq_ids = torch.arange(num_seqs, device=device, dtype=torch.int32).repeat_interleave(rows)
        lens = torch.arange(length - rows + 1, length + 1, device=device, dtype=torch.int32)
        self.kv_lens = lens.repeat(num_seqs)
        shape = (pages * PAGE, model.kv_heads)
        self.caches = []
        for _ in range(sets):
            keys = gpu.randn(*shape, model.dim)
            values = keys[..., : model.dim_v] if model.is_latent else gpu.randn(*shape, model.dim_v)
            self.caches.append(Kept.of(keys, values, model))
        total = num_seqs * rows
        self.q = gpu.randn(total, model.heads, model.dim)
        self.out = torch.empty(total, model.heads, model.dim_v, device=device, dtype=BF16)
        self.sinks = torch.randn(model.heads, device=device) if model.has_sinks else None
        size = (
            workspace_numel(total, model.heads, 1, model.dim_v, MAX_LEN, device)
            if model.is_latent
            else workspace_numel(total, model.heads, model.kv_heads, model.dim_v, MAX_LEN, device)
        )
        self.workspace = torch.empty(2 * size if rows == 1 else 0, device=device)  # tuning may split twice as often
        self.scale = model.dim**-0.5

    def call(self, index: int) -> Tensor:
        """The step on one of the caches, as operators do it."""
        kept, model = self.caches[index], self.model
        where = (self.table, PAGE, self.seq_ids, self.kv_lens, self.scale)
        workspace = self.workspace if self.rows == 1 else None
        if model.is_latent:
            given = (self.q, kept.keys, model.dim_v, *where)
            return mla_attention(*given, out=self.out, workspace=workspace, scales=kept.scales[0])
        return attention(
            self.q, kept.keys, kept.values, *where, window=model.window, sinks=self.sinks, out=self.out,
            workspace=workspace, scales=kept.scales, code_products=model.code_products,
        )  # fmt: skip

    def record(self, index: int) -> launch.Call:
        """The same as arguments of a launch."""
        kept = self.caches[index]
        return launch.Call(
            self.q, kept.keys, kept.values, self.table, PAGE, self.seq_ids, self.kv_lens, self.scale, self.out,
            self.model.window, self.sinks, is_shared=self.model.is_latent, scales=kept.scales,
            code_products=self.model.code_products,
        )  # fmt: skip

    def run(self, index: int, tile: launch.Tile) -> None:
        """`call` with another tile."""
        if self.rows == 1:
            launch.launch_decode(self.record(index), self.workspace, tile)
        else:
            launch.launch_prefill(self.record(index), tile)

    def gathered(self, index: int, seq: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence [kv_heads, length, dim]."""
        positions = torch.arange(self.length, device=self.gpu.device)
        slots = self.table[seq].long()[positions // PAGE] * PAGE + positions % PAGE
        keys, values = self.caches[index].numbers(slots)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def expected(self, row: int) -> Tensor:
        """One row by fp32 torch, [heads, dim_v]."""
        keys, values = self.gathered(0, int(self.seq_ids[row]))
        length = int(self.kv_lens[row])
        first = max(0, length - self.model.window) if self.model.window else 0
        group = self.model.heads // self.model.kv_heads
        k = keys[:, first:length].float().repeat_interleave(group, 0)
        v = values[:, first:length].float().repeat_interleave(group, 0)
        scores = (k @ self.q[row].float()[:, :, None])[..., 0] * self.scale
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[:, None]), 1)
        p = torch.softmax(scores, 1)[:, : length - first]
        return (p[:, None] @ v)[:, 0]

    def error(self) -> float:
        """Against fp32 torch, the worst of three rows."""
        out = self.call(0)
        rows = {0, self.q.shape[0] // 3, self.q.shape[0] - 1}
        return max(relative_error(out[row], self.expected(row)) for row in rows)

    def seen(self) -> int:
        """Positions that all rows see together."""
        lens = self.kv_lens.long()
        return int((lens.clamp(max=self.model.window) if self.model.window else lens).sum())

    def nbytes(self) -> int:
        """Bytes of the keys and values that are read, each once."""
        model = self.model
        positions = min(self.length, model.window + self.rows - 1) if model.window else self.length
        columns, itemsize = model.dim + (0 if model.is_latent else model.dim_v), KV_DTYPES[model.kv_type].itemsize
        scales = 4 * 2 if itemsize == 1 else 0
        return self.num_seqs * positions * model.kv_heads * (itemsize * columns + scales)

    def torch_us(self) -> float | None:
        """Torch's attention on the same rows with contiguous keys; None where it has no such thing."""
        model = self.model
        if model.is_latent or model.window or model.kv_type != "bf16" or (self.rows > 1 and self.rows != self.length):
            return None
        total = self.num_seqs
        q = self.q.view(total, self.rows, model.heads, model.dim).transpose(1, 2).contiguous()
        keys, values = zip(*(self.gathered(0, seq) for seq in range(total)), strict=True)
        sets = [(torch.stack(keys).to(BF16), torch.stack(values).to(BF16)) for _ in range(len(self.caches))]
        sdpa = partial(
            functional.scaled_dot_product_attention, is_causal=self.rows > 1, scale=self.scale, enable_gqa=True
        )
        return self.gpu.graph_us([partial(sdpa, q, k, v) for k, v in sets])


def attention_figure(gpu: Gpu, model: Model, step: Step, is_checked: bool) -> Row:
    """Time of a step, and its error where it is checked."""
    row_bytes = KV_DTYPES[model.kv_type].itemsize * model.kv_heads * (model.dim + model.dim_v)
    sets = min(gpu.copies(step.num_seqs * step.length * row_bytes), 64 if step.rows == 1 else 4)
    case = Case(gpu, model, step, sets)
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


def _candidates(model: Model, is_decode: bool, default: launch.Tile) -> Iterator[launch.Tile]:
    yield default
    sizes_m = (default.block_m,) if is_decode else (64,) if model.dim_v > 256 else (64, 128)
    for block_m, block_n, warps, stages in product(sizes_m, (32, 64, 128), (4, 8), (3, 5, 7)):
        yield launch.Tile(block_m, block_n, warps, stages)
    if is_decode:
        yield replace(default, min_chunk=64)
        yield replace(default, min_chunk=256)


def _tuned(gpu: Gpu, model: Model, step: Step) -> Row:
    """The times of the five fastest tiles and of the built-in one, printed too."""
    sets, is_decode = 4, step.rows == 1
    case = Case(gpu, model, step, sets)
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
    tried = [(model, step) for model in models for step in TUNED if step.rows > 1 or not model.code_products]
    return {"machine": facts, "rows": [_tuned(gpu, model, step) for model, step in tried]}


def compared_models() -> list[Model]:
    """For each shape and type of codes: without codes, with codes that are widened, and with products of codes."""
    found = list[Model]()
    for coded in _CODED:
        widened = replace(coded, code_products=False)
        found += [replace(widened, kv_type="bf16"), widened, coded]
    return list(dict.fromkeys(found))


def bench_gpu_attention(only: str, is_checked: bool, gpu: Gpu | None = None) -> Record:
    """Print a table. only: models whose name holds this; "rows" for the other kernels, "products" for products
    of codes; empty for all."""
    gpu = gpu or Gpu()
    facts, models = gpu.facts(), [model for model in MODELS if only in model.shown]
    print(shown_gpu(facts))
    table = Table(_COLUMNS)
    for model, step in product(models, STEPS):
        _add(table, attention_figure(gpu, model, step, is_checked), facts)
    for step, model in product(PRODUCT_STEPS, compared_models()) if only in "products" else ():
        _add(table, attention_figure(gpu, model, step, is_checked), facts)
    for row in row_figures(gpu) if only in "rows" else ():
        _add(table, row, facts)
    return {"machine": facts, "rows": table.rows}


def _add(table: Table, row: Row, facts: Row) -> None:
    rate = row.get("gb_per_s")
    table.add(row | {"of_copy": None if rate is None else rate / facts["copy_gb_s"]})
