"""Models with recurrent layers: as transformers computes them, the same bits however they are cut, packed, resumed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ktransformers.engine.sequence.generate import Control

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.paged import PagedExecutor
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import ConfigError
from ktransformers.kernels.cpu.layer import RecurrentLayer
from ktransformers.operators.layers.native_stack import NativeStack
from tests.support.engines.one_sequence import StaticEngine
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


class Counted:
    """A runner that counts what it runs."""

    def __init__(self, runner: object):
        self._runner, self.num_rows = runner, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def forward(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        self.num_rows += len(token_ids)
        return self._runner.forward(token_ids, start, keep)  # type: ignore[attr-defined,no-any-return]

    def decode(self, token_id: int, position: int, need: int) -> torch.Tensor:
        return self.forward([token_id], position, [0])


@pytest.mark.every(3)
def test_a_turn_runs_only_what_is_new(made: Made) -> None:
    runner = Counted(made.engine.runner)
    session = Session(runner, chunk_size=512)  # type: ignore[arg-type]
    history, answers = some_ids(3000), []
    for turn in range(8):
        before = runner.num_rows
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0)
        answer = [event.token_id for event in session.generate(history, params)]
        ran = runner.num_rows - before - (len(answer) - 1)
        assert ran <= (len(history) if turn == 0 else 64 + 21), turn
        answers.append((list(history), answer))
        history += [*answer, *some_ids(20, seed=turn)]  # type: ignore[list-item]
    prompt, answer = answers[-1]
    assert answer == alone(made, prompt, 40)


def test_an_answer_is_left_and_taken_up_after_another_conversation(made: Made) -> None:
    prompt, params = some_ids(130), SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    session, events, rounds = Session(made.engine.runner, chunk_size=64), [], itertools.count(4)
    answer = session.begin(prompt, params)
    while not events or events[-1].finish_reason is None:
        forwards, most = itertools.count(), next(rounds)
        control = Control(should_suspend=lambda f=forwards, n=most: next(f) >= n)
        events += session.run(answer, control)
        list(session.generate(some_ids(70, seed=2), replace(params, max_tokens=2)))
    assert next(rounds) > 6
    assert [event.token_id for event in events] == alone(made, prompt, 20)


@pytest.mark.every(3)
def test_a_question_asked_again_begins_before_its_answer(made: Made) -> None:
    runner = Counted(made.engine.runner)
    session, prompt = Session(runner, chunk_size=100), some_ids(300)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=90, ignore_eos=True, temperature=0.0)
    first = [event.token_id for event in session.generate(prompt, params)]
    before = runner.num_rows
    assert [event.token_id for event in session.generate(prompt, params)] == first
    assert runner.num_rows - before == 300 - 256 + 89


def test_no_step_begins_without_a_state(made: Made) -> None:
    runner = made.engine.runner
    runner.forward(some_ids(10), 0, [9])
    assert runner.resume_len(10) == 10
    assert runner.resume_len(9) == 0
    with pytest.raises(ConfigError, match="no state of the first 9 tokens is kept; the nearest is 0"):
        runner.forward([5], 9, [0])


def test_the_plan_counts_states(made: Made) -> None:
    for engine, most in ((made.engine, 1), (made.paged, 8)):
        cache = engine.runner.cache if isinstance(engine, StaticEngine) else engine.cache
        assert cache.states is not None
        assert cache.num_states >= most + 4
        assert sum(engine.plan.extra_bytes["states"].values()) == cache.states.nbytes
        total = sum(t.nbytes for i in cache.states.shapes for t in cache.states.layer(i).values())
        assert total == cache.states.nbytes


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe_text"])
def test_delta_nets_run_in_one_native_call(model_type: str, tmp_path: Path) -> None:
    made = make(model_type, tmp_path)
    (stack,) = made.engine.runner.model.get_submodule("model.layers")
    assert isinstance(stack, NativeStack)
    layers = list(stack.layers)
    native = [isinstance(getattr(layer, "attention", None), RecurrentLayer) for layer in layers]
    assert native == [True, True, False, True]
    made.close()
