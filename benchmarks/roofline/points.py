"""What a roofline shows: measured kernels, from their records, against what the machine can do at best.

x is operations per byte of the weights that a call touches (a multiplication and an addition are two), y the
operations a second. Bytes that are read at the measured bandwidth are a slope there, products in registers are levels;
no kernel is above both (Williams, Waterman, Patterson: Roofline, 2009). Points come from records of benchmarks.kernels,
benchmarks.gpu.linear and benchmarks.roofline. Knows nothing of pixels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ktransformers.bench.common.report import Column, FigureTable, Record, Row
from ktransformers.errors import ConfigError

__all__ = [
    "OURS",
    "Panel",
    "Point",
    "Roof",
    "Series",
    "cpu_panel",
    "gpu_panel",
    "panels_of",
    "point_rows",
    "records_in",
]

OURS = "ktransformers"
_OURS_BF16 = "ktransformers, bf16 products"
_FORMAT_BITS = {"amx_int4": 4, "amx_int8": 8, "amx_bf16": 16}
"""Bits of a weight in kt-kernel's own formats; their scales, one a row, do not count."""

_PEAKS = (("int8", "int8_peak_top_s"), ("bf16", "bf16_peak_tflop_s"), ("fp32", "fp32_peak_tflop_s"))
_GPU_KINDS = {"linear": "matrix", "moe": "experts"}
_GPU_LINEAR = "qwen3-30b qkv"  # of the matrices: more of them would hide each other

