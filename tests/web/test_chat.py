"""Chatting on the page: streams, branches, what is kept, what is sent."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import HOLD, FakeApi, called, said, thought
from tests.web.steps import answers, button, open_page, say, whole

if TYPE_CHECKING:
    from playwright.sync_api import Page

KEPT = """(text) => new Promise((resolve) => {
    indexedDB.open("ktransformers").onsuccess = ({target: {result: database}}) => {
        const request = database.transaction("messages").objectStore("messages").getAll();
        request.onsuccess = () => {
            database.close();
            resolve(request.result.some((message) => message.content === text));
        };
    };
})"""


def test_an_answer_streams_in(page: Page, api: FakeApi) -> None:
    api.answers = [[said("One "), said("**two**"), HOLD, said(" three")]]
    open_page(page, api)
    say(page, "Count", waits=False)
    expect(answers(page)).to_have_text("One two")
    expect(page.locator(".message.assistant strong")).to_have_text("two")
    assert page.locator("article[aria-busy=true]").count() == 1
    api.release()
    whole(page)
    expect(answers(page)).to_have_text("One two three")
    expect(page.locator(".figures")).to_contain_text("5 tokens · 8.0 tokens/s")
    body = api.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "Count"}]
    assert body["stream"] is True
    assert "temperature" not in body


def test_stop_leaves_the_server_and_keeps_the_text(page: Page, api: FakeApi) -> None:
    api.answers = [[said("So far"), HOLD]]
    open_page(page, api)
    say(page, "Go on", waits=False)
    expect(answers(page)).to_have_text("So far")
    page.keyboard.press("Escape")
    expect(page.locator(".ending")).to_have_text("Stopped")
    assert api.left.wait(20)
    page.reload()
    expect(answers(page)).to_have_text("So far")
    expect(page.locator(".ending")).to_have_text("Stopped")


def test_edit_and_retry_keep_both(page: Page, api: FakeApi) -> None:
    api.answers = [[said("first")], [said("second")], [said("third")]]
    open_page(page, api)
    say(page, "Question")
    button(page, "Retry").click()
    expect(answers(page)).to_have_text("second")
    whole(page)
    button(page, "Edit").click()
    page.get_by_role("textbox", name="Edit").fill("Other question")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("third")
    whole(page)
    assert [body["messages"][-1]["content"] for body in api.bodies] == ["Question", "Question", "Other question"]
    assert [len(body["messages"]) for body in api.bodies] == [1, 1, 1]

    page.reload()
    versions = page.get_by_role("group", name="Version 2 of 2")
    expect(versions).to_have_count(1)  # of the question; the new answer has no siblings
    versions.get_by_role("button", name="Previous version").click()
    expect(page.locator(".message.user .plain")).to_have_text("Question")
    expect(answers(page)).to_have_text("second")
    page.locator(".message.assistant").get_by_role("button", name="Previous version").click()
    expect(answers(page)).to_have_text("first")
    expect(page.locator(".message.assistant .numbers")).to_have_text("1/2")
    say(page, "And then?")
    assert [one["content"] for one in api.bodies[-1]["messages"]] == ["Question", "first", "And then?"]


def test_a_reload_in_mid_answer_keeps_the_text_so_far(page: Page, api: FakeApi) -> None:
    api.answers = [[said("Long "), HOLD, said("text"), HOLD]]
    open_page(page, api)
    say(page, "Tell me", waits=False)
    expect(answers(page)).to_have_text("Long")
    api.release()
    expect(answers(page)).to_have_text("Long text")
    end = time.monotonic() + 20
    while not page.evaluate(KEPT, "Long text"):  # nothing more comes; what came is kept all the same
        assert time.monotonic() < end
    page.reload()
    expect(answers(page)).to_have_text("Long text")
    expect(page.locator(".ending")).to_have_text("This answer was interrupted.")
    button(page, "Retry").click()
    expect(page.locator(".message.assistant .numbers")).to_have_text("2/2")
    expect(answers(page)).to_have_text("ok")


def test_one_chat_answers_while_another_is_read(page: Page, api: FakeApi) -> None:
    api.answers = [[said("slow"), HOLD, said(" but sure")]]
    open_page(page, api)
    say(page, "First chat", waits=False)
    expect(answers(page)).to_have_text("slow")
    page.locator(".new-chat").click()
    expect(page.locator(".greeting")).to_be_visible()
    say(page, "Second chat")
    expect(answers(page)).to_have_text("ok")
    api.release()
    page.get_by_role("link", name="First chat").click()
    expect(answers(page)).to_have_text("slow but sure")


def test_reasoning_is_folded(page: Page, api: FakeApi) -> None:
    page.clock.install()
    api.answers = [[thought("Let me "), thought("think."), HOLD, said("Done.")]]
    open_page(page, api)
    say(page, "Think", waits=False)
    expect(page.locator(".reasoning summary")).to_have_text("Thinking")
    page.clock.fast_forward(2000)
    api.release()
    whole(page)
    expect(page.locator(".reasoning summary")).to_have_text(re.compile(r"Thought for [2-9]\.\d s"))
    expect(page.get_by_text("Let me think.")).to_have_count(0)
    page.locator(".reasoning summary").click()
    expect(page.get_by_text("Let me think.")).to_be_visible()
    say(page, "More")
    assert api.bodies[1]["messages"][1] == {"role": "assistant", "content": "Done."}


def test_tool_calls_are_shown_and_answered(page: Page, api: FakeApi) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    api.answers = [[called(0, '{"ci', "weather"), called(0, 'ty": "Oslo"}'), called(1, "{}", "time")], [said("Cold.")]]
    open_page(page, api)
    button(page, "Settings of this chat").click()
    page.get_by_label("Tools").fill("{}")
    page.get_by_label("System prompt").click()
    expect(page.get_by_role("alert")).to_contain_text("Tools must be a JSON list")
    page.get_by_label("Tools").fill(json.dumps(tools))
    page.get_by_label("System prompt").click()
    page.keyboard.press("Escape")
    say(page, "Is it cold in Oslo?")
    assert api.bodies[0]["tools"] == tools
    expect(page.locator(".call h3")).to_have_text(["Calls weather", "Calls time"])
    expect(page.locator(".call pre").first).to_have_text('{\n  "city": "Oslo"\n}')
    page.get_by_label("Result of weather").fill("-5")
    page.get_by_label("Result of time").fill("noon")
    button(page, "Send results").click()
    expect(answers(page)).to_have_text("Cold.")
    asked = api.bodies[1]["messages"][1:]
    assert [call["function"]["arguments"] for call in asked[0]["tool_calls"]] == ['{"city": "Oslo"}', "{}"]
    assert asked[1:] == [
        {"role": "tool", "content": "-5", "tool_call_id": "call-0"},
        {"role": "tool", "content": "noon", "tool_call_id": "call-1"},
    ]


def test_settings_are_sent_and_kept_for_new_chats(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    button(page, "Settings of this chat").click()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Top-k").fill("40")
    page.get_by_label("Seed").fill("3")
    page.get_by_label("Stop strings").fill("END\nSTOP")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Thinking").select_option("Off")
    page.get_by_role("combobox", name="Model", exact=True).select_option("alias")
    button(page, "Use for new chats too").click()
    say(page, "Hello")
    page.goto(f"{api.url}/#/")
    page.reload()
    expect(page.locator(".model-name")).to_have_text("alias")
    say(page, "Hello again")
    for body in api.bodies:
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["temperature"], body["top_k"], body["seed"]) == (0.7, 40, 3)
        assert body["stop"] == ["END", "STOP"]
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        assert body["model"] == "alias"


def test_settings_show_the_defaults_of_the_server(page: Page, api: FakeApi) -> None:
    sampling = {"temperature": 0.6, "top_p": 0.949999988079071, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}
    api.info = {
        "fake-model": {"default_sampling": sampling, "default_max_tokens": None},
        "alias": {"default_sampling": {"temperature": 1}, "default_max_tokens": 512},
    }
    open_page(page, api)
    button(page, "Settings of this chat").click()
    shown = {"Temperature": "0.6", "Top-p": "0.95", "Top-k": "20", "Min-p": "0", "Repetition penalty": "1.05"}
    for label, text in (shown | {"Max. tokens": "up to 4,096", "Seed": "random"}).items():
        expect(page.get_by_label(label)).to_have_attribute("placeholder", text)
        expect(page.get_by_label(label)).to_have_value("")
    page.get_by_role("combobox", name="Model", exact=True).select_option("alias")
    for label, text in {"Temperature": "1", "Top-p": "", "Max. tokens": "512"}.items():
        expect(page.get_by_label(label)).to_have_attribute("placeholder", text)
    page.keyboard.press("Escape")
    say(page, "Hello")
    assert "temperature" not in api.bodies[0]  # what is shown is not sent
    api.info = {}
    button(page, "Settings of this chat").click()
    expect(page.get_by_label("Temperature")).to_have_attribute("placeholder", "")


def test_text_files_are_sent_and_others_refused(page: Page, api: FakeApi, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("a ``` fence\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\x00")
    open_page(page, api)
    page.locator("input[type=file]").first.set_input_files([tmp_path / "picture.png", tmp_path / "notes.md"])
    expect(page.locator(".notice")).to_have_text("picture.png is not a text file")
    expect(page.locator(".composer .files .name")).to_have_text("notes.md")
    say(page, "Sum up")
    assert api.bodies[0]["messages"][0]["content"] == "notes.md:\n````\na ``` fence\n````\n\nSum up"
    expect(page.locator(".bubble .files .name")).to_have_text("notes.md")


def test_files_can_be_dropped(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    page.evaluate(
        """() => {
            const transfer = new DataTransfer();
            transfer.items.add(new File(["x = 1"], "x.py"));
            for (const type of ["dragover", "drop"])
                document.body.dispatchEvent(
                    new DragEvent(type, {dataTransfer: transfer, bubbles: true, cancelable: true})
                );
        }"""
    )
    expect(page.locator(".composer .files .name")).to_have_text("x.py")


def test_search_finds_what_was_said(page: Page, api: FakeApi) -> None:
    api.answers = [[said("The capital is Oslo, in the north.")], [said("Something else.")]]
    open_page(page, api)
    say(page, "Norway")
    page.locator(".new-chat").click()
    expect(page.locator(".greeting")).to_be_visible()
    say(page, "Another")
    page.keyboard.press("Control+k")
    page.keyboard.type("oSLo")
    expect(page.locator(".chat-list .title")).to_have_text(["Norway"])
    expect(page.locator(".excerpt")).to_contain_text("capital is Oslo")
    page.locator("#search").fill("nowhere")
    expect(page.locator(".chat-list")).to_have_text("Nothing found")


def test_export_and_import_bring_everything_back(page: Page, api: FakeApi, tmp_path: Path) -> None:
    api.answers = [[thought("hm"), said("first")], [said("second")]]
    open_page(page, api)
    say(page, "Question")
    button(page, "Retry").click()
    expect(answers(page)).to_have_text("second")
    whole(page)
    button(page, "Preferences").click()
    with page.expect_download() as download:
        button(page, "Export all chats").click()
    saved = tmp_path / "chats.json"
    download.value.save_as(saved)
    assert json.loads(saved.read_text())["chats"][0]["title"] == "Question"
    button(page, "Delete all chats").click()
    page.locator("dialog").last.get_by_role("button", name="Delete").click()
    expect(page.locator(".chat-list")).to_have_text("Chats stay in this browser.")

    button(page, "Preferences").click()
    page.locator("dialog input[type=file]").set_input_files(saved)
    expect(page.locator(".notice")).to_have_text("1 chats were imported.")
    page.get_by_role("link", name="Question").click()
    expect(answers(page)).to_have_text("second")
    page.locator(".message.assistant").get_by_role("button", name="Previous version").click()
    expect(answers(page)).to_have_text("first")
    expect(page.locator(".reasoning")).to_have_count(1)

    saved.write_text('{"format": "other"}')
    button(page, "Preferences").click()
    page.locator("dialog input[type=file]").set_input_files(saved)
    expect(page.locator(".notice")).to_contain_text("it is no export of this page")


def test_chats_are_renamed_and_deleted(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    say(page, "Question")
    page.get_by_role("heading", name="Question").get_by_role("button").click()
    page.get_by_label("Name of the chat").fill("A better name")
    page.keyboard.press("Enter")
    expect(page.locator(".chat-list .title")).to_have_text("A better name")
    page.reload()
    expect(page.locator(".chat-list .title")).to_have_text("A better name")
    button(page, "Delete").click()
    button(page, "Cancel").click()
    expect(page.locator(".chat-list .title")).to_have_count(1)
    button(page, "Delete").click()
    page.locator("dialog .danger").click()
    expect(page.locator(".chat-list .title")).to_have_count(0)
    expect(page.locator(".greeting")).to_be_visible()


def test_a_chat_that_is_deleted_in_mid_answer(page: Page, api: FakeApi) -> None:
    api.answers = [[said("Long"), HOLD]]
    open_page(page, api)
    say(page, "Go on", waits=False)
    expect(answers(page)).to_have_text("Long")
    button(page, "Delete").click()
    page.locator("dialog .danger").click()
    assert api.left.wait(20)
    expect(page.locator(".chat-list .title")).to_have_count(0)  # the page says so once the store has done it
    page.reload()
    expect(page.locator(".chat-list")).to_have_text("Chats stay in this browser.")


def test_chinese(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    button(page, "Preferences").click()
    page.get_by_label("Language").select_option("zh")
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="想聊点什么？")).to_be_visible()
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    page.reload()
    expect(page.locator("#composer")).to_have_attribute("placeholder", "输入问题")


def test_code_is_coloured_and_copied(page: Page, api: FakeApi) -> None:
    api.answers = [[said("```python\ndef f(x):\n    return 'text'\n```")]]
    open_page(page, api)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(page, "Code")
    expect(page.locator(".code .hljs-keyword")).to_have_text(["def", "return"])
    page.locator(".code").get_by_role("button", name="Copy").click()
    expect(page.locator(".code figcaption")).to_contain_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f(x):\n    return 'text'\n"


def test_formulas(page: Page, api: FakeApi) -> None:
    api.answers = [[said("Euler: $e^{i\\pi} = -1$ and\n\n$$\\frac{a}{b}$$\n\n\\[x^2\\]\n\nfor $5 or $6, \\(y\\).")]]
    open_page(page, api)
    say(page, "Formulas")
    expect(page.locator(".katex")).to_have_count(4)
    expect(page.locator(".formula-block")).to_have_count(2)
    expect(answers(page)).to_contain_text("for $5 or $6,")
    above, below = (page.locator(".mfrac .mathnormal").filter(has_text=name).bounding_box() for name in "ab")
    assert above is not None
    assert below is not None
    assert above["y"] + above["height"] <= below["y"] + 2  # by styles, which the policy lets through


def test_the_keyboard_is_enough(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    expect(page.locator("#composer")).to_be_focused()
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    whole(page)
    assert api.bodies[0]["messages"][0]["content"] == "One\ntwo"
    page.keyboard.press("ArrowUp")
    expect(page.get_by_role("textbox", name="Edit")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("textbox", name="Edit")).to_have_count(0)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator(".greeting")).to_be_visible()
    expect(page.locator("#composer")).to_be_focused()
