"""Measures what predictions need of this machine's CPU, by the kernels themselves on weights of the usual sizes.

Times are the shortest of a few calls: a busy neighbour makes calls longer, nothing makes them shorter. Weights are
larger than most caches, and calls walk through them. The whole takes some fifteen seconds on two cores; every part says
so when it starts (`say`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ktransformers.bench.common.random_weights import random_raw
from ktransformers.bench.probe.steps import step_costs
from ktransformers.engine.model.threads import limit_torch_threads
from ktransformers.kernels.attention_call import AttentionCall, RowPages
from ktransformers.kernels.cpu import MoeKernel, WorkerPool, attention, limits, linear
from ktransformers.kernels.cpu.topology import ThreadPlace, thread_places
from ktransformers.kernels.types import ActivationSpec, ExpertWeight, ExpertWeights, QuantType, RawTensor
from ktransformers.operators.linear.packed import pack_experts, pack_matrix
from ktransformers.optimize.machine_speed import CpuSpeed, Curve, Peak
from ktransformers.system.cores import usable_cores

__all__ = ["FULL", "ProbeSizes", "probe_cpu", "probe_read", "thread_counts"]

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """The sizes of what is measured of a CPU. read: bytes. E experts of [width, hidden], top_k of them for a token.

    linear_rows: of the matrices [2 * hidden, hidden]. tokens: of a call of experts. context: positions attended to.
    types: of both; dense_types: of matrices only. has_steps: whether engines of small models are built. seconds: types
    that were not begun by then are left out.
    """

    read: int = 512 << 20
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    width: int = 768
    linear_bytes: int = 96 << 20
    linear_rows: tuple[int, ...] = (1, 4, 16, 64, 512)
    tokens: tuple[int, ...] = (1, 4, 16, 64, 512)
    context: int = 2048
    types: tuple[QuantType, ...] = (QuantType.Q4_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.MXFP4)
    dense_types: tuple[QuantType, ...] = (QuantType.F32, QuantType.BF16)
    has_steps: bool = True
    seconds: float = 12.0


FULL = ProbeSizes()

_LEAST_CALLS, _MOST_CALLS = 4, 24
_SECONDS = 0.1  # of a figure; three times as long where that is not enough for _LEAST_CALLS


def thread_counts(cores: int) -> list[int]:
    """Return the numbers of threads to measure: 1, 2, 4, ... and all cores."""
    powers = itertools.takewhile(lambda n: n < cores, (1 << i for i in itertools.count()))
    return [*powers, cores]


def shortest_call(once: Callable[[int], object], warm_ups: int = 1) -> float:
    """Return the seconds of a call, the shortest of a few, which are numbered."""
    for i in range(warm_ups):
        once(i)
    times: list[float] = []
    while not times or (len(times) < _MOST_CALLS and sum(times) < (_SECONDS, 3 * _SECONDS)[len(times) < _LEAST_CALLS]):
        began = time.perf_counter()
        once(warm_ups + len(times))
        times.append(time.perf_counter() - began)
    return min(times)


def probe_read(cores: int, nbytes: int = FULL.read) -> tuple[dict[int, float], dict[int, float]]:
    """Measure the bytes a second by number of threads, and of each NUMA node's threads alone where there are several.

    A node's figure is that of its threads on memory that they touched first.
    """
    limit_torch_threads()
    rates = {}
    for count in thread_counts(cores):
        with _pool(count) as pool:
            rates[count] = limits.read_bandwidth(pool, nbytes if count > 1 else nbytes // 2, 3)
    places = thread_places(cores)
    nodes = sorted({place.node for place in places})
    if len(nodes) == 1:
        return rates, {}
    by_node = {}
    for node in nodes:
        own = [replace(place, node=0) for place in places if place.node == node]
        with _pool(len(own), own) as pool:
            by_node[node] = limits.read_bandwidth(pool, nbytes, 3)
    return rates, by_node


def probe_cpu(
    cores: int = 0,
    sizes: ProbeSizes = FULL,
    say: Say = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> CpuSpeed:
    """Measure everything of the CPU, or on a busy machine what sizes.seconds are enough for; the rest is logged.

    cores: worker threads, 0 for one per core. say: called with the name of what is measured.
    """
    cores, began = cores or usable_cores(), clock()
    say("memory")
    rates, by_node = probe_read(cores, sizes.read)
    say("registers")
    peaks = _peaks(cores)
    linears: dict[str, Curve] = {}
    experts: dict[str, Curve] = {}
    left_out: list[str] = []
    with _pool(cores) as pool, torch.inference_mode():
        say("attention")
        attentions = _attention_curves(pool, sizes)
        for qtype in (*sizes.types, *sizes.dense_types):
            if linears and clock() - began > sizes.seconds:
                left_out.append(qtype.name)
                continue
            say(f"weights of {qtype.name}")
            linears[qtype.name] = _linear_curve(pool, qtype, sizes)
            if qtype in sizes.types:
                experts[qtype.name] = _expert_curve(pool, qtype, sizes)
        isa = pool.isa.value
    if left_out:
        text = "this machine is busy: %s were not measured, and predictions take the nearest type for them"
        logger.warning(text, ", ".join(left_out))
    say("steps of small models")
    steps = step_costs(cores) if sizes.has_steps else {}
    return CpuSpeed(cores, isa, rates, by_node, peaks, linears, experts, attentions, steps)


@contextmanager
def _pool(threads: int, places: list[ThreadPlace] | None = None) -> Iterator[WorkerPool]:
    pool = WorkerPool(threads, places=places)
    try:
        yield pool
    finally:
        pool.close()


def _peaks(cores: int) -> dict[str, Peak]:
    found: dict[str, list[float]] = {}
    for count in (1, cores):
        with _pool(count) as pool:
            for name, measure in (("int8", limits.int8_peak), ("bf16", limits.bf16_peak), ("fp32", limits.fp32_peak)):
                found.setdefault(name, []).append(measure(pool))
    return {name: Peak(one, together) for name, (one, together) in found.items()}


def _linear_curve(pool: WorkerPool, qtype: QuantType, sizes: ProbeSizes) -> Curve:
    """Matrices [2 * hidden, hidden] in turn, `linear_bytes` of them, as attention and dense layers have them."""
    rows, cols = 2 * sizes.hidden, sizes.hidden
    one = random_raw(qtype, rows, cols)
    count = max(sizes.linear_bytes // one.nbytes, 1)
    matrices = [pack_matrix(_copy(one), pool) for _ in range(count)]
    seconds = []
    for tokens in sizes.linear_rows:
        x = torch.randn(tokens, cols)
        out = torch.empty(tokens, rows)
        span = count if tokens <= 16 else 1  # weights come from memory where reading them is what takes time

        def once(i: int, x: torch.Tensor = x, out: torch.Tensor = out, span: int = span) -> None:
            for j in range(span):
                linear(x, matrices[(i + j) % count], pool, out=out)

        seconds.append(shortest_call(once) / span / matrices[0].nbytes)
    return Curve(tuple(map(float, sizes.linear_rows)), tuple(seconds))


def _copy(weight: RawTensor) -> RawTensor:
    return replace(weight, data=weight.data.clone())


def _expert_curve(pool: WorkerPool, qtype: QuantType, sizes: ProbeSizes) -> Curve:
    """A layer of experts on even routing, by the rows of a touched one. Consecutive calls take different experts."""
    up, down = random_raw(qtype, sizes.width, sizes.hidden), random_raw(qtype, sizes.hidden, sizes.width)
    each = 2 * up.nbytes + down.nbytes
    parts: list[list[ExpertWeight]] = [[_copy(one) for _ in range(sizes.experts)] for one in (up, up, down)]
    kernel = MoeKernel(pack_experts(ExpertWeights(parts[0], parts[1], parts[2]), pool), ActivationSpec(), pool)
    generator = torch.Generator().manual_seed(0)
    points: dict[float, float] = {}
    for tokens in sizes.tokens:
        order = torch.stack([torch.randperm(sizes.experts, generator=generator) for _ in range(tokens)])
        x, weights = torch.randn(tokens, sizes.hidden), torch.full((tokens, sizes.top_k), 1.0 / sizes.top_k)
        starts = range(0, sizes.experts - sizes.top_k + 1, sizes.top_k)
        routings = [order[:, start : start + sizes.top_k].contiguous() for start in starts]
        touched = sum(len(set(one.flatten().tolist())) for one in routings) / len(routings)

        def once(
            i: int, x: torch.Tensor = x, routings: list[torch.Tensor] = routings, w: torch.Tensor = weights
        ) -> None:
            kernel.forward(x, routings[i % len(routings)], w)

        took = shortest_call(once)
        points[tokens * sizes.top_k / touched] = took / (touched * each)
    return Curve(tuple(points), tuple(points.values()))


def _attention_curves(pool: WorkerPool, sizes: ProbeSizes) -> dict[str, Curve]:
    """32 query heads over 4 heads of 128, and 16 heads over one latent of 512 + 64, in the middle of a long prompt."""
    page, context = 64, sizes.context
    table = torch.arange(context // page, dtype=torch.int32)[None]
    curves = {}
    for name, heads, kv_heads, dim_k, dim_v in (("grouped", 32, 4, 128, 128), ("latent", 16, 1, 576, 512)):
        keys = torch.randn(context, kv_heads, dim_k)
        values = torch.randn(context, kv_heads, dim_v) if name == "grouped" else keys[..., :dim_v]
        rows, seconds = (1, 16, 128), []
        for tokens in rows:
            q = torch.randn(tokens, heads, dim_k)
            seqs, lens = torch.zeros(tokens, dtype=torch.int32), torch.arange(context - tokens + 1, context + 1)
            products = float(lens.sum()) * heads * (dim_k + dim_v)

            def once(i: int, a: tuple[torch.Tensor, ...] = (q, keys, values, seqs, lens)) -> None:
                attention(AttentionCall(a[0], a[1], a[2], RowPages(table, page, a[3], a[4]), 0.1), pool)

            seconds.append(shortest_call(once) / products)
        curves[name] = Curve(tuple(map(float, rows)), tuple(seconds))
    return curves
