"""Clients that break the rules: raw sockets against a real process, and against a server with short patience.

What the process must show: an answer of 400 to 499 or a closed connection, and the next request answered as ever.
Timeouts are tested in this process, on a made-up backend that never stops, so that nobody waits for real ones; sockets
block until the server acts, and their own timeout is a deadline for a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ktransformers.core import GenerationStats, Progress, SamplingParams, TokenEvent
from ktransformers.errors import ConfigError
from ktransformers.server import listening
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import BackendInterfaceBase, BackendStats, GenerationRequest, ModelInfo
from ktransformers.server.config import ServerConfig
from ktransformers.server.connections import connection_limit
from ktransformers.tokenizer import load_tokenizer
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.servers.server_process import ServerProcess

DEADLINE = 60.0
CHAT = "/v1/chat/completions"
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 20, "temperature": 0,
}  # fmt: skip
ANSWER = "17 + 25 = 42."
ENDLESS = QUESTION | {"max_tokens": 1900, "ignore_eos": True, "stream": True}


def connect(port: int, receive_buffer: int = 0) -> socket.socket:
    client = socket.socket()
    client.settimeout(DEADLINE)
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        client.connect(("127.0.0.1", port))
    except OSError:
        client.close()
        raise
    return client


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", "")).encode("latin-1")


def post(path: str, body: Any, *headers: str, content_type: str = "application/json") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, f"Content-Type: {content_type}", f"Content-Length: {len(data)}", *headers) + data


def read_answer(client: socket.socket) -> tuple[int, Any]:
    """Status and body, which is JSON where the server says so."""
    response = http.client.HTTPResponse(client)
    response.begin()
    data = response.read()
    is_json = response.getheader("content-type", "").startswith("application/json")
    return response.status, json.loads(data) if is_json else data


def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the server closes. A reset is an end too: the server does not read what it refused."""
    received = b""
    try:
        while data := client.recv(1 << 16):
            received += data
    except ConnectionError:
        pass
    return received


def exchange(port: int, data: bytes) -> tuple[int, Any]:
    with connect(port) as client:
        client.sendall(data)
        return read_answer(client)


def check_alive(server: ServerProcess) -> None:
    status, answer = exchange(server.port, post(CHAT, QUESTION))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, ANSWER)


def read_chunk(client: socket.socket) -> dict[str, Any]:
    """The first event of a stream."""
    received = b""
    while b"\n\n" not in received.partition(b"data: ")[2]:
        data = client.recv(1 << 16)
        assert data, received
        received += data
    chunk: dict[str, Any] = json.loads(received.partition(b"data: ")[2].partition(b"\n")[0])
    return chunk


NO_HTTP = {
    "bytes": b"\x00\x01\x02 garbage\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "version": b"GET /health HTTP/two\r\nHost: localhost\r\n\r\n",
    "raw byte in the path": b"GET /v1/\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    "space in a header's name": b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad name: b\r\n\r\n",
    "two lengths": head("POST", CHAT, "Content-Length: 3", "Content-Length: 4") + b"abcd",
    "negative length": head("POST", CHAT, "Content-Length: -3") + b"abcd",
    "length of 25 digits": head("POST", CHAT, f"Content-Length: {10**25}"),
    "other encoding": head("POST", CHAT, "Transfer-Encoding: gzip") + b"abcd",
}
LARGE_HEADS = {
    "endless header": b"GET /health HTTP/1.1\r\nX: " + b"a" * 200_000,
    "endless headers": b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: a\r\n" % i for i in range(20_000)),
}


@pytest.mark.parametrize("name", NO_HTTP | LARGE_HEADS)
def test_what_is_no_http_gets_an_error_and_is_cut_off(name: str, server: ServerProcess) -> None:
    data, status = (LARGE_HEADS[name], b"431") if name in LARGE_HEADS else (NO_HTTP[name], b"400")
    with connect(server.port) as client:
        with contextlib.suppress(ConnectionError):  # it may be refused before all of it was sent
            client.sendall(data)
        received = read_to_end(client)
    assert received.startswith(b"HTTP/1.1 %b " % status) or not received
    assert exchange(server.port, head("GET", "/health"))[0] == 200


WRONG_BODIES = {
    "deep lists in a field": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "max_tokens beyond integers": b'{"max_tokens": 1e30, "messages": [{"role": "user", "content": "x"}]}',
    "deep arguments of a tool call": json.dumps(
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}]}
    ).encode(),
}


@pytest.mark.parametrize("body", WRONG_BODIES.values(), ids=WRONG_BODIES)
def test_wrong_bodies_are_the_clients_fault(body: bytes, server: ServerProcess) -> None:
    status, answer = exchange(server.port, post(CHAT, body))
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]