_COLUMNS = (
    Column("engine", 29),
    Column("type", 30),
    Column("tokens", 6),
    Column("us", 10, ".1f"),
    Column("ops_per_byte", 9, ".2f", "ops/byte"),
    Column("top_s", 9, ".3f", "TOP/s"),
    Column("of_roof", 8, ".0%", "of roof"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A measured call of `tokens` rows. ops_per_byte: of the weights touched. top_s: 1e12 operations a second."""

    tokens: int
    us: float
    ops_per_byte: float
    top_s: float


@dataclass(frozen=True, slots=True)
class Series:
    """Calls of one program, or one kind of kernel, on one type of weights."""

    engine: str
    type: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Roof:
    """A level that no product of its kind exceeds, 1e12 operations a second."""

    name: str
    top_s: float


@dataclass(frozen=True, slots=True)
class Panel:
    """What is drawn between two axes. read_gb_s: what the memory's slope is made of."""

    title: str
    read_name: str
    read_gb_s: float
    roofs: tuple[Roof, ...]
    series: tuple[Series, ...]

    def attainable(self, ops_per_byte: float) -> float:
        """1e12 operations a second that memory and the highest level allow."""
        return min(self.read_gb_s * ops_per_byte / 1e3, max(roof.top_s for roof in self.roofs))


def _series(points: Iterable[tuple[str, str, Point]]) -> tuple[Series, ...]:
    """By engine and type, in the order in which they come first; points by tokens."""
    found: dict[tuple[str, str], list[Point]] = {}
    for engine, name, point in points:
        found.setdefault((engine, name), []).append(point)
    return tuple(Series(*key, tuple(sorted(some, key=lambda one: one.tokens))) for key, some in found.items())


def _with_time(point: Point, us: float) -> Point:
    """The same work in other time."""
    return replace(point, us=us, top_s=point.top_s * point.us / us)


def _cpu_points(row: Row, weights: int) -> Iterable[tuple[str, str, Point]]:
    """Of a row of benchmarks.kernels: ours first. weights: of an expert."""
    name, ours = row["type"], Point(row["tokens"], row["us"], 1e3 * row["tflop_s"] / row["gb_s"], row["tflop_s"])
    yield OURS, name, ours
    if row.get("bf16_us"):
        yield _OURS_BF16, name, _with_time(ours, row["bf16_us"])
    for peer, us in row.get("peer_us", {}).items():
        if us:  # it may not have the type
            yield peer, name, _with_time(ours, us)
    if row.get("peer_format_us"):
        own, nbytes = row["peer_format"], row["touched_experts"] * weights * _FORMAT_BITS[row["peer_format"]] / 8
        ops = 1e6 * ours.top_s * ours.us
        yield "kt-kernel", own, replace(_with_time(ours, row["peer_format_us"]), ops_per_byte=ops / nbytes)


def cpu_panel(record: Record) -> Panel:
    """Of a record of benchmarks.kernels. kt-kernel's own format, measured again after each type, is one series."""
    machine, shape = record["machine"], record["shape"]
    roofs = [Roof(f"{name} products", machine[key]) for name, key in _PEAKS if machine.get(key)]
    weights = 3 * shape["hidden"] * shape["width"]
    points: dict[tuple[str, str, int], Point] = {}
    for row in record["rows"]:
        for engine, name, point in _cpu_points(row, weights):
            points.setdefault((engine, name, point.tokens), point)
    return Panel(
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}: a layer of {shape['experts']} experts of "
        f"{shape['hidden']} x {shape['width']}, {shape['top_k']} per token",
        "read bandwidth",
        machine["read_bandwidth_gb_s"],
        tuple(sorted(roofs, key=lambda roof: -roof.top_s)),
        _series((engine, name, point) for (engine, name, _), point in points.items()),
    )


def gpu_panel(record: Record) -> Panel:
    """Of a record of benchmarks.gpu.linear: experts, and one matrix. A line says how many rows are not drawn."""
    machine, rows = record["machine"], record["rows"]
    drawn = [row for row in rows if row["kernel"] == "moe" or (row["kernel"], row["shape"]) == ("linear", _GPU_LINEAR)]
    if len(drawn) < len(rows):
        print(f"of the GPU {len(drawn)} of {len(rows)} rows are drawn: experts, and the matrix {_GPU_LINEAR}")
    points = (
        (
            _GPU_KINDS[row["kernel"]],
            f"{row['shape']} {row['type']}",
            Point(row["tokens"], row["us"], 1e3 * row["tflop_per_s"] / row["gb_per_s"], row["tflop_per_s"]),
        )
        for row in drawn
    )
    return Panel(
        f"{machine['gpus'][0]['name']}: products with quantized weights",
        "copies within it",
        machine["copy_gb_s"],
        (Roof("bf16 products (torch)", machine["matmul_tflop_s"]),),
        _series(points),
    )


def panels_of(cpu: Record | None, gpu: Record | None) -> list[Panel]:
    """The picture's parts, of what there is. Raises ConfigError for a record that lacks what is drawn."""
    try:
        found = [*([] if cpu is None else [cpu_panel(cpu)]), *([] if gpu is None else [gpu_panel(gpu)])]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        text = "a record lacks what the picture needs"
        raise ConfigError(
            f"{text} ({type(error).__name__}: {error}); measure again: python -m benchmarks.roofline"
        ) from error
    return [panel for panel in found if panel.series]


def records_in(paths: Sequence[Path]) -> tuple[Record | None, Record | None]:
    """The last record of a CPU's experts and the last of a GPU's products in files of one JSON record a line.

    Raises ConfigError where a line is no record, and where there is neither.
    """
    cpu, gpu = None, None
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number} is not JSON; record with --json: {error}") from error
            if not isinstance(record, dict) or not isinstance(record.get("rows"), list):
                raise ConfigError(f"{path}:{number} is not a record of a measurement")
            if "copy_gb_s" in record.get("machine", {}):
                gpu = record
            elif "int8_peak_top_s" in record.get("machine", {}) and "experts" in record.get("shape", {}):
                cpu, gpu = record, record.get("gpu") or gpu
    if cpu is None and gpu is None:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"{names}: no record of benchmarks.roofline, kernels or gpu.linear in it")
    return cpu, gpu


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def point_rows(panels: Sequence[Panel]) -> list[Row]:
    """Print a table of all points, each beside what memory and the highest level allow. Returns its rows."""
    table = FigureTable(_COLUMNS)
    for panel in panels:
        for series in panel.series:
            for point in series.points:
                row = {
                    "engine": series.engine,
                    "type": series.type,
                    "tokens": point.tokens,
                    "us": point.us,
                    "ops_per_byte": point.ops_per_byte,
                    "top_s": point.top_s,
                    "of_roof": point.top_s / panel.attainable(point.ops_per_byte),
                }
                table.add(row)
    return table.rows
