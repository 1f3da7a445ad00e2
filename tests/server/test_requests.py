"""/v1/requests: suspended, resumed, ended, and streams that are taken up again; the real app on a model of n-grams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from ktransformers.config import EngineConfig
from ktransformers.core import Progress
from ktransformers.engine.api.batch_loop import BatchLoop
from ktransformers.errors import ConfigError
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.server.app import create_app
from ktransformers.server.backend.interfaces.transformers import LoadedLoop, TransformersInterface
from ktransformers.server.config import ServerConfig
from ktransformers.server.event_log import EventLog, LogBudget
from ktransformers.server.lifecycle import drain
from ktransformers.server.streaming import EventStream
from tests.support.engines.fake_runner import FakeEngine, FakeRunner, byte_tokenizer, ngram_logits
from tests.support.servers.asgi_client import Connection

VOCAB = byte_tokenizer().vocab_size
KEEP = {"x-kt-keep": "60"}


class SteppedBackend(TransformersInterface):
    """Each forward takes a permit."""

    name = "stepped"
    can_suspend = True

    def __init__(self) -> None:
        super().__init__(EngineConfig())
        self.permits, self.runner = threading.Semaphore(0), FakeRunner(ngram_logits(VOCAB), VOCAB, 256)

    def allow(self, num_steps: int = 10_000) -> None:
        self.permits.release(num_steps)

    def forbid(self) -> None:
        while self.permits.acquire(blocking=False):
            pass

    def _load(self, progress: Progress) -> LoadedLoop:
        forward = self.runner.forward

        def waiting(*args: Any) -> Any:
            assert self.permits.acquire(timeout=60)
            return forward(*args)

        self.runner.forward = waiting  # type: ignore[method-assign]
        made = FakeEngine(self.runner, byte_tokenizer(), chunk_size=8)
        return LoadedLoop.of(BatchLoop(lambda report: made, progress), ProfileMeta(backend=self.name, version=""))


class Service:
    """The app, and what clients do."""

    def __init__(self, app: FastAPI, backend: SteppedBackend):
        self.app, self.backend = app, backend

    def open(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, key: str = ""
    ) -> Connection:
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        return Connection(self.app, method, path, body, authorization | (headers or {}))

    def complete(self, max_tokens: int = 12, number: int = 1, headers: Any = None, **more: Any) -> Connection:
        body = {"prompt": [number, 2, 3], "max_tokens": max_tokens, "temperature": 0, "stream": True}
        return self.open("POST", "/v1/completions", body | {"ignore_eos": True} | more, headers)

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        connection = await self.open(method, path, **more).begun()
        return connection.status, await connection.json()

    async def requests(self, **more: Any) -> list[dict[str, Any]]:
        return (await self.ask("GET", "/v1/requests", **more))[1]["data"]


def run(test: Callable[[Service], Awaitable[None]], **config: Any) -> None:
    async def main() -> None:
        backend = SteppedBackend()
        await backend.start()
        app = create_app(backend, ServerConfig(model_names=("demo",), **config))
        try:
            async with asyncio.timeout(10):
                await test(Service(app, backend))
        finally:
            backend.allow()
            await backend.close()
            app.state.service.workers.close()

    asyncio.run(main())


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        await asyncio.sleep(0.001)


def events_of(parts: list[bytes]) -> list[tuple[int, str]]:
    """(id, data) of what was sent, comments left out."""
    found = []
    for event in b"".join(parts).decode().split("\n\n"):
        lines = [line for line in event.split("\n") if line and not line.startswith(":")]
        if lines:
            (number,) = (int(line[4:]) for line in lines if line.startswith("id: "))
            found.append((number, "".join(line[6:] for line in lines if line.startswith("data: "))))
    return found


def texts_of(events: list[tuple[int, str]]) -> list[str]:
    return [json.loads(data)["choices"][0]["text"] for _, data in events if data != "[DONE]"]


def untimed(data: str) -> str:
    """An event without what differs between two equal requests."""
    return re.sub(r'"(id|created|usage)":("[^"]*"|\d+|\{.*?\}\}?)', "", data)


async def undisturbed(service: Service, **asked: Any) -> list[str]:
    return [untimed(data) for _, data in events_of(await service.complete(headers=KEEP, **asked).rest())]


def test_a_suspended_stream_stays_open_and_goes_on_exactly() -> None:
    async def test(service: Service) -> None:
        service.backend.allow(40)
        expected = [untimed(part.decode()) for part in await service.complete().rest()]
        service.backend.forbid()
        connection = await service.complete(headers={"x-request-id": "mine"}).begun()
        service.backend.allow(3)
        parts = [await connection.part()]
        (one,) = await service.requests()
        assert (one["id"], one["state"], one["prompt_tokens"], one["answers"]) == ("mine", "running", 3, 1)
        assert one["answer_id"].startswith("cmpl-")
        assert one["stream"] is None
        status, said = await service.ask("POST", f"/v1/requests/{one['answer_id']}/suspend")
        assert (status, said["state"]) == (200, "suspended")
        service.backend.allow(1)  # what it was computing
        await until(lambda: service.backend.stats().num_suspended == 1)
        others = service.complete(number=7, max_tokens=2)
        service.backend.allow(4)
        assert len(await others.rest()) == 3  # two tokens, [DONE]: they have the engine
        status, said = await service.ask("POST", "/v1/requests/mine/suspend")
        assert (status, said["state"]) == (200, "suspended")
        status, said = await service.ask("POST", "/v1/requests/mine/resume")
        assert (status, said["state"]) == (200, "running")
        service.backend.allow()
        parts += await connection.rest()
        assert [untimed(part.decode()) for part in parts if part] == expected
        assert not any(part.startswith(b"id:") for part in parts if part), "ids were not asked for"
        assert await service.requests() == []

    run(test)


def test_a_body_waits_while_it_is_suspended() -> None:
    async def test(service: Service) -> None:
        connection = service.complete(stream=False, n=2, headers={"x-request-id": "a/b:c"})
        while not await service.requests():
            await asyncio.sleep(0.001)
        status, said = await service.ask("POST", "/v1/requests/a/b:c/suspend")
        assert (status, said["state"], said["answers"]) == (200, "suspended", 2)
        service.backend.allow(1)
        await until(lambda: service.backend.stats().num_suspended == 2)
        assert (await service.ask("POST", "/v1/requests/a/b:c/resume"))[1]["state"] in ("waiting", "running")
        service.backend.allow()
        answer = await connection.json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]

    run(test)


@pytest.mark.parametrize("num_read", [1, 4, 9])
@pytest.mark.parametrize("is_suspended", [False, True])
def test_every_event_comes_once_over_any_number_of_connections(num_read: int, is_suspended: bool) -> None:
    async def test(service: Service) -> None:
        service.backend.allow()
        expected = await undisturbed(service)
        service.backend.forbid()
        connection = await service.complete(headers=KEEP | {"x-request-id": "r"}).begun()
        assert connection.headers["x-request-id"] == "r"
        assert connection.headers["x-kt-keep"] == "60"
        parts, last = list[bytes](), 0
        while True:
            service.backend.allow(num_read + 2)  # it goes on a little without its client
            for _ in range(num_read):
                part = await connection.event()
                if part is None:
                    break
                parts.append(part)
            await connection.leave()
            last = events_of(parts)[-1][0]
            if is_suspended:
                await service.ask("POST", "/v1/requests/r/suspend")
                await service.ask("POST", "/v1/requests/r/resume")
            if last == len(expected):
                break
            connection = await service.open(
                "GET", "/v1/requests/r/stream", headers={"last-event-id": str(last)}
            ).begun()
            assert connection.status == 200
            assert connection.headers["content-type"].startswith("text/event-stream")
        events = events_of(parts)
        assert [number for number, _ in events] == list(range(1, len(expected) + 1))
        assert [untimed(data) for _, data in events] == expected
        _, one = await service.requests()
        assert (one["state"], one["stream"]["last_event"]) == ("ended", len(expected))
        again = await service.open("GET", "/v1/requests/r/stream").rest()  # from the first one
        assert events_of(again) == events
        end = await service.open("GET", "/v1/requests/r/stream", headers={"last-event-id": str(last)}).rest()
        assert end == []

    run(test)


def test_it_goes_on_without_its_client_and_its_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ktransformers.server")

    async def test(service: Service) -> None:
        connection = await service.complete(headers=KEEP | {"x-request-id": "r"}).begun()
        service.backend.allow(2)
        await connection.part()
        await connection.leave()
        assert "goes on [r]" in caplog.text
        service.backend.allow()
        while (await service.requests())[0]["state"] != "ended":
            await asyncio.sleep(0.001)
        assert service.app.state.service.admission.num_active == 0
        assert re.search(r"cmpl-\w+ ended without its client: 12 tokens, length", caplog.text)

    run(test)


def test_without_the_header_leaving_ends_it() -> None:
    async def test(service: Service) -> None:
        connection = await service.complete(headers={"x-request-id": "r"}).begun()
        service.backend.allow(1)
        await connection.part()
        status, said = await service.ask("GET", "/v1/requests/r/stream")
        assert (status, said["error"]["code"]) == (409, "conflict")
        assert "x-kt-keep" in said["error"]["message"]
        await connection.leave()
        assert await service.requests() == []

    run(test)


def test_patience_ends() -> None:
    async def test(service: Service) -> None:
        connection = await service.complete(headers={"x-kt-keep": "0.05", "x-request-id": "r"}).begun()
        service.backend.allow(1)
        await connection.part()
        await service.ask("POST", "/v1/requests/r/suspend")
        service.backend.allow(1)
        await connection.leave()
        while await service.requests():
            await asyncio.sleep(0.001)
        assert service.app.state.service.admission.num_active == 0
        assert service.app.state.service.ongoing._budget.num_bytes == 0
        connection = service.complete(headers={"x-kt-keep": "0.05"}, max_tokens=2)
        service.backend.allow()
        await connection.rest()  # complete, and kept for the same time
        assert (await service.requests())[0]["state"] == "ended"
        await connection.leave()
        while await service.requests():
            await asyncio.sleep(0.001)
        assert service.app.state.service.ongoing._budget.num_bytes == 0

    run(test)


def test_a_request_is_ended_by_its_id() -> None:
    async def test(service: Service) -> None:
        kept = await service.complete(headers=KEEP | {"x-request-id": "kept"}).begun()
        waiting = await service.complete(headers={"x-request-id": "waiting"}).begun()
        service.backend.allow(1)
        await kept.part()
        await service.ask("POST", "/v1/requests/kept/suspend")
        service.backend.allow(1)
        assert (await service.ask("DELETE", "/v1/requests/waiting"))[1]["deleted"] is True
        service.backend.allow(1)  # its turn may have come
        assert json.loads((await waiting.rest())[-2][6:])["choices"][0]["finish_reason"] == "abort"
        assert (await service.ask("DELETE", "/v1/requests/kept"))[0] == 200
        assert json.loads(events_of(await kept.rest())[-2][1])["choices"][0]["finish_reason"] == "abort"
        assert await service.requests() == []
        assert (await service.ask("DELETE", "/v1/requests/kept"))[0] == 404

    run(test)


def test_each_key_sees_its_own() -> None:
    async def test(service: Service) -> None:
        body = {"prompt": [1, 2], "max_tokens": 4, "stream": True}
        mine = await service.open("POST", "/v1/completions", body, KEEP | {"x-request-id": "r"}, "one").begun()
        (one,) = await service.requests(key="one")
        assert await service.requests(key="two") == []
        for id in ("r", one["answer_id"]):
            for method, path in (("POST", "/suspend"), ("POST", "/resume"), ("GET", "/stream"), ("DELETE", "")):
                status, said = await service.ask(method, f"/v1/requests/{id}{path}", key="two")
                assert (status, said["error"]["code"]) == (404, "not_found")
        assert (await service.ask("GET", "/v1/requests"))[0] == 401
        twin = await service.open("POST", "/v1/completions", body, {"x-request-id": "r"}, "one").begun()
        status, said = await service.ask("POST", "/v1/requests/r/suspend", key="one")
        assert (status, said["error"]["code"]) == (409, "conflict")
        assert "answer_id" in said["error"]["message"]
        assert (await service.ask("POST", f"/v1/requests/{one['answer_id']}/suspend", key="one"))[0] == 200
        service.backend.allow()
        await twin.rest()
        await service.ask("POST", "/v1/requests/r/resume", key="one")
        await mine.rest()

    run(test, api_keys=("one", "two"))


def test_limits_of_suspension() -> None:
    async def test(service: Service) -> None:
        opened = [await service.complete(headers=KEEP | {"x-request-id": f"r{i}"}).begun() for i in range(2)]
        assert (await service.ask("POST", "/v1/requests/r0/suspend"))[0] == 200
        status, said = await service.ask("POST", "/v1/requests/r1/suspend")
        assert (status, said["error"]["code"]) == (503, "queue_full")
        assert "--max_suspended" in said["error"]["message"]
        await service.ask("POST", "/v1/requests/r0/resume")
        assert (await service.ask("POST", "/v1/requests/r1/suspend"))[0] == 200
        await service.ask("POST", "/v1/requests/r1/resume")
        service.backend.allow()
        for one in opened:
            await one.rest()
        for what in ("suspend", "resume"):
            status, said = await service.ask("POST", f"/v1/requests/r0/{what}")
            assert (status, said["error"]["code"]) == (409, "conflict")

    run(test, max_suspended=1)


def test_a_backend_that_cannot_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SteppedBackend, "can_suspend", False)

    async def test(service: Service) -> None:
        connection = await service.complete(headers={"x-request-id": "r"}).begun()
        status, said = await service.ask("POST", "/v1/requests/r/suspend")
        assert status == 400
        assert "does not suspend" in said["error"]["message"]
        service.backend.allow()
        await connection.rest()

    run(test)


def test_time_goes_on_and_the_stream_says_what_was_wrong() -> None:
    async def test(service: Service) -> None:
        connection = await service.complete(headers={"x-request-id": "r"}, timeout=0.1).begun()
        await service.ask("POST", "/v1/requests/r/suspend")
        service.backend.allow(1)
        data = (await connection.rest())[-2]
        assert json.loads(data[6:])["error"]["code"] == "deadline_exceeded"
        assert b"was suspended when the 0.1 s" in data

    run(test)


def test_what_is_suspended_ends_when_the_server_stops() -> None:
    async def test(service: Service) -> None:
        connection = await service.complete(headers=KEEP | {"x-request-id": "r"}).begun()
        await service.ask("POST", "/v1/requests/r/suspend")
        service.backend.allow(1)
        await drain([service.app.state.service], 30.0)
        assert json.loads(events_of(await connection.rest())[-2][1])["choices"][0]["finish_reason"] == "abort"
        connection = await service.complete().begun()
        assert connection.status == 503

    run(test, drain_seconds=30.0)


@pytest.mark.parametrize("last", ["-1", "x", "1.5", "", "9" * 40, "99", "٣"])
def test_event_ids_that_were_never_sent(last: str) -> None:
    async def test(service: Service) -> None:
        service.backend.allow()
        await service.complete(headers=KEEP | {"x-request-id": "r"}).rest()
        status, said = await service.ask("GET", "/v1/requests/r/stream", headers={"last-event-id": last})
        assert (status, said["error"]["type"]) == (400, "invalid_request_error")

    run(test)


@pytest.mark.parametrize("id", ["no", "../r", "r%2F", "a" * 5000, "%00", "r\n", "'", "<script>", "cmpl-", "é"])
def test_ids_of_nobody(id: str) -> None:
    async def test(service: Service) -> None:
        for method, path in (("POST", "/suspend"), ("POST", "/resume"), ("GET", "/stream"), ("DELETE", "")):
            status, said = await service.ask(method, f"/v1/requests/{id}{path}")
            assert status == 404
            assert len(json.dumps(said)) < 1000

    run(test)


@pytest.mark.every(4)
@pytest.mark.parametrize("value", ["0", "-1", "1e3", "nan", "inf", "3601", "99999999", "", "ten", "1_0", "0.0001"])
def test_how_long_is_too_long(value: str) -> None:
    async def test(service: Service) -> None:
        connection = await service.complete(headers={"x-kt-keep": value}).begun()
        assert (connection.status, service.app.state.service.admission.num_active) == (400, 0)
        assert "at most 3600" in (await connection.json())["error"]["message"]

    run(test)


def test_what_cannot_be_kept() -> None:
    async def test(service: Service) -> None:
        connection = await service.complete(stream=False, headers=KEEP).begun()
        assert connection.status == 400
        assert "send stream: true" in (await connection.json())["error"]["message"]
        chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
        connection = await service.open("POST", "/api/chat", chat, KEEP).begun()
        assert connection.status == 400
        assert "lines of JSON" in (await connection.json())["error"]
        assert service.app.state.service.admission.num_active == 0

    run(test)

    async def never(service: Service) -> None:
        connection = await service.complete(headers=KEEP).begun()
        assert connection.status == 400
        assert "--max_keep_seconds 0" in (await connection.json())["error"]["message"]

    run(never, max_keep_seconds=0.0)


def test_events_that_are_not_kept_any_more() -> None:
    async def test(service: Service) -> None:
        service.app.state.service.ongoing._budget = LogBudget(4096)
        connection, parts = service.complete(60, headers=KEEP | {"x-request-id": "r"}), list[bytes]()
        for _ in range(61):  # and [DONE]
            service.backend.allow(1)
            parts.append(await connection.event() or b"")
        whole = events_of(parts)
        (one,) = await service.requests()
        first = one["stream"]["first_event"]
        assert first > 1
        status, said = await service.ask("GET", "/v1/requests/r/stream")
        assert (status, said["error"]["code"]) == (409, "conflict")
        assert "--kept_streams" in said["error"]["message"]
        rest = service.open("GET", "/v1/requests/r/stream", headers={"last-event-id": str(first - 1)})
        assert events_of(await rest.rest()) == whole[first - 1 :]

    run(test)


def test_what_waits_is_sent_in_pieces_and_what_comes_one_by_one() -> None:
    async def main() -> None:
        log = EventLog("", LogBudget(1 << 30))
        sent = [b"data: " + b"x" * (i % 700) + b"\n\n" for i in range(1000)]
        sent[500] = b"data: " + b"y" * 100_000 + b"\n\n"
        for event in sent:
            log.append(event)
        turns = [0]

        def count() -> None:
            turns[0] += 1
            asyncio.get_running_loop().call_soon(count)

        count()
        pieces, at = list[bytes](), list[int]()
        events = log.after(3)
        async for piece in events:
            pieces.append(piece)
            at.append(turns[0])
            if piece.endswith(b"id: 1000\n" + sent[-1]):
                break
        assert b"".join(pieces) == b"".join(b"id: %d\n%b" % (i, sent[i - 1]) for i in range(4, 1001))
        assert b"id: 501\n" + sent[500] in pieces
        assert max(len(piece) for piece in pieces if b"y" not in piece) <= 1 << 16
        assert len(pieces) < 10
        assert all(before < now for before, now in itertools.pairwise(at)), "nobody else had the event loop"
        for event in (b"data: 1\n\n", b"data: 2\n\n"):
            log.append(event)  # by the same step, say
        assert [await anext(events), await anext(events)] == [b"id: 1001\ndata: 1\n\n", b"id: 1002\ndata: 2\n\n"]
        await events.aclose()

    asyncio.run(main())


def test_a_reader_who_leaves_in_the_middle_of_a_backlog_is_sent_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        log = EventLog("", LogBudget(1 << 30))
        for _ in range(20_000):
            log.append(b"data: " + b"x" * 100 + b"\n\n")
        log.end()

        async def pieces() -> AsyncGenerator[bytes, None]:
            async for piece in log.after(0):
                yield piece
                client.close()  # behind the first one

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await EventStream(pieces(), "text/event-stream", 60.0, ended.set)(scope, receive, send)

        ended = asyncio.Event()
        config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none", http="h11")
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
            client.connect(listener.getsockname())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # to close is to reset
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            serving = asyncio.create_task(server.serve([listener]))
            await ended.wait()
            server.should_exit = True
            await serving

    asyncio.run(main())
    assert "socket.send() raised exception" not in caplog.text


def test_the_key_that_keeps_most_loses_first() -> None:
    budget = LogBudget(10_000)
    small, large = EventLog("one", budget), EventLog("two", budget)
    other = EventLog("two", budget)
    for _ in range(10):
        small.append(b"x" * 36)  # 100 bytes each, with what it takes beside
        other.append(b"x" * 36)
    for _ in range(500):
        large.append(b"x" * 36)
    assert (small.first, other.first, small.last, large.last) == (1, 1, 10, 500)
    assert budget.num_bytes == small.num_bytes + large.num_bytes + other.num_bytes <= 10_000
    assert large.first > 400
    budget.forget(large)
    budget.forget(large)
    assert budget.num_bytes == 2000


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_suspended", -1), ("max_keep_seconds", -1.0), ("max_keep_seconds", 1e9), ("kept_streams", 1 << 19)],
)
def test_settings(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{setting}"):
        ServerConfig(**{setting: value})  # type: ignore[arg-type]
