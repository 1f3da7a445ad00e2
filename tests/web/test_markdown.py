"""Markdown as models write it: breaks in cells, emphasis beside Chinese, lists of tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import FakeApi, said
from tests.web.steps import answers, button, open_page, say

if TYPE_CHECKING:
    from playwright.sync_api import Page

EMPHASIS = {
    # Each with what is to be between the marks; None: no emphasis at all.
    "**中文**。": "中文",
    "他说**“你好”**。": "“你好”",
    "**注意：**后面的文字": "注意：",
    "这是**重点（important）**的内容": "重点（important）",
    "**“引用”**是": "“引用”",
    '前面**"quoted"**后面': '"quoted"',
    "使用**`code`**函数": "code",
    "共**50%**的人": "50%",
    "**「日本語」**は": "「日本語」",
    "これは**太字。**です": "太字。",
    "**한국어(hanja)**는": "한국어(hanja)",
    "中文**𠀀。**中文": "𠀀。",
    "中文 ** 不是 ** 中文": None,
    "2**3，4**": "3，4",
    "a**(b)**c": None,  # without Chinese it is as CommonMark has it
    "plain **bold**, and": "bold",
}


@pytest.fixture
def chat(page: Page, api: FakeApi) -> Page:
    open_page(page, api)
    return page


def test_strong_emphasis_beside_chinese_japanese_and_korean(chat: Page, api: FakeApi) -> None:
    api.answers = [[said("\n\n".join(EMPHASIS))]]
    say(chat, "Bold")
    blocks = answers(chat).locator(".block")
    expect(blocks).to_have_count(len(EMPHASIS))
    found = blocks.evaluate_all("(all) => all.map((one) => one.querySelector('strong')?.textContent ?? null)")
    assert dict(zip(EMPHASIS, found, strict=True)) == EMPHASIS


def test_other_emphasis_follows(chat: Page, api: FakeApi) -> None:
    api.answers = [[said("这是*斜体。*文字\n\n价格~~100元。~~免费\n\n变量snake_case_名字\n\n***“都是”***的")]]
    say(chat, "Emphasis")
    expect(answers(chat).locator("em").first).to_have_text("斜体。")
    expect(answers(chat).locator("s, del")).to_have_text("100元。")
    expect(answers(chat).locator("em")).to_have_count(2)
    expect(answers(chat).locator("em strong, strong em")).to_have_text("“都是”")


def test_breaks_in_cells_and_elsewhere(chat: Page, api: FakeApi) -> None:
    table = "| a | b |\n|---|---|\n| one<br>two<br/>three | **x**<BR />y |"
    text = f"{table}\n\nfour<br >five `<br>` <b>no</b> <br class=x> <brx>"
    api.answers = [[said(text)]]
    say(chat, "Table")
    cells = answers(chat).locator("td")
    assert cells.evaluate_all("(all) => all.map((one) => one.innerHTML.replace(/\\n/g, ''))") == [
        "one<br>two<br>three",
        "<strong>x</strong><br>y",
    ]
    expect(answers(chat).locator("p code")).to_have_text("<br>")
    expect(answers(chat).locator("p > br")).to_have_count(1)
    expect(answers(chat).locator("p")).to_contain_text("<b>no</b> <br class=x> <brx>")


def test_lists_of_tasks(chat: Page, api: FakeApi) -> None:
    text = (
        "- [x] done\n- [ ] open\n  1. [X] **nested**\n  2. plain\n- [x]not\n- [y] nor this\n- [ ]\n"
        "- [x](https://example.org) a link\n\n[x] outside\n\n* [ ] loose\n\n* [x] list"
    )
    api.answers = [[said(text)]]
    say(chat, "Tasks")
    boxes = answers(chat).locator("li.task > input[type=checkbox], li.task > p > input[type=checkbox]")
    assert boxes.evaluate_all("(all) => all.map((one) => [one.checked, one.disabled, one.ariaLabel])") == [
        [True, True, "Done"],
        [False, True, "Not done"],
        [True, True, "Done"],
        [False, True, "Not done"],
        [True, True, "Done"],
    ]
    expect(answers(chat).locator("input")).to_have_count(5)
    expect(answers(chat).locator("li strong")).to_have_text("nested")
    for rest in ("[x]not", "[y] nor this", "[x] outside"):
        expect(answers(chat)).to_contain_text(rest)
    expect(answers(chat)).not_to_contain_text("[x] done")
    button(chat, "Preferences").click()
    chat.get_by_label("Language").select_option("zh")
    chat.keyboard.press("Escape")
    expect(answers(chat).get_by_role("checkbox", name="已完成")).to_have_count(3)
