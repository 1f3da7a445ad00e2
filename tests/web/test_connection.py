"""Keys, loading, full queues, broken connections: what the page says, and how it goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import FakeApi, said
from tests.web.steps import answers, button, open_page, say

if TYPE_CHECKING:
    from playwright.sync_api import Page


BROKEN_BODIES = """() => {
    const json = Response.prototype.json;
    window.connectionHolds = false;
    Response.prototype.json = function () {
        return window.connectionHolds ? json.call(this) : Promise.reject(new TypeError("Failed to fetch"));
    };
}"""


def test_the_key_is_asked_for_once(page: Page, api: FakeApi) -> None:
    api.key = "right"
    page.goto(api.url)
    page.get_by_role("textbox", name="API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
    page.keyboard.press("Escape")
    page.get_by_role("textbox", name="API key").fill("right")
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_have_count(0)
    say(page, "Hello")
    expect(answers(page)).to_have_text("ok")
    page.reload()
    expect(page.locator(".model-name")).to_have_text("fake-model")
    other = page.context.new_page()  # the key was kept for the first tab only
    other.goto(api.url)
    expect(other.get_by_role("textbox", name="API key")).to_be_visible()


def test_the_key_can_be_remembered_and_forgotten(page: Page, api: FakeApi) -> None:
    api.key = "right"
    page.goto(api.url)
    page.get_by_role("textbox", name="API key").fill("right")
    page.get_by_label("Remember it in this browser").check()
    page.keyboard.press("Enter")
    expect(page.locator(".model-name")).to_have_text("fake-model")
    other = page.context.new_page()
    other.goto(api.url)
    expect(other.locator(".model-name")).to_have_text("fake-model")
    button(other, "Preferences").click()
    button(other, "Forget the key").click()
    expect(other.get_by_role("textbox", name="API key")).to_be_visible()
    page.reload()
    expect(page.get_by_role("textbox", name="API key")).to_be_visible()


@pytest.mark.parametrize("place", ["", "#/status"])
def test_a_connection_that_breaks_within_a_json_body_is_tried_again(page: Page, api: FakeApi, place: str) -> None:
    page.add_init_script(f"({BROKEN_BODIES})()")
    api.status = {"model": "fake-model"}
    page.goto(f"{api.url}/{place}")
    expect(page.locator(".obstacle")).to_have_text("The server cannot be reached. Trying again…")
    expect(page.locator(".model-name")).to_have_count(0)
    page.evaluate("connectionHolds = true")
    expect(page.locator(".model-name")).to_have_text("fake-model")
    expect(page.locator(".obstacle")).to_have_count(0)


def test_a_key_that_is_taken_back_in_mid_chat(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    api.key = "new"
    say(page, "Hello", waits=False)
    page.get_by_role("textbox", name="API key").fill("new")
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_have_count(0)
    expect(page.locator(".message .error")).to_have_text("the API key is wrong")
    button(page, "Retry").click()
    expect(answers(page)).to_have_text("ok")


def test_loading_shows_its_progress(page: Page, api: FakeApi) -> None:
    api.loading = "the model is loading: 42 %"
    page.goto(api.url)
    expect(page.locator(".obstacle")).to_contain_text("the model is loading: 42 %")
    page.locator("#composer").fill("Early")
    expect(button(page, "Send")).to_be_disabled()
    api.loading = ""
    expect(page.locator(".obstacle")).to_have_count(0)
    expect(button(page, "Send")).to_be_enabled()
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("ok")


@pytest.mark.parametrize("status", [429, 503])
def test_a_full_queue(page: Page, api: FakeApi, status: int) -> None:
    api.answers = [api.error(status, "too many requests wait", "queue_full", retry_after="7")]
    open_page(page, api)
    say(page, "Hello", waits=False)
    expect(page.locator(".message .error")).to_have_text("too many requests wait Try again in 7 s.")
    button(page, "Retry").click()
    expect(answers(page)).to_have_text("ok")


def test_an_error_in_mid_answer_keeps_the_text(page: Page, api: FakeApi) -> None:
    error = json.dumps({"error": {"message": "the engine died", "code": None}})
    api.answers = [[said("Half of"), error], [said("Whole")]]
    open_page(page, api)
    say(page, "Hello", waits=False)
    expect(page.locator(".message .error")).to_have_text("the engine died")
    expect(answers(page)).to_have_text("Half of")
    page.reload()
    expect(answers(page)).to_have_text("Half of")
    expect(page.locator(".message .error")).to_have_text("the engine died")


def test_a_broken_connection(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.route("**/v1/models", lambda route: route.abort())
    say(page, "Hello", waits=False)
    expect(page.locator(".message .error")).to_contain_text("The server cannot be reached.")
    expect(page.locator(".obstacle")).to_be_visible()
    page.unroute("**/v1/chat/completions")
    page.unroute("**/v1/models")
    expect(page.locator(".obstacle")).to_have_count(0)
    button(page, "Retry").click()
    expect(answers(page)).to_have_text("ok")
