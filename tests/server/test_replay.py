"""Requests that go on in the next server: the real app twice over one folder, and who is not taken up."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from fastapi import FastAPI

from ktransformers.core import FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.sequence.output_processor import OutputProcessor
from ktransformers.errors import UnsupportedError
from ktransformers.server.answers import replay
from ktransformers.server.answers.replay import resume_requests
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import BackendInterfaceBase, GenerationRequest, ModelInfo, deadline_error
from ktransformers.server.config import ServerConfig
from ktransformers.server.journal.file import JournalFile
from ktransformers.server.journal.journal import MAX_TRIES, Journal
from ktransformers.server.lifecycle import drain
from ktransformers.server.run import OneModel, _journal
from ktransformers.server.service import Service
from tests.server.test_requests import SteppedBackend
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.servers.asgi_client import Connection
from tests.support.servers.fake_backend import FakeBackend

KEEP = {"x-kt-keep": "60", "x-request-id": "mine"}
NUM_TOKENS = 12
TOKENIZER = byte_tokenizer()
LETTERS = TOKENIZER.encode("abcdefghijklmnopqrstuvwxyz")


class GoingBackend(FakeBackend):
    """Token i of an answer is a letter of its seed and i; each takes a permit. pasts: lengths that it goes on from."""

    can_go_on = True
    can_suspend = True

    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)
        self.pasts: list[int] = []
        self.timeouts: list[float | None] = []
        self.suspended: set[str] = set()

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(TOKENIZER, 256, TOKENIZER.vocab_size, (), SamplingParams(), None, "going", digest=b"d" * 32)

    def allow(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.permits.release()

    def suspend(self, request_id: str) -> None:
        self.suspended.add(request_id)

    def resume(self, request_id: str) -> None:
        self.suspended.discard(request_id)

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        if request.is_suspended():
            self.suspended.add(request.request_id)
        self.pasts.append(len(request.past))
        self.timeouts.append(request.timeout)
        output_processor = OutputProcessor(TOKENIZER, request.params, len(request.prompt_ids))
        for past in request.past:
            yield output_processor.token(past.token_id, past.logprobs, past.reason)
        if request.timeout is not None and request.timeout < 1:
            raise deadline_error(request)
        for number in range(len(request.past), NUM_TOKENS):
            await until(lambda: request.request_id not in self.suspended)
            await self.permits.acquire()
            if request.request_id in self.ended:
                yield output_processor.aborted()
                return
            token = LETTERS[((request.params.seed or 0) + number) % len(LETTERS)]
            yield output_processor.token(token, None, FinishReason.LENGTH if number == NUM_TOKENS - 1 else None)

    def end(self, request_id: str) -> None:
        super().end(request_id)
        self.permits.release()


class SingleGoing(SteppedBackend):
    """A real one of a single sequence."""

    can_go_on = True

    @property
    def model(self) -> ModelInfo:
        return replace(super().model, digest=b"d" * 32)


BackendT = TypeVar("BackendT", bound=BackendInterfaceBase)


class Server(Generic[BackendT]):
    """One life of a server on a folder."""

    def __init__(self, folder: Path, backend: BackendT, **config: Any):
        self.backend = backend
        self.app: FastAPI = create_app(self.backend, ServerConfig(model_names=("m",), **config))
        self.service: Service = self.app.state.service
        self.journal = Journal(folder)
        self.service.ongoing.journal, self.service.ongoing.is_restoring = self.journal, True

    async def start(self) -> Server[BackendT]:
        await self.backend.start()
        await resume_requests(self.app, self.service, self.journal)
        return self

    def open(self, method: str, path: str, body: Any = None, **headers: str) -> Connection:
        return Connection(self.app, method, path, body, {name.replace("_", "-"): headers[name] for name in headers})

    def complete(self, **more: Any) -> Connection:
        body = {"prompt": "abc", "stream": True, "max_tokens": NUM_TOKENS, "seed": 4} | more.pop("body", {})
        return self.open("POST", "/v1/completions", body, **KEEP, **more)

    async def die(self) -> None:
        """As by SIGKILL: what is written is there, nobody says goodbye."""
        await self.journal.written()
        self.journal.close()
        for task in self.service.ongoing.tasks:
            task.cancel()
        await asyncio.gather(*self.service.ongoing.tasks, return_exceptions=True)
        if isinstance(self.backend, SteppedBackend):
            self.backend.allow()  # its worker may wait for a permit
        await self.backend.close()


def going(folder: Path, **config: Any) -> Server[GoingBackend]:
    return Server(folder, GoingBackend(), **config)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(limited())


async def read(connection: Connection, num_events: int) -> bytes:
    await connection.begun()
    return b"".join([await connection.event() or b"" for _ in range(num_events)])


async def read_all(connection: Connection) -> bytes:
    return b"".join(await connection.events())


def texts_of_choices(data: bytes) -> dict[int, str]:
    texts: dict[int, str] = {}
    for said in re.findall(r"(?m)^data: (\{.*)$", data.decode()):
        for choice in json.loads(said)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def num_computed(server: Server[Any]) -> int:
    """Tokens of the one request there is, of which some may not be told yet."""
    (one,) = server.service.ongoing
    return one.request_metrics.total.completion_len


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def begun(folder: Path, num_tokens: int = 5, **more: Any) -> tuple[bytes, Server[GoingBackend]]:
    """A server that has told the first tokens of a stream."""
    server = await going(folder, **more.pop("config", {})).start()
    server.backend.allow(num_tokens)
    return await read(server.complete(**more), num_tokens), server


@pytest.mark.parametrize("num_tokens", [1, 5, NUM_TOKENS + 1])
def test_a_stream_goes_on_in_the_next_server(tmp_path: Path, num_tokens: int) -> None:
    async def work() -> None:
        first, server = await begun(tmp_path, num_tokens)
        await server.die()
        for seen in (num_tokens, num_tokens + 1):  # the second time it is killed a token later
            server = await going(tmp_path).start()
            connection = server.open("GET", "/v1/requests/mine/stream")
            if seen == num_tokens:
                server.backend.allow(1)
                assert (await read(connection, min(seen + 1, NUM_TOKENS + 1))).startswith(first)
                await server.die()
        server.backend.allow(NUM_TOKENS)
        whole = await read_all(await connection.begun())
        assert server.backend.pasts == [min(num_tokens + 1, NUM_TOKENS)]
        assert whole.startswith(first)
        assert "".join(re.findall(r'"text":"(.)"', whole.decode())) == "efghijklmnop"
        assert whole.endswith(b"data: [DONE]\n\n")
        rest = server.open("GET", "/v1/requests/mine/stream", last_event_id=str(num_tokens))
        assert first + await read_all(await rest.begun()) == whole
        await server.die()

    run(work)


def test_an_event_that_is_told_again_is_waited_for(tmp_path: Path) -> None:
    """After a power loss a client may have seen more than the journal has."""

    async def work() -> None:
        _, server = await begun(tmp_path, 3)
        await server.die()
        server = await going(tmp_path).start()
        server.backend.allow(NUM_TOKENS)
        connection = await server.open("GET", "/v1/requests/mine/stream", last_event_id="8").begun()
        assert connection.status == 200
        assert (await read_all(connection)).startswith(b"id: 9\n")
        late = await server.open("GET", "/v1/requests/mine/stream", last_event_id="99").begun()
        assert late.status == 400
        await server.die()

    run(work)


def test_those_that_were_ended_are_not_taken_up(tmp_path: Path) -> None:
    async def work() -> None:
        _, server = await begun(tmp_path)
        assert (await server.open("DELETE", "/v1/requests/mine").begun()).status == 200
        await server.die()
        server = await going(tmp_path).start()
        assert server.backend.pasts == []
        await server.die()

    run(work)


def test_nobody_hears_that_a_request_is_gone_before_all_are_back(tmp_path: Path) -> None:
    async def work() -> None:
        server = going(tmp_path)
        for path in ("/v1/requests", "/v1/requests/mine/stream"):
            assert (await server.open("GET", path).begun()).status == 503
        await server.start()
        assert (await server.open("GET", "/v1/requests/mine/stream").begun()).status == 404
        await server.die()

    run(work)


def test_a_request_belongs_to_its_api_key_wherever_that_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        more: dict[str, Any] = {"config": {"api_keys": ("one", "two")}, "authorization": "Bearer two"}
        _, server = await begun(tmp_path, **more)
        await server.die()
        server = await going(tmp_path, api_keys=("two", "three")).start()
        for key, status in (("two", 200), ("three", 404)):
            answer = await server.open("GET", "/v1/requests/mine/stream", authorization=f"Bearer {key}").begun()
            assert answer.status == status
        await server.die()
        server = await going(tmp_path, api_keys=("one", "three")).start()
        assert server.backend.pasts == []
        await server.die()

    run(work)
    assert "the API key that it came with is not one any more" in caplog.text
    assert "two" not in caplog.text


def test_a_request_that_may_end_servers_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        _, server = await begun(tmp_path)
        await server.die()
        for start in range(MAX_TRIES + 1):
            server = await going(tmp_path).start()
            assert len(list(server.service.ongoing)) == (start < MAX_TRIES)
            await server.die()
        assert "3 starts of the server ended before it had another token" in caplog.text
        server = await going(tmp_path).start()
        assert list(server.service.ongoing) == []
        await server.die()

    run(work)


def test_one_that_is_refused_now_is_forgotten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        _, server = await begun(tmp_path, body={"never_heard_of": 1})
        await server.die()
        server = await going(tmp_path, is_strict_on_fields=True).start()
        assert list(server.service.ongoing) == []
        assert server.service.admission.num_active == 0
        await server.die()

    run(work)
    assert "cannot go on after the restart" in caplog.text


def test_time_goes_on_while_no_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        _, server = await begun(tmp_path, body={"timeout": 100})
        await server.die()
        now = [50.0]
        wall = time.time
        monkeypatch.setattr("time.time", lambda: wall() + now[0])
        server = await going(tmp_path).start()
        connection = server.open("GET", "/v1/requests/mine/stream")
        await read(connection, 5)
        (timeout,) = server.backend.timeouts
        assert timeout is not None
        assert 0 < timeout <= 50
        await server.die()
        now[0] = 200.0
        server = await going(tmp_path).start()
        data = await read_all(await server.open("GET", "/v1/requests/mine/stream").begun())
        assert b"deadline_exceeded" in data
        await server.die()
        assert list((await going(tmp_path).start()).service.ongoing) == []

    run(work)


def test_stop_strings_are_those_of_the_request(tmp_path: Path) -> None:
    """The server dies in the middle of what becomes one."""

    async def work() -> None:
        server = await going(tmp_path).start()
        server.backend.allow(5)
        connection = await server.complete(body={"stop": ["hij"]}).begun()
        assert connection.status == 200
        await until(lambda: server.backend.permits.locked())
        await server.die()
        server = await going(tmp_path).start()
        server.backend.allow(NUM_TOKENS)
        data = (await read_all(await server.open("GET", "/v1/requests/mine/stream").begun())).decode()
        assert "".join(re.findall(r'"text":"([^"]*)"', data)) == "efg"
        assert '"finish_reason":"stop"' in data
        assert server.backend.pasts == [5]
        await server.die()

    run(work)


def test_a_signal_ends_resuming_at_once_and_leaves_the_requests_to_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ktransformers.server")

    async def work() -> None:
        first, server = await begun(tmp_path)
        await server.die()
        reached = asyncio.Event()

        async def hang(*arguments: Any) -> None:
            reached.set()
            await asyncio.get_running_loop().create_future()

        config = ServerConfig(model_names=("m",), state_dir=tmp_path, port=0)
        with monkeypatch.context() as patch:
            patch.setattr(replay, "_replay", hang)
            serving = asyncio.create_task(OneModel(GoingBackend(), config, nullcontext).serve())
            await reached.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await serving
        assert "stopped (SIGTERM) after" in caplog.messages[-1]
        assert not any("ready after" in line for line in caplog.messages)
        server = await going(tmp_path).start()
        assert await read(server.open("GET", "/v1/requests/mine/stream"), 5) == first
        await server.die()

    run(work)


def test_suspended_ones_wait_for_the_next_server(tmp_path: Path) -> None:
    async def work() -> None:
        first, server = await begun(tmp_path)
        assert (await server.open("POST", "/v1/requests/mine/suspend").begun()).status == 200
        await drain([server.service], server.service.config.drain_seconds)
        assert server.service.admission.num_active == 0
        await server.die()
        server = await going(tmp_path).start()
        connection = server.open("GET", "/v1/requests/mine/stream")
        assert await read(connection, 5) == first  # and no abort behind it
        (one,) = server.service.ongoing
        assert one.state == "suspended"
        assert server.backend.suspended == {one.answer_id}
        await server.die()

    run(work)


def test_nobody_hears_that_it_is_suspended_before_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, append = threading.Event(), JournalFile.append

    def slow(self: JournalFile, payloads: list[bytes]) -> None:
        gate.wait()
        append(self, payloads)

    async def work() -> None:
        _, server = await begun(tmp_path)
        await server.journal.written()
        monkeypatch.setattr(JournalFile, "append", slow)
        for what in ("suspend", "resume"):
            gate.clear()
            asked = asyncio.create_task(server.open("POST", f"/v1/requests/mine/{what}").begun())
            for _ in range(100):
                await asyncio.sleep(0)
            assert not asked.done(), what
            gate.set()
            assert (await asked).status == 200
        await server.die()

    run(work)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_a_suspended_one_stays_where_it_was_over_any_number_of_restarts(tmp_path: Path, num_tokens: int) -> None:
    async def work() -> None:
        first, server = await begun(tmp_path, num_tokens)
        await server.open("POST", "/v1/requests/mine/suspend").begun()
        for _ in range(MAX_TRIES + 1):
            await server.die()
            server = await going(tmp_path).start()
            server.backend.allow(NUM_TOKENS)
            connection = server.open("GET", "/v1/requests/mine/stream")
            assert await read(connection, num_tokens) == first
            (one,) = server.service.ongoing
            assert one.state == "suspended"
            assert server.backend.suspended == {one.answer_id}
        resumed = await server.open("POST", "/v1/requests/mine/resume").begun()
        assert resumed.status == 200
        whole = first + await read_all(connection)
        assert "".join(re.findall(r'"text":"(.)"', whole.decode())) == "efghijklmnop"
        assert server.backend.pasts == [num_tokens]
        await server.die()

    run(work)


@pytest.mark.every(3)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("is_suspended", [False, True])
def test_the_backend_of_one_sequence_goes_on(tmp_path: Path, num_tokens: int, is_suspended: bool) -> None:
    async def work() -> None:
        server = await Server(tmp_path / "other", SingleGoing()).start()
        server.backend.allow()
        body = {"stop": ["q", "qq"], "n": 2, "temperature": 1.0}
        undisturbed = await read_all(server.complete(body=body))
        await server.die()
        server = await Server(tmp_path, SingleGoing()).start()
        await server.complete(body=body).begun()
        if num_tokens:
            server.backend.allow(num_tokens)
        await until(lambda: num_computed(server) == num_tokens)
        if is_suspended:
            await server.open("POST", "/v1/requests/mine/suspend").begun()
        server.backend.allow()
        await server.die()
        server = await Server(tmp_path, SingleGoing()).start()
        connection = server.open("GET", "/v1/requests/mine/stream")
        if is_suspended:
            server.backend.allow()
            await until(lambda: server.backend.stats().num_suspended == 2)
            assert server.backend.runner.calls == []
            assert (await server.open("POST", "/v1/requests/mine/resume").begun()).status == 200
        server.backend.allow()
        assert texts_of_choices(await read_all(connection)) == texts_of_choices(undisturbed)
        await server.die()

    run(work)


def test_a_backend_that_cannot_go_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="--backend_type balance_serve"):
        _journal(tmp_path, FakeBackend())
    assert _journal(None, FakeBackend()) is None
