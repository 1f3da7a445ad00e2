"""The bundled model under several names: answers are its own whichever name runs, and memory holds some of them."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.api.pictures import as_served
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
from ktransformers.server.multi_model.needs import ToPlan, find_needs, pinned, plan_needs
from ktransformers.system.restart_policy import FIRST_DELAY
from tests.server.multi_model.test_gateway import DIALECTS, sse, text_of
from tests.support.engines.one_sequence import static_engine
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.demo_models import CONFIG, demo_models
from tests.support.servers.asgi_client import Connection
from tests.support.servers.balance_backend import until
from tests.support.servers.server_process import ServerProcess

QUESTION = "What is 17 + 25?"
MESSAGES = [{"role": "user", "content": QUESTION}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": QUESTION},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 64},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": QUESTION, "stream": False},
}


@pytest.fixture(scope="module")
def answer(llm: LLM) -> str:
    return llm.chat(QUESTION, SamplingParams(temperature=0))[0].text


def test_two_that_do_not_fit_together_take_turns_in_every_dialect(answer: str) -> None:
    async def work() -> None:
        async with demo_models(single=("a", "b")) as demo:
            for index, (path, body) in enumerate(BODIES.items()):
                name = "ab"[index % 2]
                assert text_of(path, await demo.post(path, body | {"model": name, "temperature": 0})) == answer
                assert demo.running == [name]
            embedded = await demo.post("/v1/embeddings", {"model": "a", "input": QUESTION})
            other = await demo.post("/v1/embeddings", {"model": "b", "input": QUESTION})
            assert embedded["data"] == other["data"]
            demo.advance(59.0)
            assert demo.running == ["b"]
            demo.advance(1.0)
            await until(lambda: demo.models.pool.state("b") == "stopped")
            assert text_of("/api/chat", await demo.post("/api/chat", BODIES["/api/chat"] | {"model": "b"})) == answer

    asyncio.run(work())


def test_many_at_once_get_the_answers_of_one(answer: str) -> None:
    async def work() -> None:
        async with demo_models(single=("a", "b", "c"), num_at_once=2) as demo:
            asked = [
                demo.post(path, body | {"model": "abc"[index % 3], "temperature": 0})
                for index, (path, body) in enumerate(3 * list(BODIES.items()))
            ]
            found = await asyncio.gather(*asked)
            assert [text_of(path, one) for path, one in zip(3 * list(BODIES), found, strict=True)] == 15 * [answer]
            assert sum(map(len, demo.made.values())) == 3

    asyncio.run(work())


@pytest.mark.parametrize("host_gib", [0.0, 0.25])
def test_a_model_takes_what_was_planned(host_gib: float) -> None:
    """host_gib: for pages below the cache, which the ktransformers backend has, too."""
    config = as_served(replace(CONFIG, cpu_memory_size_GB=host_gib))
    needs = plan_needs(ToPlan(config, beside=7))
    assert not needs.error
    assert needs.nbytes["cpu"] - plan_needs(ToPlan(CONFIG, beside=7)).nbytes["cpu"] == int(host_gib * 2**30)
    engine = static_engine(pinned(config, needs))
    try:
        assert engine.plan.total_bytes["cpu"] + 7 == needs.nbytes["cpu"]
        assert engine.runner.max_len == needs.cache_lens
    finally:
        engine.close()


def test_what_is_left_to_the_plan_is_planned_within_the_memory_for_models() -> None:
    free = plan_needs(ToPlan(CONFIG, page_size=64, max_batch_size=4)).nbytes["cpu"]
    assert plan_needs(ToPlan(CONFIG, page_size=64, max_batch_size=4, memory=free)).nbytes["cpu"] == free
    in_ram = replace(CONFIG, experts_from="ram")
    assert "the model does not fit" in plan_needs(ToPlan(in_ram, page_size=64, max_batch_size=4, memory=free - 1)).error
    assert "the model does not fit" in plan_needs(ToPlan(in_ram, page_size=64, beside=2, memory=free)).error
    from_disk = plan_needs(ToPlan(CONFIG, page_size=64, max_batch_size=4, memory=free - 1))
    assert not from_disk.error
    assert from_disk.expert_slots


@pytest.mark.exhaustive
def test_planning_in_processes_is_planning(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    wanted = [
        ToPlan(CONFIG),
        ToPlan(CONFIG, page_size=64, max_batch_size=4),
        ToPlan(CONFIG.__class__(gguf_path=broken)),
    ]
    one, two, three = find_needs(wanted)
    assert (one.nbytes, two.nbytes) == (plan_needs(wanted[0]).nbytes, plan_needs(wanted[1]).nbytes)
    assert str(broken) in three.error


@pytest.mark.exhaustive
def test_an_engine_that_is_killed_takes_its_own_model_down_only(answer: str) -> None:
    async def work() -> None:
        async with demo_models(balanced=("a", "b"), num_at_once=2) as demo:
            body = BODIES["/v1/chat/completions"] | {"temperature": 0}
            assert (
                text_of("/v1/chat/completions", await demo.post("/v1/chat/completions", body | {"model": "a"}))
                == answer
            )
            long = DIALECTS["/v1/completions"] | {
                "stream": True,
                "max_tokens": 1500,
                "ignore_eos": True,
                "temperature": 0,
            }
            whole = await Connection(demo.models.app, "POST", "/v1/completions", long | {"model": "b"}).begun()
            expected = sse(await whole.events())
            living = await Connection(demo.models.app, "POST", "/v1/completions", long | {"model": "b"}).begun()
            dying = await Connection(demo.models.app, "POST", "/v1/completions", long | {"model": "a"}).begun()
            first = [await living.event(), await dying.event()]
            (killed,) = demo.made["a"]
            assert isinstance(killed, BalanceServeInterface)
            assert killed.supervisor.engine_pid is not None
            os.kill(killed.supervisor.engine_pid, signal.SIGKILL)
            assert b'"error"' in b"".join(await dying.events())
            await until(lambda: demo.models.pool.state("a") == "stopped")
            streamed = sse([first[0] or b"", *await living.events()])
            assert "".join(map(chunk_text, streamed)) == "".join(map(chunk_text, expected))
            demo.advance(FIRST_DELAY)
            assert (
                text_of("/v1/chat/completions", await demo.post("/v1/chat/completions", body | {"model": "a"}))
                == answer
            )
            assert (len(demo.made["a"]), len(demo.made["b"])) == (2, 1)

    asyncio.run(work())


def chunk_text(chunk: object) -> str:
    return chunk["choices"][0]["text"] if isinstance(chunk, dict) and chunk["choices"] else ""


@pytest.mark.exhaustive
def test_the_command_serves_a_file_and_ends_on_a_signal(tmp_path: Path, answer: str) -> None:
    file, keys = tmp_path / "models.yaml", tmp_path / "keys"
    keys.write_text("secret name=alice rpm=1000\n")
    file.write_text(
        f"memory: 0.9\napi_key_file: {keys}\ncache_lens: 1024\nmax_batch_size: 2\nmodels:\n"
        f"  - {{name: [first, first:1b], gguf_path: {DEMO_GGUF}, load: start}}\n"
        f"  - {{name: second, gguf_path: {DEMO_GGUF}, backend_type: ktransformers}}\n"
        f"  - {{name: third, gguf_path: {DEMO_GGUF}, cache_lens: 512}}\n"
    )
    with ServerProcess(str(file), "--drain_seconds", "5") as process:
        assert httpx.get(f"{process.url}/v1/models").status_code == 401
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="secret", max_retries=0, timeout=120) as client:
            assert [one.id for one in client.models.list()] == ["first", "first:1b", "second", "third"]
            for name in ("first:1b", "second", "third", "first"):
                made = client.chat.completions.create(model=name, messages=MESSAGES, temperature=0)  # type: ignore[arg-type]
                assert made.choices[0].message.content == answer
            status = httpx.get(f"{process.url}/v1/status", headers={"x-api-key": "secret"}).json()
            assert [one["state"] for one in status["models"]] == ["running", "running", "stopped"]
        assert process.terminate() == 0
    assert any("the model first was stopped" in line for line in process.log)
    assert any("stopped (SIGTERM)" in line and "4 answers finished, 0 cut off" in line for line in process.log)


@pytest.mark.exhaustive
def test_the_example_serves(answer: str) -> None:
    with ServerProcess("examples/models.yaml", "--max_engine_restarts", "1") as process:
        with httpx.Client(base_url=process.url, timeout=120) as client:
            for name in ("demo:15m", "demo-alone", "demo-short", "demo"):
                body = {"model": name, "messages": MESSAGES, "temperature": 0}
                assert text_of("/v1/chat/completions", client.post("/v1/chat/completions", json=body).json()) == answer
            loaded = [one["name"] for one in client.get("/api/ps").json()["models"]]
            assert loaded == ["demo:latest", "demo:15m", "demo-alone:latest"]
        assert process.terminate() == 0
