"""Requests with pictures in the real scheduler and executor: tokens are those that each gets alone, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.core import FinishReason, SamplingParams
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.errors import ConfigError
from ktransformers.media.records import MediaItem, Sight
from tests.support.engines.paged_loop import Answer, PagedLoop, scheduler_config
from tests.support.engines.picture_engines import ComposedPictures, Prompt, picture_composite, picture_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(seed=3, temperature=1.1, max_tokens=12, repetition_penalty=1.3, ignore_eos=True, logprobs=2)


class Paged:
    """One model; each loop has a cache and an executor of its own."""

    def __init__(self, name: str, folder: Path, **text_values: object):
        self.engine, self.pictures = picture_engine(picture_composite(name, **text_values), folder)
        self._alone: dict[str, Answer] = {}

    def executor(self, num_pages: int = 0) -> PagedExecutor:
        engine = self.engine
        cache = PagedCache(engine.cache.shapes, num_pages or engine.cache.num_pages, 8, engine.cache.num_states)
        made = PagedExecutor(engine.executor.runner, cache, engine.pool, engine.model.vocab_size)
        made.pictures = self.pictures
        return made

    def loop(self, num_pages: int = 0, **changes: object) -> PagedLoop:
        sight = self.pictures.family.sight
        chunk_size = {Sight.NOTHING: 7, Sight.PICTURE: 32}.get(sight, 64)
        values: dict[str, object] = {"chunk_size": chunk_size, "picture_sight": sight, **changes}
        if num_pages:
            values["num_pages"] = num_pages
        if self.engine.cache.num_states:
            values["num_states"] = self.engine.cache.num_states
        return PagedLoop(scheduler_config(self.engine, **values), lambda: self.executor(num_pages))

    def alone(self, prompt: Prompt, params: SamplingParams) -> Answer:
        """What it gets with nobody else, in steps as long as they can be."""
        key = repr((prompt.ids, params))
        if key not in self._alone:
            loop = self.loop(chunk_size=256, max_batch_size=1)
            name = loop.add(prompt.ids, params, media=prompt.media)
            loop.drain()
            self._alone[key] = loop.answers[name]
        return self._alone[key]

    def check(self, loop: PagedLoop, cases: dict[str, tuple[Prompt, SamplingParams]]) -> None:
        for name, case in cases.items():
            got, want = loop.answers[name], self.alone(*case)
            assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs), name
            assert got.reason is want.reason


def mixed(pictures: ComposedPictures) -> list[tuple[Prompt, SamplingParams]]:
    """Pictures at both ends, two, the same in two requests, and text."""
    a, b = pictures.picture("a", 2, 3), pictures.picture("b", 5, 2)
    prompts = [
        pictures.prompt([5, 9, 17], a, [23, 24, 25, 26, 27, 28]),
        pictures.prompt([5, 9, 17], a, [30], b, [31, 32]),
        pictures.prompt(list(range(10, 50))),
        pictures.prompt([7], b, [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], a, [1]),
    ]
    return [(prompt, params) for params in (GREEDY, DRAWN) for prompt in prompts]


@pytest.fixture(
    scope="module", params=["qwen3_vl", "gemma3", "qwen3_5_moe", "ernie4_5_vl_moe", "paligemma of gemma2", "molmo2"]
)
def paged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paged]:
    made = Paged(request.param, tmp_path_factory.mktemp(request.param))
    with closing(made.engine):
        yield made


def added(loop: PagedLoop, cases: list[tuple[Prompt, SamplingParams]]) -> dict[str, tuple[Prompt, SamplingParams]]:
    return {loop.add(prompt.ids, params, media=prompt.media): (prompt, params) for prompt, params in cases}


@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_mixed_requests(paged: Paged, max_batch_size: int) -> None:
    loop = paged.loop(max_batch_size=max_batch_size)
    cases = added(loop, mixed(paged.pictures))
    loop.drain()
    paged.check(loop, cases)


def test_preemptions_lost_engines_and_suspended_requests(paged: Paged) -> None:
    loop = paged.loop(num_pages=12)
    cases = added(loop, mixed(paged.pictures))
    loop.disturb(random.Random(7))
    paged.check(loop, cases)
    stats = loop.scheduler.stats()
    assert stats.num_engine_losses > 0
    assert stats.num_preemptions > 0 or paged.engine.cache.num_states  # of which there are too few for that
    assert stats.num_used_pages == 0


def test_the_second_turn_computes_no_picture_again(paged: Paged) -> None:
    pictures = paged.pictures
    shown = pictures.picture("turns", 4, 3)
    first = pictures.prompt([5, 9, 17], shown, [23, 24, 25, 26, 27, 28])
    loop = paged.loop()
    name = loop.add(first.ids, GREEDY, media=first.media)
    loop.drain()
    second = Prompt([*first.ids, *loop.answers[name].token_ids, 40, 41, 42], first.media)
    pictures.asked.clear()
    again = loop.add(second.ids, GREEDY, media=second.media)
    loop.drain()
    paged.check(loop, {again: (second, GREEDY)})
    last = loop.answers[again].last
    assert last is not None
    if pictures.family.sight is Sight.PROMPT:  # whose every position depends on all others
        assert last.cached_len == 0
        third = loop.add(second.ids, GREEDY, media=second.media)
        loop.drain()
        paged.check(loop, {third: (second, GREEDY)})
        assert loop.answers[third].last.cached_len >= 24  # type: ignore[union-attr]
    elif not paged.engine.cache.num_states:  # which go on from snapshots, here none inside of prompts
        assert last.cached_len >= 24
        assert shown.digest not in pictures.asked[:-1]  # but for the oracle


def test_a_prefix_may_end_inside_a_picture(paged: Paged) -> None:
    shown = paged.pictures.picture("long", 5, 4)
    cases = [(paged.pictures.prompt([5, 9, 17], shown, more), GREEDY) for more in ([1], [1, 2], [4, 4, 4])]
    loop = paged.loop()
    done: dict[str, tuple[Prompt, SamplingParams]] = {}
    for case in cases:
        done |= added(loop, [case])
        loop.drain()
    paged.check(loop, done)


def test_a_tower_that_fails_ends_its_request_alone(paged: Paged) -> None:
    pictures = paged.pictures
    good, bad = pictures.picture("good", 2, 2), pictures.picture("bad", 3, 3)
    prompts = [pictures.prompt([5], good, list(range(20, 40))), pictures.prompt([6], bad, list(range(20, 40)))]
    pictures.broken.add(bad.digest)
    loop = paged.loop()
    fine, broken = (loop.add(prompt.ids, GREEDY, media=prompt.media) for prompt in prompts)
    loop.drain()
    paged.check(loop, {fine: (prompts[0], GREEDY)})
    last = loop.answers[broken].last
    assert last is not None
    assert (last.finish_reason, loop.answers[broken].token_ids) == (FinishReason.ABORT, [])
    assert last.error == "a picture of the prompt cannot be used: the tower has fallen"
    pictures.broken.clear()  # and nothing that was computed without it is found
    again = loop.add(prompts[1].ids, GREEDY, media=prompts[1].media)
    loop.drain()
    paged.check(loop, {again: (prompts[1], GREEDY)})


@pytest.mark.parametrize("kind", ["other ids", "no picture", "too few features", "far away"])
def test_pictures_that_are_not_the_prompts_end_its_request(
    paged: Paged, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = paged.pictures
    shown, other = pictures.picture("shown", 2, 2), pictures.picture("other", 2, 2)
    prompt = pictures.prompt([5], shown, [6, 7])
    if kind == "other ids":
        prompt.media[0] = MediaItem(other.digest, 1, 4)
    elif kind == "too few features":
        small = pictures.picture("small", 1, 2)
        pictures.pictures[shown.digest].features = small.features
    elif kind == "far away":
        monkeypatch.setattr(pictures, "positions", lambda ids, media: torch.arange(len(ids)).expand(3, -1) + 1)
    else:
        pictures.pictures.pop(shown.digest)
    loop = paged.loop()
    name = loop.add(prompt.ids, GREEDY, media=prompt.media)
    text = pictures.prompt([5, 6, 7])
    fine = loop.add(text.ids, GREEDY)
    loop.drain()
    paged.check(loop, {fine: (text, GREEDY)})
    assert loop.answers[name].reason is FinishReason.ABORT
    assert "a picture of the prompt cannot be used" in (loop.answers[name].last.error or "")  # type: ignore[union-attr]


def test_prompt_logprobs_have_none_of_pictures(paged: Paged) -> None:
    pictures = paged.pictures
    shown = pictures.picture("scored", 2, 3)
    prompt = pictures.prompt([5, 9, 17], shown, [23, 24, 25])
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    loop = paged.loop()
    name = loop.add(prompt.ids, params, media=prompt.media)
    loop.drain()
    found = loop.answers[name].prompt_logprobs
    assert [one is None for one in found] == [True, False, False, *[True] * 6, False, False, False]
    want = paged.pictures.logits(prompt).log_softmax(-1)
    for at, one in enumerate(found):
        if one is not None:
            assert np.isclose(one.logprob, float(want[at - 1, prompt.ids[at]]), atol=1e-4)


def test_drafts_change_nothing(paged: Paged) -> None:
    """Answers of prompts that repeat what stands around pictures, with and without draft tokens from the text."""
    pictures = paged.pictures
    shown = pictures.picture("drafted", 2, 2)
    prompt = pictures.prompt([5, 6, 7], shown, [8, 9, 5, 6, 7], shown, [8, 9, 5, 6])
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    changes = {"num_states": paged.engine.cache.num_states + 4} if paged.engine.cache.num_states else {}
    plain, drafted = paged.loop(), paged.loop(max_drafts=0 if changes else 4)
    for loop in (plain, drafted):
        loop.add(prompt.ids, long, media=prompt.media)
        loop.drain()
    assert plain.answers["r0"].token_ids == drafted.answers["r0"].token_ids


def test_a_picture_that_fits_no_step_is_refused_where_it_has_to(paged: Paged) -> None:
    shown = paged.pictures.picture("large", 6, 6)
    prompt = paged.pictures.prompt([5], shown, [6])
    loop = paged.loop(chunk_size=32)
    if paged.pictures.family.sight is Sight.NOTHING:
        case = (prompt, GREEDY)
        cases = added(loop, [case])
        loop.drain()
        paged.check(loop, cases)
        return
    says = {
        Sight.PICTURE: "a picture takes 36 positions, .* 32: send a",
        Sight.PICTURES: "all that is between them, 36 positions, .* 32: send fewer",
        Sight.PROMPT: "its pictures, 38 positions, .* 32: shorten",
    }
    with pytest.raises(ConfigError, match=says[paged.pictures.family.sight]):
        loop.add(prompt.ids, GREEDY, media=prompt.media)


def test_a_whole_picture_waits_for_nobody_for_ever(tmp_path: Path) -> None:
    """As large as a step, beside sequences that always have a token to run, and with a throttle."""
    paged = Paged("gemma3", tmp_path)
    with closing(paged.engine):
        shown = paged.pictures.picture("whole", 4, 4)
        long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        texts = [(paged.pictures.prompt([5 + i, 6, 7]), long) for i in range(3)]
        for ratio in (0.0, 1.5):
            loop = paged.loop(chunk_size=16, max_itl_ratio=ratio)
            cases = added(loop, texts)
            for _ in range(8):
                loop.step()
            case = (paged.pictures.prompt([5], shown, [6, 7]), GREEDY)
            cases |= added(loop, [case])
            loop.drain()
            paged.check(loop, cases)


def test_without_a_tower_a_request_with_pictures_ends(paged: Paged) -> None:
    prompt = paged.pictures.prompt([5], paged.pictures.picture("a"), [6, 7])
    loop = paged.loop()
    loop.executor.pictures = None
    name = loop.add(prompt.ids, GREEDY, media=prompt.media)
    loop.drain()
    assert loop.answers[name].last.error.endswith("this engine reads no pictures")  # type: ignore[union-attr]
