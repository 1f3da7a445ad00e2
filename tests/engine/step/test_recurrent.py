"""Models with recurrent layers: as transformers computes them, the same bits however they are cut, packed, resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.runner import ModelRunner
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.sequential import Session
from tests.support.models.made import Made, logits_in, logits_of
from tests.support.models.recurrent_models import RECURRENT_TYPES, recurrent_model
from tests.support.models.tiny_models import VOCAB_SIZE

PAGE = 16
TOLERANCE = 5e-5  # of the largest logit


def some_ids(count: int, seed: int = 7) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make(model_type: str, folder: Path, **values: object) -> Made:
    model = recurrent_model(model_type, **values)
    model.save_pretrained(folder)
    return Made(model, EngineConfig(model_path=folder, cache_lens=4096, cpu_infer=1, self_check=False), PAGE)


@pytest.fixture(scope="module", params=RECURRENT_TYPES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    made = make(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.fixture(scope="module", params=["qwen3_next", "nemotron_h", "mamba", "falcon_h1"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    made = make(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.mark.every(5)
def test_agrees_with_transformers_whatever_the_steps(family: Made) -> None:
    ids = some_ids(80)
    want, got = logits_of(family.model, ids), logits_in(family.engine, ids, [64, *[1] * 16])
    assert float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max())
    for sizes in ([80], [7] * 12, [1] * 80, [63, 2, 15]):
        assert torch.equal(logits_in(family.engine, ids, sizes), got), sizes


@pytest.mark.every(5)
def test_two_sequences_in_a_step_are_each_alone(family: Made) -> None:
    prompts = [some_ids(length, seed=length) for length in (1, 30, 70)]
    loop = paged_loop(family, num_states=8)
    names = [loop.add(prompt, SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)) for prompt in prompts]
    while loop.step():
        pass
    for name, prompt in zip(names, prompts, strict=True):
        assert loop.answers[name].token_ids == alone(family, prompt, 9), len(prompt)


def alone(made: Made, prompt: list[int], count: int) -> list[int]:
    session = Session(made.engine.runner, chunk_size=512, has_prefix_cache=False)
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
    return [event.token_id for event in session.generate(prompt, params) if event.token_id is not None]


# Many sequences.


def paged_loop(made: Made, **changes: object) -> PagedLoop:
    paged = made.paged

    def executor() -> PagedExecutor:
        states = int(changes.get("num_states", 12))  # type: ignore[call-overload]
        cache = PagedCache(paged.cache.shapes, int(changes.get("num_pages", 200)), PAGE, states)  # type: ignore[call-overload]
        runner = ModelRunner(ForwardPass(paged.executor.runner.model, paged.pool))  # type: ignore[attr-defined]
        return PagedExecutor(runner, cache, paged.pool, paged.model.vocab_size)

    values = {"num_pages": 200, "page_size": PAGE, "chunk_size": 64, "max_batch_size": 8, "num_states": 12}
    config = replace(scheduler_config(paged), **{**values, "snapshot_interval": 64, **changes})  # type: ignore[arg-type]
    return PagedLoop(config, executor)


@pytest.mark.every(5)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"chunk_size": 7},
        {"num_states": 8},  # no snapshots: nothing is shared
        {"num_pages": 24, "max_batch_size": 5},  # preemption
    ],
    ids=["roomy", "short steps", "no snapshots", "few pages"],
)
def test_many_sequences_are_each_alone(made: Made, changes: dict[str, object]) -> None:
    rng, shared = random.Random(3), some_ids(150, seed=1)
    prompts = [shared[: rng.choice((1, 66, 70, 130, 150))] + some_ids(rng.randint(1, 20), seed=i) for i in range(12)]
    loop, names, count = paged_loop(made, **changes), [], 40 if "num_pages" in changes else 12
    for prompt in prompts:
        names.append(loop.add(prompt, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)))
        loop.step()
    while loop.step():
        pass
    for name, prompt in zip(names, prompts, strict=True):
        assert loop.answers[name].token_ids == alone(made, prompt, count)
    stats = loop.scheduler.stats()
    assert (stats.prefix_hit_len > 0) == (changes.get("num_states") != 8)
    assert (stats.num_preemptions > 0) == ("num_pages" in changes)


@pytest.mark.every(3)
def test_another_engine_goes_on_where_one_died(made: Made) -> None:
    loop, prompts = paged_loop(made), [some_ids(90, seed=i) for i in range(3)]
    names = [loop.add(prompt, SamplingParams(max_tokens=70, ignore_eos=True, temperature=0.0)) for prompt in prompts]
    for _ in range(40):
        loop.step()
    loop.crash()
    while loop.step():
        pass
    for name, prompt in zip(names, prompts, strict=True):
        assert loop.answers[name].token_ids == alone(made, prompt, 70)


@pytest.mark.every(3)
def test_suspended_and_resumed_whatever_happens(made: Made) -> None:
    prompts = [some_ids(20 + 13 * i, seed=i) for i in range(8)]
    loop, names = paged_loop(made, num_pages=40, max_batch_size=4), []
    for at, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=12 + 10 * (at % 3), ignore_eos=True, temperature=0.0)
        names.append(loop.add(prompt, params, priority=at % 2))
    loop.disturb(random.Random(4))
    for at, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        assert loop.answers[name].token_ids == alone(made, prompt, 12 + 10 * (at % 3))
    assert loop.scheduler.stats().num_engine_losses > 0


# One sequence.


def turn(loop: PagedLoop, prompt: list[int], count: int) -> tuple[list[int], int]:
    """Its answer, and how many tokens of the prompt were computed."""
    before = loop.scheduler.stats().prefix_hit_len
    name = loop.add(prompt, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0))
    while loop.step():
        pass
    return loop.answers[name].token_ids, len(prompt) - (loop.scheduler.stats().prefix_hit_len - before)


@pytest.mark.every(3)
def test_a_turn_runs_only_what_is_new(made: Made) -> None:
    loop = paged_loop(made, max_batch_size=1, num_states=6)
    history, answers = some_ids(1500), []
    for number in range(8):
        answer, ran = turn(loop, history, 40)
        assert ran <= (len(history) if number == 0 else 64 + 40 + 20), number
        answers.append((list(history), answer))
        history += [*answer, *some_ids(20, seed=number)]
    prompt, answer = answers[-1]
    assert answer == alone(made, prompt, 40)


@pytest.mark.every(3)
def test_a_question_asked_again_begins_before_its_answer(made: Made) -> None:
    loop, prompt = paged_loop(made, max_batch_size=1, num_states=6, chunk_size=100), some_ids(300)
    first, ran = turn(loop, prompt, 90)
    assert ran == 300
    assert turn(loop, prompt, 90) == (first, 300 - 256)
