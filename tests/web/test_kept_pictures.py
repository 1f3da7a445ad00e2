"""Where pictures are kept: with their chat, its draft and its export, and no longer than those."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import FakeApi
from tests.web.pictures import BLUE, RED, give, previews, sent, stored
from tests.web.steps import button, open_page, say

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.usefixtures("sees")

LEFT_BEHIND = """() => new Promise((resolve, reject) => {
    const request = indexedDB.open("ktransformers");
    request.onerror = reject;
    request.onsuccess = () => {
        const transaction = request.result.transaction("pictures", "readwrite");
        const ago = (days, bytes) => transaction.objectStore("pictures").add(
            {id: (Date.now() - days * 86400000).toString(36) + "x", chat: "", blob: new Blob([bytes])});
        ago(8, "1");
        ago(6, "22");
        transaction.oncomplete = () => { request.result.close(); resolve(); };
    };
})"""

OLD_STORE = """() => new Promise((resolve, reject) => {
    const request = indexedDB.open("ktransformers", 1);
    request.onerror = reject;
    request.onupgradeneeded = () => {
        const db = request.result;
        db.createObjectStore("chats", {keyPath: "id"})
            .add({id: "c", title: "Old", created: 1, updated: 1, settings: {}, selected: {}});
        const messages = db.createObjectStore("messages", {keyPath: "id"});
        messages.createIndex("chat", "chat");
        messages.add({id: "m", chat: "c", parent: "", role: "user", content: "from before", created: 1});
    };
    request.onsuccess = () => { request.result.close(); resolve(); };
})"""


def test_drafts_keep_pictures_over_a_reload_and_lose_what_is_removed(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    give(page, "paste", {"red.png": RED, "blue.png": BLUE})
    expect(previews(page)).to_have_count(2)
    page.reload()
    expect(page.locator(".composer .thumbnail img")).to_have_count(2)
    button(page, "Remove blue.png").click()
    expect(previews(page)).to_have_count(1)
    assert stored(page) == [["", len(RED)]]
    assert base64.b64encode(RED).decode()[:40] not in page.evaluate("JSON.stringify(localStorage)")
    say(page, "Look")
    assert sent(api.bodies[0]) == [RED, "Look"]
    [[chat, _]] = stored(page)
    assert page.url.endswith(f"#/chat/{chat}")


def test_pictures_are_deleted_with_their_chats(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    for name in ("one", "two"):
        page.locator(".new-chat").click()
        expect(page.locator(".greeting")).to_be_visible()
        give(page, "paste", {"red.png": RED})
        expect(previews(page)).to_have_count(1)
        say(page, name)
    give(page, "paste", {"draft.png": BLUE})  # in the draft of the second
    expect(previews(page)).to_have_count(1)
    page.locator(".new-chat").click()
    expect(page.locator(".greeting")).to_be_visible()
    give(page, "paste", {"new.png": BLUE})
    expect(previews(page)).to_have_count(1)
    assert len(stored(page)) == 4
    page.get_by_role("link", name="two").click()
    button(page, "Delete").click()
    page.locator("dialog .danger").click()
    expect(page.locator(".greeting")).to_be_visible()
    assert sorted(size for _, size in stored(page)) == sorted([len(RED), len(BLUE)])
    button(page, "Preferences").click()
    button(page, "Delete all chats").click()
    page.locator("dialog").last.get_by_role("button", name="Delete").click()
    expect(page.locator(".chat-list")).to_have_text("Chats stay in this browser.")
    assert stored(page) == [["", len(BLUE)]]
    expect(page.locator(".composer .thumbnail img")).to_have_count(1)


def test_what_new_chats_have_left_behind_is_swept(page: Page, api: FakeApi) -> None:
    """What was attached longer ago than a week, and is in no draft."""
    open_page(page, api)
    give(page, "paste", {"kept.png": RED})
    expect(previews(page)).to_have_count(1)
    page.evaluate(LEFT_BEHIND)
    assert len(stored(page)) == 3
    page.reload()
    expect(page.locator(".model-name")).to_contain_text("fake-model")
    assert sorted(stored(page)) == [["", 2], ["", len(RED)]]  # two bytes: another tab may be writing with them
    expect(page.locator(".composer .thumbnail img")).to_have_count(1)


def test_export_and_import_bring_pictures_back(page: Page, api: FakeApi, tmp_path: Path) -> None:
    open_page(page, api)
    give(page, "paste", {"red.png": RED, "blue.png": BLUE})
    expect(previews(page)).to_have_count(2)
    say(page, "Question")
    button(page, "Preferences").click()
    with page.expect_download() as download:
        button(page, "Export all chats").click()
    saved = tmp_path / "chats.json"
    download.value.save_as(saved)
    button(page, "Delete all chats").click()
    page.locator("dialog").last.get_by_role("button", name="Delete").click()
    expect(page.locator(".chat-list")).to_have_text("Chats stay in this browser.")
    assert stored(page) == []

    def bring() -> None:
        button(page, "Preferences").click()
        page.locator("dialog input[type=file]").set_input_files(saved)
        expect(page.locator(".notice")).to_have_text("1 chats were imported.")
        page.get_by_role("link", name="Question").click()

    bring()
    expect(page.locator(".bubble .thumbnail img")).to_have_count(2)
    say(page, "Again")
    assert sent(api.bodies[1], 0) == [RED, BLUE, "Question"]

    chats = json.loads(saved.read_text())
    [first, second] = chats["chats"][0]["pictures"]
    chats["chats"][0]["pictures"] = {
        first: "data:text/html;base64," + base64.b64encode(b"<script>alert(1)</script>").decode(),
        second: "data:image/png;base64,%%%",
        "other": "https://example.org/a.png",
    }
    saved.write_text(json.dumps(chats))
    button(page, "Delete").click()
    page.locator("dialog .danger").click()
    expect(page.locator(".greeting")).to_be_visible()
    bring()
    expect(page.locator(".bubble .files")).to_contain_text("red.png is not in this browser any more")
    assert stored(page) == []
    say(page, "More", waits=False)
    expect(page.locator(".message .error")).to_have_text("red.png is not in this browser any more")
    assert len(api.bodies) == 2


def test_chats_of_before_there_were_pictures_are_kept(page: Page, api: FakeApi) -> None:
    page.goto(f"{api.url}/v1/models")
    page.evaluate(OLD_STORE)
    open_page(page, api)
    page.get_by_role("link", name="Old").click()
    expect(page.locator(".message.user .plain")).to_have_text("from before")
    give(page, "paste", {"red.png": RED})
    expect(previews(page)).to_have_count(1)
    say(page, "Look")
    assert sent(api.bodies[0]) == [RED, "Look"]


def test_without_a_store_pictures_last_until_the_page_closes(page: Page, api: FakeApi) -> None:
    page.add_init_script("IDBFactory.prototype.open = () => { throw new DOMException('denied', 'SecurityError') }")
    open_page(page, api)
    expect(page.locator(".notice")).to_contain_text("The browser does not store chats")
    give(page, "paste", {"red.png": RED, "blue.png": BLUE})
    expect(page.locator(".composer .thumbnail img")).to_have_count(2)
    button(page, "Remove blue.png").click()
    say(page, "Look")
    say(page, "Again")
    assert sent(api.bodies[1], 0) == [RED, "Look"]


def test_a_second_tab_shows_the_pictures(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    give(page, "paste", {"red.png": RED})
    expect(previews(page)).to_have_count(1)
    say(page, "Look")
    other = page.context.new_page()
    open_page(other, api, page.url.removeprefix(f"{api.url}/"))
    expect(other.locator(".bubble .thumbnail img")).to_have_count(1)


def test_an_imported_refusal_of_nothing_is_answered(page: Page, api: FakeApi, tmp_path: Path) -> None:
    refusal = {"id": "m", "parent": "", "role": "assistant", "content": "", "state": "error", "isRefused": True}
    chat = {"id": "c", "title": "Odd", "messages": [refusal]}
    (tmp_path / "a.json").write_text(json.dumps({"format": "ktransformers-chats", "version": 1, "chats": [chat]}))
    open_page(page, api)
    button(page, "Preferences").click()
    page.locator("dialog input[type=file]").set_input_files(tmp_path / "a.json")
    page.get_by_role("link", name="Odd").click()
    expect(page.locator(".chat-title")).to_have_text("Odd")
    say(page, "And?", waits=False)
    expect(page.locator(".message.assistant .markdown")).to_have_text("ok")
    assert api.bodies[0]["messages"] == [{"role": "user", "content": "And?"}]
