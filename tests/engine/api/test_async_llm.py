"""AsyncLLM on the bundled model: the answers of LLM, streamed to many tasks; nothing slow on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.core import FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.api.async_llm import AsyncLLM
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load import builder
from ktransformers.engine.sequence.outputs import PromptReader
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.errors import ConfigError, ContextLengthError, EngineError
from ktransformers.scheduler.records import SchedulerStats, StepPlan, StepResult
from tests.support.engines.stepping import Stepping

DEMO = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"cpu_infer": 1, "cache_lens": 1024, "max_batch_size": 4, "page_size": 8}
PROMPTS = ["Once upon a time", "What is 17 + 25?", [5, 6, 7] * 20, "Reverse the word: kernel", [9], "Hello", "x" * 90]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, **OPTIONS) as made:
        yield made


async def _drain(events: AsyncIterator[TokenEvent]) -> None:
    async for _ in events:
        pass


def stats(llm: AsyncLLM) -> SchedulerStats:
    assert llm._loaded is not None
    return llm._loaded.batches.stats()


def params(i: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=10 + 3 * i, logprobs=1, ignore_eos=True)


def test_an_answer_is_suspended_while_its_reader_waits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = llm.generate(PROMPTS[0], params(5))[0]
    steps = Stepping(monkeypatch, 4)

    async def ask() -> None:
        async with AsyncLLM(DEMO, **OPTIONS) as served:
            assert not await served.suspend("r")
            got: list[int | None] = []
            async for event in served.generate(PROMPTS[0], params(5), request_id="r"):
                got.append(event.token_id)
                if len(got) == 3:
                    assert await served.suspend("r")
                    steps.go_on()
                    assert stats(served).num_used_pages == 0
                    assert (await served.chat("Hello", params(1), request_id="s")).token_ids
                    assert not await served.suspend("s"), "it is over"
                    assert await served.resume("r")
            assert tuple(got) == wanted.token_ids

    asyncio.run(ask())


def test_answers_are_those_of_llm(llm: LLM) -> None:
    async def ask() -> None:
        async with AsyncLLM(DEMO, **OPTIONS) as served:
            answers = [served.generate(prompt, params(i)) for i, prompt in enumerate(PROMPTS)]
            whole = await asyncio.gather(*answers)
            for i, output in enumerate(whole):
                wanted = llm.generate(PROMPTS[i], params(i))[0]
                assert (output.prompt_token_ids, output.token_ids) == (wanted.prompt_token_ids, wanted.token_ids)
                assert (output.text, output.logprobs, output.params) == (wanted.text, wanted.logprobs, wanted.params)
            assert (await served.chat("What is 17 + 25?")).text == llm.chat("What is 17 + 25?")[0].text
            assert served.default_params == llm.default_params
            assert served.max_len == llm.max_len
            assert repr(served) == repr(llm).replace("LLM(", "AsyncLLM(")
            assert served.tokenizer.encode("a") == llm.tokenizer.encode("a")

    asyncio.run(ask())


def test_streams_are_increments_and_share_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is held until four tasks have asked."""
    execute, submit = PagedExecutor.execute, BatchLoop.submit
    four, rows = threading.Semaphore(0), []

    def submitting(self: BatchLoop, requests: Sequence[EngineRequest]) -> None:
        submit(self, requests)
        four.release()

    def executing(self: PagedExecutor, plan: StepPlan) -> StepResult:
        if not rows:
            assert all(four.acquire(timeout=60) for _ in range(4))
        rows.append(len(plan.rows))
        return execute(self, plan)

    async def read(served: AsyncLLM, i: int) -> list[TokenEvent]:
        return [event async for event in served.generate(PROMPTS[i], params(i))]

    async def ask() -> None:
        async with AsyncLLM(DEMO, **OPTIONS) as served:
            every = await asyncio.gather(*(read(served, i) for i in range(4)))
            assert max(rows) == 4
            monkeypatch.undo()
            for i, events in enumerate(every):
                wanted = llm.generate(PROMPTS[i], params(i))[0]
                assert tuple(event.token_id for event in events) == wanted.token_ids
                assert "".join(event.text for event in events) == wanted.text
                assert events[-1].finish_reason is FinishReason.LENGTH

    monkeypatch.setattr(BatchLoop, "submit", submitting)
    monkeypatch.setattr(PagedExecutor, "execute", executing)
    asyncio.run(ask())


def test_leaving_frees_the_pages_and_others_go_on(llm: LLM) -> None:
    async def until_third(served: AsyncLLM, reached: asyncio.Event) -> None:
        count = 0
        async for _ in served.generate("Once", ENDLESS):
            count += 1
            if count == 3:
                reached.set()

    async def ask() -> None:
        async with AsyncLLM(DEMO, **OPTIONS) as served:
            reached = asyncio.Event()
            cancelled = asyncio.create_task(until_third(served, reached))
            other = asyncio.create_task(_whole(served, "Once upon a time"))
            await reached.wait()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert (await other) == llm.generate("Once upon a time", params(3))[0].text
            assert stats(served).num_running == 0
            async for _ in served.generate("Once", ENDLESS):
                break
            await asyncio.sleep(0)  # the generator that was left is closed by a task
            await asyncio.sleep(0)
            assert stats(served).num_used_pages == 0
            answer = served.generate("Once", ENDLESS)
            await anext(aiter(answer))
            await answer.aclose()
            await answer.aclose()
            assert stats(served).num_used_pages == 0
            with pytest.raises(EngineError, match="read already"):
                await answer

    async def _whole(served: AsyncLLM, prompt: str) -> str:
        return (await served.generate(prompt, params(3))).text

    asyncio.run(ask())


