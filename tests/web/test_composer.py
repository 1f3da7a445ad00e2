"""The field to write in: drafts that outlive a reload, what Enter means, and long chats to write in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import HOLD, FakeApi, said
from tests.web.steps import answers, button, open_page, say, whole

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KEY = """([selector, init]) => {
    const event = new KeyboardEvent("keydown", {bubbles: true, cancelable: true, ...init});
    document.querySelector(selector).dispatchEvent(event);
    return event.defaultPrevented;
}"""


def _press(page: Page, selector: str, **init: Any) -> bool:
    """A key as the browser reports it; whether the page took it."""
    return bool(page.evaluate(KEY, [selector, init]))


def test_each_chat_keeps_its_draft_over_a_reload(page: Page, api: FakeApi, tmp_path: Path) -> None:
    composer = page.locator("#composer")
    (tmp_path / "a.txt").write_text("kept")
    open_page(page, api)
    say(page, "First chat")
    composer.fill("draft of the first\nin two lines")
    page.locator("input[type=file]").first.set_input_files(tmp_path / "a.txt")
    expect(page.locator(".composer .files .name")).to_have_text("a.txt")
    page.locator(".new-chat").click()
    expect(composer).to_have_value("")
    expect(page.locator(".composer .files")).to_have_count(0)
    composer.fill("draft of a new one")
    page.reload()
    expect(composer).to_have_value("draft of a new one")
    page.get_by_role("link", name="Status").click()
    page.get_by_role("link", name="First chat").click()
    expect(composer).to_have_value("draft of the first\nin two lines")
    page.reload()
    expect(composer).to_have_value("draft of the first\nin two lines")
    expect(page.locator(".composer .files .name")).to_have_text("a.txt")
    page.keyboard.press("Enter")
    whole(page)
    assert api.bodies[-1]["messages"][-1]["content"] == "a.txt:\n```\nkept\n```\n\ndraft of the first\nin two lines"
    page.reload()
    expect(page.locator(".message")).to_have_count(4)
    expect(composer).to_have_value("")
    page.locator(".new-chat").click()
    expect(composer).to_have_value("draft of a new one")


def test_drafts_go_with_their_chats(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    say(page, "Chat")
    page.locator("#composer").fill("private")
    page.reload()
    expect(page.locator("#composer")).to_have_value("private")
    button(page, "Delete").click()
    page.locator("dialog .danger").click()
    expect(page.locator(".greeting")).to_be_visible()
    assert "private" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_draft_that_the_browser_does_not_keep_lasts_until_the_page_closes(page: Page, api: FakeApi) -> None:
    page.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }")
    open_page(page, api)
    page.locator("#composer").fill("draft")
    page.get_by_role("link", name="Status").click()
    expect(page.get_by_role("heading", name="Status")).to_be_visible()
    page.locator(".new-chat").click()
    expect(page.locator("#composer")).to_have_value("draft")


@pytest.mark.parametrize(
    ("init", "sends"),
    [
        ({"key": "Enter"}, True),
        ({"key": "Enter", "ctrlKey": True}, True),
        ({"key": "Enter", "metaKey": True}, True),
        ({"key": "Enter", "shiftKey": True}, False),
        ({"key": "Enter", "altKey": True}, False),
        ({"key": "Enter", "isComposing": True, "keyCode": 229}, False),  # Chrome, Firefox: takes the word
        ({"key": "Enter", "keyCode": 229}, False),  # Safari: the composition has ended by now
        ({"key": "Process", "keyCode": 229}, False),
    ],
)
def test_which_enter_sends(page: Page, api: FakeApi, init: dict[str, Any], sends: bool) -> None:
    open_page(page, api)
    page.locator("#composer").fill("ni hao")
    assert _press(page, "#composer", **init) is sends
    expect(page.locator("#composer")).to_have_value("" if sends else "ni hao")
    expect(page.locator(".message.user")).to_have_count(int(sends))


def test_composing_an_edit_a_title_and_beside_an_answer(page: Page, api: FakeApi) -> None:
    composing = {"isComposing": True, "keyCode": 229}
    api.answers = [[said("a")], [said("Long "), HOLD, said("text")]]
    open_page(page, api)
    say(page, "Question")
    button(page, "Edit").click()
    for key in ("Enter", "Escape"):
        _press(page, ".editor textarea", key=key, **composing)
    expect(page.locator(".editor textarea")).to_have_count(1)
    button(page, "Cancel").click()
    page.get_by_role("heading", name="Question").get_by_role("button").click()
    for key in ("Enter", "Escape"):
        _press(page, "input.chat-title", key=key, **composing)
    expect(page.locator("input.chat-title")).to_be_focused()
    page.keyboard.press("Escape")
    say(page, "More", waits=False)
    expect(answers(page).last).to_have_text("Long")
    _press(page, "#composer", key="Escape", **composing)  # of the input method, not of the answer
    api.release()
    whole(page)
    expect(answers(page).last).to_have_text("Long text")


def test_enter_on_a_phone_is_a_new_line(browser: Browser, api: FakeApi) -> None:
    context = browser.new_context(
        viewport={"width": 400, "height": 800}, is_mobile=True, has_touch=True, locale="en-US"
    )
    page = context.new_page()
    page.goto(api.url)
    composer = page.locator("#composer")
    expect(composer).to_have_attribute("enterkeyhint", "enter")
    expect(page.locator(".greeting")).not_to_contain_text("Enter")
    composer.tap()
    page.keyboard.type("One")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    expect(composer).to_have_value("One\ntwo")
    button(page, "Send").tap()
    expect(page.locator(".message.user .plain")).to_have_text("One\ntwo")
    whole(page)
    composer.fill("with a keyboard")
    page.keyboard.press("Control+Enter")
    whole(page)
    assert [body["messages"][-1]["content"] for body in api.bodies] == ["One\ntwo", "with a keyboard"]
    context.close()


FORMULAS = """Then $\\sum_i x_i^{2}$ and

