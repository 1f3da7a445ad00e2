"""Generations over a loop, and the offline API, on models without weights. The oracle is one sequence without a
scheduler.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest
from ktransformers.engine.api.generate import Control, prefill_and_generate
from ktransformers.engine.api.llm import LLM, default_sampling_params
from ktransformers.errors import ConfigError, ContextLengthError, EngineError
from ktransformers.scheduler.records import Request
from ktransformers.tokenizer import Tokenizer
from tests.support.engines.fake_runner import FakeEngine, FakeRunner, byte_tokenizer, ngram_logits, scripted_engine
from tests.support.engines.sequential import Session, common_prefix_len
from tests.support.engines.stepping import Stepping

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0, seed=1)

Loop = BatchLoop[FakeEngine]


def ngram_runner(max_len: int = 64) -> FakeRunner:
    return FakeRunner(ngram_logits(VOCAB), VOCAB, max_len)


def ids_of(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


@contextmanager
def loop_over(
    runner: FakeRunner,
    *,
    chunk_size: int = 4,
    page_size: int = 1,
    eos_token_ids: tuple[int, ...] = (),
    tokenizer: Tokenizer | None = None,
) -> Iterator[Loop]:
    """Pages of one token, unless it is said otherwise: whatever is known of a sequence is found again."""
    engine = FakeEngine(runner, tokenizer or Tokenizer(None), page_size=page_size, chunk_size=chunk_size)
    engine.model = replace(engine.model, eos_token_ids=eos_token_ids)
    loop: Loop = BatchLoop(lambda report: engine)
    yield loop
    loop.close()


def ask(
    loop: Loop, prompt: list[int], params: SamplingParams, answer_ids: list[int] | None = None, **control: Any
) -> Iterator[TokenEvent]:
    loop.check(prompt, params)
    request = EngineRequest(Request(prompt_ids=prompt, params=params, answer_ids=answer_ids or ()))
    return iter(prefill_and_generate(loop, request, Control(**control)))


def run(
    params: SamplingParams = GREEDY,
    prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
    runner: FakeRunner | None = None,
    control: dict[str, Any] | None = None,
    **options: Any,
) -> list[TokenEvent]:
    with loop_over(runner or ngram_runner(), **options) as loop:
        return list(ask(loop, list(prompt), params, **control or {}))


def naive(prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without a loop, a cache or chunks."""
    logits, ids = ngram_logits(VOCAB), list(prompt)
    for _ in range(count):
        ids.append(int(logits(ids).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 100])
def test_tokens_do_not_depend_on_the_chunk(chunk_size: int) -> None:
    runner = ngram_runner()
    events = run(replace(GREEDY, max_tokens=12), chunk_size=chunk_size, runner=runner)
    assert ids_of(events) == naive([1, 2, 3, 4, 5], 12)
    assert [event.finish_reason for event in events] == [None] * 11 + [FinishReason.LENGTH]
    prefill = runner.calls[: -(-5 // chunk_size)]
    assert [kept for _, _, kept in prefill] == [0] * (len(prefill) - 1) + [1]  # logits of the last row only
    assert runner.calls[len(prefill) :] == [(5 + i, 1, 1) for i in range(11)]  # the last token is not run


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 1.0, "stop": ("a", "7"), "min_tokens": 6, "ignore_eos": True},
    {"temperature": 1.4, "top_k": 20, "min_p": 0.02, "stop_token_ids": tuple(range(0, 256, 25))},
    {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk_size", [1, 3, 64])
def test_answers_are_those_of_one_sequence_alone(chunk_size: int, page_size: int) -> None:
    """Prompts that begin alike, one after the other, in a cache that forgets some; answers from any token on."""
    tokenizer, rng, seen = byte_tokenizer(), random.Random(chunk_size), set[int]()
    vocab, ends = tokenizer.vocab_size, tokenizer.eos_token_ids
    shared = [rng.randrange(256) for _ in range(40)]
    oracle = Session(FakeRunner(ngram_logits(vocab), vocab, 96), chunk_size=7, eos_token_ids=ends, tokenizer=tokenizer)
    runner = FakeRunner(ngram_logits(vocab), vocab, 96)
    with loop_over(runner, chunk_size=chunk_size, page_size=page_size, eos_token_ids=ends, tokenizer=tokenizer) as loop:
        for number in range(40):
            params = SamplingParams(**{"seed": number, "max_tokens": rng.randint(6, 20), **KINDS[number % len(KINDS)]})
            prompt = shared[: rng.randint(0, 40)] + [rng.randrange(256) for _ in range(rng.randint(1, 20))]
            want = list(oracle.generate(prompt, params))
            known = 0 if params.prompt_logprobs is not None else rng.randrange(len(want))
            answer = ids_of(want)[:known]
            events = list(ask(loop, prompt, params, answer))
            assert facts(events) == facts(want[known:])
            found = events[-1].stats
            assert (found.prompt_len, found.completion_len) == (len(prompt), len(ids_of(want)))
            assert found.cached_len % page_size == 0
            seen.add(found.cached_len)
    assert len(seen) > 1


def facts(events: list[TokenEvent]) -> list[tuple[object, ...]]:
    return [(e.token_id, e.text, e.logprobs, e.finish_reason, e.stop, e.prompt_logprobs) for e in events]


def test_progress_of_the_prompt() -> None:
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    run(replace(GREEDY, max_tokens=3), chunk_size=2, control={"on_prefill": tell})
    assert told == [(0, 5), (2, 5), (4, 5)]  # and nothing for the tokens of the answer
    told.clear()
    with loop_over(ngram_runner(), chunk_size=2) as loop:
        list(ask(loop, [1, 2, 3], replace(GREEDY, max_tokens=1)))
        list(ask(loop, [1, 2, 3, 4, 5, 6], GREEDY, on_prefill=tell))
    assert told == [(0, 3), (2, 3)]  # what was cached does not count


def test_sampling_depends_on_the_seed_only() -> None:
    params = SamplingParams(seed=7, max_tokens=20)
    first = ids_of(run(params))
    assert ids_of(run(params, chunk_size=1)) == first
    assert ids_of(run(replace(params, seed=8))) != first
    # continued from its own first half, the answer goes on the same way
    assert ids_of(run(replace(params, max_tokens=10), prompt=(1, 2, 3, 4, 5, *first[:10]))) == first[10:]


def test_counts_and_times() -> None:
    events = run(replace(GREEDY, max_tokens=3))
    stats = events[-1].stats
    assert all(event.stats is stats for event in events)
    assert (stats.prompt_len, stats.cached_len, stats.completion_len) == (5, 0, 3)
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert stats.prefill_rate > 0
    assert GenerationStats().decode_rate == 0.0


def test_max_tokens_is_clipped_to_the_cache() -> None:
    events = run(runner=ngram_runner(max_len=8))
    assert len(ids_of(events)) == 3
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_prompt_checks_come_before_any_work() -> None:
    runner = ngram_runner(max_len=5)
    with loop_over(runner) as loop:
        with pytest.raises(ContextLengthError, match=r"is 5 tokens \(set by --cache_lens\).*has 5 tokens") as caught:
            loop.check([1] * 5, GREEDY)
        assert (caught.value.prompt_len, caught.value.max_len) == (5, 5)
        for prompt, message in (([], "empty"), ([VOCAB], "names token 50"), ([-1], "names token -1")):
            with pytest.raises(ConfigError, match=message):
                loop.check(prompt, GREEDY)
        with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
            loop.check([1], replace(GREEDY, stop=("x",)))
    with pytest.raises(ConfigError, match="chunk_size"), loop_over(runner, chunk_size=0):
        pass
    assert runner.calls == []


def test_end_tokens() -> None:
    answer = naive([1, 2, 3, 4, 5], 6)
    end = answer[3]
    first = answer.index(end) + 1
    events = run(eos_token_ids=(end,))
    assert (ids_of(events), events[-1].finish_reason, events[-1].stop) == (answer[:first], FinishReason.STOP, end)
    ignoring = replace(GREEDY, ignore_eos=True, max_tokens=6)
    assert ids_of(run(ignoring, eos_token_ids=(end,))) == answer
    assert ids_of(run(replace(ignoring, stop_token_ids=(end,)), eos_token_ids=(end,))) == answer[:first]


@pytest.mark.parametrize("allowed", range(6))
def test_stopping_between_steps(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ngram_runner()
    Stepping(monkeypatch, allowed)  # the model is not ahead of its reader
    events = run(runner=runner, control={"should_stop": lambda: len(runner.calls) >= allowed})
    assert len(runner.calls) == allowed  # two chunks, then single tokens
    assert events[-1].finish_reason is FinishReason.ABORT
    assert events[-1].token_id is None
    assert ids_of(events) == naive([1, 2, 3, 4, 5], max(allowed - 1, 0))


@pytest.mark.parametrize("allowed", range(1, 7))
def test_suspended_after_any_step(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By callbacks, as the single backends have their answers."""
    steps, params = Stepping(monkeypatch, allowed), replace(GREEDY, max_tokens=6)
    got: list[TokenEvent] = []
    over = threading.Event()

    def hear(event: object) -> None:
        assert isinstance(event, TokenEvent)
        got.append(event)
        if event.finish_reason is not None:
            over.set()

    with loop_over(ngram_runner()) as loop:
        generation = prefill_and_generate(loop, EngineRequest(Request(prompt_ids=[1, 2, 3, 4, 5], params=params)))
        generation.begin(hear)
        while len(loop.engine.runner.calls) < allowed:
            loop.stats()
        generation.suspend()
        assert loop.stats().num_suspended == 1
        steps.go_on()
        other = [9, *range(20)]
        assert ids_of(list(ask(loop, other, params))) == naive(other, 6)
        generation.resume()
        assert over.wait(60)
        generation.close()
    assert ids_of(got) == naive([1, 2, 3, 4, 5], 6)


# --- text ------------------------------------------------------------------------------------------------------------


def text_run(reply: str, params: SamplingParams = GREEDY) -> list[TokenEvent]:
    engine = scripted_engine(lambda _: reply)
    prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    return list(LLM.from_engine(engine).stream(prompt, params))


def test_text_is_streamed_by_characters() -> None:
    events = text_run("5 € 你😀!")
    assert "".join(event.text for event in events) == "5 € 你😀!"
    assert [event.text for event in events] == ["5", " ", "", "", "€", " ", "", "", "你", "", "", "", "😀", "!", ""]
    assert events[-1].finish_reason is FinishReason.STOP


def test_stop_strings_end_the_answer_and_are_not_shown() -> None:
    events = text_run("one STOP two", replace(GREEDY, stop=("two", "STOP")))
    assert "".join(event.text for event in events) == "one "
    assert (events[-1].finish_reason, events[-1].stop) == (FinishReason.STOP, "STOP")
    assert len(ids_of(events)) == len("one STOP")


def test_held_back_text_comes_out_in_the_end() -> None:
    events = text_run("one STO", replace(GREEDY, stop=("STOP",)))
    assert "".join(event.text for event in events) == "one STO"
    assert isinstance(events[-1].stop, int)
    cut = text_run("one STO", replace(GREEDY, stop=("STOP",), max_tokens=6))
    assert "".join(event.text for event in cut) == "one ST"
    assert cut[-1].finish_reason is FinishReason.LENGTH
    half = text_run("€", replace(GREEDY, max_tokens=2))
    assert "".join(event.text for event in half) == "\ufffd"


# --- one after the other ---------------------------------------------------------------------------------------------


def test_prefix_is_reused_and_tokens_stay_the_same() -> None:
    params = replace(GREEDY, max_tokens=6)
    runner, prompt = ngram_runner(), [1, 2, 3, 4, 5]
    with loop_over(runner) as loop:
        first = ids_of(list(ask(loop, prompt, params)))
        assert loop.used_len == len(prompt) + len(first) - 1
        second_prompt = [*prompt, *first, 9, 8, 7]
        before = runner.num_forwarded
        events = list(ask(loop, second_prompt, params))
        assert events[0].stats.cached_len == 10
        assert runner.num_forwarded - before == 4 + 5
        assert ids_of(events) == ids_of(run(params, prompt=tuple(second_prompt)))
        # a prompt that is in the cache as a whole: its last token is computed again
        again = list(ask(loop, second_prompt, params))
        assert again[0].stats.cached_len == len(second_prompt) - 1
        assert ids_of(again) == ids_of(events)
        # one that shares nothing
        assert next(ask(loop, [30, 31], params)).stats.cached_len == 0


def test_aborted_abandoned_and_failed_answers_leave_the_cache_right(caplog: pytest.LogCaptureFixture) -> None:
    params, prompt = replace(GREEDY, max_tokens=6), [1, 2, 3, 4, 5]
    expected = ids_of(run(params))
    for allowed in range(6):
        with loop_over(ngram_runner()) as loop, pytest.MonkeyPatch.context() as patch:
            runner, steps = loop.engine.runner, Stepping(patch, allowed)
            list(ask(loop, prompt, params, should_stop=lambda made=runner, n=allowed: len(made.calls) >= n))
            steps.go_on()
            assert ids_of(list(ask(loop, prompt, params))) == expected
    with loop_over(ngram_runner()) as loop:
        abandoned = ask(loop, [7, *prompt], params)
        next(abandoned)
        del abandoned
        assert ids_of(list(ask(loop, prompt, params))) == expected
        assert loop.stats().num_running == 0
    for failing_call in range(1, 6):
        runner = ngram_runner()
        runner.fails_at = failing_call
        with loop_over(runner) as loop:
            with pytest.raises(EngineError, match="fails here") as caught:
                list(ask(loop, prompt, params))
            assert isinstance(caught.value.__cause__, RuntimeError)
            assert loop.used_len == 0  # the cache may hold anything
            assert ids_of(list(ask(loop, prompt, params))) == expected
    assert caplog.text.count("a step failed") == 5


def test_common_prefix() -> None:
    assert common_prefix_len([], [1]) == 0
    assert common_prefix_len([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix_len([1, 2], [1, 2, 4]) == 2


# --- LLM -------------------------------------------------------------------------------------------------------------


def test_generate_and_chat() -> None:
    llm = LLM.from_engine(scripted_engine(lambda prompt: "yes" if "17" in prompt else "no"))
    messages = [{"role": "user", "content": "17?"}]
    prompt = llm.tokenizer.render_chat_template(messages)
    ids = llm.tokenizer.encode(prompt)
    by_text, by_ids = llm.generate(prompt), llm.generate(ids)
    assert [output.text for output in (*by_text, *by_ids, *llm.chat(messages))] == ["yes"] * 3
    (output,) = by_ids
    assert output.prompt_token_ids == tuple(ids)
    assert output.token_ids == (*llm.tokenizer.encode("yes"), llm.tokenizer.eos_token_id)
    assert (output.finish_reason, output.logprobs) == (FinishReason.STOP, None)
    assert output.params == SamplingParams(temperature=0.0, max_tokens=200, seed=output.params.seed)
    assert output.params.seed is not None
    other = [{"role": "user", "content": "x"}]
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)]
    two = llm.chat([messages, other], params)
    assert [answer.text for answer in two] == ["yes", "n"]
    assert two[1].logprobs is not None
    assert len(two[1].logprobs) == 1
    assert [answer.text for answer in llm.generate([prompt, ids])] == ["yes", "yes"]
    assert llm.generate([]) == []


def test_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine(lambda _: "x")
    Stepping(monkeypatch, 1)
    with LLM.from_engine(engine) as llm:
        running = llm.stream([1, 2, 3])
        next(running)
    assert engine.is_closed
    with pytest.raises(EngineError, match="closed while it was answering"):
        next(running)


def test_a_drawn_seed_can_be_repeated() -> None:
    engine = FakeEngine(ngram_runner(), Tokenizer(None))
    llm = LLM.from_engine(engine)
    (first,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=15))
    (second,) = llm.generate([1, 2, 3], first.params)
    assert first.token_ids == second.token_ids
    assert first.text == ""  # no vocabulary
    with pytest.raises(ConfigError, match="no vocabulary"):
        llm.generate("text")


def test_bad_calls() -> None:
    llm = LLM.from_engine(scripted_engine(lambda _: "x"))
    with pytest.raises(ConfigError, match="2 sampling parameters for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY])
    with pytest.raises(ConfigError, match="at least one message"):
        llm.chat([])
    with pytest.raises(ConfigError, match="empty"):
        llm.stream("")


def test_defaults_follow_the_generation_config() -> None:
    assert default_sampling_params({}, 5) == SamplingParams(temperature=0.0, max_tokens=5)
    assert default_sampling_params({"do_sample": False, "temperature": 0.6, "top_k": 3}, 5).is_greedy
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    assert default_sampling_params(given, None) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert default_sampling_params({"do_sample": True}, None) == SamplingParams()
    assert default_sampling_params({"temperature": 0.3, "top_k": None}, None) == SamplingParams(temperature=0.3)
    assert default_sampling_params({"repetition_penalty": 1.1}, 5).repetition_penalty == 1.1


def test_the_fake_engine_has_the_fields_of_the_real_one() -> None:
    engine = scripted_engine(lambda _: "")
    assert isinstance(engine.config, EngineConfig)
    assert byte_tokenizer().reasoning_tags == ("<think>", "</think>")


def test_prompt_logprobs_are_those_of_the_whole_prompt_whatever_the_chunks() -> None:
    """Entry i is what the logits after i tokens say of token i; worked out here from the fake model itself."""
    next_logits, prompt = ngram_logits(40), [3, 1, 4, 1, 5, 9, 2, 6]
    wanted: list[tuple[float, tuple[int, ...]] | None] = [None]
    for i in range(1, len(prompt)):
        raw = torch.from_numpy(next_logits(prompt[:i]))
        values = torch.log_softmax(raw.double(), dim=-1).float().numpy()
        wanted.append((float(values[prompt[i]]), tuple(int(j) for j in np.argsort(-values, kind="stable")[:2])))
    for chunk_size in (1, 3, 100):
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, seed=1)
        events = run(params, tuple(prompt), FakeRunner(next_logits, 40, 32), chunk_size=chunk_size)
        assert events[0].prompt_logprobs is not None
        got = [None if e is None else (e.logprob, tuple(i for i, _ in e.top)) for e in events[0].prompt_logprobs]
        assert got == wanted
        assert all(event.prompt_logprobs is None for event in events[1:])


def test_prompt_logprobs_do_not_take_the_cache_for_an_answer() -> None:
    plain = SamplingParams(temperature=0, max_tokens=2, seed=1)
    with loop_over(FakeRunner(ngram_logits(40), 40, 32)) as loop:
        list(ask(loop, [1, 2, 3, 4, 5], plain))
        events = list(ask(loop, [1, 2, 3, 4, 5], replace(plain, prompt_logprobs=0)))
    assert events[0].stats.cached_len == 0
    assert len(events[0].prompt_logprobs or ()) == 5


def test_only_allowed_tokens_are_chosen() -> None:
    for temperature in (0.0, 1.5):
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, allowed_token_ids=(7, 11), top_p=0.9)
        events = run(params, (1, 2), FakeRunner(ngram_logits(40), 40, 64))
        assert {event.token_id for event in events} <= {7, 11}
    with pytest.raises(ConfigError, match="allowed_token_ids names token 40"):
        run(SamplingParams(allowed_token_ids=(40,), seed=1), (1,), FakeRunner(ngram_logits(40), 40, 64))
