"""Times the Triton kernels of attention, latent attention, norms, rotation and routing on a GPU; the last line is JSON.

    python benchmarks/triton_attention.py [--only NAME] [--no-check] [--tune]

Each figure is the time of one call inside a CUDA graph, which also shows that the call can be captured. A graph makes
the call on several sets of inputs in turn, so many that together they exceed the L2 cache, as the layers of a model
do. GB/s counts the bytes that must move once; TFLOP/s the products of the positions that each row sees. `error` is
the largest difference from fp32 torch, relative to the largest value. `torch us` is torch's own fused attention on
contiguous keys and values. --tune tries other tiles instead and prints the fastest beside the one that is built in.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product

import torch
import torch.nn.functional as functional
from torch import Tensor

from ktransformers.kernels.triton import attention_launch as launch
from ktransformers.kernels.triton.attention import attention
from ktransformers.kernels.triton.attention_launch import workspace_numel
from ktransformers.kernels.triton.elementwise import activate, add_rms_norm
from ktransformers.kernels.triton.mla import mla_attention
from ktransformers.kernels.triton.rope import latent_to_cache, rope_to_cache
from ktransformers.kernels.triton.router import RouterSpec, topk_router
from ktransformers.kernels.triton.runtime import available, triton
from ktransformers.kernels.types import ActivationSpec

PAGE = 64
MAX_LEN = 32768
BF16 = torch.bfloat16
L2_BYTES = 128 << 20


@dataclass
class Figure:
    """One line of the output."""

    name: str
    us: float
    gb_per_s: float = 0.0
    tflop_per_s: float = 0.0
    error: float = 0.0
    torch_us: float = 0.0
    shape: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        shape = " ".join(f"{key}={value}" for key, value in self.shape.items())
        return (
            f"{self.name:24s} {shape:34s} {self.us:9.1f} us {self.gb_per_s:8.0f} GB/s {self.tflop_per_s:7.1f} TFLOP/s"
            f"  error {self.error:.1e}" + (f"  torch {self.torch_us:.1f} us" if self.torch_us else "")
        )


def graph_time(calls: list[Callable[[], object]], repeats: int = 15) -> float:
    """Median microseconds of one call, from replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / len(calls))
    return statistics.median(times[3:])


