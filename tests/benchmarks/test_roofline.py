"""The picture of kernels against limits: points from records, their places in the SVG, and the command."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from benchmarks.gpu import linear
from benchmarks.kernels.options import FORMATS
from benchmarks.roofline.__main__ import main
from benchmarks.roofline.picture import MAX_TYPES, Axis, Box, draw, text_box
from benchmarks.roofline.points import Panel, Point, Roof, Series, cpu_panel, gpu_panel, records_in
from ktransformers.errors import ConfigError
from ktransformers.kernels.cpu import limits
from ktransformers.kernels.triton.common import runtime
from ktransformers.kernels.types import QuantType
from tests.benchmarks.test_gpu import MadeUpGpu

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TINY = ["--threads", "1", "--experts", "4", "--top_k", "2", "--hidden", "256", "--width", "256", "--layers", "1"]
TINY += ["--seconds", "0", "--tokens", "1,3"]
SVG = "{http://www.w3.org/2000/svg}"

# 2 experts of 3 x 256 x 512 weights at half a byte, 1 token each: 4 operations a byte.
MACHINE = {"cpu": "made up", "threads": 2, "isa": "avx2", "read_bandwidth_gb_s": 100.0, "int8_peak_top_s": 2.0}
SHAPE = {"experts": 4, "top_k": 2, "hidden": 256, "width": 512, "layers": 1}
WEIGHTS = 3 * 256 * 512
ROW = {"type": "q4_0", "tokens": 1, "us": 10.0, "touched_experts": 2.0, "of_bandwidth": 0.8}
ROW |= {"gb_s": 2 * WEIGHTS / 2 / 10.0 / 1e3, "tflop_s": 2 * 2 * WEIGHTS / 10.0 / 1e6}
CPU = {"machine": MACHINE, "shape": SHAPE, "rows": [ROW]}
GPU = {
    "bench": "gpu_linear",
    "machine": {"gpus": [{"name": "a GPU"}], "copy_gb_s": 1000.0, "matmul_tflop_s": 100.0},
    "rows": [
        {
            "kernel": kernel,
            "shape": shape,
            "type": "Q4_K",
            "tokens": 4,
            "us": 5.0,
            "gb_per_s": 500.0,
            "tflop_per_s": 7.0,
        }
        for kernel, shape in (("linear", "qwen3-30b qkv"), ("linear", "another"), ("moe", "qwen3-30b"), ("align", ""))
    ],
}


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what the machine can do at best."""
    monkeypatch.setattr(limits, "read_bandwidth", partial(limits.read_bandwidth, nbytes=1 << 20, repeats=1))
    for name in ("int8_peak", "fp32_peak", "bf16_peak"):
        monkeypatch.setattr(limits, name, partial(getattr(limits, name), repeats=1))


