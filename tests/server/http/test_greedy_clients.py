"""Clients that ask for too much, through the real app on a made-up backend: who is let in, who keeps whom waiting."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ktransformers.core import FinishReason, GenerationStats, Progress, SamplingParams, TokenEvent
from ktransformers.errors import ConfigError, QueueFullError
from ktransformers.server.admission import Admission
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import BackendInterfaceBase, BackendStats, GenerationRequest, ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.hosts import HostRule
from ktransformers.server.middleware import BodyLimits
from ktransformers.tokenizer import load_tokenizer
from ktransformers.tokenizer.encoding import TextEncoder
from tests.support.models.demo import DEMO_CHECKPOINT

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 2048


class CountingBackend(BackendInterfaceBase):
    """Every answer is one token, when `gate` is open."""

    name = "counting"

    def __init__(self) -> None:
        tokenizer = load_tokenizer(DEMO_CHECKPOINT, None)
        self._model = ModelInfo(tokenizer, CONTEXT, tokenizer.vocab_size, (), SamplingParams(), None, "made up")
        self.gate = asyncio.Event()
        self.gate.set()
        self.running: list[GenerationRequest] = []
        self.checked: list[GenerationRequest] = []

    async def start(self, progress: Progress | None = None) -> None:
        """Nothing to load."""

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def max_running(self) -> int:
        return 4

    def stats(self) -> BackendStats:
        return BackendStats(0, 0)

    def check(self, request: GenerationRequest) -> None:
        self.checked.append(request)
        super().check(request)

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.running.append(request)
        await self.gate.wait()
        yield TokenEvent(5, "x", GenerationStats(len(request.prompt_ids), 0, 1), finish_reason=FinishReason.LENGTH)

    def end(self, request_id: str) -> None:
        """Nobody asks for it."""

    async def close(self) -> None:
        """Nothing to free."""


Ask = Callable[..., Awaitable[httpx.Response]]


def run(work: Callable[[CountingBackend, httpx.AsyncClient], Awaitable[None]], **settings: Any) -> None:
    """`work` with a client of the real app, in this process."""

    async def main() -> None:
        backend = CountingBackend()
        app = create_app(backend, ServerConfig(model_names=("made-up",), **settings))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
            await work(backend, client)
        app.state.service.workers.close()

    asyncio.run(main())


def chat(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 1, **fields}


@contextmanager
def waiting_tokenizer(patch: pytest.MonkeyPatch, is_long: Callable[[str], bool]) -> Iterator[threading.Event]:
    """Texts that are long wait for the event while they are tokenized, in whatever thread that is."""
    go_on, encoding = threading.Event(), TextEncoder._ids

    def wait(self: TextEncoder, text: str, add_special_tokens: bool) -> Any:
        if is_long(text):
            assert threading.current_thread() is not threading.main_thread()
            assert go_on.wait(60)
        return encoding(self, text, add_special_tokens)

    with patch.context() as patched:
        patched.setattr(TextEncoder, "_ids", wait)
        try:
            yield go_on
        finally:
            go_on.set()


def test_long_texts_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are threads."""

    async def work(backend: CountingBackend, client: httpx.AsyncClient) -> None:
        long = "word " * 14_000
        with waiting_tokenizer(monkeypatch, lambda text: len(text) > 60_000) as go_on:
            tasks = [asyncio.create_task(client.post(CHAT, json=chat(long))) for _ in range(40)]
            tasks.append(asyncio.create_task(client.post("/tokenize", json={"prompt": long})))
            for _ in range(3):
                assert (await client.get("/health")).status_code == 200
                assert (await client.post(CHAT, json=chat())).status_code == 200
                assert (await client.post("/tokenize", json={"prompt": "a b"})).json()["count"] > 0
            assert not any(task.done() for task in tasks)
            go_on.set()
            *chats, tokenized = await asyncio.gather(*tasks)
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in chats} == {
            (400, "context_length_exceeded")
        }
        assert tokenized.json()["count"] > CONTEXT

    run(work)


def test_what_no_prompt_can_hold_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(backend: CountingBackend, client: httpx.AsyncClient) -> None:
        monkeypatch.setattr(TextEncoder, "_ids", lambda *_: pytest.fail("it was tokenized"))
        text = " " * (CONTEXT * backend.model.tokenizer.max_token_chars + 1)
        for path, body in (
            (CHAT, chat(text)),
            (COMPLETIONS, completion(text)),
            (COMPLETIONS, completion(["a" * 9, text])),
        ):
            if path == COMPLETIONS and isinstance(body["prompt"], list):
                body["prompt"].reverse()
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")

    run(work)


