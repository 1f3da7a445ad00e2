"""The buffer between a worker thread and the event loop, and the single backend's turn-taking, without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, GenerationStats, Progress, SamplingParams, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop
from ktransformers.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    NotReadyError,
    SlowReaderError,
)
from ktransformers.profiling.messages import ProfileMeta
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.backend.events import EventBuffer
from ktransformers.server.backend.interfaces.transformers import LoadedLoop, TransformersInterface
from tests.support.engines.fake_runner import FakeEngine, FakeRunner, byte_tokenizer, ngram_logits
from tests.support.engines.sequential import Session

VOCAB = byte_tokenizer().vocab_size


def event(token_id: int) -> TokenEvent:
    return TokenEvent(token_id, "", GenerationStats())


class FakeBackend(TransformersInterface):
    """A fake model that waits at `gate` before every forward."""

    name = "fake"
    can_suspend = True

    def __init__(self) -> None:
        super().__init__(EngineConfig())
        self.gate = threading.Event()
        self.runner = FakeRunner(ngram_logits(VOCAB), VOCAB, 64)

    def _load(self, progress: Progress) -> LoadedLoop:
        forward = self.runner.forward

        def waiting(*args: object) -> object:
            assert self.gate.wait(60)
            return forward(*args)  # type: ignore[arg-type]

        self.runner.forward = waiting  # type: ignore[method-assign, assignment]
        loop = BatchLoop(lambda report: FakeEngine(self.runner, byte_tokenizer(), chunk_size=8), progress)
        return LoadedLoop.of(loop, ProfileMeta(backend=self.name, version=""))


def request(number: int = 0, **fields: object) -> GenerationRequest:
    params = SamplingParams(temperature=0, max_tokens=4)
    return GenerationRequest(**{"request_id": str(number), "prompt_ids": (number, 2, 3), "params": params, **fields})  # type: ignore[arg-type]


async def collect(backend: TransformersInterface, asked: GenerationRequest) -> list[TokenEvent]:
    async with aclosing(backend.inference(asked)) as events:
        return [event async for event in events]


async def until_turns(backend: TransformersInterface, num_running: int, num_waiting: int) -> None:
    while (backend.stats().num_running, backend.stats().num_waiting) != (num_running, num_waiting):
        await asyncio.sleep(0)


def test_events_arrive_in_order_and_a_slow_reader_is_cut_off() -> None:
    async def main() -> None:
        buffer = EventBuffer(asyncio.get_running_loop(), bound=3)
        thread = threading.Thread(target=lambda: [buffer.put(event(i)) for i in range(5)])
        thread.start()
        thread.join()
        assert buffer.is_closed
        events = aiter(buffer)
        assert [(await anext(events)).token_id for _ in range(3)] == [0, 1, 2]
        with pytest.raises(SlowReaderError):
            await anext(events)

    asyncio.run(main())


def test_requests_take_turns_in_the_order_of_their_arrival() -> None:
    async def main() -> None:
        backend = FakeBackend()
        with pytest.raises(NotReadyError):
            backend.model  # noqa: B018
        await backend.start()
        order: list[int] = []

        async def one(number: int) -> list[int | None]:
            events = await collect(backend, request(number))
            order.append(number)
            return [event.token_id for event in events]

        tasks = [asyncio.create_task(one(number)) for number in range(4)]
        await until_turns(backend, num_running=1, num_waiting=3)
        tasks[2].cancel()
        backend.gate.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 3]
        assert isinstance(answers[2], asyncio.CancelledError)
        for number in (0, 1, 3):
            assert answers[number] == alone(number, request().params)
        await backend.close()

    asyncio.run(main())


def test_deadlines_count_from_the_arrival() -> None:
    async def main() -> None:
        backend = FakeBackend()
        await backend.start()
        first = asyncio.create_task(collect(backend, request(0, timeout=0.05)))
        second = asyncio.create_task(collect(backend, request(1, timeout=0.05)))
        for task in (first, second):  # the first within its prefill, the second before its turn
            with pytest.raises(DeadlineError):
                await task
        backend.gate.set()
        assert (await collect(backend, request(2)))[-1].finish_reason is FinishReason.LENGTH
        await backend.close()

    asyncio.run(main())


def alone(number: int, params: SamplingParams) -> list[int | None]:
    tokenizer = byte_tokenizer()
    runner = FakeRunner(ngram_logits(VOCAB), VOCAB, 64)
    session = Session(runner, chunk_size=8, eos_token_ids=tokenizer.eos_token_ids, tokenizer=tokenizer)
    return [event.token_id for event in session.generate([number, 2, 3], params)]


def test_a_suspended_answer_lets_others_through_and_goes_on_exactly() -> None:
    async def main() -> None:
        backend = FakeBackend()
        await backend.start()
        long = SamplingParams(temperature=0, max_tokens=40)
        first = asyncio.create_task(collect(backend, request(0, params=long)))
        second = asyncio.create_task(collect(backend, request(1)))
        third = asyncio.create_task(collect(backend, request(2)))
        await until_turns(backend, num_running=1, num_waiting=2)
        backend.suspend("0")  # in its prefill
        backend.suspend("2")  # while it waits
        backend.suspend("nobody")
        backend.gate.set()
        assert [event.token_id for event in await second] == alone(1, request().params)
        await until_turns(backend, num_running=0, num_waiting=0)
        assert backend.stats().num_suspended == 2
        assert not first.done()
        assert not third.done()
        backend.resume("0")
        backend.resume("nobody")
        assert [event.token_id for event in await first] == alone(0, long)
        assert not third.done()
        backend.resume("2")
        assert [event.token_id for event in await third] == alone(2, request().params)
        await backend.close()

    asyncio.run(main())


def test_suspended_again_and_again() -> None:
    async def main() -> None:
        backend = FakeBackend()
        backend.gate.set()
        await backend.start()
        long, got = SamplingParams(temperature=0, max_tokens=40), list[int | None]()
        async with aclosing(backend.inference(request(0, params=long))) as events:
            async for one in events:
                got.append(one.token_id)
                backend.suspend("0")
                await collect(backend, request(len(got)))  # has the cache, if the other one's step was not its last
                backend.resume("0")
        assert got == alone(0, long)
        assert backend.stats().num_suspended == 0
        await backend.close()

    asyncio.run(main())


def test_time_and_the_end_do_not_wait_for_what_is_suspended() -> None:
    async def main() -> None:
        backend = FakeBackend()
        backend.gate.set()
        await backend.start()
        timed = asyncio.create_task(collect(backend, request(0, timeout=0.02)))
        await asyncio.sleep(0)
        backend.suspend("0")
        with pytest.raises(DeadlineError, match=r"was suspended when the 0\.02 s"):
            await timed
        left = asyncio.create_task(collect(backend, request(1)))
        closed = asyncio.create_task(collect(backend, request(2)))
        await asyncio.sleep(0)
        backend.suspend("1")
        backend.suspend("2")
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert (await collect(backend, request(3)))[-1].finish_reason is FinishReason.LENGTH
        with pytest.raises(ValueError, match="in use"):
            await collect(backend, request(2))
        await backend.close()
        assert (await closed)[-1].finish_reason is FinishReason.ABORT

    asyncio.run(main())


def test_a_failing_engine_ends_one_request(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        backend = FakeBackend()
        backend.gate.set()
        await backend.start()
        backend.runner.fails_at = 2
        with pytest.raises(EngineError, match="RuntimeError"):
            await collect(backend, request(0))
        assert len(await collect(backend, request(0))) == 4
        await backend.close()

    asyncio.run(main())
    assert "the answers that were in it end here (0), all others go on" in caplog.text


def test_closing_ends_what_runs_and_a_load_in_progress() -> None:
    async def main() -> None:
        backend = FakeBackend()
        backend.gate.set()
        await backend.start()
        params = SamplingParams(temperature=0, max_tokens=60)
        async with aclosing(backend.inference(request(0, params=params))) as events:
            await anext(events)
            closing = asyncio.create_task(backend.close())
            rest = [event async for event in events]
            await closing
        assert rest[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)

        class Loading(FakeBackend):
            def _load(self, progress: Progress) -> LoadedLoop:
                def build(report: Callable[..., None]) -> FakeEngine:
                    started.set()
                    assert go_on.wait(60)
                    report(1, 2, "a module")
                    raise AssertionError("the load was not ended")

                return LoadedLoop.of(BatchLoop(build, progress), ProfileMeta(backend=self.name, version=""))

        started, go_on = threading.Event(), threading.Event()
        loading = Loading()
        start = asyncio.create_task(loading.start())
        await asyncio.to_thread(started.wait)
        close = asyncio.create_task(loading.close())
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(NotReadyError):
            await start
        await close

    asyncio.run(main())


def test_what_can_be_refused_is_refused_before_the_queue() -> None:
    async def main() -> None:
        backend = FakeBackend()
        await backend.start()
        backend.check(request(0))
        for fields, error in (
            ({"prompt_ids": ()}, ConfigError),
            ({"prompt_ids": (1,) * 64}, ContextLengthError),
            ({"prompt_ids": (VOCAB,)}, ConfigError),
            ({"params": SamplingParams(logit_bias={VOCAB: 1.0})}, ConfigError),
            ({"params": SamplingParams(logit_bias={1: 101.0})}, ConfigError),
            ({"params": SamplingParams(allowed_token_ids=(-1,))}, ConfigError),
        ):
            with pytest.raises(error):
                backend.check(request(0, **fields))
        await backend.close()

    asyncio.run(main())
