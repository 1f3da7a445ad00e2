"""Several fake models at one address: every dialect finds its model, waits for it, and is told why when it cannot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ktransformers.errors import CapacityError, EngineError
from ktransformers.system.restart_policy import FIRST_DELAY
from tests.support.models.fake_models import Lab
from tests.support.servers.asgi_client import Connection
from tests.support.servers.balance_backend import until

MESSAGES = [{"role": "user", "content": "hello"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
}


def text_of(path: str, answer: Any) -> str:
    """What a model said, in any dialect."""
    match path:
        case "/v1/chat/completions":
            return str(answer["choices"][0]["message"]["content"])
        case "/v1/completions":
            return str(answer["choices"][0]["text"])
        case "/v1/responses":
            return str(answer["output"][0]["content"][0]["text"])
        case "/v1/messages":
            return str(answer["content"][0]["text"])
        case "/api/chat":
            return str(answer["message"]["content"])
    return str(answer["response"])


def message_of(path: str, answer: Any) -> str:
    """What an error says."""
    return str(answer["error"] if path.startswith("/api/") else answer["error"]["message"])


def run(work: Callable[[Lab], Awaitable[None]], *args: Any, **lab: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            made = Lab(*args, **lab)
            try:
                await work(made)
            finally:
                await made.close()

    asyncio.run(main())


@pytest.mark.parametrize("path", DIALECTS)
def test_every_dialect_gets_the_model_that_it_names(path: str) -> None:
    async def work(lab: Lab) -> None:
        for name in ("b", "a", "b:30b", "a"):
            asked = lab.ask("POST", path, DIALECTS[path] | {"model": name})
            assert text_of(path, await asked.json()) == f"{name[0]}."
            assert lab.running == [name[0]]
        assert (lab.lives["a"].num_loads, lab.lives["b"].num_loads) == (2, 2)

    run(work)


def test_other_routes_get_their_model_too() -> None:
    async def work(lab: Lab) -> None:
        for path, body in (
            ("/tokenize", {"prompt": "hi"}),
            ("/detokenize", {"tokens": [70]}),
            ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ):
            for name in ("a", "b"):
                asked = await lab.ask("POST", path, body | {"model": name}).begun()
                await asked.rest()
                assert asked.status == 200
                assert lab.running == [name]

    run(work)


def test_no_model_is_loaded_for_a_body_of_another_type() -> None:
    async def work(lab: Lab) -> None:
        asked = await lab.ask(
            "POST", "/v1/completions", DIALECTS["/v1/completions"] | {"model": "b"}, content_type="text/plain"
        ).begun()
        assert (asked.status, "Content-Type: application/json" in message_of("", await asked.json())) == (400, True)
        assert lab.running == []
        asked = lab.ask(
            "POST", "/api/generate", DIALECTS["/api/generate"] | {"model": "b"}, content_type="text/plain"
        )  # takes any
        assert (await asked.json())["response"] == "b."

    run(work)


def test_ollamas_names_have_tags() -> None:
    async def work(lab: Lab) -> None:
        answer = await lab.ask("POST", "/api/chat", DIALECTS["/api/chat"] | {"model": "b:latest"}).json()
        assert (answer["model"], answer["message"]["content"]) == ("b:latest", "b.")

    run(work)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_name_that_nobody_has(path: str) -> None:
    async def lenient(lab: Lab) -> None:
        for body in (DIALECTS[path] | {"model": "gpt-4"}, DIALECTS[path] | {"model": None}):
            if path == "/v1/messages" and body["model"] is None:
                continue
            assert text_of(path, await lab.ask("POST", path, body).json()) == "a."

    async def strict(lab: Lab) -> None:
        asked = await lab.ask("POST", path, DIALECTS[path] | {"model": "gpt-4"}).begun()
        message = message_of(path, await asked.json())
        assert asked.status == 404
        assert "'gpt-4' is not served here, but a, a:30b, b, b:30b" in message
        assert lab.running == []

    run(lenient)
    run(strict, is_strict_on_names=True)


@pytest.mark.parametrize("data", [b"{", b"[1]", b'"a"', b""])
def test_bodies_that_name_nothing_are_refused_and_nothing_is_loaded(data: bytes) -> None:
    async def work(lab: Lab) -> None:
        answer = await lab.send(
            "POST", "/v1/chat/completions", content=data, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert lab.running == []

    run(work)


def test_requests_wait_while_their_model_loads_and_others_are_served() -> None:
    async def work(lab: Lab) -> None:
        lab.lives["b"].may_load.clear()
        first = [lab.chat("b") for _ in range(3)]
        await until(lambda: lab.models.manager.num_waiting == 3)
        assert (await lab.chat("a").json())["choices"][0]["message"]["content"] == "a."
        assert lab.models.pool.state("b") == "loading"
        lab.lives["b"].may_load.set()
        assert [(await one.json())["model"] for one in first] == ["b", "b", "b"]
        assert lab.lives["b"].num_loads == 1

    async def loaded(lab: Lab) -> None:
        await lab.chat("a").json()
        await work(lab)

    run(loaded, memory=2)


def test_a_model_is_stopped_for_another_when_its_answer_is_over_not_before() -> None:
    async def work(lab: Lab) -> None:
        lab.lives["a"].may_answer.clear()
        stream = await lab.chat("a", stream=True).begun()
        waiting = lab.chat("b")
        await until(lambda: lab.models.manager.num_waiting == 1)
        later = lab.chat("a")
        await until(lambda: lab.models.manager.num_waiting == 2)
        assert lab.running == ["a"]
        lab.lives["a"].may_answer.set()
        assert b'"content":"a"' in b"".join(await stream.rest())
        assert (await waiting.json())["model"] == "b"
        assert (await later.json())["model"] == "a"
        assert lab.lives["a"].num_loads == 2

    run(work)


def sse(events: list[bytes]) -> list[Any]:
    """The data of server-sent events, comments left out."""
    lines = [line for event in events for line in event.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


STREAMS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_begins_while_its_model_loads(path: str) -> None:
    async def work(lab: Lab) -> None:
        body = DIALECTS[path] | {"model": "a", "stream": True}
        quick = await (await lab.ask("POST", path, body).begun()).events()
        await lab.chat("b").json()
        lab.lives["a"].may_load.clear()
        slow = await lab.ask("POST", path, body).begun()
        assert slow.status == 200
        assert slow.headers["content-type"].startswith("text/event-stream")
        assert "x-request-id" in slow.headers
        for _ in range(2):
            assert (await slow.event() or b"").startswith(b": ")
        lab.lives["a"].may_load.set()
        events = [event for event in await slow.events() if not event.startswith(b": ")]
        assert kinds(sse(events)) == kinds(sse(quick))
        assert b'"a' in b"".join(events)

    run(work, ping_seconds=0.01)


def kinds(found: list[Any]) -> list[Any]:
    return [one if isinstance(one, str) else (one.get("type"), one.get("object")) for one in found]


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_has_begun_tells_errors_as_its_dialect_does(path: str) -> None:
    async def work(lab: Lab, more: dict[str, Any], says: str) -> None:
        life = lab.lives["a"]
        life.may_load.clear()
        slow = await lab.ask("POST", path, DIALECTS[path] | {"model": "a", "stream": True} | more).begun()
        await slow.event()
        life.may_load.set()
        events = [event for event in await slow.events() if not event.startswith(b": ")]
        found = sse(events)
        if path == "/v1/responses":
            assert (found[0]["type"], found[0]["sequence_number"]) == ("error", 0)
            assert says in found[0]["message"]
        elif path == "/v1/messages":
            assert events[0].startswith(b"event: error\n")
            assert found[0]["type"] == "error"
            assert says in found[0]["error"]["message"]
        else:
            assert says in found[0]["error"]["message"]
            assert found[1:] == ["data: [DONE]"]

    async def failing(lab: Lab) -> None:
        lab.lives["a"].error = CapacityError("it does not fit")
        await work(lab, {}, "the model a could not be loaded: it does not fit")

    async def wrong(lab: Lab) -> None:
        await work(lab, {"temperature": "hot"}, "temperature")

    run(failing, ping_seconds=0.01)
    run(wrong, ping_seconds=0.01)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_load_that_fails_is_told_to_those_who_wait_and_tried_again_later(path: str) -> None:
    async def work(lab: Lab) -> None:
        life = lab.lives["a"]
        life.may_load.clear()
        life.error = EngineError("/secret/path is gone")
        asked = [lab.ask("POST", path, DIALECTS[path] | {"model": "a"}) for _ in range(2)]
        await until(lambda: lab.models.manager.num_waiting == 2)
        life.may_load.set()
        for one in asked:
            message = message_of(path, await one.json())
            assert one.status == 503
            assert one.headers["retry-after"] == "1"
            assert message == "the model a could not be loaded: the server's log says why; it is tried again after 1 s"
        again = await lab.ask("POST", path, DIALECTS[path] | {"model": "a"}).begun()
        await again.rest()
        assert (again.status, life.num_loads) == (503, 1)
        other = lab.ask("POST", path, DIALECTS[path] | {"model": "b"})
        assert text_of(path, await other.json()) == "b."
        life.error = None
        lab.advance(FIRST_DELAY)
        assert text_of(path, await lab.ask("POST", path, DIALECTS[path] | {"model": "a"}).json()) == "a."

    run(work)


def test_an_error_that_nobody_foresaw_is_one_of_its_model_alone() -> None:
    async def work(lab: Lab) -> None:
        lab.lives["a"].error = ZeroDivisionError("oops")
        answer = await lab.chat("a").json()
        assert answer["error"]["code"] == "model_not_loaded"
        assert (await lab.chat("b").json())["model"] == "b"

    run(work)


def test_a_model_that_ends_by_itself_is_loaded_anew_and_others_stream_on() -> None:
    async def work(lab: Lab) -> None:
        for life in lab.lives.values():
            life.may_answer.clear()
        dying, living = await lab.chat("a", stream=True).begun(), await lab.chat("b", stream=True).begun()
        await dying.event()
        model = lab.lives["a"].now
        assert model is not None
        model.gone.set_result(EngineError("killed too often"))
        assert b"killed too often" in b"".join(await dying.rest())
        await until(lambda: lab.models.pool.state("a") == "stopped")
        lab.advance(FIRST_DELAY)
        lab.lives["a"].may_answer.set()
        assert (await lab.chat("a").json())["model"] == "a"
        lab.lives["b"].may_answer.set()
        assert sse(await living.events())[-1] == "data: [DONE]"
        assert (lab.lives["a"].num_loads, lab.lives["b"].num_loads) == (2, 1)

    run(work, memory=2)


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async def work(lab: Lab) -> None:
        lab.lives["a"].may_load.clear()
        loading, waiting = lab.chat("a"), lab.chat("b")
        await until(lambda: lab.models.manager.num_waiting == 2)
        await waiting.leave()
        await loading.leave()
        assert lab.models.manager.num_waiting == 0
        lab.lives["a"].may_load.set()
        await until(lambda: lab.running == ["a"])  # who left may come again
        assert lab.models.pool.num_users("a") == 0
        assert lab.lives["b"].num_loads == 0
        assert (await lab.chat("b").json())["model"] == "b"

    run(work)


def test_time_in_the_line_is_the_requests_own() -> None:
    async def work(lab: Lab) -> None:
        lab.lives["a"].may_load.clear()
        asked = await lab.chat("a", timeout=0.01).begun()
        answer = await asked.json()
        assert asked.status == 408
        assert answer["error"]["message"] == "the model a was not loaded within the 0.01 s of the request"
        assert lab.models.manager.num_waiting == 0

    async def by_flag(lab: Lab) -> None:
        lab.lives["a"].may_load.clear()
        asked = await lab.chat("a", stream=True).begun()
        assert asked.status == 408
        await asked.rest()

    run(work)
    run(by_flag, request_timeout=0.01)


def test_more_than_the_queue_holds_are_told_to_come_again() -> None:
    async def work(lab: Lab) -> None:
        lab.lives["a"].may_load.clear()
        waiting = [lab.chat("a") for _ in range(2)]
        await until(lambda: lab.models.manager.num_waiting == 2)
        refused = await lab.chat("a").begun()
        answer = await refused.json()
        assert (refused.status, answer["error"]["code"], refused.headers["retry-after"]) == (503, "queue_full", "1")
        lab.lives["a"].may_load.set()
        assert [(await one.json())["model"] for one in waiting] == ["a", "a"]

    run(work, max_queue=2)


def test_keys_and_their_limits_are_of_all_models_together() -> None:
    from ktransformers.server.http.keys import KeyLimits

    async def work(lab: Lab) -> None:
        def ask(name: str, key: str) -> Connection:
            return lab.ask(
                "POST", "/v1/chat/completions", DIALECTS["/v1/chat/completions"] | {"model": name}, x_api_key=key
            )

        refused = await lab.chat("a").begun()
        await refused.rest()
        assert (refused.status, lab.lives["a"].num_loads) == (401, 0)
        lab.lives["a"].may_answer.clear()
        lab.lives["b"].may_load.clear()
        running, waiting = ask("a", "one"), ask("b", "one")
        await until(lambda: len(lab.lives["a"].asked) == 1 and lab.models.manager.num_waiting == 1)
        for name in ("a", "b"):
            third = await ask(name, "one").begun()
            assert third.status == 429
            await third.rest()
        other = ask("b", "two")
        await until(lambda: lab.models.manager.num_waiting == 2)
        for life in lab.lives.values():
            life.may_load.set()
            life.may_answer.set()
        for one in (running, waiting, other):
            await one.rest()
            assert one.status == 200
        again = await ask("a", "one").begun()
        await again.rest()
        assert again.status == 200

    keys = {"one": KeyLimits(concurrent=2), "two": KeyLimits()}
    run(work, memory=2, api_keys=tuple(keys), key_limits=keys)


def test_what_nobody_asks_for_is_stopped_and_loaded_again() -> None:
    async def work(lab: Lab) -> None:
        await lab.chat("a").json()
        lab.advance(59.0)
        assert lab.running == ["a"]
        listed = (await lab.get("/api/ps")).json()["models"]
        assert [one["name"] for one in listed] == ["a:latest", "a:30b"]
        lab.advance(1.0)
        await until(lambda: lab.models.pool.state("a") == "stopped")
        assert (await lab.get("/api/ps")).json() == {"models": []}
        assert lab.lives["a"].num_closed == 1
        assert (await lab.chat("a").json())["model"] == "a"

    run(work, idle=60.0)


def test_ollamas_keep_alive() -> None:
    async def work(lab: Lab) -> None:
        async def load(**body: Any) -> Any:
            return await lab.ask("POST", "/api/generate", {"model": "a", "stream": False, **body}).json()

        assert (await load(keep_alive=-1))["done_reason"] == "load"
        lab.advance(1e6)
        assert lab.running == ["a"]
        await load(prompt="hello", keep_alive="1m30s")
        lab.advance(89.0)
        assert lab.running == ["a"]
        lab.advance(1.0)
        await until(lambda: lab.models.pool.state("a") == "stopped")
        assert (await load(keep_alive=0))["done_reason"] == "unload"  # nothing is loaded for that
        assert lab.lives["a"].num_loads == 1
        await load(prompt="hello", keep_alive=0)
        await until(lambda: lab.models.pool.state("a") == "stopped")
        await load()
        assert (await load(keep_alive="0s"))["done_reason"] == "unload"
        await until(lambda: lab.models.pool.state("a") == "stopped")
        assert lab.lives["a"].num_loads == 3
        refused = await lab.ask("POST", "/api/generate", {"model": "a", "keep_alive": "soon"}).begun()
        assert refused.status == 400
        assert "keep_alive" in (await refused.json())["error"]

    run(work, idle=60.0)


def test_unloading_what_nobody_knows_stops_nothing() -> None:
    async def work(lab: Lab) -> None:
        await lab.chat("a").json()
        await lab.ask("POST", "/api/generate", {"model": "other", "keep_alive": 0}).rest()
        assert lab.running == ["a"]

    run(work)


def test_lists_are_of_all_models_whether_they_run_or_not() -> None:
    async def work(lab: Lab) -> None:
        await lab.chat("b").json()
        names = ["a", "a:30b", "b", "b:30b"]
        listed = (await lab.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == names
        assert {one["max_model_len"] for one in listed} == {256}
        theirs = (await lab.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert [one["id"] for one in theirs["data"]] == names
        assert (await lab.get("/v1/models/a:30b")).json()["root"] == "a"
        assert (await lab.get("/v1/models/c")).status_code == 404
        tags = (await lab.get("/api/tags")).json()["models"]
        assert [one["name"] for one in tags] == ["a:latest", "a:30b", "b:latest", "b:30b"]
        assert [one["name"] for one in (await lab.get("/api/ps")).json()["models"]] == ["b:latest", "b:30b"]
        shown = (await lab.send("POST", "/api/show", json={"model": "a"})).json()
        assert shown["modelfile"].startswith("FROM a\n")
        assert (await lab.send("POST", "/api/show", json={"model": "c"})).status_code == 404
        assert (await lab.get("/", headers={"accept": "application/json"})).json()["models"] == names
        assert lab.running == ["b"]

    run(work)


def test_figures_are_of_all_models() -> None:
    async def work(lab: Lab) -> None:
        await lab.chat("b").json()
        status = (await lab.get("/v1/status")).json()
        assert (status["model"], status["state"]) == ("b", "ready")
        assert [(one["name"], one["state"], one["bytes"]) for one in status["models"]] == [
            ("a", "stopped", {"cpu": 1}),
            ("b", "running", {"cpu": 1}),
        ]
        assert (await lab.get("/v1/status?model=a:30b")).json()["model"] == "a"
        assert (await lab.get("/v1/status?model=c")).status_code == 404
        assert (await lab.get("/server_info?model=a")).status_code == 503
        assert (await lab.get("/server_info")).json()["model"] == "b"
        text = (await lab.get("/metrics")).text
        for line in (
            'ktransformers:model_running{model_name="a"} 0.0',
            'ktransformers:model_running{model_name="b"} 1.0',
            'ktransformers:model_loads_total{model_name="b"} 1.0',
            'ktransformers:model_bytes{device="cpu",model_name="a"} 1.0',
            'ktransformers:models_memory_bytes{device="cpu"} 1.0',
            'vllm:generation_tokens_total{model_name="b"} 2.0',
            'vllm:generation_tokens_total{model_name="a"} 0.0',
        ):
            assert line in text
        assert text.count("# TYPE vllm:generation_tokens_total counter") == 1
        assert (await lab.get("/load")).json() == {"server_load": 0}
        assert (await lab.get("/health")).json() == {"status": "ok"}

    run(work)


def test_it_is_ready_when_the_first_models_are() -> None:
    async def work(lab: Lab) -> None:
        lab.lives["a"].may_load.clear()
        assert (await lab.get("/ready")).status_code == 503
        starting = asyncio.create_task(lab.models.start())
        await until(lambda: lab.models.pool.state("a") == "loading")
        assert (await lab.get("/ready")).status_code == 503
        lab.lives["a"].may_load.set()
        await starting
        assert (await lab.get("/ready")).json() == {"status": "ready"}
        assert lab.running == ["a"]
        lab.advance(60.0)
        await until(lambda: lab.running == [])
        assert (await lab.get("/ready")).status_code == 200

    run(work, first=["a"], idle=60.0)


def test_requests_are_found_whatever_model_they_are_of() -> None:
    async def work(lab: Lab) -> None:
        lab.lives["b"].may_answer.clear()
        keep = {"x-kt-keep": "60", "x-request-id": "mine"}
        body = DIALECTS["/v1/chat/completions"] | {"model": "b", "stream": True}
        stream = await Connection(lab.models.app, "POST", "/v1/chat/completions", body, keep).begun()
        first = await stream.event()
        await stream.leave()
        (one,) = (await lab.get("/v1/requests")).json()["data"]
        assert (one["id"], one["state"]) == ("mine", "running")
        waiting = lab.chat("a")  # a kept stream keeps its model, though nobody reads it
        await until(lambda: lab.models.manager.num_waiting == 1)
        assert lab.running == ["b"]
        assert (await lab.send("POST", "/v1/requests/mine/suspend")).json()["state"] == "suspended"
        assert (await lab.send("POST", "/v1/requests/mine/resume")).status_code == 200
        again = await lab.ask("GET", "/v1/requests/mine/stream").begun()
        assert await again.event() == first
        lab.lives["b"].may_answer.set()
        assert sse(await again.events())[-1] == "data: [DONE]"
        assert (await waiting.json())["model"] == "a"
        assert lab.running == ["a"]
        taken_up = await lab.ask("GET", "/v1/requests/mine/stream").begun()  # of a model that is stopped
        assert sse(await taken_up.events())[-1] == "data: [DONE]"
        assert (await lab.send("DELETE", "/v1/requests/mine")).status_code == 200
        assert (await lab.send("DELETE", "/v1/requests/mine")).status_code == 404

    run(work)


def test_responses_are_kept_for_all_models() -> None:
    async def work(lab: Lab) -> None:
        first = await lab.ask("POST", "/v1/responses", {"model": "a", "input": "hello"}).json()
        next_body = {"model": "b", "input": "and you?", "previous_response_id": first["id"]}
        second = await lab.ask("POST", "/v1/responses", next_body).json()
        assert second["output"][0]["content"][0]["text"] == "b."
        assert (await lab.get(f"/v1/responses/{first['id']}")).json()["model"] == "a"
        items = (await lab.get(f"/v1/responses/{second['id']}/input_items")).json()["data"]
        assert len(items) == 3

    run(work)


def test_draining_lets_answers_finish_and_sends_those_who_wait_elsewhere() -> None:
    async def work(lab: Lab) -> None:
        lab.lives["a"].may_answer.clear()
        running = await lab.chat("a", stream=True).begun()
        waiting = lab.chat("b")
        await until(lambda: lab.models.manager.num_waiting == 1)
        draining = asyncio.create_task(lab.models.drain(30.0))
        assert (await waiting.json())["error"]["code"] == "not_ready"
        for name in ("a", "b"):
            refused = await lab.chat(name).begun()
            await refused.rest()
            assert refused.status == 503
        assert (await lab.get("/ready")).status_code == 503
        assert not draining.done()
        lab.lives["a"].may_answer.set()
        assert sse(await running.events())[-1] == "data: [DONE]"
        await draining
        assert lab.models.num_active == 0

    run(work)


def test_kept_models_stay_and_leave_room_for_one_other() -> None:
    async def work(lab: Lab) -> None:
        for name in ("a", "b", "c", "b", "a"):
            assert (await lab.chat(name).json())["model"] == name
        assert [life.num_loads for life in lab.lives.values()] == [1, 2, 1]

    run(work, ("a", "b", "c"), memory=2, kept=["a"])


def test_a_burst_of_everything_at_once_is_answered() -> None:
    """64 requests in five dialects to five models with room for two: each gets the answer of its own model."""

    async def work(lab: Lab) -> None:
        asked = []
        for index in range(64):
            name, path = "abcde"[index * 7 % 5], list(DIALECTS)[index % len(DIALECTS)]
            asked.append((name, path, lab.ask("POST", path, DIALECTS[path] | {"model": name})))
        for name, path, one in asked:
            assert text_of(path, await one.json()) == f"{name}."
        assert sum(life.num_loads for life in lab.lives.values()) == 5
        lab.models.pool.check_integrity()
        assert all(lab.models.pool.num_users(name) == 0 for name in lab.lives)

    run(work, ("a", "b", "c", "d", "e"), memory=2)
