"""Two profiles side by side: medians, ratios, intervals, and what makes them incomparable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ktransformers.cli import main
from ktransformers.profiling import load
from ktransformers.profiling.compare import compare, median_ratio
from tests.support.checks.profile_folders import Run, Written, meta, write_lines, write_profile


@pytest.fixture(scope="module")
def slower(recorded: tuple[Path, Written], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, in which attention took twice as long."""
    folder, (source, written) = tmp_path_factory.mktemp("slower"), recorded
    steps = []
    for line in written.steps:
        attention = line["parts_us"]["attention"]
        parts = {**line["parts_us"], "attention": 2 * attention}
        steps.append({**line, "ms": line["ms"] + attention / 1e3, "parts_us": parts})
    write_lines(folder / "steps.jsonl", steps)
    for name in ("meta.json", "tokens.jsonl", "requests.jsonl"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def test_what_changed_and_what_did_not(recorded: tuple[Path, Written], slower: Path) -> None:
    folder, written = recorded
    found = compare(load(folder), load(slower))
    rows = {row.name: row for row in found.rows}
    assert found.differences == ()
    attention = rows["decode: attention"]
    decode = [line["parts_us"]["attention"] for line in written.steps if not line["prefill_rows"]]
    assert (attention.a, attention.b) == (np.median(decode), 2 * np.median(decode))
    assert attention.ratio == 2.0
    assert attention.low < 2.0 < attention.high
    assert attention.is_sure
    for same in ("decode: linear", "token to token", "time to first token", "decode: experts read"):
        assert rows[same].ratio == 1.0
        assert rows[same].low <= 1.0 <= rows[same].high
        assert not rows[same].is_sure
    assert "decode: copy" not in rows
    assert rows["decode step"].count_a == len(decode)


def test_intervals_are_those_of_a_bootstrap() -> None:
    """Beside resamples that are drawn. The ends of 4000 resamples' intervals vary by some thousandths."""
    rng = np.random.default_rng(5)
    a, b = rng.lognormal(0, 0.4, 301), rng.lognormal(0.3, 0.4, 251)
    ratio, low, high = median_ratio(a, b, np.random.default_rng(1))
    drawn = [np.median(rng.choice(x, (20_000, len(x))), axis=1) for x in (a, b)]
    expected = np.percentile(drawn[1] / drawn[0], [2.5, 97.5])
    assert ratio == np.median(b) / np.median(a)
    assert (low, high) == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([1.0], []), ([0.0] * 9, [1.0] * 9)])
def test_ratios_that_there_are_not(a: list[float], b: list[float]) -> None:
    assert np.isnan(median_ratio(np.array(a), np.array(b), np.random.default_rng())).all()


def test_few_values_have_no_interval() -> None:
    ratio, low, high = median_ratio(np.array([1.0, 2.0, 3.0]), np.array([4.0] * 9), np.random.default_rng())
    assert ratio == 2.0
    assert np.isnan([low, high]).all()


def test_the_table(recorded: tuple[Path, Written], slower: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "compare", str(recorded[0]), str(slower)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert lines["decode: attention"].endswith("*")
    assert "  2.00  " in lines["decode: attention"]
    assert not lines["decode: linear"].endswith("*")


def test_json_and_what_differs(
    recorded: tuple[Path, Written], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(Run(requests=2), has_gpu=True, model={"name": "another"})
    write_profile(tmp_path, run)
    known = meta(run)
    known["machine"]["cpu"] = ""
    (tmp_path / "meta.json").write_text(json.dumps(known))
    assert main(["profile", "compare", str(recorded[0]), str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["differences"] == [
        "models differ: tiny-moe and another",
        "shapes of models differ: 6 layers, 24 experts, 3 per token and 4 layers, 16 experts, 2 per token",
        "processors differ: Test CPU and unknown",
        "GPUs differ: none and Test GPU",
    ]
    row = next(row for row in document["rows"] if row["name"] == "time to first token")
    assert row["count_b"] == 2
    assert row["low"] is None
    assert main(["profile", "compare", str(recorded[0]), str(tmp_path)]) == 0
    assert "note: models differ: tiny-moe and another\n" in capsys.readouterr().err
    assert err == ""


def test_profiles_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "meta.json").write_text('{"v": 1}')
    assert main(["profile", "compare", str(tmp_path), str(tmp_path)]) == 0
    assert capsys.readouterr().err == "neither profile has a step or a token\n"


def test_the_page(recorded: tuple[Path, Written], slower: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "c.html"
    assert main(["profile", "compare", str(recorded[0]), str(slower), "-o", str(path)]) == 0
    page = path.read_text("utf-8")
    assert "<td>decode: attention</td>" in page
    assert "2 of " in page or "3 of " in page or "4 of " in page  # attention of both kinds, perhaps whole steps
    figure = json.loads(page.split('id="figures">')[1].split("</script>")[0])["ratios"]
    assert len(figure["data"][0]["x"]) == len(figure["data"][0]["y"]) > 10