def test_deep_parameters_of_a_tool(server: ServerProcess) -> None:
    parameters = b'{"a": ' * 900 + b"1" + b"}" * 900
    body = (
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
    )
    status, answer = exchange(server.port, post(CHAT, body + b'{"name": "f", "parameters": ' + parameters + b"}}]}"))
    assert status in (200, 400), answer  # how deep Python may recurse depends on its version


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ";"]
)
def test_other_content_types_are_refused(content_type: str, server: ServerProcess) -> None:
    status, answer = exchange(server.port, post(CHAT, QUESTION, content_type=content_type))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "Content-Type: application/json" in answer["error"]["message"]


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_a_body_in_chunks_of_one_byte(server: ServerProcess) -> None:
    body = json.dumps({**QUESTION, "user": "日本語"}, ensure_ascii=False).encode()
    start = head("POST", CHAT, "Content-Type: application/json", "Transfer-Encoding: chunked")
    status, answer = exchange(server.port, start + chunked(body, 1))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, ANSWER)
    assert exchange(server.port, start + b"zz\r\nno size\r\n0\r\n\r\n")[0] == 400


def test_a_request_that_trickles_in(server: ServerProcess) -> None:
    with connect(server.port) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post(CHAT, QUESTION):
            client.sendall(bytes([byte]))
        status, answer = read_answer(client)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, ANSWER)


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    texts = ["one", "two and three", "four, five and six"]
    requests = [post(CHAT, QUESTION), *(post("/tokenize", {"prompt": text}) for text in texts), post(CHAT, b"{")]
    with connect(server.port) as client:
        client.sendall(b"".join(requests))
        stream = client.makefile("rb")
        answers = [read_framed(stream) for _ in requests]
    assert [status for status, _ in answers] == [200, 200, 200, 200, 400]
    assert answers[0][1]["choices"][0]["message"]["content"] == ANSWER
    alone = [exchange(server.port, post("/tokenize", {"prompt": text}))[1] for text in texts]
    assert [body for _, body in answers[1:4]] == alone


def read_framed(stream: Any) -> tuple[int, Any]:
    """One answer of several on a connection; http.client would read ahead."""
    status, length = int(stream.readline().split()[1]), 0
    while line := stream.readline().strip().lower():
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return status, json.loads(stream.read(length))


def test_old_and_odd_requests(server: ServerProcess) -> None:
    assert exchange(server.port, b"GET /health HTTP/1.0\r\n\r\n") == (200, {"status": "ok"})
    for data, wanted in (
        (head("DELETE", "/v1/models"), 405),
        (head("OPTIONS", "*"), 404),
        (head("CONNECT", "example.com:443"), 404),
        (head("GET", "http://example.com/v1/models"), 404),
        (head("GET", "/v1/models/%ff%00%0d%0a"), 404),
        (head("GET", "/v1/models/..%2f..%2fetc%2fpasswd"), 404),
    ):
        status, answer = exchange(server.port, data)
        assert (status, answer["error"]["type"]) == (wanted, "invalid_request_error")


def test_unfinished_requests_keep_nobody_else_waiting(server: ServerProcess) -> None:
    starts = (b"", b"POST /v1/ch", head("POST", CHAT, "Content-Length: 10"), post(CHAT, QUESTION)[:-5])
    waiting = [connect(server.port) for _ in range(40)]
    for index, client in enumerate(waiting):
        client.sendall(starts[index % len(starts)])
    check_alive(server)
    for client in waiting:
        client.close()
    check_alive(server)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_ends_its_answer(how: str, server: ServerProcess) -> None:
    with connect(server.port) as client:
        client.sendall(post(CHAT, ENDLESS))
        request_id = read_chunk(client)["id"]
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        line = server.wait_for(rf"{request_id}: .* cut off")
    assert int(line.split(" tokens in ")[0].rsplit(" ", 1)[1]) < ENDLESS["max_tokens"]
    check_alive(server)


class EndlessBackend(BackendInterfaceBase):
    """Answers with long events as fast as they are taken, until the generator is closed, which sets `closed`."""

    name = "endless"

    def __init__(self) -> None:
        self.closed = threading.Event()

    async def start(self, progress: Progress | None = None) -> None:
        """Nothing to load."""

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def model(self) -> ModelInfo:
        tokenizer = load_tokenizer(DEMO_CHECKPOINT, None)
        return ModelInfo(tokenizer, 1 << 30, 1 << 20, (), SamplingParams(), None, "made up")

    @property
    def max_running(self) -> int:
        return 4

    def stats(self) -> BackendStats:
        return BackendStats(0, 0)

    def check(self, request: GenerationRequest) -> None:
        """Takes everything."""

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        stats = GenerationStats(prompt_len=len(request.prompt_ids))
        try:
            while True:
                stats.completion_len += 1
                yield TokenEvent(0, "x" * 1000, stats)
                await asyncio.sleep(0)
        finally:
            self.closed.set()

    def end(self, request_id: str) -> None:
        """Nobody asks for it."""

    async def close(self) -> None:
        """Nothing to free."""


