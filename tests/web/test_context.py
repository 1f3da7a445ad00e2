"""A context that is nearly full, full, and gone on without the oldest messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.support.servers.server_process import ServerProcess
from tests.web.fake_api import HOLD, FakeApi, said
from tests.web.steps import answers, button, open_page, say, whole
from tests.web.test_views import serious_faults

if TYPE_CHECKING:
    from playwright.sync_api import Page

TOO_LONG = "This model's maximum context length is 4096 tokens, for prompt and answer together."
WITHOUT = "Go on without the oldest messages"


def _usage(total: int) -> dict[str, Any]:
    return {"prompt_tokens": total - 5, "completion_tokens": 5}


def _refusal(api: FakeApi) -> Any:
    return api.error(400, TOO_LONG, "context_length_exceeded")


def _refused(page: Page, api: FakeApi) -> None:
    """A chat of three messages, the second question of which is refused."""
    api.answers = [[said("first")], _refusal(api)]
    open_page(page, api)
    say(page, "One")
    say(page, "Two", waits=False)
    expect(page.locator(".message .error")).to_have_text(TOO_LONG)


@pytest.mark.parametrize(("used", "warns"), [(3276, False), (3277, True), (4096, True)])
def test_a_warning_from_80_percent_on(page: Page, api: FakeApi, used: int, warns: bool) -> None:
    api.usage = _usage(used)
    open_page(page, api)
    say(page, "One")
    expect(page.locator(".context-warning")).to_have_count(int(warns))
    if warns:
        share = {3277: "80 %", 4096: "100 %"}[used]
        expect(page.get_by_role("status").filter(has_text="of the context is used")).to_contain_text(share)
    assert "truncate_prompt_tokens" not in api.bodies[0]


def test_from_the_warning_the_oldest_may_leave(page: Page, api: FakeApi) -> None:
    api.usage = _usage(4000)
    open_page(page, api)
    say(page, "One")
    button(page, "Leave out the oldest messages").press("Enter")
    expect(page.locator("#composer")).to_be_focused()
    expect(page.locator(".context-warning")).to_contain_text("the oldest messages are left out")
    expect(button(page, "Leave out the oldest messages")).to_have_count(0)
    api.dropped = [2]
    say(page, "Two")
    assert api.bodies[1]["truncate_prompt_tokens"] == -1
    expect(page.locator(".context-warning")).to_have_count(0)  # the line in the chat says it
    expect(page.locator(".left-out")).to_contain_text("the oldest 2 messages")


def test_a_refused_message_goes_on_and_the_chat_remembers_it(page: Page, api: FakeApi) -> None:
    _refused(page, api)
    expect(page.locator(".context-warning")).to_have_count(0)
    api.answers = [[said("sec"), HOLD, said("ond")], [said("third")], [said("fourth")], [said("fifth")]]
    api.dropped = [1, 1, 3, 3]
    button(page, WITHOUT).press("Enter")
    expect(answers(page).last).to_have_text("sec")
    expect(page.locator(".left-out")).to_have_text(
        "The model does not see the oldest message any more: the context is full."
    )
    expect(page.locator(".message .error")).to_have_count(0)
    expect(page.locator("#composer")).to_be_focused()
    api.release()
    whole(page)
    expect(page.locator(".message.assistant .numbers")).to_have_count(0)  # the same message, no branch
    assert api.bodies[2]["truncate_prompt_tokens"] == -1
    assert api.bodies[2]["messages"] == api.bodies[1]["messages"]
    page.reload()
    say(page, "Three")
    expect(page.locator(".left-out")).to_have_count(1)  # the same number is not said again
    say(page, "Four")
    expect(page.locator(".left-out")).to_have_count(2)
    expect(page.locator(".left-out").last).to_contain_text("the oldest 3 messages")
    page.locator(".new-chat").click()
    expect(page.locator(".greeting")).to_be_visible()
    say(page, "Elsewhere")
    assert [body.get("truncate_prompt_tokens") for body in api.bodies[3:]] == [-1, -1, None]


def test_it_can_be_taken_back_in_the_settings(page: Page, api: FakeApi) -> None:
    _refused(page, api)
    button(page, WITHOUT).click()
    whole(page)
    button(page, "Settings of this chat").click()
    choice = page.get_by_label("When the context is full")
    expect(choice).to_have_value("drop")
    choice.select_option("As the server does")
    page.keyboard.press("Escape")
    say(page, "Three")
    assert "truncate_prompt_tokens" not in api.bodies[-1]


def test_what_leaving_out_cannot_help(page: Page, api: FakeApi) -> None:
    """The first message alone is too long, or the last one is with nothing before it; other errors are other errors."""
    api.answers = [_refusal(api)]
    open_page(page, api)
    say(page, "Long", waits=False)
    expect(page.locator(".message .error")).to_have_text(TOO_LONG)
    expect(page.locator(".message .ending")).to_have_text("Shorten the message, or start a new chat.")
    expect(button(page, WITHOUT)).to_have_count(0)
    page.locator(".new-chat").click()
    _refused(page, api)
    api.answers = [_refusal(api), api.error(400, "no", "other")]
    button(page, WITHOUT).click()
    expect(page.locator(".message .ending")).to_have_text("Shorten the message, or start a new chat.")
    expect(button(page, WITHOUT)).to_have_count(0)
    button(page, "Retry").last.click()
    expect(page.locator(".message .error")).to_have_text("no")
    expect(button(page, WITHOUT)).to_have_count(0)
    expect(page.locator(".message .ending")).to_have_count(0)


def test_an_answer_that_filled_the_context_goes_on(page: Page, api: FakeApi) -> None:
    stop = json.dumps({"error": {"message": "the engine died", "code": None}})
    api.answers = [[said("first")], [said("sec"), stop], _refusal(api), [said("ond")]]
    open_page(page, api)
    say(page, "One")
    say(page, "Two", waits=False)
    button(page, "Continue").click()
    expect(page.locator(".message .error")).to_have_text(TOO_LONG)
    expect(button(page, "Continue")).to_have_count(0)
    button(page, WITHOUT).click()
    whole(page)
    expect(answers(page).last).to_have_text("second")
    assert api.bodies[-1]["continue_final_message"] is True
    assert api.bodies[-1]["truncate_prompt_tokens"] == -1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_on_a_phone_the_way_on_is_in_sight_and_axe_finds_nothing(
    page: Page, api: FakeApi, tmp_path: Path, theme: Literal["light", "dark"]
) -> None:
    """The field shrinks and the error grows in the same moment: the end stays where the reader is."""
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.set_viewport_size({"width": 390, "height": 700})
    api.usage = _usage(3900)
    api.answers = [[said("- [x] done\n- [ ] open\n\n| a |\n|---|\n| b<br>c |\n\n" + "A line.\n\n" * 12)], _refusal(api)]
    open_page(page, api)
    say(page, "One")
    page.locator("input[type=file]").first.set_input_files(tmp_path / "a.txt")
    expect(page.locator(".composer .files .hint")).to_contain_text("Windows-1252")
    faults = {"warning": serious_faults(page)}
    say(page, "Two", waits=False)
    expect(button(page, WITHOUT)).to_be_in_viewport(ratio=1)
    faults["refused"] = serious_faults(page)
    api.dropped = [2]
    button(page, WITHOUT).click()
    expect(page.locator(".left-out")).to_be_in_viewport()
    whole(page)
    faults["left out"] = serious_faults(page)
    assert faults == {name: [] for name in faults}


def test_with_the_bundled_model(page: Page) -> None:
    flags = ("--backend_type", "ktransformers", "--model_name", "demo", "--cache_lens", "256")
    with ServerProcess(*flags) as server:
        page.goto(server.url)
        expect(page.locator(".model-name")).to_have_text("demo")
        button(page, "Settings of this chat").click()
        page.get_by_label("Max. tokens").fill("16")
        page.keyboard.press("Escape")
        refusal = page.locator(".message .error")
        for num_before in range(12):
            say(page, "What is 17 + 25? " * 4, waits=False)
            expect(page.locator(".message.assistant").nth(num_before).locator(".figures, .error")).to_be_visible()
            expect(page.locator("[aria-busy=true]")).to_have_count(0)
            if refusal.count():
                break
        expect(refusal).to_contain_text("This model's maximum context length is 256 tokens")
        button(page, WITHOUT).click()
        expect(refusal).to_have_count(0)
        whole(page)
        expect(page.locator(".left-out")).to_contain_text("The model does not see the oldest")
