"""Clients that misbehave: whatever they send or do not send, others are served and nothing is a 5xx."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import httpx
import pytest

from tests.support.servers.server_process import ServerProcess

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 20, "temperature": 0}
ENDLESS = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1900, "ignore_eos": True, "stream": True}


def connect(server: ServerProcess) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def post(body: bytes | Any, *headers: str, path: str = CHAT, length: int | None = None) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    if not any("Transfer-Encoding" in header for header in headers):
        head.append(f"Content-Length: {len(data) if length is None else length}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of one response that says its length."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += connection.recv(65536)
    return int(head.split()[1]), body


def assert_serves(server: ServerProcess) -> None:
    answer = httpx.post(server.url + CHAT, json=QUESTION, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "17 + 25 = 42."


@pytest.mark.parametrize(
    "body",
    [b"{", b"", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000,
     b'{"messages": ' + b"9" * 5000 + b"}", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1e400}'],
    ids=["open", "empty", "array", "null", "string", "not-utf8", "nan", "deep", "long-number", "infinite"],
)  # fmt: skip
def test_bodies_that_are_not_requests(server: ServerProcess, body: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(post(body))
        status, answer = read_response(connection)
    assert status == 400
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"
    assert_serves(server)


def test_lone_surrogates_are_taken_and_named_back_safely(server: ServerProcess) -> None:
    for body in (
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"a"}],"model":"\\ud800"}',
        b'{"messages":[{"role":"user","content":"a"}],"\\udfff":1}',
        b'{"messages":[{"role":"\\udfff","content":"a"}]}',
    ):
        with connect(server) as connection:
            connection.sendall(post(body))
            status, answer = read_response(connection)
        # A model of any name is answered, other fields have no effect, what the model reads is made text; of roles the
        # template knows some.
        assert status == (400 if b'role":"\\udfff' in body else 200)
        assert ("error" in json.loads(answer)) == (status == 400)


def test_a_malformed_head_is_a_400(server: ServerProcess) -> None:
    negative = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n".encode()
    for head in (b"GARBAGE\r\n\r\n", b"GET / HTTX/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", negative):
        with connect(server) as connection:
            connection.sendall(head)
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    with connect(server) as connection:  # a head without end
        try:
            connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 20))
            assert connection.recv(65536).startswith(b"HTTP/1.1 4")
        except ConnectionError:
            pass  # closed before all of it was sent: as good
    assert_serves(server)


def test_compressed_bodies_are_refused_with_the_reason(server: ServerProcess) -> None:
    packed = gzip.compress(json.dumps(QUESTION).encode())
    for body, coding, wanted in ((packed, "GZip", 415), (json.dumps(QUESTION).encode(), "identity", 200)):
        with connect(server) as connection:
            connection.sendall(post(body, f"Content-Encoding: {coding}"))
            status, answer = read_response(connection)
        assert status == wanted
        assert (b"the body is sent as gzip: send it uncompressed" in answer) == (wanted == 415)


def test_bodies_over_the_limit(server: ServerProcess) -> None:
    with connect(server) as connection:  # announced
        connection.sendall(post(b"", length=40 << 20))
        status, answer = read_response(connection)
    assert status == 413
    assert json.loads(answer)["error"]["code"] == "request_too_large"
    with connect(server) as connection:  # found out on the way
        connection.sendall(post(b"", "Transfer-Encoding: chunked"))
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        status = 0
        try:
            for _ in range(40):
                connection.sendall(piece)
        except ConnectionError:
            pass  # the server answered and closed while we were sending
        try:
            status, answer = read_response(connection)
        except ConnectionError:
            status = 413  # the reset overtook the answer
        assert status == 413
    assert_serves(server)


def test_chunked_and_pipelined_requests(server: ServerProcess) -> None:
    data = json.dumps(QUESTION).encode()
    chunks = b"".join(b"%x\r\n%c\r\n" % (1, byte) for byte in data) + b"0\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(post(b"", "Transfer-Encoding: chunked") + chunks)
        assert read_response(connection)[0] == 200
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" + post(QUESTION, "Connection: close"))
        text = b""
        while piece := connection.recv(65536):
            text += piece
    assert text.count(b"HTTP/1.1 200") == 2
    assert text.index(b'"version"') < text.index(b"17 + 25 = 42.")


def test_a_slow_sender_holds_up_nobody(server: ServerProcess) -> None:
    request = post(QUESTION)
    with connect(server) as slow, connect(server) as headless, connect(server):  # the last one never says a word
        headless.sendall(b"POST /v1/chat")
        slow.sendall(request[:-10])
        assert_serves(server)
        slow.sendall(request[-10:-5])
        assert_serves(server)
        slow.sendall(request[-5:])
        assert read_response(slow)[0] == 200


def test_a_client_that_does_not_read_holds_up_nobody(server: ServerProcess) -> None:
    with connect(server) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(post({**ENDLESS, "logprobs": True, "top_logprobs": 20, "max_tokens": 300}))
        assert_serves(server)  # after the 300 tokens, which the server computed into its buffers


def test_leaving_in_mid_stream_stops_the_engine(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(post(ENDLESS))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert b"content" in connection.recv(65536)
    line = server.wait_for("cut off")
    assert int(line.split(" tokens in ")[0].rsplit(" ", 1)[1]) < 1900


def read_to_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_who_sends_no_more_gets_the_answer(path: str, is_streamed: bool, server: ServerProcess) -> None:
    """As `nc -N` and `socat` do, and programs that end what they send so."""
    question: dict[str, Any] = {"model": "demo", "stream": is_streamed, "max_tokens": 20, "temperature": 0}
    if path == "/v1/completions":
        question["prompt"] = "One two"
    elif path == "/v1/responses":
        question["input"] = "What is 17 + 25?"
        question["max_output_tokens"] = question.pop("max_tokens")
    else:
        question["messages"] = QUESTION["messages"]
    if path == "/api/chat":
        del question["max_tokens"]
    with connect(server) as connection:
        connection.sendall(post(question, path=path))
        connection.shutdown(socket.SHUT_WR)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    ends = {CHAT: b"[DONE]", "/v1/completions": b"[DONE]", "/v1/messages": b"message_stop", "/api/chat": b'"done":true'}
    if is_streamed:
        assert ends.get(path, b"response.completed") in body.replace(b": ", b":").replace(
            b'"done": true', b'"done":true'
        )
    else:
        assert isinstance(json.loads(body), dict)


def test_who_sends_no_more_in_mid_stream_gets_the_rest(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(post(ENDLESS | {"max_tokens": 150}))
        assert b"content" in connection.recv(65536) + connection.recv(65536)
        connection.shutdown(socket.SHUT_WR)
        assert b"[DONE]" in read_to_end(connection)


def test_who_sends_no_more_gets_all_answers_to_pipelined_requests(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(post(QUESTION) * 3)
        connection.shutdown(socket.SHUT_WR)
        assert read_to_end(connection).count(b"42.") == 3


def test_who_sends_no_more_and_leaves_then_stops_the_engine(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(post({**ENDLESS, "stream": False}))
        connection.shutdown(socket.SHUT_WR)
    server.wait_for(r"chat/completions 499 .* cut off")
    assert_serves(server)


CHUNKED = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
WRONG_CHUNKS = [b"zz\r\nabc\r\n", b'5\r\n{"mes\r\nXYZ\r\n', b"f" * 30 + b"\r\n", b"-5\r\n", b"3\r\nabcdef\r\n",
                b"2\r\n{}\r\n0\r\nbad trailer\r\n\r\n"]  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/nothing", b"/v1/models"])
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("data", WRONG_CHUNKS)
def test_a_wrong_chunk_is_one_line_in_the_log(data: bytes, is_split: bool, path: bytes, server: ServerProcess) -> None:
    """Also where the request is refused before its body has come."""
    with connect(server) as connection:
        connection.sendall(CHUNKED % path + (b"" if is_split else data))
        answer = b""
        if is_split:
            if path != b"/v1/chat/completions":  # the others are refused by their heads
                answer = connection.recv(65536)
            connection.sendall(data)
        answer += read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 4")
    assert len(server.wait_for(f"POST {path.decode()} 4")) < 400
    assert_serves(server)
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("method", ["HEAD", "GET", "PUT"])
def test_what_follows_an_answer_and_is_no_http_makes_no_traceback(method: str, server: ServerProcess) -> None:
    data = f"{method} /v1/models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode()
    for piece in (data, data.replace(b"zz", b"0\r\n\r\n\x16\x03\x01\r\n\r\n")):
        with connect(server) as connection:
            connection.sendall(piece)
            assert read_to_end(connection).startswith(b"HTTP/1.1 ")
    assert_serves(server)
    assert "Traceback" not in "".join(server.log)


def refused(server: ServerProcess) -> dict[str, float]:
    text = httpx.get(server.url + "/metrics").text
    return {
        line.split('"')[1]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("ktransformers:requests_refused_total")
    }


def test_refused_requests_are_counted_by_status(server: ServerProcess) -> None:
    before = refused(server)
    with connect(server) as connection:
        connection.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
        assert b" 400 " in read_to_end(connection)
    httpx.post(server.url + CHAT, json={"messages": 5})
    httpx.post(server.url + CHAT, json=QUESTION | {"model": "other"}).raise_for_status()
    httpx.get(server.url + "/nothing")
    httpx.get(server.url + "/v1/models", headers={"Host": "evil.example"})
    httpx.get(server.url + "/v1/models", headers={"Origin": "http://evil.example"})
    httpx.get(server.url + "/ready").raise_for_status()
    now = refused(server)
    grown = {status: count - before.get(status, 0) for status, count in now.items() if count != before.get(status)}
    assert grown == {"400": 2, "403": 1, "404": 1, "421": 1}


def test_a_large_head_is_refused_with_the_reason(server: ServerProcess) -> None:
    before = refused(server).get("431", 0.0)
    with connect(server) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"a" * (65 << 10))
        status, body = read_response(connection)
    assert (status, body) == (
        431,
        b"the request's line and headers are longer than the 64 KiB that this server takes\n",
    )
    server.wait_for(r" 431: the request's head is too large")
    assert refused(server)["431"] == before + 1
    assert_serves(server)


def test_leaving_before_the_answer_stops_the_engine(server: ServerProcess) -> None:
    with connect(server) as connection:
        connection.sendall(post({**ENDLESS, "stream": False}))
    server.wait_for(r"chat/completions 499 .* cut off")
    assert_serves(server)


def test_leaving_the_queue_leaves_the_others_in_order(server: ServerProcess) -> None:
    with connect(server) as first, connect(server) as second, connect(server) as third:
        first.sendall(post({**ENDLESS, "max_tokens": 150, "stream": False}))
        second.sendall(post(ENDLESS))
        assert second.recv(65536)  # it waits: its head is sent before its turn comes
        third.sendall(post(QUESTION))
        second.close()
        assert read_response(first)[0] == 200
        assert b"42." in read_response(third)[1]


def test_unknown_routes_and_methods_have_the_error_shape(server: ServerProcess) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)):
        answer = httpx.request(method, server.url + path, timeout=60)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
