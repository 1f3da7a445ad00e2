"""The page of a profile: collects the pictures, checks them with plotly, writes one HTML file that loads nothing.

A policy in the page's head lets its two scripts run by their hashes and forbids everything else, so that no name in a
profile can become code, and nothing can be asked of a network. All text comes through jinja2, which escapes it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from ktransformers.errors import ConfigError
from ktransformers.profiling.cache_simulation import simulate
from ktransformers.profiling.meta import Meta
from ktransformers.profiling.report import expert_pictures, request_pictures, step_pictures
from ktransformers.profiling.report.pictures import Picture, number
from ktransformers.profiling.summary import Quantiles, StepSums, expert_use, latencies, slow_steps, step_sums
from ktransformers.profiling.tables import Profile

__all__ = ["clean", "facts", "render", "script_of_plotly", "write_report"]

_FOLDER = Path(__file__).parent
_LONGEST = 200


def write_report(profile: Profile, path: Path) -> None:
    """Write the page of a profile. Raises ConfigError when plotly is missing, before anything is read."""
    plotly = script_of_plotly()
    sums, use, found = step_sums(profile), expert_use(profile), latencies(profile)
    pictures = [
        step_pictures.parts(sums),
        step_pictures.layers(sums, "decode"),
        step_pictures.layers(sums, "prefill"),
        step_pictures.slowest(sums, slow_steps(profile, sums, use)),
        step_pictures.bandwidth(sums, profile.meta),
        request_pictures.distribution("ttft", found["ttft"]),
        request_pictures.distribution("itl", found["itl"]),
        step_pictures.batches(sums),
        expert_pictures.heat_map(use),
        expert_pictures.cache(simulate(profile), profile.meta),
    ]
    title = f"Profile of {clean(profile.meta.model.name or 'a model')}"
    tiles = _tiles(profile, sums, {name: Quantiles.of(values) for name, values in found.items()})
    path.write_text(render(title, facts(profile.meta), tiles, pictures, plotly), encoding="utf-8")


def script_of_plotly() -> str:
    """Return the text of plotly.js. Raises ConfigError when it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        text = "the pictures need plotly, which is not installed: pip install plotly (or ktransformers-engine[profile])"
        raise ConfigError(text) from None
    return str(get_plotlyjs())


def render(
    title: str,
    facts: Sequence[tuple[str, str]],
    tiles: Sequence[tuple[str, str]],
    pictures: Sequence[Picture],
    plotly: str,
) -> str:
    """Return the page's HTML."""
    script = (_FOLDER / "page.js").read_text("utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        title=title,
        facts=facts,
        tiles=tiles,
        pictures=pictures,
        policy=_policy(plotly, script),
        style=(_FOLDER / "page.css").read_text("utf-8"),
        plotly=plotly,
        script=script,
        figures=_json({picture.name: _figure(picture) for picture in pictures if picture.data}),
    )


def _figure(picture: Picture) -> dict[str, Any]:
    """As plotly checked it: an attribute that there is not is an error here, not an empty picture there."""
    from plotly import graph_objects

    layout = {**picture.layout, "height": picture.height, "template": graph_objects.layout.Template()}
    figure = graph_objects.Figure(data=list(picture.data), layout=layout).to_dict()
    del figure["layout"]["template"]
    return dict(figure)


def _json(value: object) -> str:
    """To stand inside <script>: no `<` that could end it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    allowed = f"script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def clean(text: str) -> str:
    """Return a text of a profile as one line of bounded length, without characters that nobody sees."""
    shown = "".join(letter if unicodedata.category(letter)[0] != "C" else " " for letter in text[: 4 * _LONGEST])
    shown = " ".join(shown.split())
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def facts(meta: Meta) -> list[tuple[str, str]]:
    """Return what ran where, as rows of names and values."""
    model, machine = meta.model, meta.machine
    gpus = ", ".join(gpu.name or "unnamed" for gpu in machine.gpus) or "none"
    layers = f"{model.num_layers} layers, {model.num_experts} experts, {model.top_k} per token"
    limit = f", {number(machine.memory_gbps, 'GB/s')}" if machine.memory_gbps else ""
    found = {
        "model": f"{model.name} ({model.architecture or 'unknown architecture'}): {layers}",
        "began": f"{datetime.fromtimestamp(meta.began_unix_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC",
        "processor": f"{machine.cpu}, {machine.num_threads} threads, {machine.isa}{limit}",
        "GPUs": gpus,
        "backend": f"{meta.backend}, ktransformers {meta.version}",
        "command": " ".join(meta.command),
    }
    lost = {name: count for name, count in meta.dropped.items() if count}
    if lost:
        said = ", ".join(f"{count:,} {name}" for name, count in lost.items())
        found["lost"] = f"{said.replace('_', ' ')}; figures are of what is there"
    if meta.overlaps:
        found["faults"] = f"{meta.overlaps:,} steps whose parts took longer than the step itself"
    return [(name, clean(value)) for name, value in found.items()]


def _tiles(profile: Profile, sums: StepSums, found: dict[str, Quantiles]) -> list[tuple[str, str]]:
    """The figures that people look for first."""
    num_tokens = len(profile.tokens)
    seconds = float(sums.ms.sum()) / 1e3
    return [
        ("tokens", f"{num_tokens:,}"),
        ("requests that ended", f"{len(profile.requests):,}"),
        ("tokens/s while steps ran", number(num_tokens / seconds if seconds else float("nan"))),
        ("time to first token, p50", number(found["ttft"].p50, "ms")),
        ("token to token, p50", number(found["itl"].p50, "ms")),
        ("token to token, p99", number(found["itl"].p99, "ms")),
        *_stored_tiles(profile),
    ]


def _stored_tiles(profile: Profile) -> list[tuple[str, str]]:
    """Of experts in files, and of rows of tables, where there are any."""
    tiles = list[tuple[str, str]]()
    for of, what in (("stored", "experts"), ("stored_rows", "rows of tables")):
        columns = profile.steps.read(*(f"{of}_{name}" for name in ("hits", "misses", "bytes", "wait_us")))
        hits, misses, nbytes, micros = (float(np.nansum(columns[name])) for name in columns)
        if hits + misses:
            tiles += [
                (f"{what} found in RAM", number(100 * hits / (hits + misses), "%")),
                ("of them read from the disk", number(nbytes / 1e9, "GB")),
                ("waited for the disk", number(micros / 1e6, "s")),
            ]
    failed = float(np.nansum(profile.steps.read("failed")["failed"]))
    return [*tiles, ("steps that failed", f"{failed:,.0f}")] if failed else tiles
