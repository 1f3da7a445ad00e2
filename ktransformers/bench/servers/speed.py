"""Measures a running server over HTTP, the way users' `test_speed.py` do.

Speaks the protocol of upstream's script: streamed chat completions with `return_speed`, usage in the finishing chunk.
Prompts have exactly the tokens that are asked for, chat template included, and every request of every run has its own,
so that only the template's first words are shared; or the turns of one conversation are sent instead, which shows what
is reused.

    TTFT        seconds from sending a request to its first text
    prefill     prompt tokens computed per second, by the server's own clock (prefill_time)
    decode      tokens per second of one stream after its first token (decode_time)
    total       completion tokens of all streams, per second from the first request to the last answer
"""

from __future__ import annotations

import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ktransformers.bench.common.report import Column, FigureTable, Record
from ktransformers.bench.servers.client import Client, RequestError
from ktransformers.system.cores import usable_cores
from ktransformers.system.cpu_names import cpu_name

__all__ = ["SpeedWork", "bench_speed"]

WORDS = ("river", "stone", "light", "paper", "window", "garden", "music", "winter", "letter", "market", "silver")
FILLERS = ("a", "is", "1", ".", "the", "x")
TURNS = (
    "What is 17 + 25?",
    "Count from 1 to 10.",
    "What is the capital of France?",
    "What is 9 - 4?",
    "Say hello.",
    "Count from 3 to 8.",
    "What is 12 + 30?",
    "What is the capital of Italy?",
)
_COLUMNS = (
    Column("number", 4, title=" "),
    Column("prompt_len", 7, title="prompt"),
    Column("cached_len", 7, title="cached"),
    Column("completion_len", 7, title="tokens"),
    Column("ttft", 8, ".3f", "TTFT s"),
    Column("prefill_rate", 10, ".1f", "prefill/s"),
    Column("decode_rate", 9, ".1f", "decode/s"),
)

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class SpeedWork:
    """The requests to send: `concurrent` at once for each of prompt_lens, or the turns of one conversation.

    model: a name that the server knows; None: the first that it names. seed: of the prompts.
    """

    client: Client
    prompt_lens: Sequence[int]
    concurrent: int
    max_tokens: int
    temperature: float
    seed: int
    model: str | None = None
    is_conversation: bool = False


@dataclass(slots=True)
class SpeedAnswer:
    """The figures of the answer to one request. Times in seconds."""

    prompt_len: int = 0
    cached_len: int = 0
    completion_len: int = 0
    ttft: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    text: str = ""
    error: str = ""

    @property
    def prefill_rate(self) -> float:
        return (self.prompt_len - self.cached_len) / self.prefill_time if self.prefill_time else 0.0

    @property
    def decode_rate(self) -> float:
        return max(self.completion_len - 1, 0) / self.decode_time if self.decode_time else 0.0


