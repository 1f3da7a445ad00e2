"""The front page, the documentation without internet, and what the log says of requests: the app, without a process."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import httpx
import pytest

from ktransformers import __version__
from ktransformers.server.api.front import ROUTES
from ktransformers.server.app import create_app
from ktransformers.server.config import ServerConfig
from ktransformers.server.telemetry.request_log import without_quotes
from tests.support.servers.fake_backend import FakeBackend

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
SECRET = "my secret"
JSON = {"Accept": "application/json"}


def ask(method: str, path: str, *, keys: tuple[str, ...] = (), is_loaded: bool = True, **more: Any) -> httpx.Response:
    """One request to a new app, from 203.0.113.9:4711."""
    config = ServerConfig(model_names=("demo", "other"), api_keys=keys, is_strict_on_names=True, web=False)
    app = create_app(FakeBackend(is_loaded), config)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, client=("203.0.113.9", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **more)

    return asyncio.run(send())


def test_the_front_names_what_there_is() -> None:
    facts = ask("GET", "/", headers=JSON).json()
    assert facts["name"] == "ktransformers"
    assert facts["version"] == __version__
    assert facts["status"] == "ready"
    assert facts["models"] == ["demo", "other", "FakeForCausalLM"]
    assert facts["docs"] == "/docs"
    assert facts["health"] == "/health"
    assert ask("GET", "/", is_loaded=False, headers=JSON).json()["status"] == "loading"
    assert ask("HEAD", "/").status_code == 200


def test_every_route_is_named_and_every_named_one_is_there() -> None:
    paths = ask("GET", "/openapi.json").json()["paths"]
    documented = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert {route for route, _ in ROUTES} == documented | {"GET /docs", "GET /openapi.json"}


def test_the_front_is_a_page_for_browsers() -> None:
    page = ask("GET", "/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    assert "demo" in page.text
    assert all(route.replace("&", "&amp;") in page.text for route, _ in ROUTES)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["vary"] == "Accept"
    assert ask("GET", "/", headers=JSON).headers["content-type"] == "application/json"


def test_the_front_says_what_ollamas_clients_look_for() -> None:
    for method, text in (("GET", "Ollama is running"), ("HEAD", "")):
        front = ask(method, "/", headers={"Accept": "*/*"})
        assert front.status_code == 200
        assert front.text == text
        assert front.headers["vary"] == "Accept"


@pytest.mark.parametrize("accept", ["*/*", "text/html", "application/json"])
def test_the_front_keeps_models_to_itself_where_keys_are_needed(accept: str) -> None:
    front = ask("GET", "/", keys=("k",), headers={"Accept": accept})
    assert front.status_code == 200
    assert "demo" not in front.text
    assert "FakeForCausalLM" not in front.text
    assert ask("GET", "/docs", keys=("k",)).status_code == 401


def test_the_documentation_needs_no_internet() -> None:
    page = ask("GET", "/docs")
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", page.text)
    assert not [link for link in links if "//" in link]
    assert sorted(links) == [
        "data:,",
        "docs/start.js",
        "docs/swagger-ui-bundle.js",
        "docs/swagger-ui.css",
        "openapi.json",
    ]
    for link in links[1:]:
        assert ask("GET", f"/{link}").status_code == 200, link
    start = ask("GET", "/docs/start.js").text
    assert "//" not in start
    assert "validatorUrl: null" in start  # or else Swagger UI asks a service on the internet
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert not re.search(r"https?:|\*", policy)  # whatever the script names, a browser fetches nothing from elsewhere
    assert len(ask("GET", "/docs/swagger-ui-bundle.js").content) > 500_000
    assert ask("GET", "/redoc").status_code == 404


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "ktransformers.server")
    return caplog


def line_of(log: pytest.LogCaptureFixture) -> str:
    (record,) = [record for record in log.records if record.name == "ktransformers.server"]
    line = re.sub(r"\d+\.\d{3} s", "T s", record.getMessage())
    return re.sub(r" \[[^\]]*\]$", "", line)  # whose request it is: see test_keys.py


def test_an_answer_has_its_counts(log: pytest.LogCaptureFixture) -> None:
    assert ask("POST", COMPLETION, json={"prompt": [1, 2, 3, 4], "max_tokens": 3}).status_code == 200
    line = line_of(log)
    assert line.startswith(f"203.0.113.9:4711 POST {COMPLETION} 200 in T s, cmpl-")
    assert ": 4 prompt tokens (1 cached), " in line
    assert line.endswith("3 tokens in T s (0.0 tokens/s), length")


REFUSED: list[tuple[str, Any, str]] = [
    (
        COMPLETION,
        {"prompt": SECRET, "temperature": -1},
        "400 in T s: temperature: Input should be greater than",
    ),
    (COMPLETION, {"prompt": SECRET, "temperature": SECRET}, "400 in T s: temperature: Input should be a valid number"),
    (COMPLETION, {"prompt": SECRET, SECRET: 1}, "400 in T s: this model's files hold no vocabulary"),
    (COMPLETION, {"prompt": SECRET, "mirostat": SECRET}, "400 in T s: mirostat: this server does not support it; use"),
    (COMPLETION, {"prompt": [1], "extra_body": SECRET}, "400 in T s: extra_body: it must be an object"),
    (
        COMPLETION,
        {"prompt": [1], "structured_outputs": {SECRET: 1}},
        "400 in T s: structured_outputs.?: this server does not support the field",
    ),
    (COMPLETION, {"prompt": SECRET, "logit_bias": {SECRET: 1}}, "the keys of logit_bias must be token ids, got '...'"),
    (COMPLETION, {"prompt": [1], "model": SECRET}, "404 in T s: the model '...' is not served here, but demo, other"),
    (COMPLETION, {"prompt": SECRET}, "400 in T s: this model's files hold no vocabulary"),
    (CHAT, {"messages": [{"role": "user", "content": SECRET}], "chat_template_kwargs": {SECRET: 1}}, "400 in T s: "),
    (CHAT, {"messages": SECRET}, "400 in T s: messages: Input should be a valid list"),
    (COMPLETION, {"prompt": [200]}, "400 in T s: the prompt names token 200; this model's ids are 0 to 99"),
]


@pytest.mark.parametrize(("path", "body", "says"), REFUSED, ids=[says for _, _, says in REFUSED])
def test_a_refusal_says_why_and_quotes_nobody(
    path: str, body: dict[str, Any], says: str, log: pytest.LogCaptureFixture
) -> None:
    response = ask("POST", path, json=body)
    assert response.status_code in (400, 404)
    line = line_of(log)
    assert f"203.0.113.9:4711 POST {path} " in line
    assert says in line
    assert SECRET not in log.text


def test_broken_json_says_so(log: pytest.LogCaptureFixture) -> None:
    ask("POST", CHAT, content=b'{"messages": my secret', headers={"Content-Type": "application/json"})
    assert line_of(log).endswith(" 400 in T s: the body is not valid JSON: Expecting value")


def test_a_template_that_refuses_is_not_quoted(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.errors import ConversationError

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConversationError(f"the model's chat template refuses this conversation: {SECRET}")

    monkeypatch.setattr("ktransformers.server.answers.fitting.chat_prompt", refuse)
    assert SECRET in ask("POST", CHAT, json={"messages": [{"role": "user", "content": "a"}]}).text
    assert line_of(log).endswith("400 in T s: the model's chat template refuses this conversation")


def test_unknown_paths_are_shown_escaped_and_without_the_query(log: pytest.LogCaptureFixture) -> None:
    ask("GET", "/no/such%0Aroute%20here?token=my%20secret")
    assert line_of(log) == "203.0.113.9:4711 GET /no/such%0Aroute%20here 404 in T s: Not Found"
    log.clear()
    ask("GET", "/" + "x" * 5000)
    assert len(line_of(log)) < 220


def test_a_key_that_is_missing(log: pytest.LogCaptureFixture) -> None:
    ask("GET", "/v1/models", keys=("the-key",), headers={"Authorization": "Bearer wrong-key"})
    assert line_of(log) == "203.0.113.9:4711 GET /v1/models 401 in T s: the API key is wrong"
    assert "-key" not in log.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probes_are_logged_for_who_wants_to_see_them(path: str, log: pytest.LogCaptureFixture) -> None:
    ask("GET", path)
    (record,) = [record for record in log.records if record.name == "ktransformers.server"]
    assert record.levelno == logging.DEBUG
    assert f"GET {path} 200" in record.getMessage()


def test_a_bug_is_a_500_in_the_log(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(FakeBackend, "check", fail)
    with pytest.raises(ZeroDivisionError):
        ask("POST", COMPLETION, json={"prompt": [1]})
    assert f"POST {COMPLETION} 500 in T s" in line_of(log)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("the model's file 'a b' and \"c's\" end", "the model's file '...' and '...' end"),
        (r"got 'it\'s' here", "got '...' here"),
        ("got 'never closed and so on", "got '...'"),
        ("this model's ids are 0 to 9", "this model's ids are 0 to 9"),
    ],
)
def test_what_a_message_quotes_is_left_out(message: str, shown: str) -> None:
    assert without_quotes(message) == shown
