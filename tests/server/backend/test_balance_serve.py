"""balance_serve as a whole: real processes, the bundled model, one sequence alone as oracle."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.model.opened import describe_model, open_model
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.server.backend.interfaces.balance_serve import _model_info
from ktransformers.server.balance.messages import EngineFacts
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.engines.sequential import Session
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.server_process import ServerProcess

FLAGS = ("--backend_type", "balance_serve", "--gguf_path", str(DEMO_GGUF), "--model_name", "demo")
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
NUM_REQUESTS = 64


@pytest.fixture(scope="module")
def balanced() -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS, "--cache_lens", "8192", "--max_batch_size", "8", "--no-spare_engine") as process:
        yield process


def child_pids(process: ServerProcess, name: str) -> list[int]:
    """Children of the server of this name."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat, called = (entry / "stat").read_text(), (entry / "comm").read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if called == name and int(stat.rpartition(")")[2].split()[1]) == process.process.pid:
            found.append(int(entry.name))
    return found


def metrics(process: ServerProcess) -> dict[str, float]:
    text = httpx.get(f"{process.url}/metrics", timeout=60).text
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def wait_until(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)  # between two looks; what is waited for is the condition


def test_answers_are_those_of_the_single_engine(balanced: ServerProcess, llm: LLM) -> None:
    with openai.OpenAI(base_url=f"{balanced.url}/v1", api_key="none", max_retries=0) as client:
        (expected,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=20, logprobs=2))
        assert expected.logprobs is not None
        asked: dict[str, Any] = {"messages": QUESTION, "logprobs": True, "top_logprobs": 2}
        answer = client.chat.completions.create(model="demo", temperature=0, max_tokens=20, **asked)
        assert answer.choices[0].message.content == expected.text
        assert answer.choices[0].logprobs is not None
        got = [entry.logprob for entry in answer.choices[0].logprobs.content or []]
        assert got == [entry.logprob for entry in expected.logprobs][: len(got)]
        text = "The capital of France"
        scored = client.completions.create(model="demo", prompt=text, echo=True, logprobs=1, max_tokens=0)
        (wanted,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
        assert wanted.prompt_logprobs is not None
        assert scored.choices[0].logprobs is not None
        of_prompt = [None if entry is None else entry.logprob for entry in wanted.prompt_logprobs]
        assert scored.choices[0].logprobs.token_logprobs == of_prompt


def test_what_the_plan_has_on_gpus_is_told() -> None:
    described = describe_model(open_model(EngineConfig(gguf_path=DEMO_GGUF)))
    limits = SchedulerConfig(num_pages=2, page_size=4, vocab_size=9, max_model_len=8, chunk_size=4, max_batch_size=1)
    card = _model_info(described, EngineConfig(), EngineFacts(scheduler=limits, gpu_bytes=3 << 30)).card
    assert (card.gpu_bytes, card.digest) == (3 << 30, described.card.digest)


def test_prefix_hits_show_in_usage_and_metrics(balanced: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "A question that is asked twice. " * 20}], "max_tokens": 5}
    before = metrics(balanced)
    first, second, salted = (
        httpx.post(f"{balanced.url}/v1/chat/completions", json=body | extra, timeout=60).json()
        for extra in ({}, {}, {"cache_salt": "other"})
    )
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second, salted)]
    prompt_len = first["usage"]["prompt_tokens"]
    assert cached == [0, (prompt_len - 1) // 64 * 64, 0]
    assert first["choices"] == second["choices"] == salted["choices"]
    after = metrics(balanced)
    assert after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == cached[1]
    assert after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"] == 3 * prompt_len


def test_metrics_have_the_names_that_dashboards_read(balanced: ServerProcess) -> None:
    before = metrics(balanced)
    answer = httpx.post(
        f"{balanced.url}/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 20}, timeout=60
    )
    after = metrics(balanced)
    usage = answer.json()["usage"]
    for name, grown in (
        ("vllm:prompt_tokens_total", usage["prompt_tokens"]),
        ("vllm:generation_tokens_total", usage["completion_tokens"]),
        ("vllm:time_to_first_token_seconds_count", 1),
        ("vllm:inter_token_latency_seconds_count", usage["completion_tokens"] - 1),
        ("vllm:e2e_request_latency_seconds_count", 1),
    ):
        assert after[name] - before.get(name, 0) == grown, name
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert after[name] == 0
    assert after["vllm:num_preemptions_total"] >= 0
    assert after["ktransformers:engine_restarts_total"] == 0
    assert after["ktransformers:expert_rows_total"] > before["ktransformers:expert_rows_total"]
    assert 1 <= after["ktransformers:experts_touched"] <= 64


def test_status_has_the_figures_of_the_engine(balanced: ServerProcess) -> None:
    body = {"prompt": "Count", "max_tokens": 100, "ignore_eos": True}
    assert httpx.post(f"{balanced.url}/v1/completions", json=body, timeout=60).status_code == 200
    status = httpx.get(f"{balanced.url}/v1/status", timeout=60).json()
    assert status["requests"][0]["completion_tokens"] == 100
    assert status["kv"]["total_tokens"] > 0
    assert status["prefix"]["queries"] > 0
    assert status["memory"]["gbps"] > 0
    layers = status["experts"]["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2, 3]  # 61 is prime to 4: each has had its turn
    assert {len(layer["counts"]) for layer in layers} == {16}
    assert all(sum(layer["counts"]) >= 4 for layer in layers)


def test_embeddings_are_those_of_the_single_engine(balanced: ServerProcess, client: openai.OpenAI) -> None:
    """Beside others in their steps, with and without what is cached of them."""
    texts = [f"{number} and " * 3 * number for number in range(1, 30)]
    expected = [one.embedding for one in client.embeddings.create(model="demo", input=texts).data]
    with openai.OpenAI(base_url=f"{balanced.url}/v1", api_key="none", max_retries=0) as other:
        for _ in range(2):
            got = [one.embedding for one in other.embeddings.create(model="demo", input=texts).data]
            assert got == expected


def numbered(lines: Iterator[str], most: int) -> list[tuple[int, str]]:
    """(id, text) of the first events of a kept stream, [DONE] included."""
    found, number = list[tuple[int, str]](), 0
    for line in lines:
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            found.append((number, line[6:] if line == "data: [DONE]" else json.loads(line[6:])["choices"][0]["text"]))
            if len(found) == most:
                break
    return found


def test_a_stream_is_left_suspended_and_taken_up_again(balanced: ServerProcess) -> None:
    asked = {"prompt": [5, 6, 7], "max_tokens": 600, "ignore_eos": True, "temperature": 1, "seed": 3, "stream": True}
    kept, mine = {"x-kt-keep": "60", "x-request-id": "left"}, f"{balanced.url}/v1/requests/left"
    with httpx.Client(timeout=60) as client:
        with client.stream("POST", f"{balanced.url}/v1/completions", json=asked, headers=kept) as response:
            events = numbered(response.iter_lines(), 5)
        assert client.post(f"{mine}/suspend").json()["state"] == "suspended"
        wait_until(lambda: metrics(balanced)["ktransformers:num_requests_suspended"] == 1.0)
        seen = metrics(balanced)
        assert (seen["vllm:num_requests_running"], seen["vllm:kv_cache_usage_perc"]) == (0.0, 0.0)
        assert client.post(f"{mine}/resume").json()["state"] == "running"
        with client.stream("GET", f"{mine}/stream", headers={"last-event-id": str(events[-1][0])}) as response:
            events += numbered(response.iter_lines(), 2000)
        assert [number for number, _ in events] == list(range(1, len(events) + 1))
        assert client.delete(mine).status_code == 200
        body = client.post(f"{balanced.url}/v1/completions", json=asked | {"stream": False}).json()
        assert "".join(text for _, text in events) == body["choices"][0]["text"] + "[DONE]"


def test_official_clients_read_streams_with_ids(balanced: ServerProcess) -> None:
    headers, question = {"x-kt-keep": "5"}, "What is 17 + 25?"
    with openai.OpenAI(base_url=f"{balanced.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 20}
        whole = client.chat.completions.create(messages=[{"role": "user", "content": question}], **asked)
        chunks = client.chat.completions.create(
            messages=[{"role": "user", "content": question}], stream=True, extra_headers=headers, **asked
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        events = client.responses.create(
            model="demo", input=question, temperature=0, max_output_tokens=20, stream=True, extra_headers=headers
        )
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    with (
        anthropic.Anthropic(base_url=balanced.url, api_key="none", max_retries=0) as served,
        served.messages.stream(
            model="demo",
            messages=[{"role": "user", "content": question}],
            max_tokens=20,
            extra_body={"temperature": 0},
            extra_headers=headers,
        ) as stream,
    ):
        assert "".join(stream.text_stream) == text


def test_a_prompt_that_can_never_fit_is_a_400_at_once(balanced: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 9000}]}
    answer = httpx.post(f"{balanced.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.exhaustive
def test_a_dead_scheduler_ends_the_service() -> None:
    with ServerProcess(*FLAGS) as process:
        (scheduler,), (engine,) = child_pids(process, "kt-scheduler"), child_pids(process, "kt-engine")
        os.kill(scheduler, signal.SIGKILL)
        assert process.process.wait(60) == 1
        assert "error: the scheduler process ended with signal 9" in "".join(process.log)
        wait_until(lambda: not Path(f"/proc/{engine}").exists())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("number", "outcome"),
    [(signal.SIGHUP, "length"), pytest.param(signal.SIGQUIT, "abort", marks=pytest.mark.exhaustive)],
)
def test_signals_to_the_whole_group_reach_the_server_alone(
    number: signal.Signals, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd and terminals send them. Afterwards nothing is left: no process, no folder."""
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("it is ignored here, as under nohup, and stays so in the server")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        body = {"prompt": "One", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with ServerProcess(*FLAGS, "--cache_lens", "4096") as process:
            wait_until(lambda: bool(child_pids(process, "kt-spare")))
            names = ("kt-engine", "kt-scheduler", "kt-spare")
            pids = [process.process.pid, *(pid for name in names for pid in child_pids(process, name))]
            assert len(pids) == 4
            assert len(os.listdir(folder)) == 1
            with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                for pid in reversed(pids):
                    os.kill(pid, number)
                assert f'"finish_reason":"{outcome}"' in "".join(lines)
            assert process.process.wait(60) == 0
            assert os.listdir(folder) == []
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids[1:]))


@pytest.mark.exhaustive
def test_start_up_errors_of_the_engine_are_one_message() -> None:
    with ServerProcess(*FLAGS, "--cache_lens", "100000000000", "--log_level", "error", wait=False) as process:
        process.wait_for("kv cache")
        assert process.process.wait(60) == 1
        assert "Traceback" not in "".join(process.log)


class Mix:
    """64 requests of every kind: lengths from 1 to 3,000, all samplings, some leaving.

    grows: short prompts with long answers instead, which need pages that are not there when they start.
    """

    def __init__(self, engine: StaticEngine, grows: bool = False):
        self.rng = random.Random(7)
        vocab = engine.runner.vocab_size
        shared = [self.rng.randrange(vocab) for _ in range(400)]
        self.bodies: list[dict[str, Any]] = []
        self.leaves_after: list[int | None] = []
        for i in range(NUM_REQUESTS):
            length = self.rng.choice((1, 2, 63, 64, 65, 300, self.rng.randint(1, 1000), 3000 if i % 16 == 0 else 100))
            length = min(length, 65) if grows else length
            prompt = shared[: self.rng.randint(1, 400)] if i % 4 == 0 and not grows else []
            prompt = prompt + [self.rng.randrange(vocab) for _ in range(length)]
            sampling: dict[str, Any] = self.rng.choice(
                (
                    {"temperature": 0},
                    {"temperature": 0.8, "top_p": 0.9},
                    {"temperature": 1.3, "top_k": 30, "min_p": 0.01},
                    {"temperature": 0.6, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
                    {"temperature": 0, "presence_penalty": 1.0, "ignore_eos": True},
                )
            )
            self.bodies.append({"prompt": prompt[:3000], "seed": i, "max_tokens": self.rng.randint(1, 64), **sampling})
            if grows:
                self.bodies[-1] |= {"max_tokens": 64, "ignore_eos": True}
            self.leaves_after.append(self.rng.randint(0, 5) if i % 8 == 5 else None)
        oracle = Session.of(engine)
        oracle.has_prefix_cache = False
        self.expected = [self._alone(oracle, body) for body in self.bodies]

    @staticmethod
    def _alone(oracle: Session, body: dict[str, Any]) -> str:
        fields = {name: value for name, value in body.items() if name != "prompt"}
        return "".join(event.text for event in oracle.generate(body["prompt"], SamplingParams(**fields)))

    def run(self, process: ServerProcess) -> int:
        """All at once; the number of answers that were read to their end and compared."""
        with ThreadPoolExecutor(NUM_REQUESTS) as threads:
            return sum(threads.map(lambda i: self._one(process, i), range(NUM_REQUESTS)))

    def _one(self, process: ServerProcess, index: int) -> int:
        body, left = self.bodies[index] | {"stream": True}, self.leaves_after[index]
        text, num_chunks = "", 0
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=300) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
                num_chunks += 1
                if left is not None and num_chunks > left:
                    assert self.expected[index].startswith(text)
                    return 0
        assert text == self.expected[index], (index, body["seed"])
        return 1


@pytest.fixture(scope="module")
def mixes() -> tuple[Mix, Mix]:
    """(of every kind, growing)."""
    engine = static_engine(EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=4096))
    made = Mix(engine), Mix(engine, grows=True)
    engine.close()
    return made


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk_size", "max_batch_size", "more", "kills"),
    [
        pytest.param(16, 4, (), 0, marks=pytest.mark.exhaustive),
        pytest.param(256, 1, (), 0, marks=pytest.mark.exhaustive),
        pytest.param(256, 32, ("--no-prefix_cache",), 0, marks=pytest.mark.exhaustive),
        (256, 32, ("--cache_lens", "480", "--page_size", "4"), 0),  # they throw each other out
        (256, 32, (), 3),
        pytest.param(16, 32, (), 0, marks=pytest.mark.exhaustive),
    ],
)
def test_64_mixed_requests(
    mixes: tuple[Mix, Mix], chunk_size: int, max_batch_size: int, more: tuple[str, ...], kills: int
) -> None:
    flags = ("--chunk_size", str(chunk_size), "--max_batch_size", str(max_batch_size), *more)
    with ServerProcess(*FLAGS, *flags) as process:
        killer = threading.Thread(target=kill_engines, args=(process, kills))
        killer.start()
        is_tight = more[:1] == ("--cache_lens",)
        num_compared = mixes[is_tight].run(process)
        killer.join()
        assert num_compared >= NUM_REQUESTS * 3 // 4
        figures = metrics(process)
        wait_until(lambda: metrics(process)["vllm:num_requests_running"] == 0)
        assert metrics(process)["vllm:kv_cache_usage_perc"] == 0
        assert figures["ktransformers:engine_restarts_total"] == kills
        if is_tight:
            assert figures["vllm:num_preemptions_total"] > 0
        if more == () and max_batch_size < 32:
            assert figures["vllm:prefix_cache_hits_total"] > 0
        assert process.terminate() == 0


def kill_engines(process: ServerProcess, kills: int) -> None:
    """Each time after another 15 steps of work."""
    for kill in range(kills):
        steps = metrics(process)["ktransformers:engine_steps_total"]
        wait_until(lambda: metrics(process)["ktransformers:engine_steps_total"] >= steps + 15)  # noqa: B023
        os.kill(child_pids(process, "kt-engine")[0], signal.SIGKILL)
        wait_until(lambda: metrics(process)["ktransformers:engine_restarts_total"] == kill + 1)  # noqa: B023


def test_answers_to_one_prompt_compute_it_once(balanced: ServerProcess) -> None:
    """Whole pages of 64 tokens, that is; each answer computes what is left over."""
    text = "One prompt, many answers. " * 40
    before = metrics(balanced)
    body = {"prompt": text, "n": 6, "max_tokens": 4, "temperature": 1.0, "seed": 1, "cache_salt": "n"}
    with httpx.Client(base_url=balanced.url, timeout=60) as client:
        usage = client.post("/v1/completions", json=body).json()["usage"]
    after = metrics(balanced)
    grown = {name: after[name] - before[name] for name in after if name.startswith("vllm:prefix_cache")}
    pages = (usage["prompt_tokens"] - 1) // 64
    assert pages > 2
    assert grown["vllm:prefix_cache_queries_total"] == 6 * usage["prompt_tokens"]
    assert grown["vllm:prefix_cache_hits_total"] == 5 * 64 * pages
