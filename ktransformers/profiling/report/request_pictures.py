"""Pictures of latencies: until the first token, and from one token to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ktransformers.profiling.report.pictures import Picture, axis, bars, number, numbers
from ktransformers.profiling.summary import Quantiles

__all__ = ["distribution"]

_TITLES = {"ttft": "Time to first token", "itl": "Time from token to token"}
_BINS = 60


def distribution(name: str, values: npt.NDArray[np.float64]) -> Picture:
    """Draw a histogram of "ttft" or "itl", in milliseconds, with its quantiles."""
    title = _TITLES[name]
    known = values[~np.isnan(values)]
    if not len(known):
        return Picture(name, title, "No such token was recorded.")
    found = Quantiles.of(known)
    # The few above the last percentile would press all others into the first bars.
    most = min(float(known.max()), found.p99 * 1.5)
    counts, edges = np.histogram(known[known <= most], bins=_BINS)
    beyond = int((known > most).sum())
    middle, width = (edges[:-1] + edges[1:]) / 2, float(edges[1] - edges[0])
    color = {"ttft": "#f28e2b", "itl": "#4e79a7"}[name]
    data = [bars(title, numbers(middle), counts.tolist(), color, width=width, hovertemplate="%{x} ms: %{y}")]
    marks = {"p50": found.p50, "p90": found.p90, "p99": found.p99}
    layout: dict[str, Any] = {
        "xaxis": axis("ms", rangemode="tozero"),
        "yaxis": axis("tokens" if name == "itl" else "requests"),
        "showlegend": False,
        "bargap": 0.05,
        "shapes": [_mark(value) for value in marks.values()],
        "annotations": [_label(text, value, row, most) for row, (text, value) in enumerate(marks.items())],
    }
    said = ", ".join(f"{text} {number(value, 'ms')}" for text, value in marks.items())
    text = f"{said}; mean {number(found.mean, 'ms')} of {found.count:,}."
    if beyond:
        text += f" {beyond:,} above {number(most, 'ms')} are not drawn."
    rows = [(text, number(value)) for text, value in {**marks, "mean": found.mean, "max": float(known.max())}.items()]
    rows += [
        (f"{number(float(begin))} to {number(float(end))}", f"{count:,} counted")
        for begin, end, count in zip(edges[:-1], edges[1:], counts.tolist(), strict=True)
        if count
    ]
    return Picture(name, title, text, ("what", "ms"), rows, data, layout, height=280)


def _mark(value: float) -> dict[str, Any]:
    line = {"dash": "dot", "width": 1.5}
    return {"type": "line", "x0": value, "x1": value, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _label(text: str, value: float, row: int, most: float) -> dict[str, Any]:
    """Each in a line of its own, so that near ones do not cover each other, and towards the middle of the picture."""
    side = "right" if value > 0.6 * most else "left"
    place = {"x": value, "y": 1 - 0.09 * row, "yref": "paper", "xanchor": side, "yanchor": "top"}
    return {"text": f" {text} {number(value, 'ms')} ", "showarrow": False, **place}
