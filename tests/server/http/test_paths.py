"""How routes are found: slashes, HEAD, names of other servers, and what is left out."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from ktransformers import __version__
from ktransformers.server.api.front import ROUTES
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import BackendStats
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.api_paths import plain_path
from tests.support.servers.fake_backend import FakeBackend

GETS = sorted(path for method, path in (route.split() for route, _ in ROUTES) if method == "GET" and "{" not in path)
GETS.remove("/v1/profile")  # of a backend that can write profiles, which the fake one cannot


def ask(method: str, path: str, *, backend: FakeBackend | None = None, **more: Any) -> httpx.Response:
    """One request to a new app."""
    config = ServerConfig(model_names=("demo",), **more.pop("config", {}))
    app = create_app(backend or FakeBackend(), config)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.request(method, f"http://localhost{path}", **more)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("path", "plain"),
    [("/", "/"), ("//", "/"), ("/v1/models/", "/v1/models"), ("//v1///models//", "/v1/models"), ("/a/b", "/a/b")],
)
def test_plain_paths(path: str, plain: str) -> None:
    assert plain_path(path) == plain


@pytest.mark.every(5)
@pytest.mark.parametrize("path", [*GETS, "/", "/v1/models/demo", "/docs/start.js"])
def test_head_is_get_without_a_body(path: str) -> None:
    get, head = ask("GET", path), ask("HEAD", path)
    assert get.status_code == head.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    assert ask("GET", f"{path}/").status_code == 200
    assert ask("GET", f"/{path}").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "/v1//completions//"])
def test_posts_are_answered_where_they_come(path: str) -> None:
    answer = ask("POST", path, json={"prompt": [1]})
    assert answer.status_code == 200  # a redirect would lose the body with many a client
    assert answer.json()["object"] == "text_completion"


def test_slashes_open_nothing() -> None:
    keys = {"api_keys": ("k",)}
    for path in ("//health", "/health/", "/ready/", "/v1/health", "/ping", "/"):
        assert ask("GET", path, config=keys).status_code == 200, path
    for path in ("/v1/models/", "//v1/models", "/v1/status", "/props", "/health/../v1/models", "/slots/"):
        for method in ("GET", "HEAD"):
            assert ask(method, path, config=keys).status_code == 401, path


def test_head_of_what_is_only_posted() -> None:
    assert ask("HEAD", "/v1/completions").status_code == 405
    assert ask("HEAD", "/no/such/route").status_code == 404


@pytest.mark.parametrize("path", ["/v1/score", "/rerank", "/v2/rerank", "/v1/audio/speech", "/v1/images/generations"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_left_out_says_so(method: str, path: str) -> None:
    answer = ask(method, path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(f"{path} is not served: this server ")


def test_helpers_of_other_servers() -> None:
    backend = FakeBackend()
    backend.now = BackendStats(1, 2)
    assert ask("GET", "/ping").json() == ask("GET", "/v1/health").json() == {"status": "ok"}
    assert ask("GET", "/load").json() == {"server_load": 0}
    info = ask("GET", "/server_info", config={"sampling": {"temperature": 0.5}}).json()
    assert (info["version"], info["backend"], info["max_model_len"]) == (__version__, "fake", 64)
    assert info["default_sampling"]["temperature"] == 0.5
    assert info["default_max_tokens"] is None
    assert ask("GET", "/server_info", config={"max_new_tokens": 32}).json()["default_max_tokens"] == 32
    props = ask("GET", "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 64
    assert props["default_generation_settings"]["params"]["repeat_penalty"] == 1.0
    assert (props["total_slots"], props["model_alias"], props["chat_template"]) == (1, "demo", "")
    assert [slot["is_processing"] for slot in ask("GET", "/slots", backend=backend).json()] == [True]
    tokenizer = ask("GET", "/tokenizer_info").json()
    assert (tokenizer["model_max_length"], tokenizer["vocab_size"], tokenizer["eos_token_ids"]) == (64, 100, [2])
    for path in ("/props", "/slots", "/server_info", "/tokenizer_info"):
        loading = ask("GET", path, backend=FakeBackend(is_loaded=False))
        assert (loading.status_code, loading.json()["error"]["code"]) == (503, "not_ready")
    assert ask("GET", "/ping", backend=FakeBackend(is_loaded=False)).status_code == 200