def written(folder: Path, *records: object, name: str = "some.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text.encode())


def marks(root: ET.Element) -> list[tuple[str, str, int, float, float]]:
    """Engine, type, tokens and place of every point."""
    found = []
    for group in root.iter(f"{SVG}g"):
        for mark in group if group.get("class") == "series" else ():
            if mark.get("data-tokens") is not None:
                x, y = center(mark)
                found.append(
                    (group.get("data-engine", ""), group.get("data-type", ""), int(mark.get("data-tokens", 0)), x, y)
                )
    return found


def center(mark: ET.Element) -> tuple[float, float]:
    if mark.tag == f"{SVG}circle":
        return float(mark.get("cx", "")), float(mark.get("cy", ""))
    corners = [tuple(map(float, one.split(","))) for one in mark.get("points", "").split()]
    return sum(x for x, _ in corners) / len(corners), sum(y for _, y in corners) / len(corners)


def labels(root: ET.Element) -> list[Box]:
    (group,) = [one for one in root.iter(f"{SVG}g") if one.get("class") == "labels"]
    texts = list(group.iter(f"{SVG}text"))
    return [text_box(float(one.get("x", "")), float(one.get("y", "")), one.text or "") for one in texts]


def test_points_of_a_row() -> None:
    """Peers did the same work in their time; kt-kernel's own format has bytes of its own."""
    row = ROW | {"peer_us": {"llama.cpp": 20.0, "kt-kernel": None}, "bf16_us": 5.0}
    row |= {"peer_format": "amx_int8", "peer_format_us": 40.0}
    panel = cpu_panel(CPU | {"rows": [row, row | {"type": "q8_0"}], "machine": MACHINE | {"fp32_peak_tflop_s": 3.0}})
    rate = 2 * 2 * WEIGHTS / 10e-6 / 1e12
    found = {(one.engine, one.type): one.points for one in panel.series}
    want = {
        ("ktransformers", "q4_0"): (10.0, 4.0, rate),
        ("ktransformers, bf16 products", "q4_0"): (5.0, 4.0, 2 * rate),
        ("llama.cpp", "q4_0"): (20.0, 4.0, rate / 2),
        ("kt-kernel", "amx_int8"): (40.0, 2.0, rate / 4),  # two operations for a byte
    }
    for key, (us, ops_per_byte, top_s) in want.items():
        (point,) = found[key]
        assert (point.tokens, point.us) == (1, us)
        assert (point.ops_per_byte, point.top_s) == pytest.approx((ops_per_byte, top_s))
    assert len(panel.series) == 7  # the format once
    assert [(roof.name, roof.top_s) for roof in panel.roofs] == [("fp32 products", 3.0), ("int8 products", 2.0)]
    assert [panel.attainable(x) for x in (4, 100)] == [0.4, 3.0]


def test_every_format_of_the_command_line_can_be_drawn() -> None:
    for name in FORMATS:
        (_, own) = cpu_panel(CPU | {"rows": [ROW | {"peer_format": name, "peer_format_us": 1.0}]}).series
        assert own.points[0].ops_per_byte == pytest.approx(2 / {"4": 0.5, "8": 1, "6": 2}[name[-1]])


def test_points_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    panel = gpu_panel(GPU)
    assert [(one.engine, one.type) for one in panel.series] == [
        ("matrix", "qwen3-30b qkv Q4_K"),
        ("experts", "qwen3-30b Q4_K"),
    ]
    assert panel.series[0].points == (Point(4, 5.0, 14.0, 7.0),)
    assert "2 of 4 rows are drawn" in capsys.readouterr().out


def test_an_axis_is_logarithmic() -> None:
    axis = Axis(1, 1000, 100, 400)
    assert [axis.at(value) for value in (1, 10, 100, 1000)] == pytest.approx([100, 200, 300, 400])
    assert axis.ticks()[0] == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert Axis(1, 1000, 100, 0).ticks()[0] == [1, 10, 100, 1000]
    assert Axis(0.05, 0.5, 0, 100).ticks()[0] == pytest.approx([0.05, 0.1, 0.2, 0.5])


def test_the_picture_has_every_point_in_its_place() -> None:
    """Of a recorded run with two peers and kt-kernel's own format."""
    cpu, _ = records_in([RESULTS / "kernels_moe-xeon-amx.jsonl"])
    assert cpu is not None
    panel = cpu_panel(cpu)
    root = parsed(draw("a <title> & more", [panel]))
    assert root.findtext(f"{SVG}title") == "a <title> & more"
    found = {key: (x, y) for *key, x, y in marks(root) for key in [tuple(key)]}
    points = {(one.engine, one.type, point.tokens): point for one in panel.series for point in one.points}
    assert found.keys() == points.keys()
    keys = list(points)
    for axis, value in ((0, lambda p: p.ops_per_byte), (1, lambda p: -p.top_s)):  # up is less
        ordered = sorted(keys, key=lambda key: value(points[key]))
        places = [found[key][axis] for key in ordered]
        assert all(a <= b + 0.2 for a, b in pairwise(places))  # corners are rounded to 0.1
    (memory,) = [line for line in root.iter(f"{SVG}line") if line.get("class") == "memory"]
    x1, y1, x2, y2 = (float(memory.get(name, "")) for name in ("x1", "y1", "x2", "y2"))
    for key, (x, y) in found.items():
        on_slope = y1 + (x - x1) / (x2 - x1) * (y2 - y1)
        above = math.log(points[key].top_s / (panel.read_gb_s * points[key].ops_per_byte / 1e3))
        assert (y < on_slope) == (above > 0) or abs(above) < 0.02


@pytest.mark.parametrize("types", [1, 3, MAX_TYPES])
def test_labels_do_not_overlap(types: int) -> None:
    """What has no room is counted below the legend."""
    series = [
        Series(engine, f"t{i}", tuple(Point(4**n, 1.0, 3 * 2**n / 1.3**i, rate * 2**n) for n in range(6)))
        for i in range(types)
        for engine, rate in (("ktransformers", 0.3), ("llama.cpp", 0.2))
    ]
    root = parsed(draw("", [Panel("", "read", 100.0, (Roof("int8", 20.0),), tuple(series))]))
    boxes = [Box(one.left + 0.2, one.top + 0.2, one.right - 0.2, one.bottom - 0.2) for one in labels(root)]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    hidden = [int(text.split()[3]) for text in texts if "no room for" in text]
    assert len(boxes) + sum(hidden) == 12 * types
    assert types > 3 or not hidden
    _, _, _, height = map(float, root.get("viewBox", "").split())
    assert all(float(text.get("y", "")) < height for text in root.iter(f"{SVG}text"))


def test_too_many_types_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series = tuple(Series("ktransformers", str(i), (Point(1, 1.0, 1.0, 1.0),)) for i in range(MAX_TYPES + 1))
    with pytest.raises(ConfigError, match=f"at most {MAX_TYPES} types"):
        draw("", [Panel("", "read", 100.0, (Roof("int8", 20.0),), series)])
    types = "q2_k,q3_k,q4_k,q5_k,q6_k,q8_0,q4_0,q4_1,q5_0,q5_1,iq4_nl,iq4_xs,bf16"
    assert main(["-o", str(tmp_path / "a.svg"), *TINY, "--types", types]) == 2
    assert "--types must be at most 12, got 13" in capsys.readouterr().err


def test_records_of_files(tmp_path: Path) -> None:
    """The last of each kind; a roofline's record has both."""
    newer = CPU | {"bench": "kernels", "errors": {}}
    path = written(tmp_path, CPU, GPU, newer)
    assert records_in([path]) == (newer, GPU)
    other = GPU | {"bench": "other"}
    both = written(tmp_path, newer | {"bench": "roofline", "gpu": other}, name="both.jsonl")
    assert records_in([path, both])[1] == other
    assert records_in([both, path])[1] == GPU


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("type us\n", "some.jsonl:1 is not JSON; record with --json"),
        ("[1]\n", "some.jsonl:1 is not a record"),
        ('{"rows": [], "machine": {}}\n', "no record of benchmarks.roofline"),
        (None, "cannot read"),
        (json.dumps(CPU | {"rows": [{"type": "q4_0"}]}), "a record lacks what the picture needs (KeyError: 'tokens')"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.jsonl"
    if text is not None:
        path.write_text(text)
    assert main(["--from", str(path), "-o", str(tmp_path / "a.svg")]) == 2
    assert message in capsys.readouterr().err


def test_from_takes_no_flags_of_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--from", str(written(tmp_path, CPU)), "-o", str(tmp_path / "a.svg")]
    assert main([*args, "--tokens", "4"]) == 2
    assert "leave --tokens out" in capsys.readouterr().err
    assert main(args) == 0
    assert main([*args[:-1], str(tmp_path)]) == 2
    assert "is a folder; name the file to write" in capsys.readouterr().err


def last_json(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_measured_and_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU and a GPU whose times are made up; the record draws the same picture."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(runtime, "available", lambda: None)
    monkeypatch.setattr(linear, "Gpu", MadeUpGpu)
    monkeypatch.setattr(linear, "_LINEARS", (("qwen3-30b qkv", 64, 256, (QuantType.Q8_0,)),))
    monkeypatch.setattr(linear, "_MOES", (("tiny", 4, 2, 256, 256, QuantType.Q8_0, QuantType.Q8_0),))
    picture = tmp_path / "a.svg"
    assert main(["-o", str(picture), *TINY, "--types", "q4_k_m"]) == 0
    record = last_json(capsys.readouterr().out)
    assert record["bench"] == "roofline"
    assert record["machine"]["fp32_peak_tflop_s"] > 0
    assert [row["tokens"] for row in record["points"]] == 3 * [1, 3]
    assert [row["kernel"] for row in record["gpu"]["rows"]] == ["linear", "linear", "moe", "moe"]
    found = marks(parsed(picture.read_text()))
    assert [(engine, tokens) for engine, _, tokens, _, _ in found] == [
        (row["engine"], row["tokens"]) for row in record["points"]
    ]
    again = tmp_path / "again.svg"
    assert main(["-o", str(again), "--from", str(written(tmp_path, record)), "--json"]) == 0
    assert again.read_text() == picture.read_text()
    assert last_json(capsys.readouterr().out)["points"] == record["points"]


def test_without_a_gpu_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["-o", str(tmp_path / "a.svg"), *TINY, "--types", "q8_0"]) == 0
    out = capsys.readouterr().out
    assert "the CPU alone is drawn" in out
    assert last_json(out)["gpu"] is None
