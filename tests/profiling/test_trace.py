"""The trace for Perfetto: the format's rules, and that slices lie where the profile says."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ktransformers.cli import main
from ktransformers.profiling import load
from ktransformers.profiling.trace import write_trace
from tests.support.checks.profile_folders import Written, write_lines, write_profile


def events_of(folder: Path, path: Path) -> list[dict[str, Any]]:
    assert main(["profile", "trace", str(folder), "-o", str(path)]) == 0
    document = json.loads(path.read_text("utf-8"))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def tracks(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The slices of each track by its name, checked against the rules of the format on the way."""
    names: dict[tuple[int, int], str] = {}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            if event["name"] == "thread_name":
                assert (event["pid"], event["tid"]) not in names
                names[event["pid"], event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            found[event["pid"], event["tid"]].append(event)
    for slices in found.values():  # within a track, slices nest or follow each other
        stack: list[float] = []
        for event in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            while stack and stack[-1] <= event["ts"] + 0.01:
                stack.pop()
            assert not stack or event["ts"] + event["dur"] <= stack[-1] + 0.01
            stack.append(event["ts"] + event["dur"])
    return {names[key]: slices for key, slices in found.items()}


def test_slices_are_what_was_recorded(recorded: tuple[Path, Written], tmp_path: Path) -> None:
    folder, written = recorded
    found = tracks(events_of(folder, tmp_path / "trace.json"))
    steps = found["steps"]
    assert [(one["ts"], one["dur"]) for one in steps] == [
        (pytest.approx(line["t"] * 1e6), pytest.approx(line["ms"] * 1e3, abs=1.01)) for line in written.steps
    ]
    assert steps[0]["name"] == "prefill 0"
    assert steps[0]["args"]["rows"] == written.steps[0]["rows"]
    micros = defaultdict(float)
    for one in found["CPU parts"]:
        micros[one["name"]] += one["dur"]
    for part in ("experts", "attention", "host"):
        assert micros[part] == pytest.approx(sum(line["parts_us"][part] for line in written.steps), rel=3e-3)
    layer = [one["dur"] for one in found["layers: router"] if one["name"] == "layer 3"]
    assert layer == pytest.approx([line["layers_us"]["router"][3] for line in written.steps], rel=3e-3)
    assert "GPU parts" not in found


def test_requests_that_overlap_have_tracks_of_their_own(recorded: tuple[Path, Written], tmp_path: Path) -> None:
    folder, written = recorded
    found = tracks(events_of(folder, tmp_path / "trace.json"))
    requests = [one for name, slices in found.items() if name.startswith("requests ") for one in slices]
    for line in written.requests:
        (whole,) = [one for one in requests if one["name"] == line["request"]]
        assert whole["ts"] == pytest.approx(line["arrived"] * 1e6)
        assert whole["ts"] + whole["dur"] == pytest.approx(line["ended"] * 1e6)
        assert whole["args"]["finish_reason"] == "length"
    assert sum(one["name"] == "decode" for one in requests) == len(written.requests)
    most = max(
        sum(other["arrived"] <= line["arrived"] < other["ended"] for other in written.requests)
        for line in written.requests
    )
    assert sum(name.startswith("requests ") for name in found) == most


def test_requests_that_were_there_before_or_still_are(tmp_path: Path) -> None:
    written = write_profile(tmp_path, requests=3)
    before, after, waits = written.requests
    before["arrived"] = None
    after |= {"ended": None, "finish_reason": None}
    waits |= {"admitted": None, "first_token": None, "ended": None, "finish_reason": None}
    write_lines(tmp_path / "requests.jsonl", written.requests)
    found = tracks(events_of(tmp_path, tmp_path / "trace.json"))
    slices = [one for name, track in found.items() if name.startswith("requests ") for one in track]
    by_name = {one["name"]: one for one in slices}
    last = written.steps[-1]
    end = last["t"] * 1e6 + last["ms"] * 1e3
    assert by_name[before["request"]]["ts"] == 0
    for line in (after, waits):
        one = by_name[line["request"]]
        assert one["ts"] + one["dur"] == pytest.approx(end)
    assert sorted(one["name"] for one in slices if one["name"][:2] != "r-") == sorted(
        ["waits", "prefill", "decode"] * 2
    )


def test_parts_on_a_gpu_and_times_that_overlap(tmp_path: Path) -> None:
    written = write_profile(tmp_path, requests=1, has_gpu=True)
    line = written.steps[0]
    line["layers_us"]["experts"] = [line["ms"] * 500] * 4  # twice the step: the CPU's experts ran beside the GPU
    write_lines(tmp_path / "steps.jsonl", written.steps)
    found = tracks(events_of(tmp_path, tmp_path / "trace.json"))
    gpu = [(one["name"], one["dur"]) for one in found["GPU parts"][:2]]
    assert gpu == [("linear", 80.0), ("attention", 50.0)]  # in the order of PARTS
    experts = found["layers: experts"][:4]
    assert sum(one["dur"] for one in experts) == pytest.approx(line["ms"] * 1e3, abs=1.01)
    assert experts[0]["args"]["us"] == pytest.approx(line["ms"] * 500)


def test_a_long_profile_has_layers_of_its_end(
    recorded: tuple[Path, Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ktransformers.profiling.trace.MAX_LAYERED_STEPS", 10)
    folder, written = recorded
    found = tracks(events_of(folder, tmp_path / "trace.json"))
    assert len(found["steps"]) == len(written.steps)
    assert min(one["ts"] for one in found["layers: linear"]) >= written.steps[-10]["t"] * 1e6 - 0.01
    assert "layers are those of the last 10 steps" in capsys.readouterr().err


def test_report_writes_it_too(recorded: tuple[Path, Written], tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page, trace = tmp_path / "r.html", tmp_path / "t.json"
    assert main(["profile", "report", str(recorded[0]), "-o", str(page), "--trace", str(trace)]) == 0
    assert page.exists()
    assert len(json.loads(trace.read_text())["traceEvents"]) == write_trace(load(recorded[0]), tmp_path / "again.json")
