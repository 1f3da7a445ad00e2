"""Answers that were cut go on as the same message, in their text or in their reasoning."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import HOLD, LENGTH, FakeApi, called, said, thought
from tests.web.steps import answers, button, open_page, say, whole

if TYPE_CHECKING:
    from playwright.sync_api import Page


def _stopped(page: Page, api: FakeApi, *pieces: dict[str, Any]) -> None:
    """A chat whose answer was stopped after these pieces."""
    api.answers = [[*pieces, HOLD]]
    open_page(page, api)
    say(page, "Go on", waits=False)
    shown = answers(page) if "content" in pieces[-1] else page.locator(".reasoning summary")
    expect(shown).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".ending")).to_have_text("Stopped")


def test_a_stopped_answer_goes_on_as_the_same_message(page: Page, api: FakeApi) -> None:
    _stopped(page, api, thought("hm"), said("One, "))
    page.reload()
    api.answers = [[said("two"), HOLD, said(", three.")]]
    button(page, "Continue").click()
    expect(answers(page)).to_have_text("One, two")
    expect(page.locator(".ending")).to_have_count(0)
    expect(button(page, "Continue")).to_have_count(0)
    expect(page.locator("#composer")).to_be_focused()
    api.release()
    whole(page)
    expect(answers(page)).to_have_text("One, two, three.")
    expect(button(page, "Continue")).to_have_count(0)
    expect(page.locator(".message.assistant .numbers")).to_have_count(0)  # no branch
    expect(page.locator(".figures")).to_contain_text("5 more tokens")  # nobody counted those before
    body = api.bodies[-1]
    assert body["continue_final_message"] is True
    assert body["messages"][1:] == [{"role": "assistant", "content": "One, ", "reasoning_content": "hm"}]
    assert "continue_final_message" not in api.bodies[0]
    page.reload()
    expect(answers(page)).to_have_text("One, two, three.")
    say(page, "And?")
    assert api.bodies[-1]["messages"][1] == {"role": "assistant", "content": "One, two, three."}


def test_an_answer_that_reached_its_length_goes_on_twice(page: Page, api: FakeApi) -> None:
    api.answers = [[said("a"), LENGTH], [said("b"), LENGTH], [said("c")]]
    open_page(page, api)
    say(page, "Write")
    for text in ("ab", "abc"):
        expect(page.locator(".ending")).to_have_text("The answer reached the limit of its length.")
        page.locator("#composer").focus()
        page.keyboard.press("Control+Enter")
        expect(answers(page)).to_have_text(text)
        whole(page)
    expect(page.locator(".ending")).to_have_count(0)
    expect(page.locator(".figures")).to_contain_text("15 tokens · 9.3 tokens/s")  # 14 in 1.5 s
    page.keyboard.press("Control+Enter")  # nothing to go on with: nothing is asked
    say(page, "Thanks")
    assert len(api.bodies) == 4


def test_reasoning_that_was_cut_goes_on(page: Page, api: FakeApi) -> None:
    page.clock.install()
    api.answers = [[thought("First "), HOLD]]
    open_page(page, api)
    say(page, "Think", waits=False)
    expect(page.locator(".reasoning summary")).to_have_text("Thinking")
    page.clock.fast_forward(5000)
    page.keyboard.press("Escape")
    expect(page.locator(".reasoning summary")).to_have_text(re.compile(r"Thought for 5\.\d s"))
    api.answers = [[thought("second."), HOLD, said("Done.")]]
    button(page, "Continue").click()
    expect(page.locator(".reasoning summary")).to_have_text("Thinking")
    page.locator(".reasoning summary").click()
    expect(page.get_by_text("First second.")).to_be_visible()  # the time counts from its first token
    page.clock.fast_forward(3000)
    api.release()
    whole(page)
    expect(page.locator(".reasoning summary")).to_have_text(re.compile(r"Thought for [89]\.\d s"))
    expect(page.get_by_text("First second.")).to_be_visible()
    expect(answers(page).last).to_have_text("Done.")
    assert api.bodies[-1]["messages"][-1] == {"role": "assistant", "content": "", "reasoning_content": "First "}


def test_what_cannot_go_on(page: Page, api: FakeApi) -> None:
    """Nothing was said, the answer calls tools, or the chat has gone on; but an error leaves what came before it."""
    error = json.dumps({"error": {"message": "the engine died", "code": None}})
    api.answers = [[error], [said("x"), called(0, "{}", "f"), error], [said("y"), error], [error], [said("z")]]
    open_page(page, api)
    for text in ("nothing", "a call"):
        say(page, text, waits=False)
        expect(page.locator(".message .error").last).to_have_text("the engine died")
        expect(page.locator(".go-on")).to_have_count(0)
        page.locator(".new-chat").click()
        expect(page.locator(".greeting")).to_be_visible()
    say(page, "text", waits=False)
    expect(page.locator(".message .error")).to_have_text("the engine died")
    button(page, "Continue").click()
    expect(page.locator(".message .error")).to_have_text("the engine died")
    expect(answers(page)).to_have_text("y")
    button(page, "Continue").click()
    whole(page)
    expect(page.locator(".message .error")).to_have_count(0)
    expect(answers(page)).to_have_text("yz")


def test_in_chinese_and_for_a_screen_reader(page: Page, api: FakeApi) -> None:
    _stopped(page, api, said("Heard before. "))
    button(page, "Preferences").click()
    page.get_by_label("Language").select_option("zh")
    page.keyboard.press("Escape")
    api.answers = [[said("New.")]]
    button(page, "继续").press("Enter")
    expect(answers(page)).to_have_text("Heard before. New.")
    expect(page.locator("[aria-live=polite][role=log] p")).to_have_text(["New.", "回答完毕"])
