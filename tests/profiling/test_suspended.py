"""Profiles of requests that were suspended: the gap is told, and is in nobody's time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, PastToken, SamplingParams
from ktransformers.profiling.join import Joiner
from ktransformers.profiling.pauses import MAX_PAUSES, Pauses
from ktransformers.profiling.tables import load
from ktransformers.profiling.trace import write_trace
from ktransformers.scheduler.profiled import RequestTracker
from ktransformers.scheduler.records import NewSequence, RequestUpdate, StepPlan
from ktransformers.server.backend.base import BackendInterfaceBase, GenerationRequest
from ktransformers.server.backend.interfaces.ktransformers import KTransformersInterface
from ktransformers.server.backend.profiler import ProfileConfig
from tests.support.checks.profiles import ReadProfile, check_sums, read_profile
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.balance_backend import backend, check, request, run, until

MS = 1_000_000


class Told:
    """A tracker and what becomes of its records; `now` is in milliseconds."""

    def __init__(self) -> None:
        self.now, self.lines = 0.0, dict[str, list[dict[str, Any]]](tokens=[], requests=[], steps=[])
        self._joiner = Joiner(lambda name, line: self.lines[name].append(line), 0)
        self.tracker = RequestTracker(lambda one: self._joiner.take(one, 0.0), lambda: int(self.now * MS))
        self._step = 0

    def at(self, now: float) -> RequestTracker:
        self.now = now
        return self.tracker

    def start(self, now: float, *answer: int) -> None:
        start = NewSequence(run_id=1, request_id="r", params=SamplingParams(), prompt_len=2, token_ids=[1, 2, *answer])
        self.at(now).planned(StepPlan(step_id=1, starts=[start], rows=[], ended=[]))

    def token(self, now: float, index: int, reason: FinishReason | None = None) -> None:
        update = RequestUpdate(
            request_id="r", token_id=7, prompt_len=2, cached_len=0, completion_len=index + 1, finish_reason=reason
        )
        self._step += 1
        self.at(now).committed(self._step, [update], 0)

    def finish(self) -> dict[str, Any]:
        self._joiner.finish()
        (line,) = self.lines["requests"]
        return line


def test_the_gap_is_told_and_counts_as_nothing() -> None:
    told = Told()
    told.at(0).added("r", 2)
    told.at(10).pause("r", True)
    told.at(11).pause("r", True)
    told.at(40).pause("r", False)
    told.start(50)
    told.token(60, 0)
    told.token(65, 1)
    told.at(70).pause("r", True)
    told.at(100).pause("r", False)
    told.at(101).pause("r", True)
    told.at(111).pause("r", False)
    told.start(112, 7, 7)
    told.token(115, 2)
    told.start(120, 7, 7, 7)  # after a preemption
    told.token(130, 3)
    told.at(140).pause("r", True)
    told.tracker.stop()
    line = told.finish()
    assert [(one["ms"], one.get("suspended_ms")) for one in told.lines["tokens"]] == [
        (30.0, 30.0),
        (5.0, None),
        (10.0, 40.0),
        (15.0, None),
    ]
    assert line["suspended"] == [[0.01, 0.04], [0.07, 0.1], [0.101, 0.111], [0.14, None]]
    assert line["preemptions"] == 1


def test_one_that_comes_suspended() -> None:
    told = Told()
    told.at(5).added("r", 2, is_suspended=True)
    told.at(9).pause("r", False)
    told.start(10)
    told.token(12, 0, FinishReason.LENGTH)
    line = told.finish()
    assert (line["suspended"], line["preemptions"]) == ([[0.005, 0.009]], 0)
    assert (told.lines["tokens"][0]["ms"], told.lines["tokens"][0]["suspended_ms"]) == (3.0, 4.0)


def test_what_came_before_the_profile_is_no_gap() -> None:
    told = Told()
    told.at(5).pause("r", True)
    told.at(6).pause("r", False)
    told.start(7, 7)
    told.token(9, 1, FinishReason.LENGTH)
    assert told.finish()["suspended"] == []
    assert told.lines["tokens"][0]["ms"] is None


def test_lists_are_bounded_and_sums_are_not() -> None:
    pauses = Pauses()
    for at in range(2 * MAX_PAUSES):
        pauses.begin(10 * at)
        pauses.end(10 * at + 3)
    assert len(pauses.listed()) == MAX_PAUSES
    assert pauses.take() == 6 * MAX_PAUSES
    assert pauses.take() == 0


def check_profile(profile: ReadProfile, folder: Path, name: str) -> None:
    """Of this request, which was suspended behind five tokens."""
    check_sums(profile)
    (line,) = (one for one in profile.requests if one["request"] == name)
    tokens = [token for token in profile.tokens if token["request"] == name]
    ((began, ended),) = line["suspended"]
    assert line["preemptions"] == 0
    assert line["arrived"] <= line["first_token"] <= began <= ended <= line["ended"]
    (behind,) = (token for token in tokens if "suspended_ms" in token)
    assert behind["index"] >= 5
    assert behind["suspended_ms"] == pytest.approx(1000 * (ended - began), abs=0.01)
    spent = sum(token["ms"] + token.get("suspended_ms", 0.0) for token in tokens)
    assert spent == pytest.approx(1000 * (tokens[-1]["t"] - line["arrived"]), abs=0.01 * len(tokens))
    trace = folder / "trace.json"
    write_trace(load(folder), trace)
    slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "suspended"]
    assert slices[0]["dur"] == pytest.approx(1e6 * (ended - began), abs=2)


async def suspended_once(made: BackendInterfaceBase, asked: GenerationRequest) -> list[Any]:
    """Behind its fifth token; others may be computed meanwhile."""
    events = made.inference(asked)
    told = [await anext(events) for _ in range(5)]
    made.suspend(asked.request_id)
    rest = asyncio.create_task(collected(events))
    await until(lambda: made.stats().num_suspended == 1)
    made.resume(asked.request_id)
    return told + await rest


async def resumed_late(made: BackendInterfaceBase, asked: GenerationRequest) -> list[Any]:
    """Of a request that comes suspended: it tells its past, and no more before it is resumed."""
    events = made.inference(asked)
    told = [await anext(events) for _ in asked.past]
    rest = asyncio.create_task(collected(events))
    await until(lambda: made.stats().num_suspended == 1)
    assert (made.stats().num_running, rest.done()) == (0, False)
    made.resume(asked.request_id)
    return told + await rest


async def collected(events: Any) -> list[Any]:
    return [event async for event in events]


@pytest.mark.exhaustive
def test_many_sequences(tmp_path: Path) -> None:
    async def work() -> None:
        async with backend("load_slow", profile=ProfileConfig(tmp_path / "p")) as made:
            asked = request(1, params={"max_tokens": 60, "ignore_eos": True})
            events = await suspended_once(made, asked)
            check(events, asked)
            past = [PastToken(0, event.token_id, 0) for event in events[:5]]
            again = replace(asked, request_id="again", past=past, is_suspended=lambda: True)
            assert [event.token_id for event in await resumed_late(made, again)] == [one.token_id for one in events]
            at_once = made.inference(replace(again, request_id="at once"))
            first = await anext(at_once)
            made.resume("at once")  # before the scheduler has heard of it
            assert [first.token_id] + [event.token_id for event in await collected(at_once)] == [
                one.token_id for one in events
            ]

    run(work)
    profile = read_profile(tmp_path / "p")
    check_profile(profile, tmp_path / "p", "r1")
    found = {line["request"]: line for line in profile.requests}
    assert len(found["again"]["suspended"]) == 1
    assert found["again"]["arrived"] <= found["again"]["suspended"][0][0]
    assert found["again"]["suspended"][0][1] <= found["again"]["ended"]
    assert (found["again"]["preemptions"], found["at once"]["suspended"]) == (0, [])


def test_one_sequence(tmp_path: Path) -> None:
    async def work() -> None:
        config = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=512)
        made = KTransformersInterface(config, ProfileConfig(tmp_path / "p"))
        await made.start()
        try:
            params = SamplingParams(temperature=0, max_tokens=400, seed=1, ignore_eos=True)
            asked = GenerationRequest(request_id="a", prompt_ids=(5, 6, 7), params=params)
            answer = [event.token_id for event in await suspended_once(made, asked)]
            past = [PastToken(0, token, 2) for token in answer[:5]]
            events = await resumed_late(made, replace(asked, request_id="c", past=past, is_suspended=lambda: True))
            assert [event.token_id for event in events] == answer
            assert {event.stats.cached_len for event in events} == {2}
            given_up = made.inference(replace(asked, request_id="d"))
            await anext(given_up)
            made.suspend("d")
            rest = asyncio.create_task(collected(given_up))
            await until(lambda: made.stats().num_suspended == 1)
            made.end("d")
            assert (await rest)[-1].finish_reason is FinishReason.ABORT
            await made.profiler.stop()
            again = made.inference(replace(asked, request_id="b"))
            assert answer == [event.token_id for event in await collected(again)]
        finally:
            await made.close()

    run(work)
    profile = read_profile(tmp_path / "p")
    check_profile(profile, tmp_path / "p", "a")
    rest = [token for token in profile.tokens if token["request"] == "c"]
    assert [(token["index"], token["position"]) for token in rest] == [(index, index + 3) for index in range(5, 400)]
    assert [line["prompt_len"] for line in profile.requests] == [3, 3, 3]
    assert [line["finish_reason"] for line in profile.requests] == ["length", "length", "abort"]
    assert len(profile.requests[2]["suspended"]) == 1