def test_errors_come_where_the_answer_is_waited_for() -> None:
    async def ask() -> None:
        async with AsyncLLM(DEMO, **OPTIONS) as served:
            with pytest.raises(ContextLengthError, match="1100 tokens"):
                await served.generate([1] * 1100)
            with pytest.raises(ConfigError, match="is empty"):
                async for _ in served.generate([]):
                    pass
            with pytest.raises(ConfigError, match="a message is a dict"):
                await served.chat([5])  # type: ignore[list-item]
            running = served.generate("Once", ENDLESS)
            events = aiter(running)
            await anext(events)
            await served.aclose()
            with pytest.raises(EngineError, match="closed while it was answering"):
                await _drain(events)
        await served.aclose()
        assert repr(served) == "AsyncLLM(closed)"
        for use in (lambda: served.generate("a"), lambda: served.chat("a"), lambda: served.max_len):
            with pytest.raises(EngineError, match="this AsyncLLM is closed"):
                use()
        with pytest.raises(EngineError, match="closed"):
            await served.start()

    asyncio.run(ask())


def test_nothing_slow_runs_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, tokenizing, templates and steps, by the threads that they run on. The first answer loads the model."""
    threads: dict[str, set[int]] = {}

    def watch(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(builder, "build_engine")
    watch(PromptReader, "ids")
    watch(PromptReader, "conversation_ids")
    watch(PagedExecutor, "execute")

    async def ask() -> None:
        served = AsyncLLM(DEMO, **OPTIONS)
        assert repr(served) == "AsyncLLM(not loaded yet)"
        with pytest.raises(EngineError, match=r"await llm\.start\(\)"):
            _ = served.tokenizer
        both = await asyncio.gather(served.generate("Once", params(1)), served.chat("What is 17 + 25?"))
        assert "42" in both[1].text
        await served.aclose()

    asyncio.run(ask())
    assert set(threads) == {"build_engine", "ids", "conversation_ids", "execute"}
    assert threading.get_ident() not in set.union(*threads.values())
    assert len(threads["build_engine"]) == 1


def test_a_step_that_fails_ends_only_the_answers_that_were_in_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All seven have asked when the first step fails; it has room for four of them at most."""
    execute, submit = PagedExecutor.execute, BatchLoop.submit
    asked, failed = threading.Semaphore(0), []

    def submitting(self: BatchLoop, requests: Sequence[EngineRequest]) -> None:
        submit(self, requests)
        asked.release()

    def failing(self: PagedExecutor, plan: StepPlan) -> StepResult:
        if not failed:
            assert all(asked.acquire(timeout=60) for _ in PROMPTS)
            failed.extend(start.request_id for start in plan.starts)
            raise RuntimeError("out of luck")
        return execute(self, plan)

    async def ask() -> list[Any]:
        async with AsyncLLM(DEMO, **OPTIONS) as served:
            answers = [served.generate(prompt, params(i)) for i, prompt in enumerate(PROMPTS)]
            return await asyncio.gather(*answers, return_exceptions=True)

    monkeypatch.setattr(BatchLoop, "submit", submitting)
    monkeypatch.setattr(PagedExecutor, "execute", failing)
    answers = asyncio.run(ask())
    monkeypatch.undo()
    lost = [answer for answer in answers if isinstance(answer, EngineError)]
    assert 1 <= len(lost) == len(failed) <= 4
    assert all("RuntimeError: out of luck" in str(error) for error in lost)
    for i, answer in enumerate(answers):
        if answer not in lost:
            assert answer.token_ids == llm.generate(PROMPTS[i], params(i))[0].token_ids


def test_closing_while_it_loads() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def progress(*report: Any) -> None:
        reached.set()
        go_on.wait()

    async def ask() -> None:
        served = AsyncLLM(DEMO, progress=progress, **OPTIONS)
        loading = asyncio.create_task(served.start())
        await asyncio.to_thread(reached.wait)
        await served.aclose()
        go_on.set()
        with pytest.raises(EngineError, match=r"given up|closed"):
            await loading

    asyncio.run(ask())


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "ktransformers-engine"}


def test_loading_that_is_cancelled_is_given_up() -> None:
    reached, go_on, before = threading.Event(), threading.Event(), engine_threads()

    def progress(*report: Any) -> None:
        reached.set()
        go_on.wait()

    async def ask() -> None:
        served = AsyncLLM(DEMO, progress=progress, **OPTIONS)
        loading = asyncio.create_task(served.start())
        await asyncio.to_thread(reached.wait)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        go_on.set()
        assert "42" in (await served.chat("What is 17 + 25?")).text  # another task may still want it
        await served.aclose()

    asyncio.run(ask())
    assert engine_threads() <= before
