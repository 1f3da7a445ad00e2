"""A browser for the tests of the page: Debian's Chromium, driven by Playwright. Without one they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.web.fake_api import FakeApi

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 20_000
"""Milliseconds until a page on a loaded machine is taken for stuck."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one module: while Playwright runs, asyncio.run of other tests cannot."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed")
    sync_api.expect.set_options(timeout=_PATIENCE)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeApi]:
    api = FakeApi()
    yield api
    api.close()


@pytest.fixture
def api(fake: FakeApi) -> FakeApi:
    fake.reset()
    return fake


@pytest.fixture
def sees(api: FakeApi) -> None:
    """The model reads pictures."""
    api.reads = ["text", "image"]


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab of a browser that has kept nothing. Fails the test when a script fails."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, locale="en-US", accept_downloads=True)
    context.set_default_timeout(_PATIENCE)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []
