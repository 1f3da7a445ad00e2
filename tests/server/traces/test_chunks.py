"""Chunks of prompts: when they were computed, and where their spans are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import httpx
from opentelemetry.sdk.trace import ReadableSpan

from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.scheduler.chunk_watch import ChunkWatch
from ktransformers.scheduler.records import NewSequence, ScheduledSequence, StepPlan
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.backend.interfaces.balance_serve import _commands
from ktransformers.server.backend.timeline import MAX_CHUNKS, Chunk, ChunkClock, Timeline
from ktransformers.server.telemetry.traces import MAX_CHUNK_SPANS
from tests.support.servers.balance_backend import backend as balanced
from tests.support.servers.fake_backend import FakeBackend
from tests.support.servers.fake_engine import VOCAB_SIZE
from tests.support.servers.spans import (
    CONFIG,
    PHASES,
    Collected,
    ask,
    attributes,
    check_cover,
    times,
)


def test_chunks_of_one_sequence() -> None:
    now = iter([10.0, 11.0, 13.0])
    timeline = Timeline()
    clock = ChunkClock(timeline, 12, lambda: next(now))
    clock(0, 7)  # five of twelve are cached
    clock(4, 7)
    clock.finish()
    assert timeline.chunks == [Chunk(10.0, 11.0, 5, 4, 4), Chunk(11.0, 13.0, 9, 3, 3)]


def test_chunks_are_bounded() -> None:
    timeline = Timeline()
    for index in range(MAX_CHUNKS + 5):
        timeline.add(Chunk(0.0, 1.0, index, 1, 1))
    assert (len(timeline.chunks), timeline.num_chunks) == (MAX_CHUNKS, MAX_CHUNKS + 5)


def start(run_id: int, name: str, num_tokens: int) -> NewSequence:
    return NewSequence(
        run_id=run_id, request_id=name, params=SamplingParams(), prompt_len=num_tokens, token_ids=range(num_tokens)
    )


def row(run_id: int, first: int, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(
        run_id=run_id, start=first, token_ids=range(num_tokens), token_source=None, block_table=(), is_sampled=False
    )


def plan(
    step_id: int, rows: Sequence[ScheduledSequence], starts: Sequence[NewSequence] = (), ended: Sequence[int] = ()
) -> StepPlan:
    return StepPlan(step_id=step_id, starts=starts, rows=rows, ended=ended)


def test_steps_that_overlap_follow_each_other_in_the_engine() -> None:
    watch = ChunkWatch()
    watch.planned(plan(1, [row(0, 0, 8)], [start(0, "a", 10)]), 1.0)
    watch.planned(plan(2, [row(0, 8, 2), row(1, 0, 3)], [start(1, "b", 3)]), 2.0)
    watch.finished(1, 5.0)
    watch.planned(plan(3, [row(0, 10, 1), row(1, 3, 1)]), 6.0)  # decodes are no chunks
    watch.finished(2, 7.0)
    watch.finished(3, 8.0)
    traces = watch.take()
    assert traces is not None
    assert list(traces.planned) == [("a", 1.0), ("b", 2.0)]
    told = [(one.request_id, one.began, one.ended, one.position, one.num_tokens, one.num_rows) for one in traces.chunks]
    assert told == [("a", 1.0, 5.0, 0, 8, 8), ("a", 5.0, 7.0, 8, 2, 5), ("b", 5.0, 7.0, 0, 3, 5)]
    assert watch.take() is None


def test_what_an_engine_takes_with_it_is_no_chunk() -> None:
    watch = ChunkWatch()
    watch.planned(plan(1, [row(0, 0, 4)], [start(0, "a", 10)]), 1.0)
    watch.lost()
    watch.planned(plan(2, [row(1, 0, 4)], [start(1, "a", 10)]), 2.0)
    watch.finished(2, 3.0)
    traces = watch.take()
    assert traces is not None
    assert [(one.began, one.position) for one in traces.chunks] == [(2.0, 0)]


def test_twins_share_a_command_all_the_same() -> None:
    prompt = (1, 2)
    twins = [
        GenerationRequest(request_id=name, prompt_ids=prompt, params=SamplingParams(seed=seed), timeline=Timeline())
        for seed, name in enumerate("abc")
    ]
    assert len(list(_commands(twins))) == 1


class Chunky(FakeBackend):
    """Has computed each prompt in more chunks than there are spans for."""

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        timeline = request.timeline
        assert timeline is not None
        timeline.begin(timeline.created)
        for index in range(MAX_CHUNK_SPANS):
            timeline.add(Chunk(timeline.created, timeline.created, index, 1, 1))
        async for event in super().inference(request):
            yield event


def test_the_spans_of_a_request_are_bounded(collected: Collected) -> None:
    ask(Chunky(), collected, "/v1/completions", {"prompt": [1], "n": 4})
    assert sum(one.name == "prefill chunk" for one in collected.spans) == MAX_CHUNK_SPANS
    counts = [attributes(one)["ktransformers.prefill.chunks"] for one in collected.spans if one.name == "prefill"]
    assert counts == [MAX_CHUNK_SPANS] * 4


def test_sixteen_at_once_in_chunks(collected: Collected) -> None:
    prompts = [[1 + (7 * who + at) % (VOCAB_SIZE - 14) + 13 for at in range(20 + 3 * who)] for who in range(16)]

    async def work() -> None:
        async with balanced(chunk_size=16, has_traces=True, cache_lens=400, prefix_cache=False) as backend:
            transport = httpx.ASGITransport(create_app(backend, CONFIG, collected.traces))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                bodies = [{"prompt": prompt, "max_tokens": 30, "ignore_eos": True} for prompt in prompts]
                answers = await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies))
                assert [one.status_code for one in answers] == [200] * 16
            stats = backend.stats().scheduler
            assert stats is not None
            assert stats.num_preemptions > 0

    asyncio.run(work())
    assert len(collected.roots) == 16
    lengths, again = set(), list[ReadableSpan]()
    for root in collected.roots:
        phases = collected.children(root)
        assert [one.name for one in phases] == PHASES
        check_cover(root, phases)
        prefill = phases[2]
        chunks, (at, end) = collected.children(prefill), times(prefill)
        position = 0
        for chunk in chunks:
            said = attributes(chunk)
            assert at <= times(chunk)[0]
            at = times(chunk)[1]
            if said["ktransformers.chunk.position"] == 0:
                position = 0  # computed again, after a preemption
            assert said["ktransformers.chunk.position"] == position
            position += said["ktransformers.chunk.tokens"]
            assert said["ktransformers.chunk.tokens"] <= said["ktransformers.step.rows"] <= 16
        assert at <= end
        assert len(chunks) > 1
        assert position == attributes(root)["gen_ai.usage.input_tokens"]
        lengths.add(position)
        again += collected.children(phases[3])
        assert all(times(phases[3])[0] < times(one)[1] <= times(phases[3])[1] for one in collected.children(phases[3]))
        assert attributes(phases[3])["ktransformers.decode.tokens"] == 30
        assert attributes(phases[3])["ktransformers.decode.tokens_per_second"] > 0
    assert lengths == {len(prompt) for prompt in prompts}
    assert {one.name for one in again} == {"prefill chunk"}  # of those that were preempted
