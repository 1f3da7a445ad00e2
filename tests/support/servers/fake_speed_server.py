"""An HTTP server in this process that streams as ours does: every completion has the tokens it is asked for."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ktransformers.bench.servers.client import Client
from ktransformers.bench.servers.process import ServerProcess

TEMPLATE_LEN = 4
"""Tokens of a chat without words; each word is a token more."""


class Handler(BaseHTTPRequestHandler):
    """Keeps the bodies of completions, and counts tokens."""

    bodies: list[dict[str, Any]]
    failing: bool

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        tokens = sum(body["max_tokens"] for body in self.bodies)
        text = {
            "/v1/models": '{"data": [{"id": "demo"}]}',
            "/version": '{"version": "1"}',
            "/metrics": f"# HELP x\nvllm:generation_tokens_total {tokens}\nktransformers:experts_touched 4\n"
            'vllm:num_requests_running{model="demo"} 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n'
            "ktransformers:engine_restarts_total 2\nvllm:num_preemptions_total 0\n",
        }
        self.wfile.write(text[self.path].encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"count": prompt_len(body["messages"])}).encode())
            return
        self.bodies.append(body)
        self.send_response(500 if self.failing else 200)
        self.end_headers()
        if self.failing:
            self.wfile.write(b"no more memory")
            return
        try:
            for i in range(body["max_tokens"]):
                self._event(body, is_last=i == body["max_tokens"] - 1)
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):  # the client has left
            return

    def _event(self, body: dict[str, Any], is_last: bool) -> None:
        choice: dict[str, Any] = {"token_ids": [1], "delta": {"content": "a "}, "finish_reason": None}
        event: dict[str, Any] = {"choices": [choice]}
        if is_last and "messages" in body:
            choice["finish_reason"] = "length"
            usage = {"prompt_tokens": prompt_len(body["messages"]), "completion_tokens": body["max_tokens"]}
            event["usage"] = usage | {"prefill_time": 0.5, "decode_time": 2.0}
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def prompt_len(messages: list[dict[str, str]]) -> int:
    return TEMPLATE_LEN + sum(len(message["content"].split()) for message in messages)


@contextmanager
def http_server(
    *, failing: bool = False, handler: type[Handler] = Handler
) -> Iterator[tuple[Client, list[dict[str, Any]]]]:
    """A client of a running server, and the bodies of the completions that it was asked for."""
    kind = type("Kept", (handler,), {"bodies": [], "failing": failing})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Client(f"http://127.0.0.1:{server.server_port}/v1"), kind.bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class FakeServerProcess(ServerProcess):
    """In the place of a server that takes seconds to start: the flags it would get, and a client of the fake one."""

    flags: Sequence[str] = ()

    def __init__(self, client: Client) -> None:
        self.client, self.pid, self.is_closed = client, os.getpid(), False

    def started(self, flags: Sequence[str]) -> FakeServerProcess:
        self.flags = flags
        return self

    def close(self) -> None:
        self.is_closed = True
