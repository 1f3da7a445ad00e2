"""Starting, guarding, draining and stopping: one real process per question."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from ktransformers.cli import server_main as main
from ktransformers.server import listening
from ktransformers.server.config import ServerConfig
from tests.support.servers.server_process import ServerProcess

ENDLESS = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1900, "ignore_eos": True, "stream": True}
SHORT = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 20, "temperature": 0}
FLAGS = ("--backend_type", "ktransformers", "--cache_lens", "2048")


CHAT = "/v1/chat/completions"


def ask(
    process: ServerProcess, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    return httpx.request(method, process.url + path, json=body, headers=headers, timeout=60)


def get_json(process: ServerProcess, method: str, path: str, *args: Any) -> tuple[int, Any]:
    response = ask(process, method, path, *args)
    return response.status_code, response.json()


class Stream:
    """A streamed answer whose first chunk has come; or that waits, and was let in."""

    def __init__(self, process: ServerProcess, body: Any, *, has_begun: bool = True):
        self._client = httpx.Client(timeout=60)
        self._context = self._client.stream("POST", process.url + CHAT, json=body)
        self._lines = self._context.__enter__().iter_lines()
        assert not has_begun or next(self._lines).startswith("data: ")

    def rest(self) -> str:
        """What comes until the end."""
        text = "\n".join(self._lines)
        self._context.__exit__(None, None, None)
        self._client.close()
        return text


def test_keys_guard_every_route_but_the_probes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfrom-file\n\n")
    with ServerProcess(*FLAGS, "--api_key", "one,two", "--api_key_file", str(file)) as process:
        for path in ("/health", "/ready"):
            assert get_json(process, "GET", path)[0] == 200
        guarded = (("GET", "/v1/models"), ("GET", "/version"), ("POST", CHAT), ("POST", "/v1/completions"),
                   ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/openapi.json"), ("GET", "/docs"),
                   ("GET", "/no/such/route"), ("GET", "/healthy/"))  # fmt: skip
        for method, path in guarded:
            for headers in (
                {},
                {"Authorization": "Bearer on"},
                {"Authorization": "one"},
                {"Authorization": "Basic one"},
            ):
                status, body = get_json(process, method, path, None, headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key"), (method, path)
        for key in ("one", "two", "from-file"):
            assert get_json(process, "GET", "/version", None, {"Authorization": f"Bearer {key}"})[0] == 200
        assert get_json(process, "POST", CHAT, SHORT, {"Authorization": "Bearer two"})[0] == 200
        assert process.terminate() == 0
        log = "".join(process.log)
        assert "from-file" not in log
        assert "17 + 25" not in log  # neither the question nor the answer
        assert re.search(r"\d{4}-\d\d-\d\d [\d:]{8} INFO \S+ 127\.0\.0\.1:\d+ POST /v1/chat/completions 200 in ", log)
        assert "GET /v1/models 401 in " in log
        assert "/health 200" not in log
        loading = [
            line for line in process.log if "loaded 25 %" in line or "loading demo" in line or "ready after" in line
        ]
        assert len(loading) == 3  # there is no terminal to draw a bar on
        assert re.search(r"stopped \(SIGTERM\) after .*: 1 answers finished, 0 cut off", process.log[-1])


@pytest.mark.exhaustive
def test_the_queue_is_limited_and_a_drain_lets_answers_finish() -> None:
    with ServerProcess(*FLAGS, "--max_queue", "1", "--drain_seconds", "60") as process:
        streams = [Stream(process, ENDLESS)]
        streams.append(Stream(process, {**SHORT, "stream": True}, has_begun=False))
        refused = ask(process, "POST", CHAT, SHORT)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        process.process.send_signal(signal.SIGTERM)
        process.wait_for("stopping: 2 requests may finish")
        status, body = get_json(process, "GET", "/ready")
        assert (status, body["error"]["code"]) == (503, "not_ready")
        status, body = get_json(process, "POST", CHAT, SHORT)
        assert (status, body["error"]["code"]) == (503, "not_ready")
        assert get_json(process, "GET", "/health")[0] == 200
        for stream in streams:
            text = stream.rest()
            assert text.rstrip().endswith("data: [DONE]")
            assert '"finish_reason":"abort"' not in text
        assert process.process.wait(60) == 0


@pytest.mark.exhaustive
def test_a_second_signal_ends_what_still_runs() -> None:
    with ServerProcess(*FLAGS, "--drain_seconds", "600") as process:
        running = Stream(process, {**ENDLESS, "max_tokens": 2000})
        process.process.send_signal(signal.SIGINT)
        process.wait_for("stopping: 1 requests may finish")
        process.process.send_signal(signal.SIGINT)
        process.wait_for("1 requests were cut off")
        process.wait_for(r"stopped \(SIGINT\) after .*: 0 answers finished, 1 cut off")
        assert '"finish_reason":"abort"' in running.rest()
        assert process.process.wait(60) == 0


@pytest.mark.exhaustive
def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    with ServerProcess(*FLAGS, "--ssl_keyfile", str(key), "--ssl_certfile", str(certificate)) as process:
        context = ssl.create_default_context(cafile=str(certificate))
        url = process.url.replace("http:", "https:") + CHAT
        answer = httpx.post(url, json=SHORT, verify=context, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "17 + 25 = 42."


@pytest.mark.exhaustive
def test_cors_is_off_unless_asked_for() -> None:
    origin = {"Origin": "http://page.example"}
    with ServerProcess(*FLAGS, "--cors_origins", "http://page.example", "--api_key", "k") as process:
        preflight = ask(process, "OPTIONS", CHAT, None, origin | {"Access-Control-Request-Method": "POST"})
        assert preflight.status_code == 200
        assert preflight.headers["Access-Control-Allow-Origin"] == "http://page.example"
        assert "Access-Control-Allow-Origin" not in ask(process, "GET", "/health", None, {"Origin": "http://x"}).headers
    with ServerProcess(*FLAGS) as process:
        assert "Access-Control-Allow-Origin" not in ask(process, "GET", "/health", None, origin).headers


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model_path", "/no/such/folder"), "--model_path /no/such/folder does not exist"),
        (("--backend_type", "other"), "--backend_type other is not one of"),
        (("--kv_disk_size_GB", "5"), "--kv_disk_size_GB bounds the files in --kv_disk_path"),
        (("--ssl_keyfile", __file__), "TLS needs both"),
        (("--ssl_keyfile", __file__, "--ssl_certfile", __file__), "cannot be used"),
        (("--api_key", "two words"), "an API key must not be empty"),
        (("--temperature", "-3"), "temperature must be at least 0"),
        (("--max_engine_restarts", "-1"), "--max_engine_restarts must be at least 0"),
        (("--engine_timeout", "-1"), "--engine_timeout must be a number of seconds"),
        (("--port", "70000"), "--port must be between"),
        (("--ping_seconds", "-1"), "--ping_seconds must be at least 0"),
        (("--host", "256.1.1.1"), "cannot listen on 256.1.1.1"),
        (("--tool_format", "xml"), "--tool_format 'xml' is not one of auto, none, harmony, "),
        (("--prot", "1"), "did you mean --port?"),
        (("--sched-strategy", "LIFO"), "invalid choice: 'LIFO'"),
        (("--gguf_path", __file__), "error: "),
    ],
)
def test_wrong_flags_are_one_message(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["--log_level", "error", *flags])
    except SystemExit as end:
        code = end.code
    assert code == (1 if message == "error: " else 2)  # a file that is no model fails; the others are wrong usage
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.exhaustive
def test_a_busy_port_shows_before_the_model_loads() -> None:
    with ServerProcess(*FLAGS) as first, ServerProcess("--port", str(first.port), wait=False) as second:
        second.wait_for(f"cannot listen on 127.0.0.1:{first.port}")
        assert second.process.wait(60) == 1


def test_tokenize_and_detokenize(server: ServerProcess) -> None:
    status, body = get_json(server, "POST", "/tokenize", {"prompt": "Hello 123", "return_token_strs": True})
    assert status == 200
    assert "".join(body["token_strs"]) == "Hello 123"
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 2048
    assert get_json(server, "POST", "/detokenize", {"tokens": body["tokens"]}) == (200, {"prompt": "Hello 123"})
    status, chat = get_json(server, "POST", "/tokenize", {"messages": SHORT["messages"]})
    completion = get_json(server, "POST", CHAT, SHORT)[1]
    assert chat["count"] == completion["usage"]["prompt_tokens"]
    more = {"enable_thinking": False, "messages": SHORT["messages"], "chat_template_kwargs": {"odd": 1}}
    status, counted = get_json(server, "POST", "/tokenize", SHORT | more)  # a whole chat
    assert counted["count"] == get_json(server, "POST", CHAT, SHORT | more)[1]["usage"]["prompt_tokens"]
    started = [*SHORT["messages"], {"role": "assistant", "content": "It", "prefix": True}]
    whole = get_json(server, "POST", "/tokenize", {"messages": started})[1]["tokens"]
    assert whole[: chat["count"]] == chat["tokens"]
    assert get_json(server, "POST", "/detokenize", {"tokens": whole})[1]["prompt"].endswith("It")
    for wrong in ({}, {"prompt": "a", "messages": SHORT["messages"]}, {"prompt": "a", "think": True}):
        assert get_json(server, "POST", "/tokenize", wrong)[0] == 400
    assert get_json(server, "POST", "/detokenize", {"tokens": [10**6]})[0] == 400
    for path, sent, named in (
        ("/tokenize", {"content": "a", "odd": 1, "temperature": 1}, "odd"),
        ("/tokenize", SHORT | more, "chat_template_kwargs.odd"),
        ("/detokenize", {"tokens": [1], "odd": 1}, "odd"),
        ("/v1/embeddings", {"input": "a", "odd": 1, "user": "me", "normalize": True}, "odd"),
    ):
        assert ask(server, "POST", path, sent).headers["x-ktransformers-ignored"] == named
    refused = {"/tokenize": {"prompt": "a", "with_pieces": True}, "/v1/embeddings": {"input": "a", "normalize": False}}
    for path, sent in refused.items():
        status, body = get_json(server, "POST", path, sent)
        assert (status, "this server does not support it; use" in body["error"]["message"]) == (400, True)


def test_the_finishing_chunk_carries_what_speed_scripts_read(server: ServerProcess) -> None:
    response = ask(server, "POST", CHAT, {**SHORT, "stream": True, "return_speed": True, "model": "demo"})
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    finishing = next(i for i, chunk in enumerate(chunks) if chunk["choices"][0]["finish_reason"])
    usage = chunks[finishing]["usage"]
    assert usage["prompt_tokens"] > 0
    assert usage["completion_tokens"] > 1
    assert usage["prefill_time"] > 0
    assert usage["decode_time"] > 0
    assert not any("usage" in chunk for chunk in chunks[:finishing] + chunks[finishing + 1 :])


def test_what_is_written_is_sent_at_once() -> None:
    """On a socket that waits for acknowledgements (Nagle), every token comes 40 ms late."""

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            taken.set_result(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    async def accept() -> int:
        listener = listening.bind(ServerConfig(port=0))
        async with await asyncio.get_running_loop().create_server(Accepted, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await taken

    loop = asyncio.new_event_loop()
    taken: asyncio.Future[int] = loop.create_future()
    try:
        assert loop.run_until_complete(asyncio.wait_for(accept(), 60)) == 1
    finally:
        loop.close()
