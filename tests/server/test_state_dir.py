"""A server that is killed, with all its processes, forgets no kept stream: real processes, every dialect with ids."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.server_process import ServerProcess

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me of the sea."}], "stream": True, "seed": 7}
TOOL = {"type": "object", "properties": {"city": {"type": "string", "minLength": 60}}, "required": ["city"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 150}}, "required": ["a"]}
LONG = 160

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("chat/completions", CHAT | {"max_tokens": LONG, "ignore_eos": True, "temperature": 1.0}),
    "choices": (
        "chat/completions",
        CHAT | {"max_tokens": 60, "n": 3, "logprobs": True, "top_logprobs": 2, "ignore_eos": True, "temperature": 1.3},
    ),
    "calls": (
        "chat/completions",
        CHAT
        | {"max_tokens": LONG, "tools": [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]}
        | {"tool_choice": "required"},
    ),
    "structured": (
        "chat/completions",
        CHAT
        | {"max_tokens": LONG, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
    "texts": (
        "completions",
        {"prompt": ["One", "Two"], "max_tokens": 80, "stream": True, "seed": 3, "ignore_eos": True, "echo": True},
    ),
    "response": (
        "responses",
        {"input": "Tell me of the wind.", "stream": True, "max_output_tokens": LONG, "temperature": 0},
    ),
    "message": ("messages", {"messages": CHAT["messages"], "stream": True, "max_tokens": LONG, "temperature": 0}),
    "call": (
        "messages",
        {"messages": CHAT["messages"], "stream": True, "max_tokens": LONG, "temperature": 0}
        | {"tool_choice": {"type": "any"}}
        | {"tools": [{"name": "weather", "input_schema": TOOL}]},
    ),
}
FOLLOWED = {"input": [{"role": "user", "content": "Tell me of the sun."}], "max_output_tokens": 8, "temperature": 0}
FIRST = 12  # events that a client has read when the server is killed


class Client:
    """Reads one stream until it has some events, or to its end; keeps what it got."""

    def __init__(self, name: str, **more: Any):
        self.name, self.data, self._more = name, b"", more

    @property
    def last_seen(self) -> int:
        return max((int(found) for found in re.findall(rb"(?m)^id: (\d+)$", self.whole)), default=0)

    @property
    def whole(self) -> bytes:
        """Events that have come to their end."""
        return self.data[: self.data.rfind(b"\n\n") + 2]

    def read(self, chunks: Iterator[bytes], num_events: int | None) -> None:
        for chunk in chunks:
            self.data += chunk
            if num_events is not None and self.last_seen >= num_events:
                return

    def ask(self, url: str, num_events: int | None = FIRST) -> None:
        path, body = ASKED[self.name]
        headers = {"x-kt-keep": "600", "x-request-id": self.name}
        with httpx.stream("POST", f"{url}/v1/{path}", json=body | self._more, headers=headers, timeout=120) as response:
            assert response.status_code == 200, response.read()
            self.read(response.iter_bytes(), num_events)

    def attach(self, url: str, num_events: int | None = None) -> None:
        self.data = self.whole
        headers = {"last-event-id": str(self.last_seen)}
        with httpx.stream("GET", f"{url}/v1/requests/{self.name}/stream", headers=headers, timeout=120) as response:
            assert response.status_code == 200, response.read()
            self.read(response.iter_bytes(), num_events)


def follower(url: str) -> Client:
    """Of a response that follows another one, and names an item of it."""
    response = httpx.post(f"{url}/v1/responses", json=FOLLOWED, timeout=120).json()
    items = httpx.get(f"{url}/v1/responses/{response['id']}/input_items").json()["data"]
    asked = [{"role": "user", "content": "And of this?"}, {"type": "item_reference", "id": items[0]["id"]}]
    return Client("response", previous_response_id=response["id"], input=asked)


def at_once(works: list[threading.Thread]) -> None:
    for work in works:
        work.start()
    for work in works:
        work.join()


def kill(process: ServerProcess) -> None:
    """SIGKILL to the API process and to all that it has started."""
    pid = process.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in (pid, *map(int, children)):
        with contextlib.suppress(ProcessLookupError):  # they follow their parent
            os.kill(one, signal.SIGKILL)
    process.process.wait()


def plain(name: str, data: bytes) -> list[bytes]:
    """Without ids that are drawn, and without times. Answers side by side come in any order."""
    if name in ("choices", "texts"):
        events = re.sub(rb"(?m)^id: \d+\n", b"", data)
        events = re.sub(rb',"usage":[^\n]*', b"}", events)  # with the end of whichever ends last
        return sorted(_plain(events).split(b"\n\n"))
    return [_plain(data)]


def unprinted(data: bytes) -> bytes:
    """Without what tells the backend."""
    return re.sub(rb'"system_fingerprint":"\w+"', b'"system_fingerprint":""', data)


def _plain(data: bytes) -> bytes:
    data = re.sub(rb'"(created|created_at|completed_at)":\d+', rb'"\1":0', data)
    return re.sub(rb"(?<=[-_])[0-9a-f]{24,32}(?=[\"_-])", b"ID", data)


@pytest.mark.exhaustive
def test_streams_go_on_after_all_processes_are_killed_twice(tmp_path: Path) -> None:
    flags = ("--state_dir", str(tmp_path / "state"), "--no_prefix_cache")
    with ServerProcess(*flags) as process:
        clients = [follower(process.url) if name == "response" else Client(name) for name in ASKED]
        at_once([threading.Thread(target=client.ask, args=(process.url,)) for client in clients])
        kill(process)
    assert all(client.last_seen >= FIRST for client in clients)
    seen = {client.name: client.whole for client in clients}
    with ServerProcess(*flags) as process:
        process_log = "".join(process.log)
        assert f"{len(ASKED)} requests go on where they were before the restart, 0 do not" in process_log
        clients[0].attach(process.url, clients[0].last_seen + 5)
        kill(process)
    with ServerProcess(*flags) as process:
        at_once([threading.Thread(target=client.attach, args=(process.url,)) for client in clients])
        requests = httpx.get(f"{process.url}/v1/requests").json()["data"]
        (response,) = (one["answer_id"] for one in requests if one["id"] == "response")
        known = httpx.get(f"{process.url}/v1/responses/{response}/input_items?order=asc").json()["data"]
        assert [one["content"][0]["text"] for one in known[::2]] == ["Tell me of the sun.", "And of this?"]
        next_turn = {"input": "Go on.", "previous_response_id": response, "max_output_tokens": 1}
        assert httpx.post(f"{process.url}/v1/responses", json=next_turn, timeout=120).status_code == 200
        alone = [follower(process.url) if name == "response" else Client(name) for name in ASKED]
        for client in clients:
            again = Client(client.name)
            again.attach(process.url)
            assert again.data == client.data  # from the first event on, and as it was before both restarts
            assert again.data.startswith(seen[client.name])
            ended = httpx.delete(f"{process.url}/v1/requests/{client.name}")
            assert ended.status_code == 200
        for client, undisturbed in zip(clients, alone, strict=True):
            undisturbed.ask(process.url, None)
            assert plain(client.name, client.data) == plain(client.name, undisturbed.data), client.name
        assert process.terminate() == 0
    with (tmp_path / "state" / "journal").open("rb") as journal:
        assert b"Tell me of the sea" not in journal.read()  # three letters come by chance


@pytest.mark.exhaustive
def test_a_suspended_request_waits_through_kills_of_either_backend(tmp_path: Path) -> None:
    state = ("--state_dir", str(tmp_path / "state"), "--no_prefix_cache")
    tiers = ("--cpu_memory_size_GB", "0.1", "--kv_disk_path", str(tmp_path / "pages"))
    client = Client("plain")
    with ServerProcess(*state[:2], *tiers) as process:
        client.ask(process.url)
        assert httpx.post(f"{process.url}/v1/requests/plain/suspend").status_code == 200
        kill(process)
    for flags in ((*state, "--backend_type", "ktransformers"), (*state[:2], *tiers)):
        with ServerProcess(*flags) as process:
            again = Client("plain")
            again.attach(process.url, FIRST)
            told, before = (unprinted(one.whole).split(b"\n\n")[:FIRST] for one in (again, client))
            assert told == before
            (one,) = httpx.get(f"{process.url}/v1/requests").json()["data"]
            assert one["state"] == "suspended"
            status = httpx.get(f"{process.url}/v1/status").json()
            assert (status["queue"]["running"], status["queue"]["suspended"], status["kv"]["used_tokens"]) == (0, 1, 0)
            if "ktransformers" in flags:
                kill(process)
                continue
            assert httpx.post(f"{process.url}/v1/requests/plain/resume").status_code == 200
            client.attach(process.url)
            alone = Client("plain")
            alone.ask(process.url, None)
            assert plain("plain", unprinted(client.data)) == plain("plain", unprinted(alone.data))
