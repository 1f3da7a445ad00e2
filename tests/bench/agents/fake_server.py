"""A server of completions that counts as servers do: a token for each id of a prompt, or for each word of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from tests.support.servers.fake_speed_server import Handler

PATIENCE = 60.0
"""Seconds that an answer waits for a request that a test says must come; a deadline, not an expectation."""


class AgentsHandler(Handler):
    """Streams max_tokens tokens, then says why the answer ends in an event of its own, then the usage.

    refused_len: prompts of this many tokens are refused. Half of a prompt's tokens are said to be cached.
    """

    refused_len = -1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        is_refused = self.failing or length_of(body["prompt"]) == self.refused_len
        self.send_response(400 if is_refused else 200)
        self.end_headers()
        if is_refused:
            self.wfile.write(b"the prompt is too long")
            return
        for number in range(body["max_tokens"]):
            self.before_token(body, number)
            self.send({"choices": [{"text": "", "finish_reason": None}]})
        self.send({"choices": [{"text": "", "finish_reason": "length"}]})
        self.send({"choices": [], "usage": self.usage(body)})
        self.wfile.write(b"data: [DONE]\n\n")

    def before_token(self, body: dict[str, Any], number: int) -> None:
        """Called before a token is sent."""

    def usage(self, body: dict[str, Any]) -> dict[str, Any] | None:
        length = length_of(body["prompt"])
        details = {"cached_tokens": length // 2}
        return {"prompt_tokens": length, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}

    def send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


class WaitingHandler(AgentsHandler):
    """An answer of `held_len` tokens stops before its token `held_at` until a request for `other_len` tokens comes.

    sent: tokens of the held answer so far. sent_before: how many they were when the other request came.
    """

    held_len, held_at, other_len = 0, 0, 0
    other_came: threading.Event
    sent: list[int]
    sent_before: list[int]

    def before_token(self, body: dict[str, Any], number: int) -> None:
        if body["max_tokens"] == self.other_len and number == 0:
            self.sent_before.append(self.sent[0])
            self.other_came.set()
        if body["max_tokens"] == self.held_len:
            self.sent[0] = number
            if number == self.held_at:
                assert self.other_came.wait(PATIENCE), "the other request did not come"


def waiting_handler(held_len: int, held_at: int, other_len: int) -> type[WaitingHandler]:
    given = {"held_len": held_len, "held_at": held_at, "other_len": other_len}
    state = {"other_came": threading.Event(), "sent": [0], "sent_before": []}
    return type("Waiting", (WaitingHandler,), {**given, **state})


def length_of(prompt: str | Sequence[int]) -> int:
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)
