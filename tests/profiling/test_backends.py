"""Profiles of all backends: a line for every token of every answer, sums that are right, answers that do not change."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.engine.api.llm import LLM
from ktransformers.errors import ConfigError
from ktransformers.profiling.capture import ProfileLimits
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import BackendInterfaceBase, GenerationRequest
from ktransformers.server.backend.interfaces.ktransformers import KTransformersInterface
from ktransformers.server.backend.interfaces.transformers import TransformersInterface
from ktransformers.server.backend.profiler import ProfileConfig
from ktransformers.server.config import ServerConfig
from tests.support.checks.profiles import check_answers, check_nothing_lost, check_sums, read_profile
from tests.support.engines.fake_runtime import FakeRuntime
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_GGUF
from tests.support.servers.balance_backend import backend, check, collect, request, run, until
from tests.support.servers.fake_backend import FakeBackend

Answers = dict[str, list[int]]


def tokens_of(asked: Sequence[GenerationRequest], streams: Sequence[list[TokenEvent]]) -> Answers:
    return {
        one.request_id: [event.token_id for event in events if event.token_id is not None]
        for one, events in zip(asked, streams, strict=True)
    }


def test_16_mixed_requests_with_few_pages_and_long_prompts(tmp_path: Path) -> None:
    """Preempted, chunked, sharing prompts, with end tokens while the next step is planned already."""
    answers: Answers = {}
    num_preemptions = 0

    async def work() -> None:
        nonlocal num_preemptions
        async with backend(cache_lens=200, profile=ProfileConfig(tmp_path / "p")) as made:
            asked = [request(number) for number in range(16)]
            asked += [replace(asked[3], request_id=f"twin{i}", params=replace(asked[3].params, seed=i)) for i in (1, 2)]
            streams = await asyncio.gather(*(collect(made, one) for one in asked))
            for events, one in zip(streams, asked, strict=True):
                check(events, one)
            answers.update(tokens_of(asked, streams))
            stats = made.stats().scheduler
            assert stats is not None
            num_preemptions = stats.num_preemptions

    run(work)
    profile = read_profile(tmp_path / "p")
    assert num_preemptions > 0
    assert sum(line["preemptions"] for line in profile.requests) == num_preemptions
    check_answers(profile, answers)
    check_sums(profile)
    check_nothing_lost(profile)
    check_fake_experts(profile.steps, profile.tokens)
    for line in profile.requests:
        assert 0 <= line["arrived"] <= line["admitted"] <= line["first_token"] <= line["ended"]
    assert any(step["prefill_rows"] == 16 for step in profile.steps)  # a whole chunk
    assert max(step["waiting"] for step in profile.steps) > 0
    assert {step["epoch"] for step in profile.steps} == {0}
    # Latencies of a request add up to the time from its arrival to its last token.
    for line in profile.requests:
        mine = [token for token in profile.tokens if token["request"] == line["request"]]
        last = max(token["t"] for token in mine)
        spent = 1000 * (last - line["arrived"])
        assert sum(token["ms"] for token in mine) == pytest.approx(spent, abs=0.01 * len(mine))


def check_fake_experts(steps: list[dict[str, Any]], tokens: list[dict[str, Any]]) -> None:
    """Counts are exact, and a token has the experts of the row that it was sampled from."""
    for step in steps:
        assert [layer for layer, _ in step["experts"]] == list(range(FakeRuntime.NUM_LAYERS)) or not step["sampled"]
        assert all(sum(rows.values()) == step["rows"] for _, rows in step["experts"])
    for token in tokens:
        first, second = token["experts"]
        assert second == [(first[0] + 1) % FakeRuntime.NUM_EXPERTS]


@pytest.mark.exhaustive
def test_an_engine_that_is_killed_costs_times_and_no_token(tmp_path: Path) -> None:
    answers: Answers = {}

    async def work() -> None:
        async with backend("load_slow", profile=ProfileConfig(tmp_path / "p")) as made:
            params = {"max_tokens": 60, "ignore_eos": True}
            asked = [request(number, params=params) for number in range(6)]
            streams = [asyncio.create_task(collect(made, one)) for one in asked]
            await until(lambda: made.stats().engine.num_steps >= 20)
            assert made.supervisor.engine_pid is not None
            os.kill(made.supervisor.engine_pid, signal.SIGKILL)
            answers.update(tokens_of(asked, [await stream for stream in streams]))

    run(work)
    profile = read_profile(tmp_path / "p")
    check_answers(profile, answers)
    check_sums(profile)
    assert {step["epoch"] for step in profile.steps} == {0, 1}
    lost = [token for token in profile.tokens if token["step_ms"] is None]
    assert all(token["experts_why"] for token in lost)
    # What was not drained is missing: steps of 10 ms, drained ten times a second; and a crash loses a second at most.
    last = max(step["t"] for step in profile.steps if step["epoch"] == 0)
    assert max((token["t"] for token in lost), default=last) <= last + 1.0
    assert len(lost) < len(profile.tokens) / 2


@pytest.mark.exhaustive
def test_a_bridge_that_is_killed_ends_the_profile_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with backend("load_slow", profile=ProfileConfig(tmp_path / "p", root=tmp_path)) as made:
            params = {"max_tokens": 150, "ignore_eos": True}
            asked = [request(number, params=params) for number in range(4)]
            streams = [asyncio.create_task(collect(made, one)) for one in asked]
            counts: dict[str, int] = {}
            while counts.get("tokens", 0) < 20:
                counts = made.profiler.status()["counts"]
                await asyncio.sleep(0.001)
            pid = made.profiler._capture.pid  # type: ignore[union-attr]
            os.kill(pid, signal.SIGKILL)
            await until(lambda: made.profiler.status()["state"] == "off")
            assert len((tmp_path / "p" / "tokens.jsonl").read_text().splitlines()) >= counts["tokens"]
            for events, one in zip([await stream for stream in streams], asked, strict=True):
                check(events, one)
            await made.profiler.start("again", None)
            late = request(50)
            answers = tokens_of([late], [await collect(made, late)])
            await made.profiler.stop()
            check_answers(read_profile(tmp_path / "again"), answers)

    run(work)
    profile = read_profile(tmp_path / "p")  # whole lines, all of them
    assert profile.meta["stopped_unix_ns"] is None
    assert {line["request"] for line in profile.tokens} == {f"r{number}" for number in range(4)}
    assert "nothing else does" in caplog.text


def test_a_stop_string_ends_the_request_where_its_answer_ends(tmp_path: Path) -> None:
    """The scheduler hears of it late: what it has computed by then is in lines beyond completion_len."""

    async def work() -> None:
        async with backend("load_slow", profile=ProfileConfig(tmp_path / "p")) as made:
            plain = request(1, params={"max_tokens": 60, "ignore_eos": True})
            text = "".join(event.text for event in await collect(made, plain))
            stop = text[len(text) // 2 : len(text) // 2 + 3]
            asked = replace(
                request(1, params={"max_tokens": 2000, "ignore_eos": True, "stop": (stop,)}), request_id="s"
            )
            (answer,) = tokens_of([asked], [await collect(made, asked)]).values()
            await until(lambda: made.stats().num_running == 0)
            await made.profiler.stop()
            profile = read_profile(tmp_path / "p")
            (line,) = [line for line in profile.requests if line["request"] == "s"]
            assert (line["completion_len"], line["finish_reason"]) == (len(answer), "stop")
            assert profile.answers()["s"][: len(answer)] == answer
            assert len(profile.answers()["s"]) < 2000

    run(work)


def test_on_and_off_while_requests_run(tmp_path: Path) -> None:
    async def work() -> None:
        async with backend("load_slow", profile=ProfileConfig(root=tmp_path)) as made:
            params = {"max_tokens": 120, "ignore_eos": True}
            asked = [request(number, params=params) for number in range(3)]
            streams = [asyncio.create_task(collect(made, one)) for one in asked]
            await until(lambda: made.stats().engine.num_steps >= 10)
            status = await made.profiler.start("p", None)
            assert (status["state"], status["dir"]) == ("on", "p")
            steps = made.stats().engine.num_steps
            await until(lambda: made.stats().engine.num_steps >= steps + 20)
            status = await made.profiler.stop()
            assert status["last"]["counts"]["requests"] == 3
            whole = tokens_of(asked, [await stream for stream in streams])
            profile = read_profile(tmp_path / "p")
            check_sums(profile)
            for name, tokens in whole.items():
                indices = [line["index"] for line in profile.tokens if line["request"] == name]
                assert indices == list(range(indices[0], indices[-1] + 1))  # one run of them, with nothing missing
                assert len(indices) >= 15
                seen = [line["token"] for line in profile.tokens if line["request"] == name]
                assert seen == tokens[indices[0] : indices[-1] + 1]
            assert all(line["finish_reason"] is None and line["arrived"] is None for line in profile.requests)

    run(work)


@pytest.mark.parametrize("kind", [KTransformersInterface, TransformersInterface])
def test_a_backend_of_one_sequence(kind: Any, tmp_path: Path) -> None:
    """Chunks of 8, an answer that its reader leaves, one that shares the prompt, and the same without a profile."""
    paths = {"gguf_path": DEMO_GGUF} if kind is KTransformersInterface else {"model_path": DEMO_CHECKPOINT}
    config = EngineConfig(**paths, cpu_infer=1, cache_lens=256, chunk_size=8)

    async def answered(made: BackendInterfaceBase) -> Answers:
        starting = asyncio.create_task(made.start())
        while not made.is_ready and not starting.done():  # requests come as soon as they are let in
            await asyncio.sleep(0)
        assert made.profiler.config.folder is None or made.profiler.status()["state"] == "on"
        await starting
        try:
            ids = made.model.tokenizer.apply_chat_template([{"role": "user", "content": "What is 17 + 25?"}])
            params = SamplingParams(temperature=0, max_tokens=30, seed=1)
            asked = [GenerationRequest(request_id=f"a{i}", prompt_ids=tuple(ids), params=params) for i in range(2)]
            asked.append(replace(asked[0], request_id="short", params=replace(params, max_tokens=1)))
            asked.append(replace(asked[0], request_id="stopped", params=replace(params, stop=("25",), max_drafts=0)))
            return tokens_of(asked, [[event async for event in made.inference(one)] for one in asked])
        finally:
            await made.close()

    plain = asyncio.run(answered(kind(config)))
    profiled = asyncio.run(answered(kind(config, ProfileConfig(tmp_path / "p"))))
    assert plain == profiled
    profile = read_profile(tmp_path / "p")
    check_answers(profile, plain)
    check_sums(profile)
    check_nothing_lost(profile)
    assert profile.meta["backend"] == kind.name
    assert profile.meta["model"]["num_layers"] == 4
    prompt_len = profile.requests[0]["prompt_len"]
    assert sum(step["prefill_rows"] for step in profile.steps[: -(-prompt_len // 8)]) == prompt_len
    assert [line["cached_len"] for line in profile.requests] == [0] + [(prompt_len - 1) // 16 * 16] * 3  # whole pages
    assert all(step["parts_us"].get("sampling", 0) > 0 for step in profile.steps if step["sampled"])


def test_on_and_off_while_one_sequence_is_answered(tmp_path: Path) -> None:
    """Both take effect between two steps of the answer, whose reader then goes on.

    Nothing holds the engine up for its reader, and the bridge's process needs its time to start. So the answer begins
    once the bridge runs, and is far longer than what is computed until the engine has been told.
    """

    async def work() -> None:
        config = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=16384)
        made = KTransformersInterface(config, ProfileConfig(root=tmp_path))
        await made.start()
        params = SamplingParams(temperature=0, max_tokens=16000, seed=1, ignore_eos=True, max_drafts=0)
        events = made.inference(GenerationRequest(request_id="a", prompt_ids=(5, 6, 7), params=params))
        tokens: list[int | None] = []
        turn = made.profiler.turn

        async def read(num_tokens: int) -> None:
            tokens.extend([(await anext(events)).token_id for _ in range(num_tokens)])

        async def turn_in_the_answer(endpoint: str | None) -> None:
            if endpoint is not None:
                await read(3)
            await turn(endpoint)

        made.profiler.turn = turn_in_the_answer
        try:
            await made.profiler.start("p", None)
            await read(20)
            status = await made.profiler.stop()
            lines = read_profile(tmp_path / "p").tokens
            assert 0 < len(lines) == status["last"]["counts"]["tokens"]
            first, end = lines[0]["index"], lines[-1]["index"] + 1
            await read(max(0, end - len(tokens)) + 20)
            assert 0 < first < end < len(tokens)
            assert [line["index"] for line in lines] == list(range(first, end))
            assert [line["token"] for line in lines] == tokens[first:end]
            (ended,) = read_profile(tmp_path / "p").requests
            assert (ended["finish_reason"], ended["arrived"]) == (None, None)
        finally:
            await events.aclose()
            await made.close()

    asyncio.run(work())


def test_llm_is_profiled_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    prompts = ["What is 17 + 25?", "Count to ten.", "hello"] * 3
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for options in ({}, {"profile": tmp_path / "p", "profile_max_bytes": 1 << 20}):
        with LLM(cpu_infer=1, cache_lens=256, max_batch_size=4, page_size=4, chunk_size=16, **options) as llm:
            answers.append([list(output.token_ids) for output in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
    profile = read_profile(tmp_path / "p")
    check_answers(profile, {f"r{number}": tokens for number, tokens in enumerate(answers[1])})
    check_sums(profile)
    check_nothing_lost(profile)
    assert (profile.meta["backend"], profile.meta["model"]["top_k"]) == ("offline", 4)
    assert all(nbytes > 0 for nbytes in profile.meta["model"]["expert_bytes"])
    with pytest.raises(ConfigError, match="holds a profile already"):
        LLM(profile=tmp_path / "p")
    with pytest.raises(ConfigError, match="profile_max_bytes"):
        LLM(profile=tmp_path / "q", profile_max_bytes=1)


def test_a_chat_is_profiled(tmp_path: Path) -> None:
    def chat() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ktransformers", "chat", "--temperature", "0", "--cpu_infer", "1"]
        command += ["-p", "my secret", "--profile", str(tmp_path / "p")]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    done = chat()
    assert done.returncode == 0, done.stderr
    profile = read_profile(tmp_path / "p")
    check_sums(profile)
    check_nothing_lost(profile)
    (line,) = profile.requests
    assert line["completion_len"] == len(profile.tokens) > 0
    assert profile.meta["backend"] == "local_chat"
    assert all(b"secret" not in path.read_bytes() for path in (tmp_path / "p").iterdir())
    again = chat()
    assert again.returncode != 0
    assert "holds a profile already" in again.stderr


def test_routes(tmp_path: Path) -> None:
    async def test() -> None:
        async with backend("load_slow", profile=ProfileConfig(root=tmp_path)) as made:
            app = create_app(made, ServerConfig(model_names=("demo",), api_keys=("k",)))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                assert (await client.get("/v1/profile")).status_code == 401
                assert (await client.post("/v1/profile/start")).status_code == 401
                client.headers["authorization"] = "Bearer k"
                assert (await client.get("/v1/profile")).json() == {"state": "off", "last": None}
                assert (await client.post("/v1/profile/stop")).status_code == 409
                for name in ("../up", "/tmp/x", ".hidden", "", "a/b", "x" * 65, "a\n"):
                    answer = await client.post("/v1/profile/start", json={"dir": name})
                    assert answer.status_code == 400, name
                for wrong in ({"max_seconds": 0}, {"max_seconds": -1}, {"where": "x"}, {"dir": 5}, []):
                    assert (await client.post("/v1/profile/start", json=wrong)).status_code == 400, wrong
                assert list(tmp_path.iterdir()) == []
                begun = await client.post("/v1/profile/start", json={"dir": "one"})
                assert (begun.status_code, begun.json()["state"]) == (200, "on")
                again = await client.post("/v1/profile/start")
                assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
                body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "n": 2}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                stopped = (await client.post("/v1/profile/stop")).json()
                assert (stopped["state"], stopped["last"]["counts"]["tokens"]) == ("off", 10)
                taken = await client.post("/v1/profile/start", json={"dir": "one"})
                assert taken.status_code == 400
                await client.post("/v1/profile/start", json={"max_seconds": 0.05})
                while (await client.get("/v1/profile")).json()["state"] == "on":
                    await asyncio.sleep(0.01)
        assert len(read_profile(tmp_path / "one").answers()) == 2  # each choice has a name of its own
        assert len(list(tmp_path.iterdir())) == 2

    asyncio.run(test())


def test_without_a_root_or_a_backend_that_records(tmp_path: Path) -> None:
    async def status_of(made: BackendInterfaceBase) -> int:
        transport = httpx.ASGITransport(create_app(made, ServerConfig(model_names=("demo",))))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post("/v1/profile/start")).status_code

    async def test() -> None:
        assert await status_of(FakeBackend()) == 400
        async with backend() as made:
            assert await status_of(made) == 400

    asyncio.run(test())
    with pytest.raises(ConfigError, match="profile_root"):
        ProfileConfig(root=tmp_path / "none").check()
    with pytest.raises(ConfigError):
        ProfileConfig(folder=tmp_path, limits=ProfileLimits(1)).check()