def test_the_size_of_bodies_goes_by_the_context() -> None:
    async def work(backend: CountingBackend, client: httpx.AsyncClient) -> None:
        largest = " " * (CONTEXT * backend.model.tokenizer.max_token_chars)
        body = json.dumps(chat(largest)).replace(" ", "\\u0020")  # the longest way to write it
        answer = await client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400)
        answer = await client.post(CHAT, content=" " * (8 << 20), headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")

    run(work)


TOO_MUCH = {
    "many ids": (COMPLETIONS, completion([1] * 500_000), "values"),
    "many prompts": (COMPLETIONS, completion([[1]] * 500_000), "values"),
    "prompts": (COMPLETIONS, completion([[1]] * 129), "128 prompts"),
    "prompts times n": (COMPLETIONS, completion([[1], [2]], n=65), "more than 128 answers"),
    "messages": (CHAT, {"messages": [""] * 70_000}, "strings, lists and objects"),
    "fields": (CHAT, chat() | {f"x{i}": 1 for i in range(300)}, "fields"),
    "depth": (CHAT, chat(chat_template_kwargs={"a": json.loads("[" * 200 + "]" * 200)}), "within each other"),
    "stop strings": (CHAT, chat(stop=["a"] * 33), "32"),
    "a stop string": (CHAT, chat(stop="a" * 1025), "1024"),
    "long stop strings": (CHAT, chat(stop=["a" * 1000] * 9), "8192 together"),
    "biases": (CHAT, chat(logit_bias={str(i): "a" for i in range(10_000)}), "numbers"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_with_its_reason(name: str) -> None:
    path, body, reason = TOO_MUCH[name]

    async def work(backend: CountingBackend, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert reason in answer.json()["error"]["message"]
        assert not backend.checked
        assert (await client.post(CHAT, json=chat())).status_code == 200

    run(work)


ODD_VALUES = {
    "surrogates in stop": (b'"stop": "a\\ud800"', "stop"),
    "surrogates in a stop": (b'"stop": ["b", "\\udfff"]', "stop"),
    "surrogates in the salt": (b'"cache_salt": "\\udfff"', "cache_salt"),
    "a tiny penalty": (b'"repetition_penalty": 1e-300', "repetition_penalty"),
    "very deep calls": (
        b'"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "'
        + b"[" * 100_000 + b'"}}]}]',
        "maximum context length",  # what a model said is taken, see test_past_calls.py
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_VALUES)
def test_odd_values_are_the_clients_fault(name: str) -> None:
    fields, named = ODD_VALUES[name]

    async def work(backend: CountingBackend, client: httpx.AsyncClient) -> None:
        start = b"{" if b'"messages"' in fields else b'{"messages": [{"role": "user", "content": "Hi"}], '
        answer = await client.post(CHAT, content=start + fields + b"}", headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert named in answer.json()["error"]["message"]

    run(work)


def test_answers_are_counted_not_requests() -> None:
    """128 answers per request: two requests fill a queue of 256, and 62 more are refused before any work."""

    async def work(backend: CountingBackend, client: httpx.AsyncClient) -> None:
        backend.gate.clear()
        body = chat(n=128, max_tokens=1)
        tasks = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(64)]
        done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while len(running) > 2:
            more, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert {(await task).status_code for task in done} == {503}
        assert {(await task).json()["error"]["code"] for task in done} == {"queue_full"}
        assert (await client.get("/health")).status_code == 200
        while len(backend.running) < 256:
            await asyncio.sleep(0)
        backend.gate.set()
        assert [len((await task).json()["choices"]) for task in running] == [128, 128]
        assert len(backend.running) == 256
        assert len(backend.checked) == 2  # what they share is looked at once
        assert len({id(request.prompt_ids) for request in backend.running}) == 2
        assert (await client.post(CHAT, json=body)).status_code == 200  # they have left

    run(work, max_queue=256)


def test_a_key_has_a_share_of_its_own() -> None:
    async def work(backend: CountingBackend, client: httpx.AsyncClient) -> None:
        backend.gate.clear()
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        running = [asyncio.create_task(client.post(CHAT, json=chat(n=3), headers=first))]
        while len(backend.running) < 3:
            await asyncio.sleep(0)
        refused = await client.post(CHAT, json=chat(n=2), headers=first)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert "--max_queue_per_key 4" in refused.json()["error"]["message"]
        running.append(asyncio.create_task(client.post(CHAT, json=chat(n=4), headers=second)))
        while len(backend.running) < 7:
            await asyncio.sleep(0)
        backend.gate.set()
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await client.post(CHAT, json=chat(n=9), headers=first)).status_code == 200  # alone, as many as it likes

    run(work, max_queue_per_key=4, api_keys=("one", "two"))


def test_admission_adds_up() -> None:
    admission = Admission(max_queue=2, max_per_key=None)
    admission.enter(1, 100)  # alone
    with pytest.raises(QueueFullError, match="100 answers are running or waiting, and 1 more"):
        admission.enter(1, 1)
    admission.leave(100)
    for _ in range(3):
        admission.enter(1, 1)
    with pytest.raises(QueueFullError):
        admission.enter(1, 1)
    assert (admission.num_active, admission.num_answers) == (3, 3)


# --- hosts and origins -----------------------------------------------------------------------------------------------


def test_pages_of_other_sites_and_other_names_are_refused() -> None:
    async def work(backend: CountingBackend, client: httpx.AsyncClient) -> None:
        async def status(**headers: str) -> tuple[int, str | None]:
            answer = await client.post(CHAT, json=chat(), headers=headers)
            return answer.status_code, answer.json().get("error", {}).get("code")

        assert await status() == (200, None)
        assert await status(Host="localhost:10002", Origin="http://localhost:10002") == (200, None)
        assert await status(Host="127.0.0.1:10002") == (200, None)
        assert await status(Host="[::1]") == (200, None)
        assert await status(Origin="https://page.example") == (200, None)  # --cors_origins
        for origin in (
            "http://evil.example",
            "null",
            "http://localhost:3000",
            "file://",
            "http://page.example",
            "http://[",
        ):
            assert await status(Host="localhost:10002", Origin=origin) == (403, "origin_not_allowed")
        for host in ("evil.example", "evil.example:10002", "localhost.evil.example", "192.168.1.2", "[", ""):
            assert await status(Host=host, Origin=f"http://{host}") == (421, "host_not_allowed")
        preflight = await client.options(
            CHAT, headers={"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        )
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        preflight = await client.options(
            CHAT, headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        )
        assert preflight.status_code == 403

    run(work, cors_origins=("https://page.example",))


@pytest.mark.parametrize(
    ("allowed", "bound", "good", "bad"),
    [
        ((), "127.0.0.1", ["LOCALHOST:1", "127.1.2.3", "[::1]:80", "a.localhost", "localhost."], ["a", "10.0.0.1"]),
        ((), "10.0.0.1", ["10.0.0.1:10002", "localhost"], ["10.0.0.2", "evil.example"]),
        ((), "gpu.lan", ["GPU.lan:1"], ["lan", "x.gpu.lan"]),
        ((), "0.0.0.0", ["10.0.0.1", "[fe80::1]:1", "localhost"], ["evil.example", "1.2.3.4.evil.example"]),
        (("a.example", "*.b.example"), "127.0.0.1", ["a.example:1", "x.b.example"], ["b.example", "xb.example"]),
        (("*",), "127.0.0.1", ["evil.example", "["], []),
    ],
)  # fmt: skip
def test_host_rules(allowed: tuple[str, ...], bound: str, good: list[str], bad: list[str]) -> None:
    rule = HostRule(allowed, bound)
    assert [host for host in good if not rule.allows(host)] == []
    assert [host for host in bad if rule.allows(host)] == []


def test_keys_make_names_unimportant() -> None:
    assert ServerConfig(model_names=("a",), api_keys=("k",)).host_names == ("*",)
    assert ServerConfig(model_names=("a",), api_keys=("k",), allowed_hosts=("b",)).host_names == ("b",)
    with pytest.raises(ConfigError, match="max_queue_per_key"):
        ServerConfig(max_queue_per_key=0)


# --- bodies ----------------------------------------------------------------------------------------------------------


class SkippingLoop(asyncio.SelectorEventLoop):
    """Time goes by as the test says."""

    skipped = 0.0

    def time(self) -> float:
        return super().time() + self.skipped


@pytest.mark.parametrize(
    ("seconds", "num_bytes", "arrives"), [(5.0, 1, False), (5.0, 40_000, True), (29.0, 200_000, True)]
)
def test_a_body_has_a_rate_to_keep(seconds: float, num_bytes: int, arrives: bool) -> None:
    """A client that sends num_bytes every so many seconds, each time soon enough."""
    sent: list[Any] = []
    loop = SkippingLoop()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, Any]:
        nonlocal count
        count += 1
        loop.skipped += seconds
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * num_bytes, "more_body": count < 50}

    async def send(message: Any) -> None:
        sent.append(message)

    count = 0
    limits = BodyLimits(app, max_body=lambda: 32 << 20, body_timeout=30.0)
    scope = {"type": "http", "headers": [], "method": "POST", "path": "/"}
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(limits(scope, receive, send))
    assert sent[0]["status"] == (200 if arrives else 408)
    assert count == 50 if arrives else count < 10


def test_bodies_in_memory_are_bounded_together() -> None:
    async def main() -> None:
        held, statuses = asyncio.Event(), []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await held.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * 1000, "more_body": False}

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.append(message["status"])

        limits = BodyLimits(app, max_body=lambda: 1000, body_timeout=30.0)
        scope = {"type": "http", "headers": [], "method": "POST", "path": "/"}
        running = [asyncio.create_task(limits(scope, receive, send)) for _ in range(20)]
        while len(statuses) < 4:
            await asyncio.sleep(0)
        assert statuses == [503] * 4
        held.set()
        await asyncio.gather(*running)
        assert statuses == [503] * 4 + [200] * 16

    asyncio.run(main())
