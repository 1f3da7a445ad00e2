"""Pictures of the web page for docs/web.md: the page as it is built, over an API whose answers stand here.

    python -m docs.images.web        # writes web-*.png beside this file; needs playwright, Pillow, Chromium

The figures on them are as made up as the answers.
"""

from __future__ import annotations

import io
import math
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.web.fake_api import HOLD, FakeApi, said, thought
from tests.web.steps import button, say, whole
from tests.web.test_views import ANSWER, STATUS

__all__ = ["main"]

HERE = Path(__file__).resolve().parent

WIDE, PHONE = {"width": 1120, "height": 780}, {"width": 380, "height": 780}
NUM_SAMPLES = 24
QUESTION = "How does quicksort work, and how many comparisons does it need?"
SHORT = "It picks a pivot, puts what is smaller before it and the rest behind it, and sorts both parts in the same way."
CHINESE = """快速排序是一种**分治**算法：

1. 选取一个基准元素
2. 将较小的元素放到它的左边，其余放到右边
3. 对两部分递归排序

平均需要约 $1.39\\,n \\log_2 n$ 次比较，最坏情况为 $\\frac{n(n-1)}{2}$ 次。

```python
def quicksort(items):
    if len(items) < 2:
        return items
    pivot, *rest = items
    return quicksort([x for x in rest if x < pivot]) + [pivot] + quicksort([x for x in rest if x >= pivot])
```
"""


def _save(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(HERE / f"web-{name}.png", optimize=True)


def _tab(browser: Browser, api: FakeApi, *, theme: str, size: dict[str, int], locale: str = "en-US") -> Page:
    api.reset()
    api.model = "example-model"
    api.usage = {"prompt_tokens": 31, "completion_tokens": 248, "decode_time": 4.9}
    context = browser.new_context(viewport=size, color_scheme=theme, locale=locale)
    page = context.new_page()
    page.goto(api.url)
    return page


def _chat(browser: Browser, api: FakeApi, *, size: dict[str, int], name: str) -> None:
    page = _tab(browser, api, theme="light", size=size)
    api.answers = [[said("ok")], [said(SHORT)], [thought("They want the idea and the count."), HOLD, said(ANSWER)]]
    if size is WIDE:
        say(page, "A name for a boat")
        page.locator(".new-chat").click()
        expect(page.locator(".greeting")).to_be_visible()
    else:
        api.answers.pop(0)
    say(page, QUESTION)
    button(page, "Retry").click()
    expect(page.locator(".reasoning")).to_be_visible()
    page.wait_for_timeout(1700)
    api.release()
    expect(page.locator(".katex").last).to_be_visible()
    whole(page)
    page.locator(".scroller").evaluate("(box) => { box.scrollTop = 0 }")
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    _save(page, name)
    page.context.close()


def _chinese(browser: Browser, api: FakeApi) -> None:
    page = _tab(browser, api, theme="dark", size=WIDE, locale="zh-CN")
    api.answers = [[thought("用户想了解算法。"), HOLD, said(CHINESE)]]
    page.locator("#composer").fill("快速排序是如何工作的？")
    page.keyboard.press("Enter")
    expect(page.locator(".reasoning")).to_be_visible()
    page.wait_for_timeout(1200)
    api.release()
    expect(page.locator(".katex").last).to_be_visible()
    expect(page.locator(".hljs-keyword").last).to_be_visible()
    page.wait_for_timeout(300)
    _save(page, "chat-dark")
    page.context.close()


def _status(browser: Browser, api: FakeApi, theme: str, name: str) -> None:
    page = _tab(browser, api, theme=theme, size=WIDE)
    page.clock.install()
    page.goto(f"{api.url}/#/status")
    for index in range(NUM_SAMPLES):
        speed = {"prefill_tps": 800 + 120 * math.sin(index / 2), "decode_tps": 90 + 14 * math.sin(index)}
        api.status = _example() | {"speed": speed}
        page.clock.run_for(1000)
        page.wait_for_timeout(60)
    _save(page, name)
    page.context.close()


def _example() -> dict[str, Any]:
    layers = [
        {"layer": layer, "counts": [int(400 / (1 + (layer * 37 + expert * 53) % 64)) + 9 for expert in range(64)]}
        for layer in range(24)
    ]
    return STATUS | {"model": "example-model", "experts": {"layers": layers}}


def main() -> None:
    """Writes all pictures."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    api = FakeApi()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        _chat(browser, api, size=WIDE, name="chat")
        _chat(browser, api, size=PHONE, name="phone")
        _chinese(browser, api)
        _status(browser, api, "light", "status")
        _status(browser, api, "dark", "status-dark")
        browser.close()
    api.close()


if __name__ == "__main__":
    main()
