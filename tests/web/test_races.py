"""What is done at once: two tabs, clicks in mid-answer, a reload before the store is ready, no store at all."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import HOLD, FakeApi, said
from tests.web.steps import answers, button, open_page, say, whole

if TYPE_CHECKING:
    from playwright.sync_api import Page

SLOW_STORE = """() => {
    const plain = IDBFactory.prototype.open;
    window.storeOpens = () => undefined;
    const isAllowed = new Promise((resolve) => { window.storeOpens = resolve; });
    const success = Object.getOwnPropertyDescriptor(IDBRequest.prototype, "onsuccess");
    const add = IDBOpenDBRequest.prototype.addEventListener;
    IDBOpenDBRequest.prototype.addEventListener = function (kind, listener, options) {
        if (kind !== "success") return add.call(this, kind, listener, options);
        return add.call(this, kind, (event) => void isAllowed.then(() => listener.call(this, event)), options);
    };
}"""

NO_STORE = """() => {
    const refuse = () => { throw new DOMException("denied", "SecurityError"); };
    IDBFactory.prototype.open = refuse;
    for (const name of ["localStorage", "sessionStorage"]) Object.defineProperty(window, name, {get: refuse});
}"""

FULL_STORE = """() => {
    IDBObjectStore.prototype.put = () => { throw new DOMException("no room is left", "QuotaExceededError"); };
    Storage.prototype.setItem = () => { throw new DOMException("no room is left", "QuotaExceededError"); };
}"""


BUSY_STORE = """() => new Promise((resolve, reject) => {
    window.storeIsFree = false;
    const request = indexedDB.open("ktransformers");
    request.onerror = reject;
    request.onsuccess = () => {
        const chats = request.result.transaction(["chats", "messages"], "readwrite").objectStore("chats");
        const hold = () => { if (!window.storeIsFree) chats.count().onsuccess = hold; };
        chats.count().onsuccess = () => { hold(); resolve(); };
    };
})"""


def _other_tab(page: Page, api: FakeApi) -> Page:
    other = page.context.new_page()
    open_page(other, api, page.url.removeprefix(f"{api.url}/"))
    return other


def _run_until(page: Page, text: str) -> None:
    """Let the page's clock go until the answer is shown, and little longer."""
    end = time.monotonic() + 20
    while text not in answers(page).all_inner_texts():
        assert time.monotonic() < end
        page.clock.run_for(20)


def _rename(page: Page, name: str) -> None:
    page.locator("h1 button").click()
    page.get_by_label("Name of the chat").fill(name)
    page.keyboard.press("Enter")


def test_a_reload_right_after_a_text_was_shown_keeps_it(page: Page, api: FakeApi) -> None:
    """Before the first save, which comes half a second later: here never, the clock stands still."""
    api.answers = [[said("Shown"), HOLD], [said(" and more"), HOLD]]
    page.clock.install()
    open_page(page, api)
    page.clock.pause_at(page.evaluate("Date.now() + 1000"))
    say(page, "Go on", waits=False)
    expect(page.locator(".message.assistant")).to_have_count(1)
    _run_until(page, "Shown")
    page.reload()
    expect(answers(page)).to_have_text("Shown")
    expect(page.locator(".ending")).to_have_text("This answer was interrupted.")
    button(page, "Continue").click()
    _run_until(page, "Shown and more")


def test_a_reload_before_the_store_has_taken_anything_loses_nothing(page: Page, api: FakeApi) -> None:
    """The store waits for a transaction of another tab: what is shown meanwhile is there after the reload."""
    open_page(page, api)
    other = page.context.new_page()
    other.goto(f"{api.url}/v1/models")
    other.evaluate(BUSY_STORE)
    api.answers = [[said("Shown"), HOLD], [said(" and more")]]
    say(page, "Go on", waits=False)
    expect(answers(page)).to_have_text("Shown")
    page.keyboard.press("Escape")
    expect(page.locator(".ending")).to_have_text("Stopped")
    _rename(page, "A better name")
    expect(page.locator(".chat-list .title")).to_have_text("A better name")
    page.reload()
    other.evaluate("window.storeIsFree = true")
    expect(page.locator(".message.user .plain")).to_have_text("Go on")
    expect(answers(page)).to_have_text("Shown")
    expect(page.locator(".ending")).to_have_text("Stopped")
    expect(page.locator("h1")).to_have_text("A better name")
    button(page, "Continue").click()
    expect(answers(page)).to_have_text("Shown and more")
    whole(page)
    page.reload()
    expect(answers(page)).to_have_text("Shown and more")


