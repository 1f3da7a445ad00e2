"""Several API keys, each with what it may do: the file they come from, how they are counted, what clients see of it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ktransformers.core import TokenEvent
from ktransformers.errors import ConfigError, RateLimitError
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.keys import KeyLimits, KeyUse, read_api_keys
from tests.support.servers.fake_backend import FakeBackend

COMPLETION = "/v1/completions"
BODY: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 3}


class GatedBackend(FakeBackend):
    """Answers begin when the gate is open. asked: what it was asked for."""

    has_priorities = True

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.asked = asyncio.Event(), list[GenerationRequest]()

    @property
    def max_running(self) -> int:
        return 100

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.asked.append(request)
        await self.gate.wait()
        async for event in super().inference(request):
            yield event


Test = Callable[[httpx.AsyncClient, GatedBackend], Awaitable[None]]


def run(test: Test, client: tuple[str, int] = ("127.0.0.1", 4711), **config: Any) -> None:
    async def main() -> None:
        backend = GatedBackend()
        app = create_app(backend, ServerConfig(model_names=("demo",), **config))
        transport = httpx.ASGITransport(app, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            await test(http, backend)

    asyncio.run(main())


def limited(**limits: KeyLimits) -> dict[str, Any]:
    """Settings of a service whose keys are called as their limits are."""
    return {"api_keys": tuple(limits), "key_limits": limits}


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_file_says_what_keys_may_do(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team\nplain\n\n  abc name=alice rpm=60 concurrent=4 priority=-2\na,b rpm=1\nplain\n")
    assert read_api_keys(["x,y", "z"], file) == {
        "x": KeyLimits(),
        "y": KeyLimits(),
        "z": KeyLimits(),
        "plain": KeyLimits(),
        "abc": KeyLimits("alice", 60, 4, -2),
        "a,b": KeyLimits(rpm=1),
    }
    assert read_api_keys(["abc"], file)["abc"].name == "alice"
    assert "abc" not in repr(ServerConfig(model_names=("m",), api_keys=("abc",), key_limits={"abc": KeyLimits()}))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("secret other", "line 2: after the key come name=TEXT"),
        ("secret rps=1", "line 2: after the key come name=TEXT"),
        ("secret rpm=1 rpm=2", "line 2: after the key come name=TEXT"),
        ("secret rpm=0", "line 2: rpm must be a whole number from 1 to"),
        ("secret rpm=1.5", "line 2: rpm must be a whole number"),
        ("secret concurrent=-1", "line 2: concurrent must be a whole number from 1"),
        ("secret priority=x", "line 2: priority must be a whole number"),
        ("secret name=", "line 2: name must be 1 to 64"),
        ("secret name=é", "line 2: name must be 1 to 64"),
        ("secret rpm=1\nsecret rpm=2", "line 3: this key is there already"),
        ("secreté", "must consist of visible ASCII"),
    ],
)
def test_a_wrong_line_is_named_and_no_key_quoted(line: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        read_api_keys([], file)
    assert "secret" not in str(caught.value)


# --- counting --------------------------------------------------------------------------------------------------------


def test_no_sixty_seconds_see_more_requests_than_the_limit() -> None:
    now = 100.0
    use = KeyUse("k", KeyLimits(rpm=3), clock=lambda: now)
    for at in (100.0, 130.0, 150.0):
        now = at
        use.check(1)
        use.note()
    now = 155.0
    with pytest.raises(RateLimitError, match=r"3 requests per minute; try again in 5\.0 s") as caught:
        use.check(1)
    assert caught.value.retry_after == 5.0
    assert dict(use.headers())[b"x-ratelimit-remaining-requests"] == b"0"
    assert dict(use.headers())[b"x-ratelimit-reset-requests"] == b"55.000s"
    now = 160.0
    use.check(1)
    use.note()
    with pytest.raises(RateLimitError):
        use.check(1)
    now = 189.0
    with pytest.raises(RateLimitError):
        use.check(1)
    now = 500.0
    assert dict(use.headers())[b"x-ratelimit-remaining-requests"] == b"3"
    assert dict(use.headers())[b"x-ratelimit-reset-requests"] == b"0.000s"


@pytest.mark.parametrize(
    ("own", "asked", "gets"),
    [(None, 0, 0), (None, -7, -7), (5, 0, 5), (5, 9, 9), (5, -1, 5), (-5, 0, -5), (-5, 3, 3), (-5, -9, -5)],
)
def test_a_key_comes_no_earlier_than_it_may(own: int | None, asked: int, gets: int) -> None:
    assert KeyUse("k", KeyLimits(priority=own)).priority(asked) == gets


# --- what clients see ------------------------------------------------------------------------------------------------


def test_a_key_that_asks_too_often_is_told_when_to_come_back() -> None:
    async def test(client: httpx.AsyncClient, backend: GatedBackend) -> None:
        backend.gate.set()
        slow, fast = {"x-api-key": "slow"}, {"Authorization": "Bearer fast"}
        first = await client.post(COMPLETION, json=BODY, headers=slow)
        assert (first.status_code, first.headers["x-ratelimit-limit-requests"]) == (200, "2")
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        for _ in range(5):  # these ask for no answers
            assert (await client.get("/v1/models", headers=slow)).headers["x-ratelimit-remaining-requests"] == "1"
        assert (await client.post(COMPLETION, json=BODY, headers=slow)).status_code == 200
        refused = await client.post(COMPLETION, json=BODY, headers=slow)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        for _ in range(5):
            answer = await client.post(COMPLETION, json=BODY, headers=fast)
            assert answer.status_code == 200
            assert "x-ratelimit-limit-requests" not in answer.headers
        assert len(backend.asked) == 7

    run(test, **limited(slow=KeyLimits("s", rpm=2), fast=KeyLimits("f")))


def test_a_key_has_so_many_answers_at_once() -> None:
    async def test(client: httpx.AsyncClient, backend: GatedBackend) -> None:
        few = {"x-api-key": "few"}
        running = asyncio.create_task(client.post(COMPLETION, json=BODY | {"n": 2}, headers=few))
        while len(backend.asked) < 2:
            await asyncio.sleep(0)
        refused = await client.post(COMPLETION, json=BODY, headers=few)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        never = await client.post(COMPLETION, json=BODY | {"n": 3}, headers=few)
        assert never.status_code == 400
        assert "may have 2 answers at once, and the request asks for 3" in never.json()["error"]["message"]
        other = asyncio.create_task(client.post(COMPLETION, json=BODY, headers={"x-api-key": "other"}))
        while len(backend.asked) < 3:
            await asyncio.sleep(0)
        backend.gate.set()
        assert [(await task).status_code for task in (running, other)] == [200, 200]
        assert (await client.post(COMPLETION, json=BODY, headers=few)).status_code == 200  # the others have ended

    run(test, **limited(few=KeyLimits(concurrent=2), other=KeyLimits()))


def test_a_key_has_a_priority() -> None:
    async def test(client: httpx.AsyncClient, backend: GatedBackend) -> None:
        backend.gate.set()
        for asked in ({}, {"priority": -9}, {"priority": 9}):
            answer = await client.post(COMPLETION, json=BODY | asked, headers={"x-api-key": "late"})
            assert answer.status_code == 200
        assert [request.priority for request in backend.asked] == [4, 4, 9]

    run(test, **limited(late=KeyLimits(priority=4)))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "one")], 200),
        ([("Authorization", "bearer one")], 200),
        ([("Authorization", "Bearer none"), ("x-api-key", "one")], 200),  # what a client sends that has one of them
        ([("x-api-key", "none"), ("Authorization", "Bearer two")], 200),
        ([("x-api-key", "no")], 401),
        ([("x-api-key", "Bearer one")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "one"), ("x-api-key", "two")], 401),
        ([("Authorization", "Bearer one"), ("Authorization", "Bearer one")], 401),
        ([("Authorization", "one")], 401),
        ([("Authorization", "Basic one")], 401),
        ([], 401),
    ],
)
def test_where_a_key_may_stand(headers: list[tuple[str, str]], status: int) -> None:
    async def test(client: httpx.AsyncClient, backend: GatedBackend) -> None:
        assert (await client.get("/v1/models", headers=headers)).status_code == status

    run(test, api_keys=("one", "two"))


def test_the_log_names_keys_and_requests(caplog: pytest.LogCaptureFixture) -> None:
    async def test(client: httpx.AsyncClient, backend: GatedBackend) -> None:
        for key, sent in (("secret-1", "my-id.17"), ("secret-2", "two words"), ("secret-2", "x" * 200)):
            answer = await client.get("/v1/models", headers={"x-api-key": key, "x-request-id": sent})
            got = answer.headers["x-request-id"]
            assert (got == sent) == (sent == "my-id.17")
            name = "alice" if key == "secret-1" else "key 2"
            assert caplog.messages[-1].endswith(f" [{name}, {got}]")
        refused = await client.get("/v1/models", headers={"x-request-id": "again"})
        assert refused.headers["x-request-id"] == "again"
        assert caplog.messages[-1].endswith(" [again]")
        assert "secret" not in caplog.text

    with caplog.at_level(logging.INFO, "ktransformers.server"):
        run(test, api_keys=("secret-1", "secret-2"), key_limits={"secret-1": KeyLimits("alice")})


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("127.0.0.1", {"Host": "evil.example"}, 401),  # a page may have made its own name an address of this machine
        ("127.0.0.1", {"X-Forwarded-For": "203.0.113.9"}, 401),
        ("127.0.0.1", {"Via": "1.1 proxy"}, 401),
        ("0.0.0.0", {}, 401),
        ("192.0.2.1", {}, 401),
        ("0.0.0.0", {"x-api-key": "k"}, 200),
    ],
)
def test_metrics_need_no_key_on_loopback(host: str, headers: dict[str, str], status: int) -> None:
    async def test(client: httpx.AsyncClient, backend: GatedBackend) -> None:
        for path in ("/metrics", "/metrics/"):
            assert (await client.get(path, headers=headers)).status_code == status
        assert (await client.get("/version", headers={"Host": "localhost"})).status_code == 401

    run(test, api_keys=("k",), host=host)
