"""Reading a profile's folder: every column, rotated files, torn ends, other versions, memory."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ktransformers.errors import ConfigError
from ktransformers.profiling import lines, load
from ktransformers.profiling.records import PARTS
from tests.support.checks.profile_folders import Run, Written, expert_counts, write_lines, write_profile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def written(folder: Path) -> Written:
    return write_profile(folder)


@pytest.fixture(params=[1 << 22, 700], ids=["one_chunk", "small_chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", request.param)


@pytest.mark.usefixtures("chunks")
def test_every_column_says_what_the_lines_say(folder: Path, written: Written) -> None:
    profile = load(folder)
    for table, rows in (
        (profile.steps, written.steps),
        (profile.tokens, written.tokens),
        (profile.requests, written.requests),
    ):
        columns = table.read()
        assert set(columns) == set(table.names)
        assert len(table) == len(rows)
        for name in {name for name in table.names if name in rows[0] and columns[name].ndim == 1}:
            assert columns[name].tolist() == [row[name] for row in rows], name
    parts = [[row["parts_us"].get(part, 0.0) for part in PARTS] for row in written.steps]
    assert profile.steps["parts_us"].tolist() == parts
    assert profile.steps["cpu_idle_us"].tolist() == [row["cpu"]["idle_us"] for row in written.steps]
    assert np.isnan(profile.steps["gpu_us"]).all()
    layers = np.array([row["layers_us"] for row in written.tokens], np.float32)
    assert np.array_equal(profile.tokens["layers_us"], layers)
    by_layer = profile.steps["layers_us"]
    assert by_layer.shape == (len(written.steps), len(PARTS), 4)
    assert by_layer[5, PARTS.index("router")].tolist() == pytest.approx(written.steps[5]["layers_us"]["router"])


@pytest.mark.usefixtures("chunks")
def test_experts_of_tokens_and_steps(folder: Path, written: Written) -> None:
    profile = load(folder)
    ids = profile.tokens["experts"]
    assert ids.tolist() == [[[-1, -1] if one is None else one for one in row["experts"]] for row in written.tokens]
    columns = profile.experts.read()
    expected = [
        (row["step"], layer, int(expert), rows)
        for row in written.steps
        for layer, by_expert in row["experts"]
        for expert, rows in by_expert.items()
    ]
    assert list(zip(*(columns[name].tolist() for name in ("step", "layer", "expert", "rows")), strict=True)) == expected
    counts = np.zeros((4, 16), np.int64)
    np.add.at(counts, (columns["layer"], columns["expert"]), columns["rows"])
    assert np.array_equal(counts, expert_counts(written, Run()))


def test_tokens_whose_experts_were_not_captured(tmp_path: Path) -> None:
    written = write_profile(tmp_path, requests=2)
    written.tokens[0] |= {"experts": None, "experts_why": "replayed"}
    written.tokens[1] |= {"batch": None, "layers_us": None, "ms": None}  # the engine died before it told
    written.tokens[2]["experts"][2] = [-1, 3]
    write_lines(tmp_path / "tokens.jsonl", written.tokens)
    tokens = load(tmp_path).tokens
    assert (tokens["experts"][0] == -1).all()
    assert tokens["experts"][1, 1].tolist() == written.tokens[1]["experts"][1]
    assert tokens["experts"][2, 2].tolist() == [-1, 3]
    assert np.isnan([tokens["batch"][1], tokens["ms"][1]]).all()
    assert tokens["layers_us"][1].tolist() == [0.0] * 4
    assert tokens["experts_why"][:2].tolist() == ["replayed", None]


def test_experts_of_another_shape_than_the_model(tmp_path: Path) -> None:
    written = write_profile(tmp_path, requests=2)
    write_lines(tmp_path / "tokens.jsonl", [{**written.tokens[0], "experts": [None, [1], [2], [3]]}])
    with pytest.raises(ConfigError, match="do not have the shape that meta"):
        _ = load(tmp_path).tokens["experts"]
    write_lines(tmp_path / "tokens.jsonl", [{**written.tokens[0], "experts": [None, [1, 2], [2, 16], [3, 4]]}])
    with pytest.raises(ConfigError, match="outside of the 16"):
        _ = load(tmp_path).tokens["experts"]


def test_rotated_files_are_read_in_the_order_of_writing(tmp_path: Path) -> None:
    written = write_profile(tmp_path)
    rows = written.tokens
    cuts = [0, 3, 5, *range(6, 16), len(rows)]  # up to tokens.12.jsonl: 10 comes after 9, not after 1
    for number, (begin, end) in enumerate(itertools.pairwise(cuts), 1):
        name = "tokens.jsonl" if end == len(rows) else f"tokens.{number}.jsonl"
        write_lines(tmp_path / name, rows[begin:end])
    (tmp_path / "tokens.1.jsonl.bak").write_text("not of the profile")
    assert load(tmp_path).tokens["t"].tolist() == [row["t"] for row in rows]


def test_a_torn_last_line_is_left_out_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_profile(tmp_path)
    path = tmp_path / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    for size in (1 << 22, 64):
        monkeypatch.setattr(lines, "CHUNK_BYTES", size)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load(tmp_path).steps["step"].tolist() == [row["step"] for row in written.steps[:-1]]
        assert [record.message for record in caplog.records] == [
            f"{path}: the last line is torn and left out: whoever wrote it was stopped"
        ]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    write_profile(tmp_path)
    path = tmp_path / "steps.jsonl"
    good = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*good[:4], b'{"v":1,"step":"x"}', *good[4:]]))
    with pytest.raises(ConfigError, match=r"steps.jsonl, line 5 is no line of a profile: Expected `int`, got `str`"):
        len(load(tmp_path).steps)


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    written = write_profile(tmp_path)
    write_lines(tmp_path / "steps.jsonl", [{**row, "v": 2} for row in written.steps])
    write_lines(tmp_path / "tokens.jsonl", [{"v": 2, "of": "another shape"}])
    profile = load(tmp_path)
    for table in (profile.steps, profile.tokens, profile.experts):
        with pytest.raises(ConfigError, match=r"has schema version 2, and this ktransformers reads up to 1: read it"):
            len(table)
    (tmp_path / "meta.json").write_text('{"v": 3, "model": ["of another shape"]}')
    with pytest.raises(ConfigError, match=r"meta.json has schema version 3"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no profile"),
        ("{", "is no meta.json of a profile"),
        ('{"v": "x"}', "is no meta.json of a profile"),
        ('{"v": 1, "schema": "other"}', "is of another program"),
    ],
)
def test_folders_that_hold_no_profile(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "meta.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path)


def test_a_profile_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(json.dumps({"v": 1}))
    profile = load(tmp_path)
    for table in (profile.steps, profile.tokens, profile.requests, profile.experts):
        assert len(table) == 0
        assert all(len(column) == 0 for column in table.read().values())
    assert profile.meta.machine.memory_gbps is None
    with pytest.raises(KeyError, match=r"no column 'nonsense'; there are step, t, ms"):
        _ = profile.steps["nonsense"]


def test_a_column_takes_no_more_memory_than_its_numbers_and_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_profile(tmp_path, requests=2)
    line = (json.dumps(written.tokens[1]) + "\n").encode()
    copies = 40_000
    (tmp_path / "tokens.jsonl").write_bytes(line * copies)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 1 << 18)
    tracemalloc.start()
    assert load(tmp_path).tokens["ms"].tolist() == [written.tokens[1]["ms"]] * copies
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = len(line) * copies
    assert size > 8 << 20
    assert peak < 4 << 20  # 0.3 MB of numbers, as a list 1.3 MB, and some chunks


def test_pandas_and_arrow(folder: Path, written: Written) -> None:
    pandas = pytest.importorskip("pandas")
    pyarrow = pytest.importorskip("pyarrow")
    tokens = load(folder).tokens
    frame = tokens.to_pandas("request", "ms", "experts")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["request"].tolist() == [row["request"] for row in written.tokens]
    assert frame["experts"][0].shape == (4, 2)
    table = tokens.to_arrow("ms", "experts")
    assert isinstance(table, pyarrow.Table)
    assert table.column("experts")[3].as_py() == tokens["experts"][3].tolist()


@pytest.mark.parametrize(("name", "method"), [("pandas", "to_pandas"), ("pyarrow", "to_arrow")])
def test_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"this needs {name}, which is not installed: pip install {name}"):
        getattr(load(folder).tokens, method)("ms")