def copies(nbytes: int) -> int:
    """How many sets of inputs exceed the L2 cache; at least four, so that launches overlap as in a model."""
    return max(4, min(64, -(-L2_BYTES // nbytes)))


def relative_error(out: Tensor, want: Tensor) -> float:
    return float((out.float() - want.float()).abs().max() / want.float().abs().max())


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


MODELS = [
    Model("qwen3-30b-a3b", 32, 4, 128, 128),
    Model("glm-4.5-air", 96, 8, 128, 128),
    Model("qwen2-57b-a14b", 28, 4, 128, 128),
    Model("gpt-oss-20b", 64, 8, 64, 64, window=128, has_sinks=True),
    Model("gemma-like", 16, 8, 256, 256),
    Model("deepseek-v2-lite", 16, 1, 576, 512, is_latent=True),
    Model("deepseek-v3", 128, 1, 576, 512, is_latent=True),
]


class Case:
    """`num_seqs` sequences whose last `rows` positions, up to `length`, are the rows of a step."""

    def __init__(self, model: Model, num_seqs: int, rows: int, length: int, sets: int):
        self.model, self.num_seqs, self.rows, self.length = model, num_seqs, rows, length
        device = torch.device("cuda")
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
            keys = torch.randn(*shape, model.dim, device=device, dtype=BF16)
            values = keys[..., : model.dim_v] if model.is_latent else torch.randn(
                *shape, model.dim_v, device=device, dtype=BF16
            )  # fmt: skip
            self.caches.append((keys, values))
        total = num_seqs * rows
        self.q = torch.randn(total, model.heads, model.dim, device=device, dtype=BF16)
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
        keys, values = self.caches[index]
        where = (self.table, PAGE, self.seq_ids, self.kv_lens, self.scale)
        workspace = self.workspace if self.rows == 1 else None
        if self.model.is_latent:
            return mla_attention(self.q, keys, self.model.dim_v, *where, out=self.out, workspace=workspace)
        return attention(
            self.q, keys, values, *where, window=self.model.window, sinks=self.sinks, out=self.out, workspace=workspace
        )

    def record(self, index: int) -> launch.Call:
        keys, values = self.caches[index]
        return launch.Call(
            self.q, keys, values, self.table, PAGE, self.seq_ids, self.kv_lens, self.scale, self.out,
            self.model.window, self.sinks, is_shared=self.model.is_latent,
        )  # fmt: skip

    def run(self, index: int, tile: launch.Tile) -> None:
        """`call` with another tile."""
        if self.rows == 1:
            launch.launch_decode(self.record(index), self.workspace, tile)
        else:
            launch.launch_prefill(self.record(index), tile)

    def gathered(self, index: int, seq: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one sequence [kv_heads, length, dim]."""
        positions = torch.arange(self.length, device="cuda")
        slots = self.table[seq].long()[positions // PAGE] * PAGE + positions % PAGE
        keys, values = self.caches[index]
        return keys[slots].transpose(0, 1), values[slots].transpose(0, 1)

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
        return 2 * self.num_seqs * positions * model.kv_heads * (model.dim + (0 if model.is_latent else model.dim_v))

    def torch_us(self) -> float:
        """Torch's attention on the same rows with contiguous keys; 0 where it has no such thing."""
        model = self.model
        if model.is_latent or model.window or (self.rows > 1 and self.rows != self.length):
            return 0.0
        total = self.num_seqs
        q = self.q.view(total, self.rows, model.heads, model.dim).transpose(1, 2).contiguous()
        keys, values = zip(*(self.gathered(0, seq) for seq in range(total)), strict=True)
        sets = [(torch.stack(keys), torch.stack(values)) for _ in range(len(self.caches))]
        return graph_time(
            [
                lambda k=k, v=v: functional.scaled_dot_product_attention(
                    q, k, v, is_causal=self.rows > 1, scale=self.scale, enable_gqa=True
                )
                for k, v in sets
            ]
        )


def attention_figure(model: Model, num_seqs: int, rows: int, length: int, is_checked: bool) -> Figure:
    row_bytes = 2 * model.kv_heads * (model.dim + model.dim_v)
    sets = min(copies(num_seqs * length * row_bytes), 64 if rows == 1 else 4)
    case = Case(model, num_seqs, rows, length, sets)
    us = graph_time([lambda index=index: case.call(index) for index in range(sets)])
    flops = 2 * model.heads * (model.dim + model.dim_v) * case.seen()
    return Figure(
        f"{model.name} {'decode' if rows == 1 else 'prefill'}",
        us,
        case.nbytes() / us / 1e3,
        flops / us / 1e6,
        case.error() if is_checked else 0.0,
        case.torch_us(),
        {"seqs": num_seqs, "rows": rows, "length": length},
    )


DECODE_SHAPES = ((1, 1024), (1, 8192), (1, 32768), (4, 1024), (16, 1024), (16, 8192))
PREFILL_SHAPES = ((1, 128, 128), (1, 512, 512), (1, 2048, 2048), (1, 2048, 16384), (4, 512, 4096))


def candidates(model: Model, is_decode: bool, default: launch.Tile) -> Iterator[launch.Tile]:
    yield default
    sizes_m = (default.block_m,) if is_decode else (64,) if model.dim_v > 256 else (64, 128)
    for block_m, block_n, warps, stages in product(sizes_m, (32, 64, 128), (4, 8), (3, 5, 7)):
        yield launch.Tile(block_m, block_n, warps, stages)
    if is_decode:
        yield replace(default, min_chunk=64)
        yield replace(default, min_chunk=256)


def tune(model: Model, num_seqs: int, rows: int, length: int) -> None:
    """Print the times of the five fastest tiles and of the built-in one."""
    sets = 4
    case = Case(model, num_seqs, rows, length, sets)
    default = (launch.decode_tile if rows == 1 else launch.prefill_tile)(case.record(0))
    times = {}
    for tile in candidates(model, rows == 1, default):
        try:
            times[tile] = graph_time([lambda i=i, tile=tile: case.run(i, tile) for i in range(sets)])
        except triton.runtime.errors.OutOfResources:
            continue
    print(f"{model.name} seqs={num_seqs} rows={rows} length={length}: built in {times[default]:.1f} us, {default}")
    for tile in sorted(times, key=times.__getitem__)[:5]:
        print(f"    {times[tile]:8.1f} us {tile}", flush=True)


def attention_figures(models: list[Model], is_checked: bool) -> Iterator[Figure]:
    for model in models:
        for num_seqs, length in DECODE_SHAPES:
            yield attention_figure(model, num_seqs, 1, length, is_checked)
        for num_seqs, rows, length in PREFILL_SHAPES:
            yield attention_figure(model, num_seqs, rows, length, is_checked)


def norm_figure(rows: int, width: int) -> Figure:
    nbytes = 8 * rows * width
    sets = copies(nbytes)
    x, residual, out = (torch.randn(sets, rows, width, device="cuda", dtype=BF16) for _ in range(3))
    weight = torch.randn(width, device="cuda", dtype=BF16)
    us = graph_time(
        [lambda i=i: add_rms_norm(x[i], residual[i], weight, 1e-6, out[i], residual[i]) for i in range(sets)]
    )
    return Figure("add_rms_norm", us, nbytes / us / 1e3, shape={"rows": rows, "width": width})


def silu_figure(rows: int, width: int) -> Figure:
    nbytes = 6 * rows * width
    sets = copies(nbytes)
    x = torch.randn(sets, rows, 2 * width, device="cuda", dtype=BF16)
    out = torch.empty(sets, rows, width, device="cuda", dtype=BF16)
    silu = ActivationSpec()
    us = graph_time([lambda i=i: activate(silu, x[i, :, :width], x[i, :, width:], out[i]) for i in range(sets)])
    want = functional.silu(x[0, :, :width].float()) * x[0, :, width:].float()
    return Figure(
        "silu_mul", us, nbytes / us / 1e3, 0.0, relative_error(out[0], want), 0.0, {"rows": rows, "width": width}
    )


def rope_figure(rows: int, heads: int, kv_heads: int, dim: int) -> Figure:
    nbytes = 4 * rows * (heads + 2 * kv_heads) * dim
    sets = copies(nbytes)
    qkv = torch.randn(sets, rows, heads + 2 * kv_heads, dim, device="cuda", dtype=BF16)
    k_cache, v_cache = (torch.zeros(rows, kv_heads, dim, device="cuda", dtype=BF16) for _ in range(2))
    angles = torch.rand(4096, dim // 2, device="cuda")
    cos, sin, ids = angles.cos(), angles.sin(), torch.arange(rows, device="cuda")
    weights = (torch.ones(dim, device="cuda"), torch.ones(dim, device="cuda"))
    q_out = torch.empty(rows, heads, dim, device="cuda", dtype=BF16)

    def call(index: int) -> Tensor:
        q, k, v = qkv[index].split((heads, kv_heads, kv_heads), 1)
        return rope_to_cache(
            q, k, v, cos, sin, k_cache, v_cache, ids, positions=ids, norm_weights=weights, eps=1e-6, q_out=q_out
        )

    us = graph_time([lambda i=i: call(i) for i in range(sets)])
    x = qkv[sets - 1, :, :heads].float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    a, b, c, s = x[..., : dim // 2], x[..., dim // 2 :], cos[:rows, None], sin[:rows, None]
    want = torch.cat((a * c - b * s, b * c + a * s), -1)
    return Figure(
        "norm, rope, cache",
        us,
        nbytes / us / 1e3,
        0.0,
        relative_error(q_out, want),
        0.0,
        {"rows": rows, "heads": heads},
    )


def latent_figure(rows: int, heads: int) -> Figure:
    nbytes = 4 * rows * (heads * 64 + 576)
    sets = copies(nbytes)
    q = torch.randn(sets, rows, heads, 192, device="cuda", dtype=BF16)[..., 128:]
    kv = torch.randn(sets, rows, 576, device="cuda", dtype=BF16)
    cache = torch.zeros(rows, 1, 576, device="cuda", dtype=BF16)
    out = torch.empty(rows, heads, 576, device="cuda", dtype=BF16)[..., 512:]
    angles = torch.rand(4096, 32, device="cuda")
    cos, sin, ids, weight = (
        angles.cos(),
        angles.sin(),
        torch.arange(rows, device="cuda"),
        torch.ones(512, device="cuda"),
    )
    us = graph_time(
        [
            lambda i=i: latent_to_cache(q[i], kv[i], weight, 1e-6, cos, sin, cache, ids, positions=ids, q_out=out)
            for i in range(sets)
        ]
    )
    return Figure("latent norm, rope, cache", us, nbytes / us / 1e3, shape={"rows": rows, "heads": heads})


def router_figure(name: str, rows: int, num_experts: int, spec: RouterSpec) -> Figure:
    logits = torch.randn(8, rows, num_experts, device="cuda")
    bias = torch.zeros(num_experts, device="cuda") if spec.scoring == "sigmoid" else None
    ids = torch.empty(rows, spec.top_k, dtype=torch.int64, device="cuda")
    weights = torch.empty(rows, spec.top_k, device="cuda")
    us = graph_time([lambda i=i: topk_router(logits[i], spec, bias, ids, weights) for i in range(8)])
    return Figure(f"router {name}", us, shape={"rows": rows, "experts": num_experts})


def row_figures() -> Iterator[Figure]:
    for rows in (1, 16, 2048):
        yield norm_figure(rows, 2048)
        yield norm_figure(rows, 7168)
        yield silu_figure(rows, 6144)
        yield rope_figure(rows, 32, 4, 128)
        yield latent_figure(rows, 128)
        yield router_figure("qwen3", rows, 128, RouterSpec(8))
        yield router_figure("deepseek-v3", rows, 256, RouterSpec(8, "sigmoid", 8, 4, scaling=2.5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the models whose name holds this; 'rows' for the other kernels")
    parser.add_argument("--no-check", action="store_true", help="do not compare with torch")
    parser.add_argument("--tune", action="store_true", help="try other tiles of attention")
    options = parser.parse_args()
    reason = available()
    if reason is not None or not torch.cuda.is_available():
        raise SystemExit(f"this benchmark needs a GPU: {reason or 'there is no CUDA device'}")
    torch.manual_seed(0)
    models = [model for model in MODELS if options.only in model.name]
    if options.tune:
        for model in models:
            for num_seqs, rows, length in ((1, 1, 1024), (1, 1, 8192), (16, 1, 1024), (1, 512, 512), (1, 2048, 4096)):
                tune(model, num_seqs, rows, length)
        return
    figures = []
    others = row_figures() if options.only in "rows" else iter(())
    for figure in chain(attention_figures(models, not options.no_check), others):
        print(figure, flush=True)
        figures.append(asdict(figure))
    device = torch.cuda.get_device_name()
    print(
        json.dumps({"benchmark": "triton_attention", "device": device, "torch": torch.__version__, "figures": figures})
    )


if __name__ == "__main__":
    main()
