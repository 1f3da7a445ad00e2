"""A section of the page: a picture as plotly's JSON has it, what it shows in words, its numbers as a table.

Colours that depend on the theme are set by page.js; those here can be seen on white and on black.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PART_COLORS", "Picture", "Row", "axis", "bars", "line", "number", "numbers", "part_name", "seconds_bins"]

Row = Sequence[str]

PART_COLORS = {
    "other": "#8a8f98",
    "norm": "#b07aa1",
    "linear": "#4e79a7",
    "attention": "#f28e2b",
    "recurrent": "#ef5fa7",
    "router": "#d4a72c",
    "experts": "#2f9e6e",
    "shared_experts": "#86b85a",
    "mlp": "#6fb1a0",
    "embedding": "#a58f7c",
    "lm_head": "#c96f6f",
    "sampling": "#e377a2",
    "wait_cpu": "#e15759",
    "copy": "#7f6fd0",
    "wait_disk": "#a0522d",
    "tower": "#17a2b8",
    "gpu": "#b8a1cf",
    "host": "#6c7686",
}


@dataclass(frozen=True)
class Picture:
    """A section of the page.

    text: one or two sentences, which are also what a screen reader says instead of the picture.
    """

    name: str
    title: str
    text: str
    head: Row = ()
    rows: Sequence[Row] = ()
    data: Sequence[dict[str, Any]] = ()
    """plotly's traces; none where there is nothing to draw."""
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    height: int = 340
    is_open: bool = False
    """Whether its table is the point of it."""


def number(value: float, unit: str = "") -> str:
    """Format a number with three significant digits; a dash for NaN. Many ms are said as seconds."""
    if math.isnan(value):
        return "–"
    if unit == "ms" and abs(value) >= 10_000:
        value, unit = value / 1e3, "s"
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}" + (f"\u00a0{unit}" if unit else "")


def numbers(values: npt.ArrayLike) -> list[Any]:
    """Return values as plotly takes them: five significant digits, None for NaN. Nested as the array is."""
    array = np.asarray(values, np.float64)
    if array.ndim > 1:
        return [numbers(row) for row in array]
    return [None if math.isnan(value) else float(f"{value:.5g}") for value in array.tolist()]


def part_name(part: str) -> str:
    """Return the name of a part of a step as people say it: "wait for CPU" for "wait_cpu"."""
    return {
        "wait_cpu": "wait for CPU",
        "wait_disk": "wait for disk",
        "lm_head": "LM head",
        "tower": "tower for pictures",
        "gpu": "GPU, not timed by part",
    }.get(part, part.replace("_", " "))


def axis(title: str, **options: Any) -> dict[str, Any]:
    """Return one axis of plotly's layout."""
    return {"title": {"text": title}, "automargin": True, **options}


def bars(name: str, x: Iterable[Any], y: Iterable[Any], color: str, **options: Any) -> dict[str, Any]:
    """Return a plotly trace of bars."""
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), "marker": {"color": color}, **options}


def line(name: str, x: Iterable[Any], y: Iterable[Any], color: str, **options: Any) -> dict[str, Any]:
    """Return a plotly trace of a line."""
    style = {"color": color, "width": 2, **options.pop("line", {})}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": style, **options}


def seconds_bins(t: npt.NDArray[np.float64], most: int = 300) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return edges of at most `most` equal spans of time that cover `t`, and the span of each value. t is not empty."""
    count = max(1, min(most, len(t)))
    begin, end = float(t.min()), float(t.max())
    edges = np.linspace(begin, end if end > begin else begin + 1e-6, count + 1)
    return edges, np.clip(np.searchsorted(edges, t, side="right") - 1, 0, count - 1)
