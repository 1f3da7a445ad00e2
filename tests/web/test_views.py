"""The status view, other widths, and what axe says of every view in both themes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import HOLD, FakeApi, called, said, thought
from tests.web.steps import answers, button, open_page, say, whole

if TYPE_CHECKING:
    from playwright.sync_api import Page

STATUS: dict[str, Any] = {
    "model": "fake-model",
    "backend": "balance_serve",
    "queue": {"running": 3, "waiting": 2, "suspended": 7},
    "kv": {"used_tokens": 12_288, "total_tokens": 65_536},
    "prefix": {"hits": 750, "queries": 1_000},
    "speed": {"prefill_tps": 812.25, "decode_tps": 96.1},
    "memory": {"gbps": 310.5, "limit_gbps": 460.8},
    "experts": {
        "layers": [
            {"layer": layer, "counts": [(layer * 31 + expert * expert * 17) % 97 for expert in range(64)]}
            for layer in range(1, 13)
        ]
    },
    "requests": [
        {
            "id": f"chatcmpl-{index:032x}",
            "at": 1_790_000_000 + index,
            "status": "finished" if index else "running",
            "prompt_tokens": 100 + index,
            "completion_tokens": index,
            "ttft": 0.25,
            "seconds": 1.5,
            "finish_reason": "stop" if index else None,
        }
        for index in range(8)
    ],
}

ANSWER = """## What it does

