"""What the server does for the page: where it is, under which policy, for whom; and that the built files are fresh."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from ktransformers.errors import ConfigError
from ktransformers.server.api import web
from ktransformers.server.app import create_app
from ktransformers.server.config import ServerConfig
from tests.support.servers.fake_backend import FakeBackend

SOURCES = Path(__file__).resolve().parents[2] / "web"
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = sorted(str(path.relative_to(web.WEB_PATH)) for path in web.WEB_PATH.rglob("*") if path.is_file())


def get(path: str, headers: dict[str, str] | None = None, **config: Any) -> httpx.Response:
    app = create_app(FakeBackend(), ServerConfig(model_names=("demo",), **config))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(send())


def test_browsers_get_the_page_and_programs_json() -> None:
    page = get("/", BROWSER)
    assert page.text == (web.WEB_PATH / "index.html").read_text()
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["vary"] == "Accept"
    assert get("/", {"Accept": "application/json"}).json()["name"] == "ktransformers"


@pytest.mark.parametrize(
    ("config", "has_page"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "web": True}, True),
        ({"web": False}, False),
    ],
)
def test_web_decides_and_loopback_is_the_default(config: dict[str, Any], has_page: bool) -> None:
    assert ("page/app.js" in get("/", BROWSER, **config).text) == has_page
    assert get("/page/app.js", **config).status_code == (200 if has_page else 404)


@pytest.mark.exhaustive
def test_every_file_comes_with_the_policy_and_needs_no_key() -> None:
    for name in FILES:
        response = get("/" if name == "index.html" else f"/{name}", BROWSER, api_keys=("k",))
        assert response.status_code == 200, name
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"https?:|\*", policy)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"
    assert get("/v1/models", api_keys=("k",)).status_code == 401
    assert get("/page/../v1/models", api_keys=("k",)).status_code == 401


@pytest.mark.parametrize(
    "path", ["/page/%2e%2e/index.html", "/page/..%2findex.html", "/page//etc/passwd", "/page/", "/page"]
)
def test_nothing_else_is_served(path: str) -> None:
    assert get(path, api_keys=("k",)).status_code in (401, 404)


def test_files_that_a_browser_has_are_not_sent_again() -> None:
    first = get("/page/app.js")
    assert get("/page/app.js", {"If-None-Match": first.headers["etag"]}).status_code == 304


def test_the_types_are_what_browsers_insist_on() -> None:
    assert "javascript" in get("/page/app.js").headers["content-type"]
    assert get("/page/index.css").headers["content-type"].startswith("text/css")
    assert get("/page/icon.svg").headers["content-type"] == "image/svg+xml"


def test_the_log_is_not_about_files_of_the_page(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ktransformers.server")
    get("/page/app.js")
    assert caplog.text == ""


def test_a_missing_page_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(web, "WEB_PATH", tmp_path)
    with pytest.raises(ConfigError, match=r"make web.*--no_web"):
        get("/")
    assert get("/", web=False).status_code == 200


def test_it_is_small_and_asks_nobody_else() -> None:
    sizes = {name: (web.WEB_PATH / name).stat().st_size for name in FILES}
    of_pdfs = {name for name in FILES if name.startswith(("page/pdf.", "page/cmaps/"))}  # loaded with the first PDF
    assert sum(size for name, size in sizes.items() if name not in of_pdfs) < 1_500_000
    assert sum(sizes[name] for name in of_pdfs) < 2_600_000
    index = (web.WEB_PATH / "index.html").read_text()
    linked = re.findall(r'(?:src|href)="\./([^"]+)"', index)
    assert sorted(linked) == ["page/app.js", "page/icon.svg", "page/index.css"]
    assert set(linked) <= set(FILES)
    assert "<script>" not in index
    for name in FILES:
        if name.endswith(".css"):
            css = (web.WEB_PATH / name).read_text()
            assert not re.search(r"url\((?!\./)|@import", css), name
            for font in re.findall(r"url\(\./([^)]+)\)", css):
                assert f"page/{font}" in FILES


def test_the_built_files_are_those_of_the_sources() -> None:
    tops = ["index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"]
    paths = [*(SOURCES / "src").rglob("*"), *(SOURCES / name for name in tops)]
    names = sorted(path.relative_to(SOURCES).as_posix() for path in paths if path.is_file())
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (SOURCES / name).read_bytes() + b"\0")
    built = (web.WEB_PATH / "page" / "sources.sha256").read_text().strip()
    assert built == digest.hexdigest(), "web/ has changed since the page was built: run `make web` and commit"


def test_a_fresh_build_makes_the_same_files(tmp_path: Path) -> None:
    npx = shutil.which("npx")
    if npx is None or not (SOURCES / "node_modules" / "vite").is_dir():
        pytest.skip("needs node, and `npm ci` in web/")
    command = [npx, "vite", "build", "--outDir", str(tmp_path), "--logLevel", "error"]
    subprocess.run(command, cwd=SOURCES, check=True, capture_output=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (web.WEB_PATH / name).read_bytes(), name
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == FILES


def test_the_licenses_are_of_all_that_is_built_in() -> None:
    lock = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    inside = {
        f"{path.rpartition('node_modules/')[2]} {entry['version']}"
        for path, entry in lock.items()
        if path and not entry.get("dev") and not entry.get("optional")
    }
    parts = (web.WEB_PATH / "page" / "LICENSES.txt").read_text().split("\n" + "-" * 80 + "\n")
    heads = {part.strip().splitlines()[0] for part in parts}
    assert inside < heads
    assert {head.split(" ")[0] for head in heads} >= {"katex", "pdfjs-dist", "core-js"}
    core = re.search(r"core-js\S*?/(?:blob/)?v?(\d+\.\d+\.\d+)/LICENSE", (web.WEB_PATH / "page" / "pdf.js").read_text())
    assert core is not None
    assert f"core-js {core[1]} (in pdfjs-dist)" in heads
    assert (web.WEB_PATH / "page" / "cmaps" / "LICENSE").is_file()
