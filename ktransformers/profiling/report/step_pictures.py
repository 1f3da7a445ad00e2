"""Pictures of steps: where their time goes, by part and by layer, what memory gives, how many rows they have."""

from __future__ import annotations

import numpy as np

from ktransformers.profiling.meta import Meta
from ktransformers.profiling.records import PARTS
from ktransformers.profiling.report.pictures import (
    PART_COLORS,
    Picture,
    axis,
    bars,
    line,
    number,
    numbers,
    part_name,
    seconds_bins,
)
from ktransformers.profiling.summary import SlowStep, StepSums

__all__ = ["bandwidth", "batches", "layers", "parts", "slowest"]

_KINDS = ("decode", "prefill")
_TITLES = {"decode": "Decode steps", "prefill": "Steps with rows of prompts"}


def parts(sums: StepSums) -> Picture:
    """Draw the mean step of either kind, divided by part."""
    means = {kind: _mean(sums, kind) for kind in _KINDS if sums.of_kind(kind).any()}
    shown = [index for index in range(len(PARTS)) if any(mean[index] > 0 for mean in means.values())]
    data = [
        bars(
            part_name(PARTS[index]),
            [number(mean[index] / mean.sum() * 100) for mean in means.values()],
            list(means),
            PART_COLORS[PARTS[index]],
            orientation="h",
            hovertemplate="%{x} %",
        )
        for index in shown
    ]
    rows = [
        (
            _TITLES[kind],
            part_name(PARTS[index]),
            number(mean[index] / 1e3),
            number(mean[index] / mean.sum() * 100),
        )
        for kind, mean in means.items()
        for index in shown
    ]
    said = [
        f"{_TITLES[kind]} take {number(mean.sum() / 1e3, 'ms')} in the mean, most of it "
        f"{part_name(PARTS[int(mean.argmax())])} ({number(mean.max() / mean.sum() * 100, '%')})."
        for kind, mean in means.items()
    ]
    layout = {"barmode": "stack", "xaxis": axis("% of the step", range=[0, 100]), "yaxis": axis("")}
    return Picture(
        "parts",
        "Where the time goes",
        " ".join(said) or "No step was recorded.",
        ("steps", "part", "ms per step", "% of the step"),
        rows,
        data,
        layout,
        "Host is what no operation has: Python, torch, and the system between operations.",
        height=280,
    )


