"""What goes wrong beside a backend's one answer at a time, and what is noted of it; without a model, then with one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, PastToken, Progress, SamplingParams, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop
from ktransformers.errors import DeadlineError, EngineError, NotReadyError, SlowReaderError
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.server.backend.base import BackendInterfaceBase, GenerationRequest
from ktransformers.server.backend.events import EventBuffer
from ktransformers.server.backend.interfaces import transformers as interface
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
from ktransformers.server.backend.interfaces.ktransformers import KTransformersInterface
from ktransformers.server.backend.interfaces.transformers import LoadedLoop
from ktransformers.server.backend.timeline import Timeline
from ktransformers.server.balance.supervisor import BalanceConfig
from tests.server.backend.test_events import FakeBackend, alone, collect, request, until_turns
from tests.support.engines.fake_runner import FakeEngine, byte_tokenizer
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.sequential import Session
from tests.support.models.demo import DEMO_GGUF

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


async def rest_of(events: AsyncGenerator[TokenEvent, None]) -> list[TokenEvent]:
    return [event async for event in events]


def test_a_step_that_fails_ends_its_answer_alone_and_says_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        backend = FakeBackend()
        backend.runner.fails_at = 3
        await backend.start()
        failing = asyncio.create_task(collect(backend, request(0, params=LONG)))
        await until_turns(backend, 1, 0)
        aside = asyncio.create_task(collect(backend, request(1, is_suspended=lambda: True)))
        waiting = asyncio.create_task(collect(backend, request(2)))
        await until_turns(backend, 1, 1)
        backend.gate.set()
        with pytest.raises(EngineError) as failed:
            await failing
        assert str(failed.value) == "the engine failed with RuntimeError; the server's log says more"
        assert [event.token_id for event in await waiting] == alone(2, request().params)
        backend.resume("1")
        assert [event.token_id for event in await aside] == alone(1, request().params)
        await backend.close()

    asyncio.run(main())
    assert "the fake fails here" in caplog.text


@pytest.mark.parametrize("state", ["waiting", "running", "suspended"])
def test_the_error_says_where_the_time_went(state: str) -> None:
    said = {
        "waiting": "the request's time was over before its turn came",
        "running": r"the answer was not complete within the 0\.05 s that it was given",
        "suspended": r"the answer was suspended when the 0\.05 s that it was given were over",
    }

    async def main() -> None:
        backend = FakeBackend()
        await backend.start()
        if state == "waiting":
            other = asyncio.create_task(collect(backend, request(1, params=LONG)))
            await until_turns(backend, 1, 0)
        is_suspended = state == "suspended"
        with pytest.raises(DeadlineError, match=said[state]):
            await collect(backend, request(0, params=LONG, timeout=0.05, is_suspended=lambda: is_suspended))
        backend.gate.set()
        if state == "waiting":
            assert len(await other) == 40
        assert [event.token_id for event in await collect(backend, request(2))] == alone(2, request().params)
        await backend.close()

    asyncio.run(main())


def test_who_is_resumed_waits_again_for_its_turn() -> None:
    async def main() -> None:
        backend = FakeBackend()
        await backend.start()
        first = asyncio.create_task(collect(backend, request(0, params=LONG)))
        second = asyncio.create_task(collect(backend, request(1, params=LONG)))
        await until_turns(backend, 1, 1)
        backend.suspend("0")
        backend.gate.set()
        while not backend._requests["1"].has_begun:
            await asyncio.sleep(0)
        backend.gate.clear()
        backend.resume("0")
        assert (backend.stats().num_running, backend.stats().num_waiting) == (1, 1)
        backend.gate.set()
        assert [event.token_id for event in await second] == alone(1, LONG)
        assert [event.token_id for event in await first] == alone(0, LONG)
        await backend.close()

    asyncio.run(main())


def test_who_reads_too_slowly_is_cut_off_and_the_next_one_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "EventBuffer", partial(EventBuffer, bound=5))

    async def main() -> None:
        backend = FakeBackend()
        backend.gate.set()
        await backend.start()
        events = backend.inference(request(0, params=replace(LONG, max_tokens=60)))
        await anext(events)
        buffer = backend._requests["0"].buffer
        while not buffer.is_closed:
            await asyncio.to_thread(lambda: None)  # this loop goes on, and does not read
        assert len(await collect(backend, request(1))) == 4
        with pytest.raises(SlowReaderError):
            await rest_of(events)
        assert backend.stats().num_running == 0
        await backend.close()

    asyncio.run(main())


def test_closing_ends_each_answer_with_abort() -> None:
    """One that runs, one that waits, one that is set aside, and one whose past is not told yet."""

    async def main() -> None:
        backend = FakeBackend()
        await backend.start()
        running = asyncio.create_task(collect(backend, request(0, params=LONG)))
        await until_turns(backend, 1, 0)
        waiting = asyncio.create_task(collect(backend, request(1)))
        aside = asyncio.create_task(collect(backend, request(2, is_suspended=lambda: True)))
        past = [PastToken(0, token, 0) for token in alone(3, LONG)[:3] if token is not None]
        begun = backend.inference(request(3, params=LONG, past=past))
        await anext(begun)
        await until_turns(backend, 1, 2)
        closing = asyncio.create_task(backend.close())
        await asyncio.sleep(0)  # it has said that all are to end
        backend.gate.set()
        for task in (running, waiting, aside):
            assert (await task)[-1].finish_reason is FinishReason.ABORT
        assert (await rest_of(begun))[-1].finish_reason is FinishReason.ABORT
        await closing

    asyncio.run(main())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_model_that_is_loaded_when_the_server_has_stopped_is_closed(is_cancelled: bool) -> None:
    started, go_on, made = threading.Event(), threading.Event(), list[FakeEngine]()

    class Loading(FakeBackend):
        def _load(self, progress: Progress) -> LoadedLoop:
            def build(report: Callable[..., None]) -> FakeEngine:
                started.set()
                assert go_on.wait(60)
                made.append(FakeEngine(self.runner, byte_tokenizer()))
                return made[0]  # without a last word of how far it is

            return LoadedLoop.of(BatchLoop(build, progress), ProfileMeta(backend=self.name, version=""))

    async def main() -> None:
        backend = Loading()
        start = asyncio.create_task(backend.start())
        await asyncio.to_thread(started.wait)
        if is_cancelled:
            start.cancel()
        closing = asyncio.create_task(backend.close())
        await asyncio.sleep(0)
        assert not closing.done()
        go_on.set()
        await closing
        assert made[0].is_closed
        with pytest.raises(asyncio.CancelledError if is_cancelled else NotReadyError):
            await start
        assert not backend.is_ready

    asyncio.run(main())


def test_chunks_are_noted_where_they_are_also_of_one_that_goes_on() -> None:
    """A prompt of 20 tokens in chunks of 8; then its 20, and what it has of its answer, behind a whole page."""

    async def main() -> None:
        backend = FakeBackend()
        backend.gate.set()
        await backend.start()
        timeline = Timeline()
        asked = request(0, prompt_ids=tuple(range(20)), params=LONG, timeline=timeline)
        events = backend.inference(asked)
        got = [await anext(events) for _ in range(3)]
        assert [(one.position, one.num_tokens, one.num_rows) for one in timeline.chunks[:3]] == [
            (0, 8, 8),
            (8, 8, 8),
            (16, 4, 4),
        ]
        assert timeline.began is not None
        assert timeline.created <= timeline.began <= timeline.chunks[0].began
        rest = asyncio.create_task(rest_of(events))
        backend.suspend("0")
        await collect(backend, request(1, prompt_ids=tuple(range(50, 70))))
        num_chunks = timeline.num_chunks
        backend.resume("0")
        got += await rest
        if len(got) == 40 and num_chunks == 3 and timeline.num_chunks > 3:  # it was not over before it was set aside
            first, *others = timeline.chunks[3:]
            assert first.position % 16 == 0
            for before, after in zip([first, *others], others, strict=False):
                assert after.position == before.position + before.num_tokens
            last = timeline.chunks[-1]
            assert 20 < last.position + last.num_tokens < 60
        await backend.close()

    asyncio.run(main())


# With a model.


@asynccontextmanager
async def served(backend: BackendInterfaceBase) -> AsyncIterator[BackendInterfaceBase]:
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def asked_of(number: int, **fields: object) -> GenerationRequest:
    params = SamplingParams(temperature=0.9, seed=number, max_tokens=12 + number, ignore_eos=bool(number % 2))
    ids = tuple(range(5, 25 + 7 * number))
    return GenerationRequest(**{"request_id": f"r{number}", "prompt_ids": ids, "params": params, **fields})  # type: ignore[arg-type]


async def tokens_of(backend: BackendInterfaceBase, asked: GenerationRequest) -> list[int | None]:
    return [event.token_id for event in await rest_of(backend.inference(asked))]


def test_answers_are_those_of_balance_serve_and_of_the_oracle() -> None:
    config = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=512, chunk_size=8, self_check=False)
    engine = static_engine(config)
    oracle = Session.of(engine)
    wanted = []
    for number in range(4):
        one = asked_of(number)
        wanted.append([event.token_id for event in oracle.generate(one.prompt_ids, one.params)])
    engine.close()
    balance = BalanceConfig(replace(config, cache_lens=1024), page_size=16, max_batch_size=4, has_spare_engine=False)

    async def main() -> None:
        for made in (KTransformersInterface(config), BalanceServeInterface(balance)):
            async with served(made) as backend:
                answers = [tokens_of(backend, asked_of(number)) for number in range(4)]
                assert await asyncio.gather(*answers) == wanted

    asyncio.run(main())


def test_the_model_goes_on_with_a_past_and_keeps_salts_apart() -> None:
    config = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=512, self_check=False)

    async def main() -> None:
        async with served(KTransformersInterface(config)) as backend:
            prompt, cached_lens, answers = tuple(range(5, 55)), [], []
            for number, salt in enumerate(["a", "a", "b", "a", "b", ""]):
                asked = asked_of(1, prompt_ids=prompt, request_id=str(number), cache_salt=salt)
                events = await rest_of(backend.inference(asked))
                cached_lens.append(events[-1].stats.cached_len)
                answers.append([event.token_id for event in events])
            assert cached_lens == [0, 48, 0, 48, 48, 0]
            assert all(answer == answers[0] for answer in answers)
            past = [PastToken(0, token, 7) for token in answers[0][:5] if token is not None]
            events = await rest_of(backend.inference(asked_of(1, prompt_ids=prompt, past=past)))
            assert [event.token_id for event in events] == answers[0]
            assert {event.stats.cached_len for event in events} == {7}

    asyncio.run(main())


@pytest.mark.exhaustive
def test_a_model_that_is_divided_answers_the_same() -> None:
    config = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=512, chunk_size=8, self_check=False)

    async def main() -> None:
        answers = []
        for each in (config, replace(config, pipeline=2)):
            async with served(KTransformersInterface(each)) as backend:
                answers.append([await tokens_of(backend, asked_of(number)) for number in range(3)])
        assert answers[0] == answers[1]

    asyncio.run(main())
