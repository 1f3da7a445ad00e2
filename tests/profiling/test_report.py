"""The page: what it says, what it does not load, how it looks at names that are markup, in a browser."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ktransformers.cli import main
from ktransformers.errors import ConfigError
from ktransformers.profiling import load
from ktransformers.profiling.records import PARTS
from ktransformers.profiling.summary import Quantiles, expert_use, latencies, slow_steps, step_sums
from tests.support.checks.profile_folders import Run, Written, expert_counts, meta, write_lines, write_profile

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

RUN = Run(requests=16, layers=6, experts=24, top_k=3)
NAMES = (
    "parts",
    "layers-decode",
    "layers-prefill",
    "slowest",
    "bandwidth",
    "ttft",
    "itl",
    "batches",
    "experts",
    "cache",
)
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>\u202e"


def report(folder: Path, path: Path) -> str:
    pytest.importorskip("plotly", reason="the pictures are drawn by plotly")
    assert main(["profile", "report", str(folder), "-o", str(path)]) == 0
    return path.read_text("utf-8")


class Sections(HTMLParser):
    """The text of each section, and the cells of its table."""

    def __init__(self, page: str):
        super().__init__()
        self.texts: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self._name, self._is_cell = "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self._name = dict(attrs)["id"] or ""
            self.texts[self._name], self.rows[self._name] = "", []
        elif tag == "tr":
            self.rows[self._name].append([])
        elif tag in ("td", "th"):
            self._is_cell = True
            self.rows[self._name][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._is_cell = False

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.rows[self._name][-1][-1] += data
        elif self._name:
            self.texts[self._name] += data


@pytest.fixture(scope="module")
def page_file(recorded: tuple[Path, Written], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report(recorded[0], path)
    return path


# Numbers


def test_sums_by_part(recorded: tuple[Path, Written]) -> None:
    folder, written = recorded
    sums = step_sums(load(folder))
    decode = [line for line in written.steps if not line["prefill_rows"]]
    assert int((~sums.is_prefill).sum()) == len(decode)
    for index, part in enumerate(PARTS):
        assert sums.parts_us[~sums.is_prefill, index].tolist() == [line["parts_us"].get(part, 0.0) for line in decode]
        layers = np.mean([line["layers_us"].get(part, [0.0] * RUN.layers) for line in decode], axis=0)
        assert np.allclose(sums.layers_us["decode"][index], layers, rtol=1e-6)  # read as float32
    nbytes = sum(line["bytes"]["experts"] for line in decode)
    micros = sum(max(line["parts_us"]["experts"], sum(line["layers_us"]["experts"])) for line in decode)
    assert sums.gbps("decode")[PARTS.index("experts")] == pytest.approx(nbytes / micros / 1e3, rel=1e-6)


def test_latencies(recorded: tuple[Path, Written]) -> None:
    folder, written = recorded
    found = latencies(load(folder))
    assert found["ttft"].tolist() == [line["ms"] for line in written.tokens if line["index"] == 0]
    assert found["itl"].tolist() == [line["ms"] for line in written.tokens if line["index"] > 0]
    assert Quantiles.of(np.array([np.nan, *range(101)])) == Quantiles(101, 50, 90, 99, 50)
    assert Quantiles.of(np.array([])).count == 0


def test_expert_counts_and_cold_experts(recorded: tuple[Path, Written], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.profiling.summary.COLD_STEPS", 3)
    monkeypatch.setattr("ktransformers.profiling.lines.CHUNK_BYTES", 3000)
    folder, written = recorded
    use = expert_use(load(folder))
    assert np.array_equal(use.rows, expert_counts(written, RUN))
    last: dict[tuple[int, str], int] = {}
    for line in written.steps:
        keys = [(layer, expert) for layer, by_expert in line["experts"] for expert in by_expert]
        assert use.touched[line["step"]] == len(keys)
        assert use.cold[line["step"]] == sum(line["step"] - last.get(key, -100) > 3 for key in keys)
        last |= dict.fromkeys(keys, line["step"])


def test_slow_steps_name_the_part_and_what_was_different(tmp_path: Path) -> None:
    written = write_profile(tmp_path, RUN)
    decode = [line for line in written.steps if not line["prefill_rows"] and line["seqs"] == 4]
    by_part = {"host": decode[20], "experts": decode[30]}
    for part, line in by_part.items():
        line["parts_us"][part] += 1e6
        line["ms"] += 1e3
    by_part["experts"]["experts"] = [[layer, {str(e): 4 for e in range(24)}] for layer in range(1, 6)]
    write_lines(tmp_path / "steps.jsonl", written.steps)
    profile = load(tmp_path)
    slow = {one.step: one for one in slow_steps(profile, step_sums(profile), expert_use(profile), most=2)}
    assert set(slow) == {line["step"] for line in by_part.values()}
    host, experts = slow[by_part["host"]["step"]], slow[by_part["experts"]["step"]]
    assert (host.part, experts.part) == ("host", "experts")
    assert host.excess_ms == pytest.approx(1000, abs=100)
    assert any("Python, torch" in text for text in host.why)
    assert any(text.startswith("120 experts touched, others ") for text in experts.why)


# The page


def test_every_section_has_words_a_picture_and_its_numbers(page_file: Path, recorded: tuple[Path, Written]) -> None:
    written = recorded[1]
    page = page_file.read_text("utf-8")
    assert len(page) < 10_000_000
    found = Sections(page)
    assert tuple(found.texts) == NAMES
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    assert set(figures) == set(NAMES)
    assert all(len(rows) > 1 for rows in found.rows.values())
    for name in NAMES:  # what a screen reader says
        assert re.search(rf'data-figure="{name}"[^>]*role="figure" aria-label="[^"]{{30,}}"', page)
    counts = expert_counts(written, RUN)
    assert found.rows["experts"][1:] == [[str(layer), *map(str, counts[layer])] for layer in range(1, RUN.layers)]
    assert figures["experts"]["data"][0]["y"] == list(range(1, RUN.layers))
    ttft = [line["ms"] for line in written.tokens if line["index"] == 0]
    assert found.rows["ttft"][1] == ["p50", f"{np.median(ttft):.3g}"]
    assert len(found.rows["cache"]) == RUN.experts + 2
    assert found.rows["cache"][-1][1:] == ["100", *found.rows["cache"][-1][2:4], "100", "100"]
    assert "A sensible --gpu_memory is 0." in found.texts["cache"]
    assert "% of what memory gave when it was measured (40.0\u00a0GB/s)" in found.texts["bandwidth"]


def test_the_page_names_nothing_outside(page_file: Path) -> None:
    page = page_file.read_text("utf-8")
    plain = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r"""(?:src|href)=["'](?!#|data:)""", plain) == []
    assert "url(" not in plain
    assert "default-src &#39;none&#39;" in plain
    assert "unsafe-eval" not in plain
    assert "&#39;unsafe-inline&#39;" not in plain.split("style-src")[0]