def _mean(sums: StepSums, kind: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    mean: np.ndarray[tuple[int], np.dtype[np.float64]] = sums.parts_us[sums.of_kind(kind)].mean(axis=0)
    return mean if mean.sum() > 0 else mean + np.finfo(np.float64).tiny


def layers(sums: StepSums, kind: str) -> Picture:
    """Draw the mean time of each layer of "decode" or "prefill" steps."""
    by_layer = sums.layers_us[kind]
    shown = [index for index in range(len(PARTS)) if by_layer[index].any()]
    total = by_layer.sum(axis=0)
    name, title = f"layers-{kind}", f"Time per layer: {_TITLES[kind].lower()}"
    if not shown:
        return Picture(name, title, "No such step was recorded with times of layers.")
    numbered = list(range(by_layer.shape[1]))
    data = [
        bars(
            part_name(PARTS[index]),
            numbered,
            numbers(by_layer[index]),
            PART_COLORS[PARTS[index]],
            hovertemplate="layer %{x}: %{y} µs",
        )
        for index in shown
    ]
    slowest = int(total.argmax())
    text = (
        f"A layer takes {number(float(np.median(total)), 'µs')} per step in the median; the slowest is layer {slowest} "
        f"with {number(float(total[slowest]), 'µs')}."
    )
    rows = [
        (str(layer), *(number(float(by_layer[index, layer])) for index in shown), number(float(total[layer])))
        for layer in numbered
    ]
    head = ("layer", *(f"{part_name(PARTS[index])} µs" for index in shown), "all µs")
    layout = {"barmode": "stack", "bargap": 0.1, "xaxis": axis("layer"), "yaxis": axis("µs per step")}
    return Picture(name, title, text, head, rows, data, layout)


def bandwidth(sums: StepSums, meta: Meta) -> Picture:
    """Draw GB/s of each part beside what the machine's memory gave when it was measured."""
    rates = {kind: sums.gbps(kind) for kind in _KINDS}
    shown = [i for i in range(len(PARTS)) if any(not np.isnan(rate[i]) for rate in rates.values())]
    title = "Bytes per second of each part"
    if not shown:
        return Picture("bandwidth", title, "No part said how many bytes it read.")
    names = [part_name(PARTS[index]) for index in shown]
    colors = {"decode": "#2f9e6e", "prefill": "#4e79a7"}
    data = [
        bars(kind, names, numbers(rates[kind][shown]), colors[kind], hovertemplate="%{x}: %{y} GB/s") for kind in _KINDS
    ]
    limits = [("CPU memory", meta.machine.memory_gbps)]
    limits += [(f"memory of GPU {index}", gpu.memory_gbps) for index, gpu in enumerate(meta.machine.gpus)]
    known = [(name, limit) for name, limit in limits if limit]
    data += [
        line(f"{name}, measured", names, [limit] * len(names), "#e15759", mode="lines+markers", line={"dash": "dash"})
        for name, limit in known
    ]
    experts = rates["decode"][PARTS.index("experts")]
    limit = meta.machine.memory_gbps
    text = "GB/s of weights and cache that each part reads while it computes."
    if limit and not np.isnan(experts):
        text += f" In decode the experts read {number(experts, 'GB/s')}: {number(100 * experts / limit, '%')} of what "
        text += f"memory gave when it was measured ({number(limit, 'GB/s')})."
    if not known:
        text += " The machine's limit was not measured."
    rows = [
        (name, *(number(float(rates[kind][index])) for kind in _KINDS))
        for name, index in zip(names, shown, strict=True)
    ]
    rows += [(f"{name}, measured", number(limit), number(limit)) for name, limit in known]
    note = "A part well below the line in decode computes, or waits; one above it reads from the processor's caches."
    layout = {"barmode": "group", "yaxis": axis("GB/s", rangemode="tozero"), "xaxis": axis("")}
    return Picture("bandwidth", title, text, ("part", "decode GB/s", "prefill GB/s"), rows, data, layout, note)


def batches(sums: StepSums) -> Picture:
    """Draw sequences and rows of steps, and requests that wait, over time."""
    title = "Batch and queue over time"
    if not len(sums.t):
        return Picture("batches", title, "No step was recorded.")
    edges, at = seconds_bins(sums.t)
    count = np.bincount(at, minlength=len(edges) - 1)
    used = np.flatnonzero(count)
    waiting, has_queue = np.nan_to_num(sums.waiting), not np.isnan(sums.waiting).all()
    means = {
        "sequences": np.bincount(at, sums.seqs, minlength=len(count))[used] / count[used],
        "rows": np.bincount(at, sums.rows, minlength=len(count))[used] / count[used],
    }
    if has_queue:
        means["waiting"] = np.bincount(at, waiting, minlength=len(count))[used] / count[used]
    middle = (edges[:-1] + edges[1:])[used] / 2
    colors = {"sequences": "#4e79a7", "rows": "#2f9e6e", "waiting": "#e15759"}
    data = [
        line(name, numbers(middle), numbers(means[name]), colors[name], **({"yaxis": "y2"} if name == "rows" else {}))
        for name in means
    ]
    text = (
        f"A step has {number(float(sums.seqs.mean()))} sequences and {number(float(sums.rows.mean()))} rows in the "
        "mean; " + (f"up to {int(waiting.max())} requests waited." if has_queue else "there is no queue.")
    )
    layout = {
        "xaxis": axis("seconds"),
        "yaxis": axis("sequences, waiting", rangemode="tozero"),
        "yaxis2": axis("rows", overlaying="y", side="right", rangemode="tozero", showgrid=False, tickmode="auto"),
        "hovermode": "x unified",
    }
    columns = [middle, *means.values()]
    rows = [tuple(number(float(column[row])) for column in columns) for row in range(len(used))]
    return Picture("batches", title, text, ("seconds", *means), rows, data, layout, "Means over spans of time.")


def slowest(sums: StepSums, slow: list[SlowStep]) -> Picture:
    """Draw steps over time, and list which of them took longest beyond the usual."""
    title = "Slowest steps, and why"
    if not len(sums.t):
        return Picture("slowest", title, "No step was recorded.")
    edges, at = seconds_bins(sums.t)
    most = np.zeros(len(edges) - 1)
    np.maximum.at(most, at, sums.ms)
    used = np.flatnonzero(most)
    middle = (edges[:-1] + edges[1:])[used] / 2
    data = [
        line("slowest of each span", numbers(middle), numbers(most[used]), "#4e79a7"),
        {
            "type": "scatter",
            "mode": "markers",
            "name": "listed below",
            "x": numbers([one.t for one in slow]),
            "y": numbers([one.ms for one in slow]),
            "text": [f"step {one.step}: {part_name(one.part)}" for one in slow],
            "marker": {"color": "#e15759", "size": 9},
        },
    ]
    text = "No step took longer than others of its size."
    if slow:
        first = slow[0]
        text = (
            f"The worst is step {first.step}: {number(first.ms, 'ms')} where {number(first.usual_ms, 'ms')} are usual, "
            f"of which {number(first.part_excess_ms, 'ms')} in {part_name(first.part)}."
        )
    rows = [
        (
            str(one.step),
            number(one.t),
            number(one.ms),
            number(one.usual_ms),
            str(one.rows),
            f"{part_name(one.part)} +{number(one.part_excess_ms, 'ms')}",
            "; ".join(one.why) or "nothing that was recorded",
        )
        for one in slow
    ]
    head = ("step", "at s", "ms", "usual ms", "rows", "most of it", "what was different")
    layout = {"xaxis": axis("seconds"), "yaxis": axis("ms", rangemode="tozero")}
    note = "Usual is the median of steps with as many rows, or of all steps of the kind where few have as many."
    return Picture("slowest", title, text, head, rows, data, layout, note, is_open=True)
