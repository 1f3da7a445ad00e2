"""Search leads to the match: its chat, its branch, its message, its words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import FakeApi, said
from tests.web.steps import answers, button, open_page, say, whole
from tests.web.test_composer import long_chat

if TYPE_CHECKING:
    from playwright.sync_api import Page

MARKED = "() => [...(CSS.highlights.get('found') ?? [])].map(String)"


def _search(page: Page, text: str) -> None:
    page.keyboard.press("Control+k")
    page.locator("#search").fill(text)
    expect(page.locator(".excerpt").first).to_be_visible()


@pytest.mark.parametrize("number", [1, 77, 151])
def test_to_the_match_in_a_long_chat(page: Page, api: FakeApi, tmp_path: Path, number: int) -> None:
    open_page(page, api)
    button(page, "Preferences").click()
    page.locator("dialog input[type=file]").set_input_files(long_chat(tmp_path / "long.json", 160))
    expect(page.locator("dialog")).to_have_count(0)  # which closes when all is there
    _search(page, f"nUMBER {number}.")
    page.get_by_role("link", name="Long").click()
    message = page.locator(".message", has_text=f"Number {number}.")
    expect(message).to_be_focused()
    page.wait_for_function(
        """(number) => {
            const [range] = CSS.highlights.get("found") ?? [];
            const box = document.querySelector(".scroller").getBoundingClientRect();
            const {top, bottom} = range?.getBoundingClientRect() ?? {};
            return String(range) === `Number ${number}.` && top > box.top && bottom < box.bottom;
        }""",
        arg=number,
    )
    page.locator("#search").fill("")
    page.wait_for_function("() => !CSS.highlights.has('found')")
    expect(message.get_by_text(f"Number {number}.")).to_be_in_viewport()  # and the reader stays there


def test_the_branch_of_the_match_is_shown(page: Page, api: FakeApi) -> None:
    api.answers = [[said("the old answer")], [said("the new answer")], [said("more")]]
    open_page(page, api)
    say(page, "Question")
    button(page, "Retry").click()
    expect(answers(page)).to_have_text("the new answer")
    whole(page)
    say(page, "Next")
    page.locator(".new-chat").click()
    expect(page.locator("#composer")).to_be_focused()  # before the search takes the focus
    _search(page, "old ans")
    page.keyboard.press("Enter")  # opens the first chat that is found
    expect(answers(page)).to_have_text("the old answer")
    page.wait_for_function(f"() => ({MARKED})()[0] === 'old ans'")
    page.locator("#search").fill("new ans")  # in the chat that is open by now
    expect(page.locator(".excerpt")).to_contain_text("the new answer")
    page.get_by_role("link", name="Question").click()
    expect(answers(page).first).to_have_text("the new answer")


def test_words_across_marks_and_a_new_message_after_it(page: Page, api: FakeApi) -> None:
    api.answers = [[said("Some **bold** and `code` words.\n\nBold AND code again: bold and code")], [said("fine")]]
    open_page(page, api)
    say(page, "Write")
    page.locator(".new-chat").click()
    _search(page, "bold and code")
    page.locator("#search").press("Enter")
    page.wait_for_function(f"() => ({MARKED})().length === 3")
    assert page.evaluate(MARKED) == ["bold and code", "Bold AND code", "bold and code"]
    say(page, "Go on")  # does not lead back to the match
    expect(answers(page).last.get_by_text("fine")).to_be_in_viewport()
    expect(page.locator("#composer")).to_be_focused()


def test_a_match_in_the_source_alone_leads_to_its_message(page: Page, api: FakeApi) -> None:
    api.answers = [[said("Some **bold** words")]]
    open_page(page, api)
    say(page, "Write")
    page.locator(".new-chat").click()
    _search(page, "**bold")
    page.locator("#search").press("Enter")
    expect(page.locator(".message.assistant")).to_be_focused()