def test_a_profile_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"v": 1}')
    found = Sections(report(tmp_path, tmp_path / "r.html"))
    assert tuple(found.texts) == NAMES
    assert "No step was recorded." in found.texts["batches"]


def test_a_backend_without_a_queue(tmp_path: Path) -> None:
    written = write_profile(tmp_path, requests=2)
    write_lines(tmp_path / "steps.jsonl", [{**line, "waiting": None} for line in written.steps])
    found = Sections(report(tmp_path, tmp_path / "r.html"))
    assert "there is no queue" in found.texts["batches"]
    assert found.rows["batches"][0] == ["seconds", "sequences", "rows"]


def test_what_was_lost_is_said(tmp_path: Path) -> None:
    write_profile(tmp_path, requests=2)
    lost = {"dropped": {"records": 12345, "messages": 0, "files": 2}, "overlaps": 7}
    (tmp_path / "meta.json").write_text(json.dumps({**meta(Run()), **lost}))
    page = report(tmp_path, tmp_path / "r.html")
    assert "12,345 records, 2 files; figures are of what is there" in page
    assert "7 steps whose parts took longer than the step itself" in page


def test_even_use_of_experts_names_no_budget(tmp_path: Path) -> None:
    written = write_profile(tmp_path, RUN)
    for at, line in enumerate(written.tokens):
        chosen = [(3 * at + i) % 24 for i in range(3)]
        line["experts"] = [None, *[chosen] * 5]
    write_lines(tmp_path / "tokens.jsonl", written.tokens)
    assert "No budget stands out" in Sections(report(tmp_path, tmp_path / "r.html")).texts["cache"]


