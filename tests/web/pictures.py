"""Pictures for tests of the page: drawn, given to it, and looked for in what it sends and keeps."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

GIVE = """([kind, files, texts]) => {
    const data = new DataTransfer();
    for (const [name, type, base64] of files) {
        data.items.add(new File([Uint8Array.from(atob(base64), (one) => one.charCodeAt(0))], name, {type}));
    }
    for (const [type, text] of Object.entries(texts)) data.setData(type, text);
    const options = {bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data};
    const event = kind === "drop" ? new DragEvent(kind, options) : new ClipboardEvent(kind, options);
    document.querySelector("#composer").dispatchEvent(event);
    return event.defaultPrevented;
}"""

STORED = """() => new Promise((resolve, reject) => {
    const request = indexedDB.open("ktransformers");
    request.onerror = reject;
    request.onsuccess = () => {
        const all = request.result.transaction("pictures").objectStore("pictures").getAll();
        all.onsuccess = () => {
            request.result.close();
            resolve(all.result.map(({chat, blob}) => [chat, blob.size]));
        };
    };
})"""


def encoded(size: tuple[int, int], kind: str = "PNG", color: str = "red", **options: Any) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, color).save(data, kind, **options)
    return data.getvalue()


RED = encoded((8, 6))
BLUE = encoded((5, 9), color="blue")


def give(page: Page, kind: str, files: dict[str, bytes], **texts: str) -> bool:
    """By paste or drop; whether the page took it."""
    given = [[name, "image/png", base64.b64encode(data).decode()] for name, data in files.items()]
    return bool(page.evaluate(GIVE, [kind, given, {f"text/{name}": text for name, text in texts.items()}]))


def pick(page: Page, name: str, data: bytes) -> None:
    picker = page.locator("input[type=file][accept='image/*']")
    picker.set_input_files({"name": name, "mimeType": "image/png", "buffer": data})


def previews(page: Page) -> Locator:
    return page.locator(".composer .files li")


def sent(body: dict[str, Any], at: int = -1) -> list[bytes | str]:
    """The parts of a message: texts, and pictures as bytes."""
    content = body["messages"][at]["content"]
    assert isinstance(content, list)
    return [
        part["text"]
        if part["type"] == "text"
        else base64.b64decode(part["image_url"]["url"].partition(";base64,")[2], validate=True)
        for part in content
    ]


def stored(page: Page) -> list[list[Any]]:
    found: list[list[Any]] = page.evaluate(STORED)
    return found