def test_what_a_closed_tab_left_another_one_takes_up(page: Page, api: FakeApi) -> None:
    """At once, not with its next load: it would overwrite what was written in between."""
    open_page(page, api)
    closed = page.context.new_page()
    closed.add_init_script(f"({SLOW_STORE})()")
    closed.goto(api.url)
    say(closed, "Early", waits=False)
    expect(answers(closed)).to_have_text("ok")
    closed.close(run_before_unload=False)
    page.get_by_role("link", name="Early").click()
    expect(answers(page)).to_have_text("ok")
    assert page.evaluate("Object.keys(localStorage).filter((name) => name.includes('.left.'))") == []


def test_an_answer_that_another_tab_reads_is_neither_interrupted_nor_asked_again(page: Page, api: FakeApi) -> None:
    api.answers = [[said("Half"), HOLD, said(" and whole.")]]
    open_page(page, api)
    say(page, "Go on", waits=False)
    expect(answers(page)).to_have_text("Half")
    other = _other_tab(page, api)
    expect(other.locator(".ending")).to_have_text("Another tab is reading this answer.")
    expect(button(other, "Continue")).to_have_count(0)
    expect(button(other, "Retry")).to_have_count(0)
    other.locator("#composer").fill("Next")
    expect(button(other, "Send")).to_be_disabled()
    api.release()
    whole(page)
    expect(answers(other)).to_have_text("Half and whole.")
    expect(other.locator(".ending")).to_have_count(0)
    expect(button(other, "Send")).to_be_enabled()


def test_an_answer_whose_tab_was_closed_can_go_on_in_another(page: Page, api: FakeApi) -> None:
    api.answers = [[said("Half"), HOLD], [said(" and whole.")]]
    open_page(page, api)
    say(page, "Go on", waits=False)
    expect(answers(page)).to_have_text("Half")
    other = _other_tab(page, api)
    expect(other.locator(".ending")).to_have_text("Another tab is reading this answer.")
    page.close(run_before_unload=False)
    button(other, "Continue").click()
    expect(answers(other)).to_have_text("Half and whole.")


def test_a_chat_deleted_in_another_tab_ends_its_answer(page: Page, api: FakeApi) -> None:
    api.answers = [[said("Half"), HOLD]]
    open_page(page, api)
    say(page, "Go on", waits=False)
    expect(answers(page)).to_have_text("Half")
    other = _other_tab(page, api)
    button(other, "Delete").click()
    other.locator("dialog .danger").click()
    assert api.left.wait(20)
    expect(page.locator(".greeting")).to_be_visible()
    for tab in (page, other):
        tab.reload()
        expect(tab.locator(".chat-list")).to_have_text("Chats stay in this browser.")


def test_tabs_that_change_one_chat_keep_each_others_changes(page: Page, api: FakeApi) -> None:
    """The second tab does not hear of the first one: what it writes is the change, not its copy of the chat."""
    api.answers = [[said("first")], [said("second")]]
    open_page(page, api)
    say(page, "Question")
    button(page, "Retry").click()
    expect(answers(page)).to_have_text("second")
    whole(page)
    other = page.context.new_page()
    other.add_init_script("delete window.BroadcastChannel")
    open_page(other, api, page.url.removeprefix(f"{api.url}/"))
    expect(answers(other)).to_have_text("second")
    _rename(page, "A better name")
    expect(page.locator(".chat-list .title")).to_have_text("A better name")
    button(other, "Previous version").click()
    expect(answers(other)).to_have_text("first")
    other.reload()
    expect(answers(other)).to_have_text("first")
    expect(other.locator(".chat-list .title")).to_have_text("A better name")


def test_another_chat_is_opened_right_after_sending(page: Page, api: FakeApi) -> None:
    """In the same turn of the event loop: the question is still the one that was asked."""
    open_page(page, api)
    say(page, "First")
    page.locator(".new-chat").click()
    expect(page.locator(".greeting")).to_be_visible()
    say(page, "Second")
    page.locator("#composer").fill("Third")
    page.evaluate(
        """() => {
            document.querySelector(".composer button[aria-label=Send]").click();
            [...document.querySelectorAll(".chat-list a")].find((one) => one.textContent === "First").click();
        }"""
    )
    expect(page.locator(".message.user .plain")).to_have_text(["First"])
    page.get_by_role("link", name="Second").click()
    expect(answers(page)).to_have_text(["ok", "ok"])
    assert [one["content"] for one in api.bodies[-1]["messages"]] == ["Second", "ok", "Third"]


