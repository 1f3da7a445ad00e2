"""Measures a running server over HTTP, the way users' `test_speed.py` do: `--concurrent N --prompt_lens 1024`.

Speaks the protocol of upstream's script: streamed chat completions with `return_speed`, usage in the finishing chunk.
Needs nothing but Python's standard library. Prompts have exactly the tokens that --prompt_lens says, chat template
included, and every request of every run has its own, so that only the template's first words are shared; with
`--conversation` the turns of one conversation are sent instead, which shows what is reused.

    TTFT        seconds from sending a request to its first text
    prefill     prompt tokens computed per second, by the server's own clock (prefill_time)
    decode      tokens per second of one stream after its first token (decode_time)
    total       completion tokens of all streams, per second from the first request to the last answer

The last line is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WORDS = (
    "river",
    "stone",
    "light",
    "paper",
    "window",
    "garden",
    "music",
    "winter",
    "letter",
    "market",
    "silver",
    "forest",
)
FILLERS = ("a", "is", "1", ".", "the", "x")
ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "sve")
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


@dataclass(slots=True)
class Answer:
    """What one request gave. Times in seconds."""

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


class Server:
    """One server, reached at `url`."""

    def __init__(self, url: str, api_key: str, timeout: float):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._is_tls, self._host, self._prefix = parts.scheme == "https", parts.netloc, parts.path.rstrip("/")
        self._prefix = self._prefix.removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._timeout = timeout

    def request(self, method: str, path: str, body: Any = None) -> tuple[http.client.HTTPConnection, Any]:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, timeout=self._timeout)
        data = None if body is None else json.dumps(body)
        connection.request(method, self._prefix + path, data, self._headers)
        return connection, connection.getresponse()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        connection, response = self.request(method, path, body)
        try:
            answer = json.loads(response.read() or b"{}")
            if response.status != 200:
                raise RuntimeError(f"{method} {path}: {response.status} {answer}")
            return answer
        finally:
            connection.close()

    def model(self) -> str:
        return str(self.json("GET", "/v1/models")["data"][0]["id"])

    def version(self) -> Any:
        """What the server says of itself; other makers' need not have the route."""
        try:
            return self.json("GET", "/version")
        except (RuntimeError, ValueError):
            return None

    def count(self, words: Sequence[str]) -> int | None:
        """Tokens of the prompt that a question of these words becomes, or None when the server does not tell."""
        try:
            return int(self.json("POST", "/tokenize", {"messages": question(words)})["count"])
        except (RuntimeError, LookupError, TypeError, ValueError):
            return None

    def chat(self, messages: list[dict[str, str]], model: str, max_tokens: int, temperature: float) -> Answer:
        body = {
            "messages": messages,
            "model": model,
            "temperature": temperature,
            "top_p": 1.0,
            "stream": True,
            "return_speed": True,
            "max_tokens": max_tokens,
        }
        answer, began = Answer(), time.perf_counter()
        try:
            connection, response = self.request("POST", "/v1/chat/completions", body)
            try:
                if response.status != 200:
                    answer.error = f"{response.status} {response.read(300).decode(errors='replace')}"
                else:
                    _read_stream(response, answer, began)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            answer.error = repr(error)
        return answer


def question(words: Sequence[str]) -> list[dict[str, str]]:
    """A conversation that begins, as upstream's script sends it."""
    return [{"role": "system", "content": ""}, {"role": "user", "content": " ".join(words)}]


def _read_stream(response: Any, answer: Answer, began: float) -> None:
    usage: dict[str, Any] = {}
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            answer.error = str(chunk["error"])
            return
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


def make_prompt(server: Server, length: int, seed: int) -> list[str]:
    """Random words whose prompt has `length` tokens. A server that has no /tokenize gets that many words.

    Raises RuntimeError when there is no such prompt.
    """
    words = random.Random(seed).choices(WORDS, k=length)
    count = server.count([])
    if count is None:
        print("this server has no usable /tokenize: a word counts as a token", file=sys.stderr)
        return words
    if count >= length:
        raise RuntimeError(f"a prompt of {length} tokens is not possible: the chat template alone takes {count}")
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
            raise RuntimeError(f"found no prompt of exactly {length} tokens; try another --prompt_lens")
        count = fitting[0]
        words.append(fitting[1])
    return words


def run_concurrent(
    server: Server, model: str, prompts: list[list[str]], args: argparse.Namespace
) -> tuple[list[Answer], float]:
    """All prompts at once; the answers and the seconds from first to last."""
    answers: list[Answer] = [Answer() for _ in prompts]

    def one(index: int) -> None:
        answers[index] = server.chat(question(prompts[index]), model, args.max_tokens, args.temperature)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers, time.perf_counter() - began