$$\\begin{pmatrix} a & b \\\\ c & \\sqrt{d} \\end{pmatrix}$$

| a |
|---|
| $y$ |
"""


def long_chat(path: Path, num_messages: int) -> Path:
    """An export of one chat, three formulas in each answer."""
    messages = [
        {
            "id": f"m{at}",
            "parent": f"m{at - 1}" if at else "",
            "role": "assistant" if at % 2 else "user",
            "content": FORMULAS * 2 + f"Number {at}." if at % 2 else f"Question {at}",
            "created": at + 1,
            "state": "done",
        }
        for at in range(num_messages)
    ]
    chat = {
        "id": "c",
        "title": "Long",
        "created": 1,
        "updated": 2,
        "settings": {},
        "selected": {},
        "messages": messages,
    }
    path.write_text(json.dumps({"format": "ktransformers-chats", "version": 1, "chats": [chat]}))
    return path


def test_typing_in_along_chat_touches_no_message(page: Page, api: FakeApi, tmp_path: Path) -> None:
    """300 messages with 900 formulas: those out of sight are not rendered, and none changes while somebody types."""
    open_page(page, api)
    button(page, "Preferences").click()
    page.locator("dialog input[type=file]").set_input_files(long_chat(tmp_path / "long.json", 300))
    page.get_by_role("link", name="Long").click()
    expect(page.get_by_text("Number 299.")).to_be_in_viewport()
    page.locator("#composer").press_sequentially("at once")  # while the older ones are still being set
    expect(page.locator("#composer")).to_have_value("at once")
    page.locator("#composer").fill("")
    expect(page.locator(".katex")).to_have_count(900)
    expect(page.get_by_text("Number 299.")).to_be_in_viewport()  # and the end is where the reader is
    page.wait_for_function(
        """() => {
            const isRendered = (one) => one.checkVisibility({contentVisibilityAuto: true});
            return [...document.querySelectorAll(".message > *")].filter(isRendered).length < 40;
        }"""
    )
    page.evaluate(
        """() => {
            window.changes = 0;
            const all = {subtree: true, childList: true, attributes: true, characterData: true};
            const count = (changes) => { window.changes += changes.length };
            new MutationObserver(count).observe(document.querySelector(".messages"), all);
        }"""
    )
    page.locator("#composer").press_sequentially("some words", delay=0)
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and a line")
    expect(page.locator("#composer")).to_have_value("some words\nand a line")
    assert page.evaluate("window.changes") == 0
    page.locator(".scroller").evaluate("(box) => { box.scrollTop = 0 }")
    expect(page.get_by_text("Question 0", exact=True)).to_be_in_viewport()
