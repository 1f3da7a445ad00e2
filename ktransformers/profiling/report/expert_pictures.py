"""Pictures of experts: how often each is used, and what keeping some of them on a GPU would bring."""

from __future__ import annotations

import numpy as np

from ktransformers.profiling.cache_simulation import HitRates
from ktransformers.profiling.meta import Meta
from ktransformers.profiling.report.pictures import Picture, axis, line, number, numbers
from ktransformers.profiling.summary import ExpertUse

__all__ = ["cache", "heat_map"]

_GIB = 1 << 30

_POLICIES = {
    "static": ("most used of the whole run, in hindsight", "#f28e2b"),
    "lfu": ("most used so far (LFU)", "#2f9e6e"),
    "lru": ("used last (LRU)", "#4e79a7"),
    "hot": ("hot experts, as --hot_experts keeps them", "#e15759"),
    "layers": ("whole layers, as --gpu_memory places them", "#b07aa1"),
}


def heat_map(use: ExpertUse) -> Picture:
    """Draw the rows of each expert of each layer over what even use would give."""
    title = "Use of experts"
    per_layer = use.rows.sum(axis=1)
    layers = np.flatnonzero(per_layer)
    if not len(layers):
        return Picture("experts", title, "No step said which experts it used.")
    num_experts = use.rows.shape[1]
    share = use.rows[layers] / per_layer[layers, None] * num_experts
    top = max(1, num_experts // 10)
    in_top = np.sort(use.rows[layers], axis=1)[:, -top:].sum() / per_layer.sum()
    unused = int((use.rows[layers] == 0).sum())
    text = (
        f"The {top} most used of the {num_experts} experts of a layer compute {number(100 * float(in_top), '%')} of "
        f"the rows; even use would be {number(100 * top / num_experts, '%')}."
        + (f" {unused:,} experts were never used." if unused else " Every expert was used.")
    )
    data = [
        {
            "type": "heatmap",
            "z": numbers(share),
            "x": list(range(num_experts)),
            "y": layers.tolist(),
            "zmin": 0,
            "zmax": float(f"{np.percentile(share, 99.5):.3g}") or 1.0,
            "hovertemplate": "layer %{y}, expert %{x}: %{z} times even use<extra></extra>",
            "colorbar": {"title": {"text": "× even", "side": "right"}, "thickness": 12, "outlinewidth": 0},
        }
    ]
    layout = {"xaxis": axis("expert"), "yaxis": axis("layer", autorange="reversed"), "showlegend": False}
    head = ("layer", *map(str, range(num_experts)))
    rows = [(str(layer), *map(str, use.rows[layer].tolist())) for layer in layers.tolist()]
    note = "Counts are exact, of all rows of all steps, prefill included. The table has the rows that each computed."
    height = int(np.clip(140 + 9 * len(layers), 240, 640))
    return Picture("experts", title, text, head, rows, data, layout, note, height)


def cache(rates: HitRates | None, meta: Meta) -> Picture:
    """Draw the hit rate against memory for experts, and a value for --gpu_memory."""
    title = "What memory for experts on a GPU would bring"
    if rates is None:
        text = "No decode step was recorded with the experts of its tokens, or the size of experts is not known."
        return Picture("cache", title, text)
    gib = rates.budgets / _GIB
    hover = "%{x} GiB: %{y} %<extra></extra>"
    data = [
        line(
            name,
            numbers(gib),
            numbers(100 * rates.rates[policy]),
            color,
            hovertemplate=hover,
            line={"shape": "hv" if policy == "layers" else "linear"},
        )
        for policy, (name, color) in _POLICIES.items()
    ]
    rows = [
        (number(float(gib[at])), *(number(100 * float(rates.rates[policy][at])) for policy in _POLICIES))
        for at in range(len(gib))
    ]
    layout = {
        "xaxis": axis("GiB of experts on the GPU", rangemode="tozero"),
        "yaxis": axis("% of reads", range=[0, 102]),
    }
    note = (
        f"Replayed: {rates.num_reads:,} reads of experts in {rates.num_steps:,} decode steps. An expert is read once a "
        "step. LRU and LFU have the same number of slots in each layer. Their rates say nothing of what the copies of "
        "misses cost."
    )
    head = ("GiB", *(f"{name}: % of reads" for name, _ in _POLICIES.values()))
    return Picture("cache", title, advice(rates, meta), head, rows, data, layout, note, height=380)


def advice(rates: HitRates, meta: Meta) -> str:
    """Say which --gpu_memory to give."""
    gib, total = rates.budgets / _GIB, float(rates.budgets[-1]) / _GIB
    resident = sum(
        count * size for count, size in zip(meta.experts_on_gpu, meta.model.expert_bytes, strict=False) if count
    )
    now = f" This run had {number(resident / _GIB, 'GiB')} of experts there." if resident else ""
    knee = rates.knee
    if knee is None:
        return (
            f"Experts are used about evenly: each of the {number(total, 'GiB')} that they take serves about as many "
            f"reads. No budget stands out: give --gpu_memory what the GPU has.{now}"
        )
    static, lru, layers = (100 * float(rates.rates[policy][knee]) for policy in ("static", "lru", "layers"))
    return (
        f"{number(float(gib[knee]), 'GiB')} of experts (of {number(total, 'GiB')}) stand out: chosen by use they serve "
        f"{number(static, '%')} of the reads, an LRU cache {number(lru, '%')}, whole layers {number(layers, '%')}. A "
        f"sensible --gpu_memory is {number(float(gib[knee]))} plus what `ktransformers plan` shows for everything else "
        f"on the GPU.{now}"
    )