def run_conversation(server: Server, model: str, args: argparse.Namespace) -> list[Answer]:
    """The turns one after the other, each with all before it."""
    messages: list[dict[str, str]] = []
    answers = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answer = server.chat(messages, model, args.max_tokens, args.temperature)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
        if answer.error:
            break
    return answers


def machine() -> dict[str, Any]:
    """What this runs on; the server may run elsewhere."""
    facts: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "isa": []}
    facts["python"] = platform.python_version()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return facts  # not Linux
    flags = (lines.get("flags") or lines.get("Features") or "").split()
    return facts | {"cpu": lines.get("model name", facts["cpu"]), "isa": [name for name in ISA_FLAGS if name in flags]}


def show(title: str, answers: list[Answer], seconds: float) -> dict[str, Any]:
    """Print a table; returns its figures."""
    good = [answer for answer in answers if not answer.error]
    print(f"\n{title}")
    print(f"{'':>4} {'prompt':>7} {'cached':>7} {'tokens':>7} {'TTFT s':>8} {'prefill/s':>10} {'decode/s':>9}")
    for i, a in enumerate(answers):
        if a.error:
            print(f"{i:>4} failed: {a.error}")
        else:
            print(
                f"{i:>4} {a.prompt_len:>7} {a.cached_len:>7} {a.completion_len:>7} {a.ttft:>8.3f} "
                f"{a.prefill_rate:>10.1f} {a.decode_rate:>9.1f}"
            )
    figures = {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(a.prompt_len for a in good),
        "cached_tokens": sum(a.cached_len for a in good),
        "completion_tokens": sum(a.completion_len for a in good),
        "total_tokens_per_s": round(sum(a.completion_len for a in good) / seconds, 2) if seconds else 0.0,
        "ttft_median_s": round(statistics.median(a.ttft for a in good), 4) if good else None,
        "prefill_tokens_per_s_mean": round(statistics.mean(a.prefill_rate for a in good), 1) if good else None,
        "decode_tokens_per_s_mean": round(statistics.mean(a.decode_rate for a in good), 1) if good else None,
    }
    rate = figures["total_tokens_per_s"]
    print(f"     total {rate} tokens/s, {len(good)} of {len(answers)} requests in {seconds:.2f} s")
    return figures


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", help="the server; overrides --host and --port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=10002)
    parser.add_argument("--api_key", default="")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--concurrent", type=int, default=1, help="requests at once")
    parser.add_argument("--prompt_lens", type=int, nargs="+", default=[1024], help="tokens of the prompts")
    parser.add_argument("--max_tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.3)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--seed", type=int, help="of the prompts; default: another one for each run")
    parser.add_argument("--conversation", action="store_true", help="send the turns of one conversation instead")
    args = parser.parse_args([underscored(flag) for flag in (sys.argv[1:] if argv is None else argv)])
    if args.concurrent < 1 or args.max_tokens < 1 or min(args.prompt_lens) < 1:
        parser.error("--concurrent, --max_tokens and --prompt_lens must be at least 1")
    args.seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    return args


def underscored(flag: str) -> str:
    """--prompt-lens means --prompt_lens. Values keep their hyphens."""
    name, equals, value = flag.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if flag.startswith("--") else flag


def main(argv: list[str] | None = None) -> int:
    """Returns 1 when a request failed."""
    args = parse(argv)
    server = Server(args.url or f"http://{args.host}:{args.port}", args.api_key, args.timeout)
    try:
        model = args.model or server.model()
        version = server.version()
    except (OSError, http.client.HTTPException, RuntimeError, LookupError, TypeError, ValueError) as error:
        print(f"error: no usable answer from the server: {error!r}", file=sys.stderr)
        return 1
    here = machine()
    print(f"{here['cpu']}, {here['cores']} CPUs, {' '.join(here['isa'])}; {model} behind {version or 'a server'}")
    result: dict[str, Any] = {"machine": here, "model": model, "server": version, "seed": args.seed, "runs": []}
    if args.conversation:
        began = time.perf_counter()
        answers = run_conversation(server, model, args)
        result["runs"].append({"conversation": len(TURNS)} | show("conversation", answers, time.perf_counter() - began))
    for length in [] if args.conversation else args.prompt_lens:
        try:
            prompts = [make_prompt(server, length, args.seed + i) for i in range(args.concurrent)]
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        answers, seconds = run_concurrent(server, model, prompts, args)
        title = f"prompts of {length} tokens, {args.concurrent} at once"
        result["runs"].append({"prompt_len": length, "concurrent": args.concurrent} | show(title, answers, seconds))
    print(json.dumps(result))
    return 1 if any(run["failed"] for run in result["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