def test_a_message_is_sent_while_the_store_is_still_opening(page: Page, api: FakeApi) -> None:
    page.add_init_script(f"({SLOW_STORE})()")
    page.goto(api.url)
    page.locator("#composer").fill("Early")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("ok")
    page.locator("#composer").fill("Again")
    page.evaluate("storeOpens()")
    expect(page.locator(".model-name")).to_contain_text("fake-model")
    expect(answers(page)).to_have_text("ok")
    whole(page)
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text(["ok", "ok"])
    whole(page)
    assert [one["content"] for one in api.bodies[-1]["messages"]] == ["Early", "ok", "Again"]


def test_retry_twice_asks_once(page: Page, api: FakeApi) -> None:
    api.answers = [[said("first")], [said("second"), HOLD, said(" whole")]]
    open_page(page, api)
    say(page, "Question")
    page.evaluate("document.querySelector('button[aria-label=Retry]').click()")
    page.evaluate("document.querySelector('button[aria-label=Retry]')?.click()")
    expect(answers(page)).to_have_text("second")
    expect(page.locator(".message.assistant .numbers")).to_have_text("2/2")
    assert len(api.bodies) == 2
    api.release()
    whole(page)


def test_an_edit_in_mid_answer_ends_it_and_keeps_its_text(page: Page, api: FakeApi) -> None:
    api.answers = [[said("Old text"), HOLD], [said("New text")]]
    open_page(page, api)
    say(page, "Question", waits=False)
    expect(answers(page)).to_have_text("Old text")
    button(page, "Edit").click()
    page.get_by_role("textbox", name="Edit").fill("Better question")
    page.keyboard.press("Enter")
    assert api.left.wait(20)
    expect(answers(page)).to_have_text("New text")
    whole(page)
    page.locator(".message.user").get_by_role("button", name="Previous version").click()
    expect(answers(page)).to_have_text("Old text")
    expect(page.locator(".ending")).to_have_text("Stopped")
    expect(button(page, "Continue")).to_be_visible()


def test_rename_switch_and_import_in_mid_answer(page: Page, api: FakeApi, tmp_path: Path) -> None:
    """None of them loses the answer, the name or the branch."""
    api.answers = [[said("first")], [said("second"), HOLD, said(" whole")]]
    open_page(page, api)
    say(page, "Question")
    button(page, "Retry").click()
    expect(answers(page)).to_have_text("second")
    _rename(page, "Named")
    page.locator(".message.assistant").get_by_role("button", name="Previous version").click()
    expect(answers(page)).to_have_text("first")
    chats = [{"title": "Imported", "messages": [{"id": "a", "role": "user", "content": "x"}]}]
    saved = tmp_path / "chats.json"
    saved.write_text(json.dumps({"format": "ktransformers-chats", "version": 1, "chats": chats}))
    button(page, "Preferences").click()
    page.locator("dialog input[type=file]").set_input_files(saved)
    expect(page.locator(".notice")).to_have_text("1 chats were imported.")
    api.release()
    expect(page.locator("[role=img][aria-label=Answering]")).to_have_count(0)
    expect(answers(page)).to_have_text("first")
    for _ in range(2):
        expect(page.locator(".chat-list .title")).to_have_text(["Named", "Imported"])
        page.locator(".message.assistant").get_by_role("button", name="Next version").click()
        expect(answers(page)).to_have_text("second whole")
        page.locator(".message.assistant").get_by_role("button", name="Previous version").click()
        expect(answers(page)).to_have_text("first")
        page.reload()


@pytest.mark.parametrize("trouble", [NO_STORE, FULL_STORE], ids=["refused", "full"])
def test_without_a_store_chats_last_until_the_page_is_closed(page: Page, api: FakeApi, trouble: str) -> None:
    page.add_init_script(f"({trouble})()")
    open_page(page, api)
    say(page, "First")
    expect(page.locator(".notice")).to_contain_text("The browser does not store chats: ")
    page.locator(".new-chat").click()
    expect(page.locator(".greeting")).to_be_visible()
    say(page, "Second")
    page.get_by_role("link", name="First").click()
    expect(page.locator(".message.user .plain")).to_have_text("First")
    expect(answers(page)).to_have_text("ok")
    _rename(page, "A better name")
    expect(page.locator(".chat-list .title")).to_have_text(["Second", "A better name"])
    page.keyboard.press("Control+k")
    page.keyboard.type("second")
    expect(page.locator(".chat-list .title")).to_have_text(["Second"])
    page.locator("#search").fill("")
    other = _other_tab(page, api)  # its news do not take anything away here
    say(other, "Third")
    rest = ["Second"] if trouble == NO_STORE else ["Third", "Second"]
    expect(page.locator(".chat-list .title")).to_have_text([*rest, "A better name"])
    button(page, "Delete").click()
    page.locator("dialog .danger").click()
    expect(page.locator(".chat-list .title")).to_have_text(rest)
