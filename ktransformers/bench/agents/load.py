"""Sends waves of agents to a server and times the answers. Knows no shape by name, prints nothing.

Every request is a streamed POST /v1/completions on a connection and a thread of its own, as agents of different
programs are. `cache_prompt` asks llama-server to keep what it computed, `ignore_eos` lets answers have their full
length; other servers ignore what they do not know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ktransformers.bench.agents.shapes import AgentGroup, Prompt, Prompts, Wave
from ktransformers.bench.servers.client import Client, RequestError

__all__ = ["GroupTurn", "Load", "TimedAnswer", "model_name"]


@dataclass(slots=True)
class TimedAnswer:
    """An answer to one request with its times. Times are in seconds on the clock of time.perf_counter.

    token_times: when each event with a token came; several tokens in one event count once, and the event that ends an
    answer counts when there is no other. cached_len: tokens of the prompt that the server did not compute, None where
    it does not say. error: why there is no whole answer, or "".
    """

    sent_at: float
    token_times: list[float] = field(default_factory=list)
    prompt_len: int = 0
    cached_len: int | None = None
    answer_len: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """The seconds from sending the request to its first token."""
        return self.token_times[0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """The seconds between one token and the next."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class GroupTurn:
    """The answers of one group's turn, numbered from 1, and the seconds from its first request to its last answer."""

    group: AgentGroup
    number: int
    answers: Sequence[TimedAnswer]
    seconds: float


class _Progress:
    """How far the first group of a wave is, for groups that wait for that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._has_begun = self._is_over = False
        self._tokens = 0

    def begin(self) -> None:
        """The first group is being sent."""
        with self._changed:
            self._has_begun = True
            self._changed.notify_all()

    def add_token(self) -> None:
        """The first group has received another token."""
        with self._changed:
            self._tokens += 1
            self._changed.notify_all()

    def end(self) -> None:
        """The first group is over, which begins it if nothing else has."""
        with self._changed:
            self._has_begun = self._is_over = True
            self._changed.notify_all()

    def wait_for(self, group: AgentGroup) -> None:
        """Return when `group` is to be sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_begun)
            self._changed.wait_for(lambda: self._is_over or self._tokens >= group.after_tokens)
            if group.after_seconds:
                self._changed.wait_for(lambda: self._is_over, group.after_seconds)


class Load:
    """Sends waves to the server behind `client`, for its model called `model`."""

    def __init__(self, client: Client, model: str, prompts: Prompts) -> None:
        self._client, self._model, self._prompts = client, model, prompts

    def run(self, wave: Wave) -> list[GroupTurn]:
        """Send a wave; return its turns by group. Failed requests are answers with an error."""
        progress = _Progress()
        prompts = [[self._prompts.of(wave, group, turn + 1) for turn in range(group.turns)] for group in wave.groups]
        with ThreadPoolExecutor(len(wave.groups)) as threads:
            tasks = [
                threads.submit(self._run_group, group, turns, progress, number == 0)
                for number, (group, turns) in enumerate(zip(wave.groups, prompts, strict=True))
            ]
            return [turn for task in tasks for turn in task.result()]

    def _run_group(
        self, group: AgentGroup, prompts: Sequence[Sequence[Prompt]], progress: _Progress, is_first: bool
    ) -> list[GroupTurn]:
        watched = progress if is_first else None
        if is_first:
            progress.begin()
        else:
            progress.wait_for(group)
        turns = []
        try:
            with ThreadPoolExecutor(group.agents) as threads:
                for number, of_turn in enumerate(prompts, 1):
                    began = time.perf_counter()
                    answers = list(threads.map(lambda prompt: self._ask(prompt, group.answer, watched), of_turn))
                    turns.append(GroupTurn(group, number, answers, time.perf_counter() - began))
        finally:
            if is_first:
                progress.end()
        return turns

    def _ask(self, prompt: Prompt, answer_len: int, progress: _Progress | None) -> TimedAnswer:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": answer_len,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = TimedAnswer(time.perf_counter())
        try:
            self._read(body, answer, progress)
        except (RequestError, LookupError, TypeError, AttributeError) as error:  # all but the first: no such JSON
            answer.error = str(error) if isinstance(error, RequestError) else f"an event of the stream: {error!r}"
        return answer

    def _read(self, body: dict[str, Any], answer: TimedAnswer, progress: _Progress | None) -> None:
        usage: dict[str, Any] = {}
        ended_at = 0.0
        for event in self._client.events("/v1/completions", body):
            usage = event.get("usage") or usage
            choices = event.get("choices") or ()
            if any(map(_has_token, choices)):
                answer.token_times.append(time.perf_counter())
                if progress is not None:
                    progress.add_token()
            elif choices:
                ended_at = time.perf_counter()
        if not usage:
            raise RequestError("the stream carries no usage; the server must know stream_options.include_usage")
        answer.prompt_len, answer.answer_len = usage["prompt_tokens"], usage["completion_tokens"]
        if not answer.answer_len:
            raise RequestError("the answer has no tokens")
        if not answer.token_times:  # llama-server keeps back tokens that are no text, here all of them
            answer.token_times.append(ended_at)
        answer.cached_len = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether an event brings a token: some servers say why an answer ends in an event of its own, without text."""
    return bool(choice.get("text")) or not choice.get("finish_reason")


def model_name(client: Client) -> str:
    """Return the first model that the server names. Raises RequestError when it names none."""
    try:
        return str(client.json("GET", "/v1/models")["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise RequestError(f"the server names no model: {error!r}; pass --model_name") from error
