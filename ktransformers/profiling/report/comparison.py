"""`ktransformers profile compare -o`: the comparison of two profiles as a page."""

from __future__ import annotations

import math
from pathlib import Path

from ktransformers.profiling.compare import ComparedFigure, Comparison
from ktransformers.profiling.report.page import clean, facts, render, script_of_plotly
from ktransformers.profiling.report.pictures import Picture, axis, number, numbers
from ktransformers.profiling.tables import Profile

__all__ = ["write_comparison"]


def write_comparison(a: Profile, b: Profile, found: Comparison, path: Path) -> None:
    """Write the page that compares two profiles. Raises ConfigError when plotly is missing."""
    plotly = script_of_plotly()
    known = [*(("differs", clean(text)) for text in found.differences)]
    known += [(f"{name}: {what}", value) for name, one in (("A", a), ("B", b)) for what, value in facts(one.meta)]
    path.write_text(render("Two profiles compared", known, [], [_ratios(found)], plotly), encoding="utf-8")


def _ratios(found: Comparison) -> Picture:
    shown = [row for row in found.rows if not math.isnan(row.ratio)][::-1]  # plotly draws from below
    bars = {
        "type": "scatter",
        "mode": "markers",
        "x": numbers([row.ratio for row in shown]),
        "y": [row.name for row in shown],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "color": "#8a8f98",
            "array": [_reach(row.high - row.ratio) for row in shown],
            "arrayminus": [_reach(row.ratio - row.low) for row in shown],
        },
        "marker": {"size": 9, "color": ["#e15759" if row.is_sure else "#8a8f98" for row in shown]},
        "hovertemplate": "%{y}: %{x}<extra></extra>",
    }
    sure = sum(row.is_sure for row in shown)
    text = f"{sure} of {len(shown)} figures differ for sure: the 95 % interval of their ratio does not hold 1."
    rows = [
        (row.name, number(row.a, row.unit), number(row.b, row.unit), number(row.ratio), interval(row), _verdict(row))
        for row in found.rows
    ]
    line = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dot", "width": 1.5}}
    layout = {"xaxis": axis("B / A", type="log"), "yaxis": axis(""), "showlegend": False, "shapes": [line]}
    head = ("median of", "A", "B", "B / A", "95 % interval", "differs")
    height = 120 + 24 * len(shown)
    return Picture("ratios", "Medians", text, head, rows, [bars] if shown else [], layout, height=height, is_open=True)


def _reach(value: float) -> float:
    return 0.0 if math.isnan(value) else max(0.0, value)


def _verdict(row: ComparedFigure) -> str:
    return "yes" if row.is_sure else "" if math.isnan(row.low) else "not for sure"


def interval(row: ComparedFigure) -> str:
    """Format a figure's interval as people write it; a dash where there is none."""
    return "–" if math.isnan(row.low) else f"{number(row.low)} to {number(row.high)}"
