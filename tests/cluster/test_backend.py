"""Answers whose replicas are lost, without Ray: real schedulers, engines without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from ktransformers.cluster.backend import ReplicaInterface
from ktransformers.cluster.records import Ask
from ktransformers.core import FinishReason, TokenEvent
from ktransformers.errors import DeadlineError, EngineError, NotReadyError, SlowReaderError
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.system.restart_policy import MAX_STRIKES
from tests.support.servers.balance_backend import alone, backend, check, collect, request, run, until
from tests.support.servers.balance_fakes import POISON
from tests.support.servers.fake_replicas import FakeReplicas


@asynccontextmanager
async def service(
    dies: Callable[[Ask, int], bool] = lambda ask, num_told: False,
    factories: tuple[str, ...] = ("load", "load"),
    max_unread: int = 4096,
    **config: Any,
) -> AsyncIterator[tuple[ReplicaInterface, FakeReplicas]]:
    async with AsyncExitStack() as stack:
        backends = [await stack.enter_async_context(backend(factory, **config)) for factory in factories]
        replicas = FakeReplicas(*backends, dies=dies)
        stack.push_async_callback(replicas.close)
        made = ReplicaInterface(replicas, lambda: backends[0].model.tokenizer, max_unread)
        stack.push_async_callback(made.close)
        with pytest.raises(NotReadyError):
            made.model  # noqa: B018
        await made.start()
        yield made, replicas


def test_replicas_are_sent_no_pictures() -> None:
    async def work() -> None:
        async with service() as (made, _):
            check(await collect(made, request(1)), request(1))
            assert made.model.modalities == ["text"]
            assert made.model.no_pictures == "replicas on other machines are sent none"

    run(work)


def shown(events: list[TokenEvent]) -> list[tuple[object, ...]]:
    """Of events what no clock decides."""
    return [(one.token_id, one.text, one.logprobs, one.finish_reason, one.stop, one.prompt_logprobs) for one in events]


def long_request(number: int = 1, **fields: Any) -> GenerationRequest:
    return request(number, params={"max_tokens": 40, "ignore_eos": True, "logprobs": 2}, **fields)


def test_every_answer_is_as_if_nothing_had_happened() -> None:
    """Each request loses its first replica behind another number of tokens, and its second one a token later."""

    def dies(ask: Ask, num_told: int) -> bool:
        name, _, num_asked = ask.request_id.split(".")
        return int(num_asked) < 3 and num_told >= (int(name.removeprefix("r")) % 7 if num_asked == "1" else 1)

    async def work() -> None:
        async with service(dies) as (made, replicas):
            asked = [request(number, params={"logprobs": 1}) for number in range(24)]
            answers = await asyncio.gather(*(collect(made, one) for one in asked))
            for one, events in zip(asked, answers, strict=True):
                check(events, one)
            assert len({ask.request_id for ask in replicas.asked}) == len(replicas.asked)
            replicas.dies = lambda ask, num_told: False
            for one, events in zip(asked[:8], answers, strict=False):
                assert shown(await collect(made, one)) == shown(events)
            assert made.stats().num_taken_over >= 24

    run(work)


def test_a_request_that_takes_its_replicas_along_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.cluster.backend.MAX_LOSSES", 5)

    async def work() -> None:
        async with service(lambda ask, num_told: True) as (made, replicas):
            with pytest.raises(EngineError, match=f"{MAX_STRIKES} replicas were lost"):
                await collect(made, request(1))
            assert len(replicas.asked) == MAX_STRIKES
            replicas.asked.clear()
            replicas.dies = lambda ask, num_told: num_told >= 1
            with pytest.raises(EngineError, match="5 replicas were lost"):
                await collect(made, request(1, params={"max_tokens": 3000, "ignore_eos": True}))
            assert [len(ask.past) for ask in replicas.asked] == sorted(len(ask.past) for ask in replicas.asked)
            replicas.dies = lambda ask, num_told: False
            check(await collect(made, request(2)), request(2))

    run(work)


def test_a_replica_whose_engine_is_gone_for_good_is_left() -> None:
    asked = request(5, (POISON, 7, 8))

    async def work() -> None:
        async with service(factories=("load_mortal", "load"), max_engine_restarts=0) as (made, replicas):
            check(await collect(made, asked), asked)
            assert len(replicas.asked) == 2

    run(work)


def test_what_is_wrong_with_a_request_is_no_reason_to_ask_again() -> None:
    async def work() -> None:
        async with service(factories=("load_slow",)) as (made, replicas):
            with pytest.raises(DeadlineError):
                await collect(made, long_request(timeout=0.05))
            assert len(replicas.asked) == 1

    run(work)


def test_a_suspended_answer_stays_so_at_the_next_replica() -> None:
    asked = long_request(3)

    async def work() -> None:
        async with service(factories=("load_slow", "load_slow")) as (made, replicas):
            answer = asyncio.create_task(collect(made, asked))
            await until(lambda: "r3" in made._runs and len(made._runs["r3"].past) >= 3)
            made.suspend("r3")
            made.suspend("another")  # nobody's
            await until_suspended(made)
            replicas.kill()
            await until(lambda: len(replicas.asked) == 2)
            assert replicas.asked[1].is_suspended
            await until(lambda: made._runs["r3"].replica == "replica1")
            made.resume("r3")
            made.suspend("r3")
            made.resume("r3")
            check(await answer, asked)
            assert [order.what for order in replicas.orders] == ["suspend", "resume", "suspend", "resume"]

    run(work)


def test_a_request_that_comes_suspended_waits_for_resume() -> None:
    asked = long_request(4, is_suspended=lambda: True)

    async def work() -> None:
        async with service() as (made, replicas):
            answer = asyncio.create_task(collect(made, asked))
            await until(lambda: bool(replicas.asked))
            assert replicas.asked[0].is_suspended
            await made._look()
            await until_suspended(made)
            made.resume(asked.request_id)
            check(await answer, asked)

    run(work)


async def _rest(events: AsyncGenerator[TokenEvent, None]) -> None:
    async for _ in events:
        pass


async def until_suspended(made: ReplicaInterface) -> None:
    while made.stats().num_suspended != 1:
        await made._look()
        await asyncio.sleep(0)


def test_the_end_of_an_answer_reaches_its_replica_or_nobody() -> None:
    asked = long_request(6)

    async def work() -> None:
        async with service(factories=("load_slow",)) as (made, replicas):
            reasons = []
            async with aclosing(made.inference(asked)) as events:
                async for event in events:
                    reasons.append(event.finish_reason)
                    if len(reasons) == 2:
                        made.end(asked.request_id)
                        made.end(asked.request_id)
            assert reasons[-1] is FinishReason.ABORT
            assert len(reasons) < 40
            assert [order.what for order in replicas.orders] == ["end"]
            replicas.are_there.clear()
            answer = asyncio.create_task(collect(made, asked))
            await until(lambda: asked.request_id in made._runs)
            made.end(asked.request_id)
            assert [event.finish_reason for event in await answer] == [FinishReason.ABORT]

    run(work)


def test_time_runs_while_no_replica_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.cluster.backend._SLACK_SECONDS", 0.0)

    async def work() -> None:
        async with service(factories=("load",)) as (made, replicas):
            replicas.are_there.clear()
            with pytest.raises(DeadlineError):
                await collect(made, long_request(timeout=0.01))

    run(work)


def test_whoever_does_not_read_is_cut_off() -> None:
    async def work() -> None:
        async with service(max_unread=4) as (made, _), aclosing(made.inference(long_request())) as events:
            await anext(events)
            await until(lambda: made._runs["r1"].buffer.is_closed)
            with pytest.raises(SlowReaderError):
                await _rest(events)

    run(work)


def test_whoever_leaves_frees_the_replica() -> None:
    async def work() -> None:
        async with service(factories=("load_slow",)) as (made, _):
            async with aclosing(made.inference(long_request())) as events:
                await anext(events)
            while made.stats().num_running or made.stats().scheduler is None:
                await made._look()
                await asyncio.sleep(0)
            assert not made._runs

    run(work)


def test_figures_are_those_of_all() -> None:
    async def work() -> None:
        async with service() as (made, _):
            prompt = tuple(20 + number % 17 for number in range(40))
            for number in (1, 3, 5, 7):  # two at each
                await collect(made, request(number, prompt))
            while (known := made.stats().scheduler) is None or known.prefix_query_len < 160:
                await made._look()
                await asyncio.sleep(0)
            stats = made.stats()
            assert [one.name for one in stats.replicas] == ["replica0", "replica1"]
            assert stats.scheduler.prefix_query_len == 160
            hits = [one.stats.scheduler.prefix_hit_len for one in stats.replicas]
            assert stats.scheduler.prefix_hit_len == sum(hits)
            assert min(hits) > 0
            assert stats.cache_len == 2 * 4000
            assert made.max_running == 2 * 8
            assert made.pause is None

    run(work)


def test_drafts_of_all_replicas_are_counted_and_each_has_the_prediction() -> None:
    async def work() -> None:
        def dies(ask: Ask, num_told: int) -> bool:
            return ask.request_id.endswith(".1") and num_told >= 30

        plain = request(1, params={"max_tokens": 60, "ignore_eos": True})
        expected, _ = alone(plain)
        async with service(dies, ("load_drafting", "load_drafting")) as (made, replicas):
            assert made.model.max_drafts == 3
            events = await collect(made, replace(plain, prediction_ids=tuple(expected)))
            check(events, plain)
            assert [ask.prediction_ids for ask in replicas.asked] == [tuple(expected)] * 2
            counts = [(told.stats.num_drafted, told.stats.num_accepted) for told in replicas.told]
            before, after = counts[29], counts[-1]
            assert before[1] > 0
            assert after[1] > 0
            stats = events[-1].stats
            assert (stats.num_drafted, stats.num_accepted) == (before[0] + after[0], before[1] + after[1])

    run(work)
