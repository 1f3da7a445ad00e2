"""Files that become part of a message: texts in several encodings, PDFs, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven by the package playwright")

from playwright.sync_api import expect

from tests.web.fake_api import FakeApi
from tests.web.steps import button, open_page, say

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MIB = 1 << 20


def _pdf(content: bytes, font: str, trailer: str = "") -> bytes:
    """A PDF of one page, without a table of contents: readers build it themselves."""
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 300]/Resources<</Font<</F 5 0 R>>>>/Contents 4 0 R>>",
        f"<</Length {len(content)}>>stream\n{content.decode('latin-1')}\nendstream",
        font,
    ]
    body = "".join(f"{number} 0 obj\n{text}\nendobj\n" for number, text in enumerate(objects, 1))
    return f"%PDF-1.7\n{body}trailer\n<</Root 1 0 R/Size 6{trailer}>>\n".encode("latin-1")


HELVETICA = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>"


def _without_embedding(encoding: str, ordering: str) -> str:
    """A font that the file only names, as old word processors wrote them."""
    system = f"<</Registry(Adobe)/Ordering({ordering})/Supplement 2>>"
    descriptor = "<</Type/FontDescriptor/FontName/Song/Flags 4/FontBBox[0 0 1000 1000]/ItalicAngle 0/Ascent 800>>"
    cid = f"<</Type/Font/Subtype/CIDFontType0/BaseFont/Song/CIDSystemInfo{system}/FontDescriptor {descriptor}>>"
    return f"<</Type/Font/Subtype/Type0/BaseFont/Song/Encoding/{encoding}/DescendantFonts[{cid}]>>"


def _shown(text: bytes) -> bytes:
    return b"BT /F 12 Tf 20 200 Td <" + text.hex().encode() + b"> Tj ET"


def _give(page: Page, *paths: Path) -> None:
    page.locator("input[type=file]").first.set_input_files(list(paths))


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        ("naïve — “café”, 5 €".encode("cp1252"), "naïve — “café”, 5 €", "Windows-1252"),
        ("Straße, Größe\r\n".encode("latin-1"), "Straße, Größe\r\n", "Windows-1252"),
        ("你好，世界。int x = 1; // 变量".encode("gbk"), "你好，世界。int x = 1; // 变量", "GB18030"),
        ("zażółć".encode("utf-16"), "zażółć", "UTF-16"),
        (b"\xfe\xff" + "Привет".encode("utf-16-be"), "Привет", "UTF-16"),
        ("naïve 你好".encode(), "naïve 你好", ""),
        (b"\xef\xbb\xbfwith a mark", "with a mark", ""),
    ],
)
def test_encodings_of_text(page: Page, api: FakeApi, tmp_path: Path, data: bytes, text: str, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    open_page(page, api)
    _give(page, tmp_path / "a.txt")
    hint = page.locator(".composer .files .hint")
    expect(hint).to_have_text(f"{encoding} · {len(text.splitlines())} lines" if encoding else "1 lines")
    say(page, "Read")
    content = api.bodies[0]["messages"][0]["content"]
    assert content == f"a.txt:\n```\n{text.removesuffix(chr(10))}\n```\n\nRead"
    page.reload()
    expect(page.locator(".bubble .files .hint")).to_contain_text(encoding or "1 lines")


def test_every_refused_file_is_named(page: Page, api: FakeApi, tmp_path: Path) -> None:
    encrypted = f"/ID[<00><00>]/Encrypt<</Filter/Standard/V 1/R 2/O<{'41' * 32}>/U<{'42' * 32}>/P -4>>"
    files = {
        "picture.png": b"\x89PNG\r\n\x1a\n\x00\x00",
        "large.log": b"x" * (MIB + 1),
        "program": b"\x7fELF\x02\x01\xff\x08",
        "broken.pdf": b"%PDF-1.7\nnothing else",
        "scan.pdf": _pdf(b"0 0 10 10 re f", HELVETICA),
        "locked.pdf": _pdf(_shown(b"secret"), HELVETICA, encrypted),
        "good.txt": b"good",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    open_page(page, api)
    _give(page, *(tmp_path / name for name in files))
    expect(page.locator(".notice")).to_contain_text("picture.png")
    assert sorted(page.locator(".notice").inner_text().split("\n")) == [
        "This model reads text only. Not added: picture.png",
        "broken.pdf cannot be read as a PDF",
        "large.log is larger than 1 MiB",
        "locked.pdf is locked by a password",
        "program is not a text file",
        "scan.pdf holds no text: its pages are pictures",
    ]
    expect(page.locator(".composer .files .name")).to_have_text(["good.txt"])


@pytest.mark.parametrize(
    ("content", "font", "text"),
    [
        (_shown("Größe: 5 €".encode("cp1252")), HELVETICA, "Größe: 5 €"),
        (_shown("你好，世界".encode("gbk")), _without_embedding("GBK-EUC-H", "GB1"), "你好，世界"),
        (_shown("日本語".encode("shift-jis")), _without_embedding("90ms-RKSJ-H", "Japan1"), "日本語"),
        (_shown("한국어".encode("cp949")), _without_embedding("KSCms-UHC-H", "Korea1"), "한국어"),
        (_shown("繁體字".encode("big5")), _without_embedding("ETen-B5-H", "CNS1"), "繁體字"),
        (_shown("汉字".encode("utf-16-be")), _without_embedding("UniGB-UTF16-H", "GB1"), "汉字"),
    ],
)
def test_texts_of_pdfs(page: Page, api: FakeApi, tmp_path: Path, content: bytes, font: str, text: str) -> None:
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if "olicy" in message.text else None)
    (tmp_path / "a.pdf").write_bytes(_pdf(content, font))
    open_page(page, api)
    _give(page, tmp_path / "a.pdf")
    expect(page.locator(".composer .files .hint")).to_have_text("PDF · 1 pages")
    say(page, "Read")
    assert api.bodies[0]["messages"][0]["content"] == f"a.pdf:\n```\n{text}\n```\n\nRead"
    assert complaints == []  # the policy of the page lets the worker run


def test_pages_lines_and_a_second_pdf(browser: Browser, page: Page, api: FakeApi, tmp_path: Path) -> None:
    """PDFs as a browser prints them."""
    tab = browser.new_page()
    tab.set_content("<p>First line<br>second line</p><p style='break-before: page'>E = mc²</p>")
    (tmp_path / "a.pdf").write_bytes(tab.pdf())
    tab.set_content("<p>Other</p>")
    (tmp_path / "b.pdf").write_bytes(tab.pdf())
    tab.close()
    open_page(page, api)
    _give(page, tmp_path / "a.pdf", tmp_path / "b.pdf")
    expect(page.locator(".composer .files .hint")).to_have_text(["PDF · 2 pages", "PDF · 1 pages"])
    button(page, "Remove b.pdf").click()
    say(page, "Read")
    content = api.bodies[0]["messages"][0]["content"]
    assert content == "a.pdf:\n```\nFirst line\nsecond line\n\nE = mc²\n```\n\nRead"
