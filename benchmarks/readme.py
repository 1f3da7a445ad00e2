"""Writes the figures in README.md from benchmarks/results: what it says first, a table of machines, the kernels.

And the table of all measured models in docs/benchmarks.md, and docs/images/roofline.svg, which draws those kernels.

python -m benchmarks.readme        # or make readme

The newest run of a file counts, its last line. A file of whole models is called KIND-MODEL-Nlayers-PLACE.jsonl: KIND is
`offline` or `model`, N how many layers were measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.roofline.draw import draw_recorded

__all__ = ["Run", "chosen", "headline", "kernels_text", "page_with", "renewed", "runs_in", "table", "whole_table"]

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
WHOLE_PAGE = ROOT / "docs" / "benchmarks.md"
HEADLINE_GPU, HEADLINE_CPU = "offline-qwen3.6-35b-40layers-4gb-h200", "model-qwen3-30b-8layers-xeon-amx"
KERNELS = "kernels_moe-xeon-amx"
CHOSEN = (
    "offline-qwen3-30b-48layers-cpu-xeon-amx",
    "offline-qwen3-30b-48layers-4gb-h200",
    "offline-qwen3-30b-48layers-vram-h200",
    HEADLINE_CPU,
    "model-qwen3-30b-8layers-epyc-avx2",
    HEADLINE_GPU,
    "offline-gpt-oss-20b-24layers-4gb-h200",
    "offline-deepseek-v3-7layers-8gb-h200",
)
"""The rows of README.md, by file: each way to divide a model between CPU and GPU, and the runs of the headline."""
PICTURE = ROOT / "docs" / "images" / "roofline.svg"
PEER = "llama.cpp"
MODELS = {
    "qwen3-30b": ("Qwen3-30B-A3B", 48),
    "qwen3.6-35b": ("Qwen3.6-35B-A3B", 40),
    "qwen3-coder-next": ("Qwen3-Coder-Next", 48),
    "gpt-oss-20b": ("gpt-oss-20b", 24),
    "deepseek-v3": ("DeepSeek-V3", 61),
}
"""By its name in files: its own, and its layers. The table has them in this order."""

COLUMNS = (("prefill", 512), ("prefill", 2048), ("decode", 1), ("decode", 4), ("decode", 16))
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A row of the table. rates: tokens/s by phase and size, ours and llama.cpp's (None where it was not measured)."""

    file: str
    model: str
    layers: int
    machine: Record
    rates: dict[tuple[str, int], tuple[float, float | None]]
    vram_gb: float = 0.0
    on_gpu: float = 0.0
    settings: str = ""


def last_record(path: Path) -> Record:
    """The newest run in a file."""
    found: Record = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    return found


def run_of(path: Path) -> Run:
    """Raises ValueError that says how to call a file, or that a model is not in MODELS."""
    match = re.match(r"(?P<kind>offline|model)-(?P<model>.+?)-(?P<layers>\d+)layers-", path.name)
    if match is None:
        raise ValueError(f"{path.name}: call it KIND-MODEL-Nlayers-PLACE.jsonl, as the others are")
    if match["model"] not in MODELS:
        raise ValueError(f"{path.name}: add {match['model']}, its name and its layers to MODELS of {__name__}")
    record, layers = last_record(path), int(match["layers"])
    if match["kind"] == "model":
        rates = {
            (row["phase"], row["size"]): (row["tokens_s"], (row.get("peer_tokens_s") or {}).get(PEER))
            for row in record["rows"]
        }
        return Run(path.stem, match["model"], layers, record["machine"], rates)
    rates = {(row["phase"], row["tokens"]): (row["tokens_per_s"], row.get(PEER)) for row in record["rows"]}
    weights = record["model"]["weight_bytes"]
    on_gpu = sum(size for device, size in weights.items() if device != "cpu") / sum(weights.values())
    chosen = record["settings"]  # older records have neither of these
    words = [
        *(["skewed routing"] if chosen.get("routing", "even") != "even" else []),
        *(["hot experts"] if chosen.get("hot_experts", "off") != "off" else []),
    ]
    settings = ", ".join(words)
    vram = record["memory"]["vram_peak_gb"]
    return Run(path.stem, match["model"], layers, record["machine"], rates, vram, on_gpu, settings)


def runs_in(folder: Path) -> list[Run]:
    """One a file, by model, then from no weights on a GPU to all of them."""
    paths = [path for kind in ("offline", "model") for path in folder.glob(f"{kind}-*.jsonl")]
    models = list(MODELS)
    return sorted(map(run_of, paths), key=lambda run: (models.index(run.model), -run.layers, run.on_gpu, run.file))


def _machine(run: Run) -> str:
    machine = run.machine
    names = [gpu["name"].removeprefix("NVIDIA ") for gpu in machine.get("gpus", [])] if run.on_gpu else []
    count = f"{len(names)} x " if len(names) > 1 else ""
    cpu = next((word for word in ("Xeon", "EPYC", "Ryzen") if word in machine["cpu"]), machine["cpu"])
    parts = [
        *([f"{count}{names[0]}"] if names else []),
        f"{machine.get('cores', machine['threads'])} {cpu} cores ({machine['isa'].split('_')[0]})",
        f"{machine['read_bandwidth_gb_s']:.0f} GB/s",
    ]
    return ", ".join(parts)


