"""What tests of the page do again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect

from tests.web.fake_api import FakeApi

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def open_page(page: Page, api: FakeApi, place: str = "") -> None:
    """The page, connected."""
    page.goto(f"{api.url}/{place}")
    expect(page.locator(".model-name")).to_contain_text("fake-model")


def say(page: Page, text: str, *, waits: bool = True) -> None:
    """Send it; waits: until the answer is whole."""
    num_before = page.locator(".message.assistant").count()
    page.locator("#composer").fill(text)
    page.keyboard.press("Enter")
    if waits:
        expect(page.locator(".message.assistant")).to_have_count(num_before + 1)
        whole(page)


def whole(page: Page) -> None:
    """Wait until no answer is on its way."""
    expect(page.locator(".message.assistant .actions").last).to_contain_text("first after")
    expect(page.locator("[aria-busy=true]")).to_have_count(0)


def answers(page: Page) -> Locator:
    return page.locator(".message.assistant .markdown")


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)