@contextlib.contextmanager
def impatient_server(backend: BackendInterfaceBase, **settings: Any) -> Iterator[int]:
    """A server in a thread; its port."""
    config = ServerConfig(port=0, model_names=("endless",), **settings)
    listener = listening.bind(config)
    listener.listen()  # now, so that whoever connects before the thread runs is kept waiting instead of refused
    server = listening.Server(listening.uvicorn_config(create_app(backend, config), config))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(DEADLINE)
        listener.close()
    assert not thread.is_alive()


def test_a_client_that_does_not_read_is_cut_off() -> None:
    backend = EndlessBackend()
    with impatient_server(backend, send_timeout=0.2) as port, connect(port, receive_buffer=4096) as client:
        client.sendall(post(CHAT, {**QUESTION, "stream": True}))
        assert backend.closed.wait(DEADLINE)
        received = read_to_end(client)  # what was on its way
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"[DONE]" not in received


@pytest.mark.parametrize("is_soon", [True, False])
def test_a_client_elsewhere_that_sends_no_more(is_soon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it reads on is a guess where the kernel does not know: soon after the request it does, later it has left.

    Who reads on, and then leaves after all, is noticed by what it is sent.
    """
    monkeypatch.setattr(listening, "reads_still", lambda connection: None)
    monkeypatch.setattr(listening, "_HALF_CLOSE_SECONDS", DEADLINE if is_soon else 0.0)
    backend = EndlessBackend()
    with impatient_server(backend) as port, connect(port) as client:
        client.sendall(post(CHAT, {**QUESTION, "stream": True}))
        client.shutdown(socket.SHUT_WR)
        if is_soon:
            received = 0
            while received < 10 << 20:  # far more than is buffered anywhere on the way
                received += len(client.recv(1 << 16))
            assert not backend.closed.is_set()
            client.close()
        assert backend.closed.wait(DEADLINE)


def test_idle_connections_outlive_those_of_proxies() -> None:
    config = ServerConfig(port=0, model_names=("endless",))
    made = listening.uvicorn_config(create_app(EndlessBackend(), config), config)
    assert made.timeout_keep_alive == 75


def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEADER_TIMEOUT", 0.2)
    with impatient_server(EndlessBackend()) as port:
        for start in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "):
            with connect(port) as client:
                client.sendall(start)
                assert read_to_end(client) == b""


def test_a_later_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEADER_TIMEOUT", 0.2)
    health = head("GET", "/health")
    with impatient_server(EndlessBackend()) as port:
        with connect(port) as client:
            client.sendall(health + b"GET /hea")
            assert read_to_end(client).count(b"HTTP/1.1 ") == 1
        with connect(port) as client:
            client.sendall(health)
            assert read_framed(client.makefile("rb"))[0] == 200
            client.sendall(b"GET /hea")
            assert read_to_end(client) == b""
        with connect(port) as client:  # the clock stops when the head has come
            for _ in range(3):
                client.sendall(health[:9])
                client.sendall(health[9:])
                assert read_framed(client.makefile("rb"))[0] == 200


def test_the_rest_of_an_answered_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEADER_TIMEOUT", 0.2)
    with impatient_server(EndlessBackend(), api_keys=("key",)) as port:
        for path, wanted in ((CHAT, b"HTTP/1.1 401 "), ("/ready", b"HTTP/1.1 405 ")):
            with connect(port) as client:
                client.sendall(head("POST", path, "Content-Length: 1000") + b"{")
                assert read_to_end(client).startswith(wanted)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with impatient_server(EndlessBackend(), body_timeout=0.2) as port:
        for part in (b"", b'{"messages": ['):
            with connect(port) as client:
                client.sendall(head("POST", CHAT, "Content-Type: application/json", "Content-Length: 1000") + part)
                status, answer = read_answer(client)
                assert (status, answer["error"]["code"]) == (408, "deadline_exceeded")
                assert read_to_end(client) == b""


def test_a_length_beside_an_encoding_is_refused_with_the_reason(server: ServerProcess) -> None:
    """RFC 9112, 6.3: such a request may be read in two ways."""
    body = json.dumps(QUESTION).encode()
    for length in (len(body), 0, 10_000):
        start = head(
            "POST", CHAT, "Content-Type: application/json", f"Content-Length: {length}", "Transfer-Encoding: chunked"
        )
        with connect(server.port) as client:
            client.sendall(start + chunked(body, 100))
            status, answer = read_answer(client)
            assert status == 400
            assert "not both" in answer["error"]["message"]
            assert read_to_end(client) == b""
    check_alive(server)


def test_idle_connections_make_room_for_new_ones(caplog: pytest.LogCaptureFixture) -> None:
    health = head("GET", "/health")
    with impatient_server(EndlessBackend(), max_connections=8) as port, contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connect(port)) for _ in range(8)]
        used = silent[0]
        used.sendall(health)
        assert read_framed(used.makefile("rb"))[0] == 200  # the second is now idle for longest
        for _ in range(100):
            assert exchange(port, health)[0] == 200
        assert read_to_end(silent[1]) == b""
        assert len([line for line in caplog.messages if "connections are open" in line]) == 1
        assert len(caplog.messages) < 10


def test_connections_in_use_are_kept_and_new_ones_refused() -> None:
    with impatient_server(EndlessBackend(), max_connections=3) as port, contextlib.ExitStack() as opened:
        streams = [opened.enter_context(connect(port)) for _ in range(3)]
        for stream in streams:
            stream.sendall(post(CHAT, {**QUESTION, "stream": True}))
            assert read_chunk(stream)["object"] == "chat.completion.chunk"
        assert exchange(port, head("GET", "/health"))[0] == 503
        assert all(stream.recv(1 << 16) for stream in streams)
        streams[0].close()
        while exchange(port, head("GET", "/health"))[0] != 200:
            pass


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Flags of a server with TLS."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    paths = {"ssl_keyfile": folder / "key.pem", "ssl_certfile": folder / "cert.pem"}
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-keyout", str(paths["ssl_keyfile"]), "-out", str(paths["ssl_certfile"])]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def over_tls(client: socket.socket, certificate: dict[str, Path]) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(certificate["ssl_certfile"]))
    return context.wrap_socket(client, server_hostname="localhost")


def test_handshakes_count_as_connections(certificate: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with (
        impatient_server(EndlessBackend(), max_connections=4, **certificate) as port,
        contextlib.ExitStack() as opened,
    ):
        silent = [opened.enter_context(connect(port)) for _ in range(4)]
        for stream in [over_tls(connect(port), certificate) for _ in range(3)]:
            opened.enter_context(stream)
            stream.sendall(post(CHAT, {**QUESTION, "stream": True}))
            assert read_chunk(stream)["object"] == "chat.completion.chunk"
        assert [read_to_end(client) for client in silent[:3]] == [b""] * 3  # they had been idle for longest
        with over_tls(silent[3], certificate) as last:
            last.sendall(post(CHAT, {**QUESTION, "stream": True}))
            assert read_chunk(last)["object"] == "chat.completion.chunk"
            with connect(port) as refused:
                assert read_to_end(refused) == b""
    assert len([line for line in caplog.messages if "connections are open" in line]) == 1


@pytest.mark.exhaustive
def test_a_handshake_that_does_not_come_is_not_waited_for(
    certificate: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "HEADER_TIMEOUT", 0.2)
    with impatient_server(EndlessBackend(), max_connections=4, **certificate) as port:
        for start in (b"", b"\x16\x03\x01\x02\x00", b"GET /health HTTP/1.1\r\n\r\n"):
            for _ in range(5):  # more than there is room for: they leave it again
                with connect(port) as client:
                    client.sendall(start)
                    read_to_end(client)
        with over_tls(connect(port), certificate) as client:
            assert read_to_end(client) == b""  # a head is waited for no longer than without TLS


def test_descriptors_are_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    room = 1024 - len(os.listdir("/proc/self/fd"))  # other tests of this process may have some
    assert room - 200 < connection_limit(None) < room - 32
    assert connection_limit(5) == 5
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    with pytest.raises(ConfigError, match=r"may open 100 files.* raise `ulimit -n`"):
        connection_limit(None)


def test_a_body_in_chunks_is_counted() -> None:
    with impatient_server(EndlessBackend(), max_body=1000) as port:
        start = head("POST", CHAT, "Content-Type: application/json", "Transfer-Encoding: chunked")
        status, answer = exchange(port, start + chunked(b" " * 1001, 100))
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        status, answer = exchange(port, start + chunked(b" " * 999, 100))
        assert status == 400