def test_plotly_is_asked_for(
    recorded: tuple[Path, Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    folder, output = recorded[0], tmp_path / "r.html"
    assert main(["profile", "report", str(folder), "-o", str(output)]) == 2
    assert "error: the pictures need plotly, which is not installed: pip install plotly" in capsys.readouterr().err
    assert not output.exists()
    assert main(["profile", "trace", str(folder), "-o", str(tmp_path / "t.json")]) == 0
    assert main(["profile", "compare", str(folder), str(folder)]) == 0


@pytest.mark.parametrize(("path", "said"), [("", "is a folder; name the file"), ("no/r.html", "is no folder; make it")])
def test_places_where_no_file_can_be(
    recorded: tuple[Path, Written], tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, said: str
) -> None:
    assert main(["profile", "report", str(recorded[0]), "-o", str(tmp_path / path)]) == 2
    assert said in capsys.readouterr().err


# In a browser


Open = Callable[..., "Page"]


@pytest.fixture
def opened(browser: Browser) -> Any:
    contexts, said = [], []

    def open_page(path: Path, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: said.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_are_drawn_in_the_colours_of_the_theme(page_file: Path, opened: Open, scheme: str) -> None:
    page = opened(page_file, color_scheme=scheme)
    page.wait_for_selector("#cache .main-svg")
    assert page.locator("[data-figure] .main-svg:first-child").count() == len(NAMES)
    color = page.evaluate("getComputedStyle(document.body).color")
    tick = "getComputedStyle(document.querySelector('#batches .xtick text')).fill"
    assert page.evaluate(tick) == color
    page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
    same = f"{tick} === getComputedStyle(document.body).color"
    page.evaluate(f"new Promise(done => {{ (function look() {{ {same} ? done() : requestAnimationFrame(look) }})() }})")
    assert page.evaluate(tick) != color


def test_a_phone_does_not_scroll_sideways(page_file: Path, opened: Open) -> None:
    page = opened(page_file, viewport={"width": 360, "height": 740})
    page.wait_for_selector("#cache .main-svg")
    for summary in page.locator("summary").all():
        if not summary.evaluate("one => one.parentElement.open"):
            summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_keyboard_reaches_tables(page_file: Path, opened: Open) -> None:
    page = opened(page_file)
    summary = page.locator("#ttft summary")
    summary.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Table: Time to first token"


def test_accessibility_rules(page_file: Path, opened: Open) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = opened(page_file)
    page.wait_for_selector("#cache .main-svg")
    found = axe.Axe().run(page, options={"resultTypes": ["violations"]})
    assert found.response["violations"] == []


def test_names_that_are_markup(tmp_path: Path, opened: Open) -> None:
    run = replace(RUN, requests=3, model={"name": HOSTILE + "x" * 100_000, "architecture": HOSTILE})
    written = write_profile(tmp_path, run)
    (tmp_path / "meta.json").write_text(json.dumps({**meta(run), "backend": HOSTILE, "command": [HOSTILE] * 50}))
    written.requests[0] |= {"request": HOSTILE, "finish_reason": HOSTILE}
    write_lines(tmp_path / "requests.jsonl", written.requests)
    text = report(tmp_path, tmp_path / "r.html")
    assert "<img" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert len(text) < 6_000_000
    page = opened(tmp_path / "r.html")
    page.wait_for_selector("#cache .main-svg")
    title = page.title()
    assert title.startswith("Profile of </script><script>")
    assert len(title) < 250
    assert "\u202e" not in title
    assert html.unescape(title) == title


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_profile_of_real_size(tmp_path: Path) -> None:
    """100,000 tokens of 48 layers with 128 experts: the page stays small, and so does what is held."""
    run = Run(500, 200, 500, 48, 0, 128, 8, chunk=512, max_batch=8)
    folder = tmp_path / "profile"
    assert len(write_profile(folder, run).tokens) == 100_000
    size = sum(path.stat().st_size for path in folder.iterdir())
    # Not getrusage: after fork and exec its peak is that of this process too.
    code = "import pathlib, sys; from ktransformers.cli import main; main(sys.argv[1:]); "
    code += "print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    command = [sys.executable, "-c", code, "profile", "report", str(folder), "-o", str(tmp_path / "r.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "r.html").stat().st_size < 10_000_000
    assert size > 400_000_000
    assert int(done.stdout) < 350_000  # KiB


def test_a_profile_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no profile"):
        load(tmp_path)