class _Server:
    """The routes that this needs."""

    def __init__(self, work: SpeedWork) -> None:
        """Find the model to ask for. Raises RequestError when the server names no model."""
        self._client, self._work = work.client, work
        try:
            self.model = work.model or str(self._client.json("GET", "/v1/models")["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise RequestError(f"the server names no model: {error!r}; pass --model_name") from error

    def version(self) -> Any:
        """Return the server's own version; other makers' servers need not have the route."""
        try:
            return self._client.json("GET", "/version")
        except RequestError:
            return None

    def count(self, words: Sequence[str]) -> int | None:
        """Tokens of the prompt that a question of these words becomes, or None when the server does not report it."""
        try:
            return int(self._client.json("POST", "/tokenize", {"messages": _question(words)})["count"])
        except (RequestError, LookupError, TypeError, ValueError):
            return None

    def chat(self, messages: Messages) -> SpeedAnswer:
        """Ask and time the answer; a failure is the answer's error."""
        body = {
            "messages": messages,
            "model": self.model,
            "temperature": self._work.temperature,
            "top_p": 1.0,
            "stream": True,
            "return_speed": True,
            "max_tokens": self._work.max_tokens,
        }
        answer, began = SpeedAnswer(), time.perf_counter()
        try:
            self._read(body, answer, began)
        except (RequestError, LookupError, TypeError) as error:
            answer.error = str(error) or repr(error)
        return answer

    def _read(self, body: Any, answer: SpeedAnswer, began: float) -> None:
        usage: dict[str, Any] = {}
        for chunk in self._client.events("/v1/chat/completions", body):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
                if text and not answer.ttft:
                    answer.ttft = time.perf_counter() - began
                answer.text += text
            if chunk["choices"] and chunk["choices"][0]["finish_reason"]:
                break  # as upstream's script does: the usage has to be here
        answer.prompt_len, answer.completion_len = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        answer.cached_len = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        answer.prefill_time, answer.decode_time = usage.get("prefill_time", 0.0), usage.get("decode_time", 0.0)
        if not answer.prompt_len:
            answer.error = "the finishing chunk carries no usage"


def _question(words: Sequence[str]) -> Messages:
    """A conversation that begins, as upstream's script sends it."""
    return [{"role": "system", "content": ""}, {"role": "user", "content": " ".join(words)}]


def _prompt(server: _Server, length: int, seed: int) -> list[str]:
    """Random words whose prompt has `length` tokens. A server that has no /tokenize gets that many words.

    Raises RequestError when there is no such prompt.
    """
    words = random.Random(seed).choices(WORDS, k=length)
    count = server.count([])
    if count is None:
        print("this server has no usable /tokenize: a word counts as a token", file=sys.stderr)
        return words
    if count >= length:
        raise RequestError(f"a prompt of {length} tokens is not possible: the chat template alone takes {count}")
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        found = server.count(words[:middle]) or 0
        low, high, count = (middle, high, found) if found <= length else (low, middle - 1, count)
    words = words[:low]
    while count < length:  # what a whole word is too long for
        sizes = ((server.count([*words, filler]) or 0, filler) for filler in FILLERS)
        fitting = next(((size, filler) for size, filler in sizes if count < size <= length), None)
        if fitting is None:
            raise RequestError(f"found no prompt of exactly {length} tokens; try another --prompt_lens")
        count = fitting[0]
        words.append(fitting[1])
    return words


def _run_concurrent(server: _Server, prompts: Sequence[Sequence[str]]) -> list[SpeedAnswer]:
    """All prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda words: server.chat(_question(words)), prompts))


def _run_conversation(server: _Server) -> list[SpeedAnswer]:
    """The turns one after the other, each with all before it."""
    messages: Messages = []
    answers = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answers.append(server.chat(messages))
        messages.append({"role": "assistant", "content": answers[-1].text})
        if answers[-1].error:
            break
    return answers


def _shown(title: str, answers: list[SpeedAnswer], seconds: float) -> Record:
    """Print a table; returns its figures."""
    good = [answer for answer in answers if not answer.error]
    print(f"\n{title}")
    table = FigureTable(_COLUMNS)
    for number, one in enumerate(answers):
        if one.error:
            print(f"{number:>4} failed: {one.error}")
        else:
            row = {"number": number, **asdict(one), "prefill_rate": one.prefill_rate, "decode_rate": one.decode_rate}
            table.add(row)
    total = sum(one.completion_len for one in good)
    rate = round(total / seconds, 2) if seconds else 0.0
    print(f"     total {rate} tokens/s, {len(good)} of {len(answers)} requests in {seconds:.2f} s")
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(one.prompt_len for one in good),
        "cached_tokens": sum(one.cached_len for one in good),
        "completion_tokens": total,
        "total_tokens_per_s": rate,
        "ttft_median_s": round(statistics.median(one.ttft for one in good), 4) if good else None,
        "prefill_tokens_per_s_mean": round(statistics.mean(one.prefill_rate for one in good), 1) if good else None,
        "decode_tokens_per_s_mean": round(statistics.mean(one.decode_rate for one in good), 1) if good else None,
    }


def bench_speed(work: SpeedWork) -> Record:
    """Measure a running server; print a table per length of prompts, a line per request.

    The record's is_failed: one failed.
    Raises RequestError when the server gives no usable answer, or cannot be asked for prompts of such a length.
    """
    server = _Server(work)
    machine, version = (
        {"cpu": cpu_name(), "cores": usable_cores(), "python": platform.python_version()},
        server.version(),
    )
    print(f"{machine['cpu']}, {machine['cores']} cores; {server.model} behind {version or 'a server'}")
    runs: list[Record] = []
    if work.is_conversation:
        began = time.perf_counter()
        answers = _run_conversation(server)
        runs.append({"conversation": len(TURNS)} | _shown("conversation", answers, time.perf_counter() - began))
    for length in () if work.is_conversation else work.prompt_lens:
        prompts = [_prompt(server, length, work.seed + i) for i in range(work.concurrent)]
        began = time.perf_counter()
        answers = _run_concurrent(server, prompts)
        title, seconds = f"prompts of {length} tokens, {work.concurrent} at once", time.perf_counter() - began
        runs.append({"prompt_len": length, "concurrent": work.concurrent} | _shown(title, answers, seconds))
    return {
        "machine": machine,
        "model": server.model,
        "server": version,
        "seed": work.seed,
        "runs": runs,
        "is_failed": any(run["failed"] for run in runs),
    }