It **sorts** the list *in place*, see [the manual](https://docs.python.org/3/howto/sorting.html):

1. pick a pivot
2. split, then sort `left` and `right`

```python
def quicksort(items: list[int]) -> list[int]:
    if len(items) < 2:
        return items
    pivot, *rest = items  # the first one
    return quicksort([x for x in rest if x < pivot]) + [pivot] + quicksort([x for x in rest if x >= pivot])
```

| case | comparisons |
|---|--:|
| mean | $1.39\\,n \\log_2 n$ |
| worst | $n^2 / 2$ |

$$\\mathbb{E}[C_n] = 2 (n + 1) H_n - 4n \\approx 1.39\\, n \\log_2 n$$

> The worst case is a list that is sorted already.
"""


def test_the_status_view(page: Page, api: FakeApi) -> None:
    api.status = STATUS
    open_page(page, api, "#/status")
    cards = page.locator(".cards")
    for text in (
        "96.1",
        "812.3",
        "310.5",
        "of 460.8 GB/s",
        "3",
        "running",
        "7 suspended",
        "19 %",
        "12,288 of 65,536 tokens",
        "75 %",
    ):
        expect(cards).to_contain_text(text)
    expect(page.locator(".log tbody tr")).to_have_count(8)
    expect(page.locator(".log tbody tr").last).to_contain_text("running")
    canvas = page.get_by_role("img", name=re.compile("Heat map: 12 layers of 64 experts"))
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".heat-foot")).to_contain_text("Layer 2, expert 0: 62 tokens")
    drawn = page.evaluate(
        "() => { const c = document.querySelector('canvas');"
        " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        " return new Set(Array.from({length: d.length / 4}, (_, i) => `${d[4 * i]},${d[4 * i + 1]}`)).size }"
    )
    assert drawn > 20
    api.status = {**STATUS, "speed": {"prefill_tps": 1, "decode_tps": 2.5}}
    expect(cards).to_contain_text("2.5")


@pytest.mark.parametrize(
    "status",
    [
        {},
        [],
        {"model": "x", "queue": None, "kv": {}, "prefix": {"hits": 0, "queries": 0}, "memory": None, "experts": None},
        {
            "kv": {"used_tokens": "many", "total_tokens": None},
            "experts": {"layers": [{"counts": []}, 3]},
            "requests": 5,
        },
        {"experts": {"layers": [{"layer": 0, "counts": [0, 0]}, {"counts": [1]}]}, "requests": [{}, None, {"id": 3}]},
    ],
)
def test_parts_that_a_backend_lacks_are_left_out(page: Page, api: FakeApi, status: Any) -> None:
    api.status = status
    page.goto(f"{api.url}/#/status")
    expect(page.get_by_role("heading", name="Requests")).to_be_visible()


def test_a_server_without_figures(page: Page, api: FakeApi) -> None:
    page.goto(f"{api.url}/#/status")
    expect(page.get_by_text("This server does not offer figures")).to_be_visible()


def test_a_screen_reader_hears_whole_blocks(page: Page, api: FakeApi) -> None:
    api.answers = [[said("First paragraph.\n\nSec"), HOLD, said("ond one.")]]
    open_page(page, api)
    say(page, "Read", waits=False)
    log = page.locator("[aria-live=polite][role=log] p")
    expect(log).to_have_text(["First paragraph."])
    api.release()
    expect(log).to_have_text(["First paragraph.", "Second one.", "The answer is complete"])


def test_a_phone(page: Page, api: FakeApi) -> None:
    api.answers = [[said(ANSWER)]]
    api.status = STATUS
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(api.url)
    say(page, "Sort " + "x" * 200)
    for place in ("", "#/status"):
        if place:
            page.goto(f"{api.url}/{place}")
            expect(page.locator(".cards")).to_be_visible()
        assert page.evaluate("document.scrollingElement.scrollWidth") == 360
        assert page.evaluate("[...document.querySelectorAll('.scroller')].every((e) => e.scrollWidth <= 360)")
    expect(page.locator("#search")).to_be_hidden()
    button(page, "Menu").click()
    page.get_by_role("link", name="Sort").click()
    expect(page.locator("#search")).to_be_hidden()
    expect(answers(page)).to_be_visible()


def serious_faults(page: Page) -> list[str]:
    """What axe finds on the page as it is."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [
        f"{one['id']} ({one['impact']}): {node['html'][:120]}: {node['failureSummary']}"
        for one in found
        if one["impact"] in ("serious", "critical", "moderate")
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(page: Page, api: FakeApi, theme: str, width: int) -> None:
    api.answers = [[thought("Hm."), said(ANSWER), called(0, '{"a": 1}', "f")], [said("x"), HOLD]]
    api.status = STATUS
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(api.url)
    expect(page.locator(".greeting .facts")).to_be_visible()
    faults = {"empty": serious_faults(page)}
    say(page, "How does quicksort work?")
    expect(page.locator(".hljs-keyword").first).to_be_visible()
    expect(page.locator(".katex").last).to_be_visible()
    faults["chat"] = serious_faults(page)
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    faults["editor"] = serious_faults(page)
    button(page, "Cancel").click()
    button(page, "Settings of this chat").click()
    faults["settings"] = serious_faults(page)
    page.keyboard.press("Escape")
    if width < 800:
        button(page, "Menu").click()
        expect(page.locator("#search")).to_be_visible()
        faults["menu"] = serious_faults(page)
    button(page, "Preferences").click()
    faults["preferences"] = serious_faults(page)
    page.keyboard.press("Escape")
    page.goto(f"{api.url}/#/status")
    expect(page.locator(".cards")).to_be_visible()
    faults["status"] = serious_faults(page)
    api.key = "k"
    page.reload()
    page.goto(f"{api.url}/#/")
    page.reload()
    expect(page.get_by_role("textbox", name="API key")).to_be_visible()
    faults["key"] = serious_faults(page)
    assert {view: found for view, found in faults.items() if found} == {}


def test_the_theme_can_be_chosen(page: Page, api: FakeApi) -> None:
    page.emulate_media(color_scheme="light")
    open_page(page, api)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    button(page, "Preferences").click()
    page.get_by_label("Theme").select_option("Dark")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == dark


def test_the_rate_is_shown_while_an_answer_streams(page: Page, api: FakeApi) -> None:
    page.clock.install()
    api.answers = [[said("a "), said("b "), HOLD, said("c "), said("d"), HOLD]]
    open_page(page, api)
    say(page, "Go", waits=False)
    expect(answers(page)).to_have_text("a b")
    page.clock.fast_forward(2000)
    api.release()
    expect(page.locator(".figures")).to_have_text(re.compile(r"^[01]\.\d tokens/s$"))
    api.release()
    whole(page)
