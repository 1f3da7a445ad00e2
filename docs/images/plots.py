"""The two plots of speed in the README, drawn from benchmarks/results.

    python docs/images/plots.py        # writes cpu.svg and gpu.svg beside this file; needs matplotlib

Every point is a figure of a run whose machine, settings and command stand in the file that it was read from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Series", "cpu_series", "gpu_series", "last_row", "main"]

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"

OURS, PEER, BOUND = "#0f766e", "#94a3b8", "#334155"
SHADES = ("#5eb5a6", "#0f766e", "#134e4a")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """Tokens/s over sizes: prompt lengths of prefill, sequences of decode."""

    label: str
    sizes: tuple[int, ...]
    tokens_per_s: tuple[float, ...]


def last_row(name: str) -> Row:
    """The newest run in a file of results."""
    return json.loads((RESULTS / name).read_text().splitlines()[-1])


def cpu_series(run: Row, phase: str) -> list[Series]:
    """Ours, llama.cpp and the memory's bound, from `benchmarks.model --peer llama.cpp`. Some sizes have no bound."""
    rows = [row for row in run["rows"] if row["phase"] == phase]
    sizes = tuple(row["size"] for row in rows)
    bounded = [row for row in rows if row["bound_tokens_s"] is not None]
    return [
        Series("ktransformers", sizes, tuple(row["tokens_s"] for row in rows)),
        Series("llama.cpp", sizes, tuple(row["peer_tokens_s"]["llama.cpp"] for row in rows)),
        Series(
            "bound by memory",
            tuple(row["size"] for row in bounded),
            tuple(row["bound_tokens_s"] for row in bounded),
        ),
    ]


def gpu_series(runs: dict[str, Row], phase: str) -> list[Series]:
    """One series a run of `bench offline`, labelled by the video memory that it took."""
    found = []
    for label, run in runs.items():
        rows = [row for row in run["rows"] if row["phase"] == phase]
        sizes, rates = (tuple(row[name] for row in rows) for name in ("tokens", "tokens_per_s"))
        found.append(Series(f"{label}, {run['memory']['vram_peak_gb']:.1f} GB of VRAM", sizes, rates))
    return found


def _new_figure(title: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"svg.hashsalt": "ktransformers", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    )
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left", weight="bold")
    return figure, axes


def _style(axis: Any, title: str, sizes: tuple[int, ...], x_label: str) -> None:
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel(x_label)
    axis.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axis.spines[["top", "right"]].set_visible(False)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.grid(axis="y", color="#e2e8f0", linewidth=0.7)
    axis.set_axisbelow(True)


def _draw_bars(axis: Any, series: list[Series], title: str, x_label: str) -> None:
    """Ours beside the peer's; the bound as a line over the bars where it is near enough to be read."""
    ours, peer, bound = series
    is_decode = ours.sizes[0] == 1  # of prefill it is the bound of arithmetic that counts
    for offset, one, color in ((-0.2, ours, OURS), (0.2, peer, PEER)):
        places = [index + offset for index in range(len(one.sizes))]
        bars = axis.bar(places, one.tokens_per_s, 0.38, color=color, label=one.label)
        axis.bar_label(bars, [f"{rate:,.0f}" for rate in one.tokens_per_s], fontsize=7, padding=1)
    near = [rate for rate in bound.tokens_per_s if rate <= 1.5 * max(ours.tokens_per_s)] if is_decode else []
    axis.set_ylim(0, 1.15 * max(*ours.tokens_per_s, *near))
    for size, rate in zip(bound.sizes, bound.tokens_per_s, strict=True):
        if rate in near:
            place = ours.sizes.index(size)
            axis.hlines(rate, place - 0.4, place + 0.4, color=BOUND, linestyles="dashed", linewidth=1)
            axis.annotate("memory bound", (place, rate), fontsize=7, ha="center", va="bottom", color=BOUND)
    _style(axis, title, ours.sizes, x_label)


def _draw_lines(axis: Any, series: list[Series], title: str, x_label: str) -> None:
    sizes = tuple(sorted({size for one in series for size in one.sizes}))
    for one, color in zip(series, SHADES, strict=True):
        axis.plot([sizes.index(size) for size in one.sizes], one.tokens_per_s, "o-", color=color, label=one.label)
        axis.annotate(
            f"{one.tokens_per_s[-1]:,.0f}",
            (sizes.index(one.sizes[-1]), one.tokens_per_s[-1]),
            textcoords="offset points",
            xytext=(0, 6),
            fontsize=7,
            ha="center",
        )
    axis.set_yscale("log")
    _style(axis, title, sizes, x_label)
    rates = [rate for one in series for rate in one.tokens_per_s]
    axis.set_ylim(min(rates) / 1.5, max(rates) * 2.2)
    ticks = [scale * 10**power for power in range(1, 6) for scale in (1, 2, 5)]
    axis.set_yticks([tick for tick in ticks if min(rates) / 1.5 <= tick <= max(rates) * 2.2])
    axis.minorticks_off()


def _draw(title: str, panels: list[tuple[Callable[..., None], list[Series], str, str]], path: Path) -> None:
    figure, axes = _new_figure(title)
    for axis, (draw, series, name, x_label) in zip(axes, panels, strict=True):
        draw(axis, series, name, x_label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    axes[0].set_ylabel("tokens/s")
    figure.savefig(path, metadata={"Date": None})
    print(path.name)


def main() -> None:
    """Draw both."""
    cpu = last_row("model-qwen3-30b-8layers-xeon-amx.jsonl")
    machine = cpu["machine"]
    _draw(
        f"Qwen3-30B-A3B's shape, 8 layers, Q4_K_M, on {machine['threads']} cores alone "
        f"({machine['read_bandwidth_gb_s']:.0f} GB/s)",
        [
            (_draw_bars, cpu_series(cpu, "prefill"), "Reading a prompt", "tokens of the prompt"),
            (_draw_bars, cpu_series(cpu, "decode"), "Writing", "sequences at once"),
        ],
        HERE / "cpu.svg",
    )
    runs = {
        "experts in RAM": last_row("offline-qwen3-30b-48layers-4gb-h200.jsonl"),
        "21 of 48 layers' experts on the GPU": last_row("offline-qwen3-30b-48layers-10gb-h200.jsonl"),
        "all on the GPU": last_row("offline-qwen3-30b-48layers-vram-h200.jsonl"),
    }
    _draw(
        "Qwen3-30B-A3B's shape, 48 layers, Q4_K_M, one H200 and 16 cores",
        [
            (_draw_lines, gpu_series(runs, "prefill"), "Reading a prompt", "tokens of the prompt"),
            (_draw_lines, gpu_series(runs, "decode"), "Writing", "sequences at once"),
        ],
        HERE / "gpu.svg",
    )


if __name__ == "__main__":
    main()
