"""Pictures: how they come in, what is sent and shown, and what a model that reads text only says."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from PIL import Image
from playwright.sync_api import expect

from tests.web.fake_api import FakeApi, said
from tests.web.pictures import BLUE, RED, encoded, give, pick, previews, sent
from tests.web.steps import answers, button, open_page, say, whole
from tests.web.test_views import serious_faults

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.usefixtures("sees")


def test_pasted_dropped_and_picked_pictures_are_sent_in_order(page: Page, api: FakeApi, tmp_path: Path) -> None:
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if "olicy" in message.text else None)
    (tmp_path / "a.txt").write_text("kept")
    open_page(page, api)
    assert give(page, "paste", {"red.png": RED})
    expect(previews(page)).to_have_count(1)
    page.locator("input[type=file]").first.set_input_files(tmp_path / "a.txt")
    expect(previews(page)).to_have_count(2)
    assert give(page, "drop", {"one.png": BLUE, "two.png": RED})
    expect(previews(page)).to_have_count(4)
    pick(page, "last.png", BLUE)
    expect(page.locator(".composer .files .name")).to_have_text(["red.png", "a.txt", "one.png", "two.png", "last.png"])
    expect(previews(page).first.locator(".hint")).to_have_text("8 × 6 · PNG · 1 kB")
    button(page, "Remove two.png").click()
    expect(page.locator("#composer")).to_be_focused()
    say(page, "What is this?")
    text = "a.txt:\n```\nkept\n```"
    assert sent(api.bodies[0]) == [RED, text, BLUE, BLUE, "What is this?"]
    assert api.bodies[0]["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    expect(page.locator(".bubble .thumbnail img")).to_have_count(3)
    page.reload()
    expect(page.locator(".bubble .thumbnail img")).to_have_count(3)
    widths = page.locator(".bubble .thumbnail img").evaluate_all("(all) => all.map((one) => one.naturalWidth)")
    assert widths == [8, 5, 5]
    say(page, "And now?")
    assert sent(api.bodies[1], 0) == sent(api.bodies[0])
    assert api.bodies[1]["messages"][-1]["content"] == "And now?"
    assert complaints == []


def test_a_picture_needs_no_words(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    give(page, "paste", {"red.png": RED})
    expect(previews(page)).to_have_count(1)
    page.keyboard.press("Enter")
    whole(page)
    assert sent(api.bodies[0]) == [RED]
    expect(page.locator(".chat-title")).to_have_text("red.png")


def test_a_model_that_reads_text_only_says_so(page: Page, api: FakeApi) -> None:
    api.reads = ["text"]
    open_page(page, api)
    expect(button(page, "Add pictures")).to_have_count(0)
    assert give(page, "paste", {"red.png": RED, "blue.png": BLUE})
    expect(page.locator(".notice")).to_have_text("This model reads text only. Not added: red.png, blue.png")
    expect(previews(page)).to_have_count(0)
    say(page, "Then not")
    assert api.bodies[0]["messages"][-1]["content"] == "Then not"


def test_a_text_with_a_picture_beside_it_is_a_text(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    assert not give(page, "paste", {"image.png": RED}, html="<b>a</b>", plain="a")  # as office programs copy
    assert give(page, "paste", {"image.png": RED}, html="<img src='x'>")  # as browsers copy pictures
    expect(previews(page)).to_have_count(1)


def test_edit_and_retry_keep_pictures_and_copy_has_the_text(page: Page, api: FakeApi) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_page(page, api)
    give(page, "paste", {"red.png": RED, "blue.png": BLUE})
    expect(previews(page)).to_have_count(2)
    say(page, "First")
    page.locator(".message.user").get_by_role("button", name="Copy").click()
    expect(page.locator(".notice")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "First"
    button(page, "Retry").click()
    expect(page.locator(".message.assistant .numbers")).to_have_text("2/2")
    whole(page)
    assert sent(api.bodies[1]) == [RED, BLUE, "First"]
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.locator(".editor").get_by_role("button", name="Remove red.png").click()
    page.locator(".editor textarea").fill("Second")
    page.locator(".editor .primary").click()
    expect(page.locator(".message.user .numbers")).to_have_text("2/2")
    whole(page)
    assert sent(api.bodies[2]) == [BLUE, "Second"]
    page.locator(".message.user").get_by_role("button", name="Previous version").click()
    expect(page.locator(".bubble .thumbnail img")).to_have_count(2)  # the old branch has both


@pytest.mark.parametrize(
    ("kind", "name", "size", "sent_kind", "sent_size"),
    [
        ("PNG", "wide.png", (5000, 100), "PNG", (4096, 82)),
        ("JPEG", "photo.jpg", (40, 6000), "JPEG", (27, 4096)),
        ("BMP", "old.bmp", (30, 20), "PNG", (30, 20)),
        ("PNG", "line.png", (1, 20000), "PNG", (1, 4096)),
    ],
)
def test_what_is_too_large_is_made_smaller_and_the_preview_says_so(
    page: Page, api: FakeApi, kind: str, name: str, size: tuple[int, int], sent_kind: str, sent_size: tuple[int, int]
) -> None:
    open_page(page, api)
    pick(page, name, encoded(size, kind))
    hint = previews(page).locator(".hint")
    expect(hint).to_contain_text(f"{sent_size[0]} × {sent_size[1]} · {sent_kind} · ")
    expect(hint).to_contain_text(f"(made from {size[0]} × {size[1]} · {kind} · ")
    say(page, "See")
    picture = Image.open(io.BytesIO(sent(api.bodies[0])[0]))
    assert (picture.format, picture.size) == (sent_kind, sent_size)


@pytest.mark.parametrize("is_noise", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_picture_of_too_many_bytes_is_made_smaller(
    page: Page, api: FakeApi, tmp_path: Path, *, is_noise: bool
) -> None:
    """Packed again; what is noise has to lose pixels, too."""
    picture = Image.new("RGB", (2700, 2600))
    if is_noise:
        picture.frombytes(random.Random(1).randbytes(2700 * 2600 * 3))
    picture.save(tmp_path / "a.png", compress_level=0)
    assert (tmp_path / "a.png").stat().st_size > 20_000_000
    open_page(page, api)
    page.locator("input[type=file]").first.set_input_files(tmp_path / "a.png")
    expect(previews(page).locator(".hint")).to_contain_text("(made from 2700 × 2600 · PNG · 21.1 MB)")
    say(page, "See")
    data = sent(api.bodies[0])[0]
    assert len(data) <= 20_000_000
    assert (Image.open(io.BytesIO(data)).size == (2700, 2600)) is not is_noise


def test_a_turned_photo_is_upright_when_it_is_made_smaller_and_else_as_it_was(page: Page, api: FakeApi) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the right
    small = encoded((40, 30), "JPEG", exif=turned)
    open_page(page, api)
    pick(page, "small.jpg", small)
    expect(previews(page).locator(".hint")).to_contain_text("30 × 40 · JPEG")
    pick(page, "large.jpg", encoded((5000, 2000), "JPEG", exif=turned))
    expect(previews(page).locator(".hint").last).to_contain_text("1638 × 4096 · JPEG")
    say(page, "See")
    first, second, _ = sent(api.bodies[0])
    assert first == small
    picture = Image.open(io.BytesIO(second))
    assert picture.size == (1638, 4096)
    assert picture.getexif().get(0x0112, 1) == 1


def test_a_broken_picture_is_refused_by_name(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    give(page, "drop", {"broken.png": RED[:30], "red.png": RED})
    expect(page.locator(".notice")).to_have_text("broken.png cannot be read as a picture")
    expect(page.locator(".composer .files .name")).to_have_text(["red.png"])


def test_a_refused_message_is_back_in_the_field(page: Page, api: FakeApi) -> None:
    reason = "messages.0.content.0.image_url: the picture is larger than 10 pixels"
    api.answers = [api.error(400, reason, "invalid_image"), [said("better")], [said("more")]]
    open_page(page, api)
    give(page, "paste", {"bad.png": BLUE, "red.png": RED})
    expect(previews(page)).to_have_count(2)
    say(page, "What is this?", waits=False)
    expect(page.locator(".message .error")).to_have_text(reason)
    expect(page.locator("#composer")).to_have_value("What is this?")
    expect(page.locator(".composer .files .name")).to_have_text(["bad.png", "red.png"])
    expect(page.locator(".bubble .thumbnail img")).to_have_count(2)
    page.reload()
    expect(page.locator("#composer")).to_have_value("What is this?")
    button(page, "Remove bad.png").click()
    expect(previews(page)).to_have_count(1)
    page.locator("#composer").press("Enter")
    expect(answers(page)).to_have_text("better")
    whole(page)
    assert [one["role"] for one in api.bodies[1]["messages"]] == ["user"]  # beside the one that was refused
    assert sent(api.bodies[1]) == [RED, "What is this?"]
    expect(previews(page)).to_have_count(0)
    say(page, "Next")
    assert [one["role"] for one in api.bodies[2]["messages"]] == ["user", "assistant", "user"]
    page.locator(".message.user").first.get_by_role("button", name="Previous version").click()
    expect(page.locator(".bubble .thumbnail img")).to_have_count(2)  # both are still there


def test_a_message_that_is_too_long_is_answered_as_without_pictures(page: Page, api: FakeApi) -> None:
    api.answers = [api.error(400, "too long", "context_length_exceeded")]
    open_page(page, api)
    give(page, "paste", {"red.png": RED})
    expect(previews(page)).to_have_count(1)
    say(page, "Look", waits=False)
    expect(page.locator(".message .error")).to_have_text("too long")
    expect(page.get_by_text("Shorten the message, or start a new chat.")).to_be_visible()
    expect(page.locator("#composer")).to_have_value("")


def test_a_picture_is_shown_in_full_by_keyboard(page: Page, api: FakeApi) -> None:
    open_page(page, api)
    give(page, "paste", {"red.png": RED})
    for place in (".composer", ".bubble"):
        if place == ".bubble":
            say(page, "Look")
        thumbnail = page.locator(place).get_by_role("button", name="Show red.png")
        expect(thumbnail).to_be_enabled()
        thumbnail.focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="red.png")
        expect(dialog.get_by_role("img", name="red.png")).to_be_visible()
        expect(dialog).to_contain_text("8 × 6 · PNG")
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        expect(thumbnail).to_be_focused()
    thumbnail.click()
    button(page, "Close").click()
    expect(page.locator("dialog")).to_have_count(0)
    assert len(api.bodies) == 1  # the dialog's buttons send nothing


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(page: Page, api: FakeApi, theme: str) -> None:
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(api.url)
    expect(page.locator(".greeting")).to_contain_text("This model reads pictures, too.")
    give(page, "paste", {f"{'long name ' * 9}.png": encoded((5000, 90)), "red.png": RED})
    expect(page.locator(".composer .thumbnail img")).to_have_count(2)
    faults = {"composer": serious_faults(page)}
    assert page.evaluate("document.scrollingElement.scrollWidth") == 360
    say(page, "Look")
    expect(page.locator(".bubble .thumbnail img")).to_have_count(2)
    assert page.evaluate("[...document.querySelectorAll('.scroller')].every((e) => e.scrollWidth <= 360)")
    faults["message"] = serious_faults(page)
    page.locator(".thumbnail").first.click()
    expect(page.locator("dialog img")).to_be_visible()
    faults["dialog"] = serious_faults(page)
    assert page.evaluate("document.querySelector('dialog').getBoundingClientRect().width") <= 360
    assert {view: found for view, found in faults.items() if found} == {}


def test_a_phone_offers_its_camera_and_its_pictures(browser: Browser, api: FakeApi) -> None:
    context = browser.new_context(
        viewport={"width": 400, "height": 800}, is_mobile=True, has_touch=True, locale="en-US"
    )
    page = context.new_page()
    page.goto(api.url)
    with page.expect_file_chooser() as chooser:
        button(page, "Add pictures").tap()
    assert chooser.value.is_multiple()
    assert chooser.value.element.get_attribute("accept") == "image/*"
    assert chooser.value.element.get_attribute("capture") is None
    chooser.value.set_files([{"name": "a.jpg", "mimeType": "image/jpeg", "buffer": encoded((9, 9), "JPEG")}])
    expect(previews(page)).to_have_count(1)
    button(page, "Send").tap()
    whole(page)
    assert api.bodies[0]["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    context.close()


def test_the_words_are_chinese_where_the_page_is(page: Page, api: FakeApi) -> None:
    page.add_init_script("localStorage.setItem('ktransformers.language', 'zh')")
    open_page(page, api)
    expect(button(page, "添加图片")).to_be_visible()
    give(page, "paste", {"a.png": encoded((5000, 9))})
    expect(previews(page).locator(".hint")).to_contain_text("（由 5000 × 9 · PNG")
