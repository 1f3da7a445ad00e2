"""The page in front of the real server and the bundled model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

import httpx
from playwright.sync_api import expect

from ktransformers import LLM, SamplingParams
from tests.engine.api.test_chat_with_pictures import drawing, folder_of, png
from tests.support.pictures.speaking import let_speak
from tests.support.servers.server_process import ServerProcess
from tests.web.pictures import pick, previews
from tests.web.steps import answers, button, say, whole

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_a_chat_with_the_bundled_model(page: Page) -> None:
    violations: list[str] = []
    page.on("console", lambda message: violations.append(message.text) if "policy" in message.text.lower() else None)
    flags = ("--backend_type", "ktransformers", "--model_name", "demo", "--cache_lens", "2048", "--api_key", "the-key")
    with ServerProcess(*flags) as server:
        server.wait_for(f"chat in a browser on {server.url}$")
        page.goto(server.url)
        page.get_by_role("textbox", name="API key").fill("the-key")
        page.keyboard.press("Enter")
        expect(page.locator(".model-name")).to_have_text("demo")
        button(page, "Settings of this chat").click()
        page.get_by_label("Temperature").fill("0")
        page.keyboard.press("Escape")
        say(page, "What is 17 + 25?")
        expect(answers(page)).to_have_text("17 + 25 = 42.")
        expect(page.locator(".figures")).to_have_text(
            re.compile(r"^12 tokens · [\d,.]+ tokens/s · first after \d+\.\d\d s$")
        )
        button(page, "Retry").click()
        expect(page.locator(".message.assistant .numbers")).to_have_text("2/2")
        whole(page)
        page.reload()
        expect(answers(page)).to_have_text("17 + 25 = 42.")
        button(page, "Settings of this chat").click()
        page.get_by_label("Max. tokens").fill("8")
        page.keyboard.press("Escape")
        button(page, "Retry").click()
        expect(page.locator(".ending")).to_have_text("The answer reached the limit of its length.")
        assert answers(page).inner_text() in "17 + 25 = 42."
        button(page, "Continue").click()
        expect(answers(page)).to_have_text("17 + 25 = 42.")
        expect(page.locator(".figures")).to_contain_text("12 tokens")
        page.goto(f"{server.url}/#/status")
        expect(page.get_by_role("heading", name="Status")).to_be_visible()
    assert violations == []


def test_a_picture_reaches_a_model_with_a_tower(page: Page, tmp_path: Path) -> None:
    folder = let_speak(folder_of("qwen3_vl", tmp_path / "tiny")[0])
    picture, params = png(drawing()), SamplingParams(temperature=0, max_tokens=24)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What is this?"}]
    with LLM(folder, cache_lens=2048, cpu_infer=1, self_check=False) as llm:
        (expected,) = llm.chat([{"role": "user", "content": content}], params)
    with ServerProcess(str(folder), "--backend_type", "ktransformers", "--cache_lens", "2048") as server:
        page.goto(server.url)
        expect(page.locator(".model-name")).to_have_text("tiny")
        button(page, "Settings of this chat").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Max. tokens").fill("24")
        page.keyboard.press("Escape")
        pick(page, "drawing.png", picture)
        expect(previews(page)).to_have_count(1)
        say(page, "What is this?")
        whole(page)
        assert httpx.get(f"{server.url}/v1/status").json()["pictures"]["read"] == 1
        expect(page.locator(".figures")).to_contain_text("24 tokens")
        expect(answers(page)).to_have_text(expected.text)