def _model(run: Run) -> str:
    name, layers = MODELS[run.model]
    cut = f"{run.layers} of {layers} layers" if run.layers < layers else ""
    return ", ".join(filter(None, (name, cut, run.settings)))


def _rate(value: float) -> str:
    return f"{value:,.0f}"


def _cell(pair: tuple[float, float | None] | None) -> str:
    if pair is None:
        return "-"
    ours, peer = pair
    return _rate(ours) if peer is None else f"{_rate(ours)} ({_rate(peer)})"


def table(runs: Iterable[Run]) -> str:
    """A row a run, tokens/s."""
    head = "| machine | model | video memory | prompt of 512 | 2,048 | one answer | 4 at once | 16 |"
    lines = [head, "|" + 8 * "---|"]
    for run in runs:
        vram = f"{run.vram_gb:.1f} GB ({run.on_gpu:.0%} of the weights)" if run.on_gpu else "none"
        cells = [_machine(run), _model(run), vram, *(_cell(run.rates.get(column)) for column in COLUMNS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def chosen(runs: Iterable[Run]) -> list[Run]:
    """The runs that README.md shows, in the table's order. Raises ValueError that names a missing file of CHOSEN."""
    runs = list(runs)
    missing = set(CHOSEN) - {run.file for run in runs}
    if missing:
        raise ValueError(f"no results for {', '.join(sorted(missing))}: measure it, or take it out of CHOSEN")
    return [run for run in runs if run.file in CHOSEN]


def headline(runs: Iterable[Run]) -> str:
    """What the page says first. Raises ValueError when llama.cpp was not measured in the run with a GPU."""
    by_file = {run.file: run for run in runs}
    hybrid, cpu = by_file[HEADLINE_GPU], by_file[HEADLINE_CPU]
    ratios = [ours / peer for (phase, _), (ours, peer) in cpu.rates.items() if phase == "prefill" and peer is not None]
    (decode, decode_peer), (prefill, prefill_peer) = hybrid.rates["decode", 1], hybrid.rates["prefill", 2048]
    if decode_peer is None or prefill_peer is None:
        raise ValueError(
            f"the newest run of {HEADLINE_GPU} lacks llama.cpp: python -m benchmarks.offline --peer llama.cpp"
        )
    return (
        f"**Run Mixture-of-Experts models that do not fit into your GPU:** {MODELS[hybrid.model][0]}'s shape in Q4_K_M "
        f"writes {_rate(decode)} tokens/s and reads {_rate(prefill)}\nwith {hybrid.vram_gb:.1f} GB of video memory, "
        f"{decode / decode_peer:.1f} and {prefill / prefill_peer:.1f} times as fast as llama.cpp beside it; on "
        f"{cpu.machine['threads']} cores alone, prompts are read {min(ratios):.1f} to {max(ratios):.1f} times as fast."
    )


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def kernels_text(record: Record) -> str:
    """Our time over kt-kernel's, of a record of benchmarks.kernels. Raises ValueError without that peer's figures."""
    shape = record["shape"]
    rows = [row for row in record["rows"] if row["type"] == "q4_k_m"]
    if not rows or not all(row["peer_us"].get("kt-kernel") and row.get("peer_format_us") for row in rows):
        flags = "--types q4_k_m,q8_0 --peer kt-kernel --peer_format amx_int4"
        raise ValueError(f"the newest run of {KERNELS} lacks kt-kernel's figures: python -m benchmarks.kernels {flags}")

    def ratios(time: Callable[[Record], float], low: int, high: int) -> str:
        return _range([row["us"] / time(row) for row in rows if low <= row["tokens"] <= high])

    def same(row: Record) -> float:
        return float(row["peer_us"]["kt-kernel"])

    def own(row: Record) -> float:
        return float(row["peer_format_us"])

    return (
        f"A layer of {shape['experts']} experts of {shape['hidden']} x {shape['width']} in Q4_K_M takes "
        f"{ratios(same, 1, 64)} times what kt-kernel needs at 1 to 64 tokens, at 1,024 tokens\n"
        f"{ratios(same, 1024, 1024)} times; {ratios(own, 1, 64)}, and {ratios(own, 1024, 1024)} times what it needs "
        f"in its own {rows[0]['peer_format']}."
    )


def page_with(parts: dict[str, str], page: str) -> str:
    """The page with other texts between the marks. Raises ValueError where one has none."""
    for name, text in parts.items():
        begin, end = f"<!-- {name}: written by `make readme` -->\n", f"\n<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found or not found_end:
            raise ValueError(f"the page has no marks of {name}: {begin.strip()} ... {end.strip()}")
        page = f"{before}{begin}{text}{end}{after}"
    return page


def renewed(page: str, folder: Path = RESULTS) -> str:
    """README.md with the figures of the results in `folder`."""
    runs = runs_in(folder)
    kernels = kernels_text(last_record(folder / f"{KERNELS}.jsonl"))
    return page_with({"headline": headline(runs), "table": table(chosen(runs)), "kernels": kernels}, page)


def whole_table(page: str, folder: Path = RESULTS) -> str:
    """docs/benchmarks.md with a row for each model that was measured."""
    return page_with({"models": table(runs_in(folder))}, page)


if __name__ == "__main__":
    for page, written in ((PAGE, renewed), (WHOLE_PAGE, whole_table)):
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    draw_recorded([RESULTS / f"{KERNELS}.jsonl"], PICTURE)
