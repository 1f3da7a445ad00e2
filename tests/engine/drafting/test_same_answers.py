"""The same answers, `==`, with draft tokens and without: 200 prompts of each model, by each drafter, in each way that a
request may ask for them, in peace and while requests are suspended and engines die. Thinned but under --exhaustive."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ktransformers.config import EngineConfig, bundled_model
from ktransformers.core import Constraint, ConstraintKind, SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.sequence.outputs import RequestOutput
from ktransformers.engine.step.executor import PagedExecutor
from tests.support.engines.drafter_steps import equal_steps
from tests.support.engines.known_drafts import told
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.models.assistant_models import TARGETS, tiny_assistant, write_assistant
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.models.mtp_families import FAMILIES, tiny_family, write_family
from tests.support.models.mtp_models import tiny_mtp, write_mtp
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model, write_safetensors

MODELS = (
    *("qwen3_next", "deepseek_v3", "glm4_moe", "qwen3_5_moe_text", "ernie4_5_moe", "nemotron_h", "mimo_v2_flash"),
    *("step3p7", "exaone_moe", "bailing_hybrid"),
)
DRAFTERS = ("ngram", "draft", "mtp")
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 1.1, "top_k": 20, "logprobs": 0, "min_tokens": 12},
    {"temperature": 0.8, "logit_bias": {3: 4.0, 9: -5.0}, "prompt_logprobs": 1},
]


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps take the same: as much is drafted as may be, on any machine."""
    equal_steps(monkeypatch)


@contextmanager
def engine_of(folder: Path, speculative: str, draft: Path) -> Iterator[Engine]:
    config = EngineConfig(
        model_path=folder,
        cpu_infer=1,
        cache_lens=1024,
        self_check=False,
        speculative=speculative,
        draft_model=draft if speculative == "draft" else None,
    )
    with closing(build_engine(config, page_size=16, max_batch_size=8)) as engine:
        yield engine


def asked(count: int) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts of which every other one repeats itself; with a seed twice, as the choices of n = 2 have them."""
    rng = random.Random(7)
    for number in range(count):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(4, 30))]
        values = PARAMS[number % len(PARAMS)]
        yield prompt * (1 + number % 2), SamplingParams(max_tokens=24, ignore_eos=True, seed=number // 2, **values)


Told = list[tuple[Any, ...]]


def answers_of(
    engine: Engine, count: int, run: Callable[[PagedLoop], None] = PagedLoop.drain, known: Told | None = None
) -> tuple[Told, int]:
    """What all were told, and how many draft tokens were accepted. known: the answers, of which every third request
    brings its own as a prediction, with a wrong token in it."""

    def fresh() -> PagedExecutor:
        engine.executor.reset()
        return engine.executor

    config, found, accepted = engine.scheduler_config, Told(), 0
    values = {"max_drafts": config.max_drafts, "drafter": config.drafter, "num_states": engine.cache.num_states}
    requests = list(asked(count))
    for first in range(0, count, 8):
        loop = PagedLoop(scheduler_config(engine, chunk_size=64, **values), fresh)
        for number, (prompt, params) in enumerate(requests[first : first + 8], first):
            ids = [] if known is None or number % 3 else [*prompt[-2:], *known[number][0]]
            loop.add(prompt, params, prediction_ids=[*ids[:9], 5, *ids[10:]] if ids else [])
        run(loop)
        found += told(list(loop.answers.values()))
        accepted += loop.scheduler.stats().num_accepted
    return found, accepted


def written(model_type: str, folder: Path) -> Path:
    if model_type in FAMILIES:
        return write_family(tiny_family(model_type), folder)
    return write_mtp(tiny_mtp(model_type), folder)


def check_same(folder: Path, speculative: str, draft: Path, count: int) -> None:
    """Of so many requests."""
    rng = random.Random(3)
    with engine_of(folder, "off", draft) as engine:
        plain, none = answers_of(engine, count)
    with engine_of(folder, speculative, draft) as engine:
        drafted, accepted = answers_of(engine, count, known=plain)
        disturbed, others = answers_of(engine, count, lambda loop: loop.disturb(rng), plain)
    assert drafted == plain
    assert disturbed == plain
    assert none == 0 < accepted
    assert others > 0


@pytest.mark.every(5)
@pytest.mark.parametrize("speculative", DRAFTERS)
@pytest.mark.parametrize("model_type", MODELS)
def test_tiny_models(
    model_type: str, speculative: str, tmp_path: Path, random_cases: Callable[[int, int], int]
) -> None:
    folder = written(model_type, tmp_path / "model")
    draft = write_safetensors(tiny_model("qwen3_moe"), tmp_path / "draft")
    check_same(folder, speculative, draft, random_cases(16, 200))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", TARGETS)
def test_an_assistant(name: str, tmp_path: Path, random_cases: Callable[[int, int], int]) -> None:
    folder, draft = write_assistant(tiny_assistant(name), tmp_path)
    check_same(folder, "draft", draft, random_cases(16, 200))


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 30}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "convert",
        "description": "Convert a length",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "number"}, "unit": {"type": "string"}},
            "required": ["value", "unit"],
        },
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeds": {"temperature": 0.8, "seed": 7},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "schema": {"temperature": 0.0, "constraint": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))},
    "tools": {"temperature": 0.8, "seed": 9},
    "n": {"temperature": 0.9, "seed": 11, "n": 2, "logprobs": 0},
}
QUESTIONS = (
    "{0} meters is how many centimeters?",
    "Write this list backwards: beach, pocket, clock {0}, ocean, comet",
    "Count from {0} to {1}.",
    "Sort {1}, 2, {0}, 9",
)


def bundled_answers(speculative: str, count: int) -> dict[str, Sequence[RequestOutput]]:
    draft = bundled_model("") if speculative == "draft" else None
    questions = [QUESTIONS[i % len(QUESTIONS)].format(i, i + 5) for i in range(count)]
    messages = [[{"role": "user", "content": question}] for question in questions]
    with LLM(model_path=DEMO_CHECKPOINT, cpu_infer=1, speculative=speculative, draft_model=draft) as llm:
        return {
            way: llm.chat(messages, SamplingParams(max_tokens=40, **values), tools=[TOOL] if way == "tools" else None)
            for way, values in WAYS.items()
        }


@pytest.fixture(scope="module")
def plain_answers(random_cases: Callable[[int, int], int]) -> dict[str, Sequence[RequestOutput]]:
    return bundled_answers("off", random_cases(4, 200))


@pytest.mark.every(3)
@pytest.mark.parametrize("speculative", ["mtp", "ngram", "draft"])
def test_the_bundled_model(
    speculative: str, plain_answers: dict[str, Sequence[RequestOutput]], random_cases: Callable[[int, int], int]
) -> None:
    drafted, accepted = bundled_answers(speculative, random_cases(4, 200)), 0
    for way, plain in plain_answers.items():
        for one, other in zip(plain, drafted[way], strict=True):
            for two in zip(one.outputs, other.outputs, strict=True):
                assert len({(tuple(each.token_ids), each.text, each.finish_reason) for each in two}) == 1, way
                assert two[0].logprobs == two[1].logprobs, way
            accepted += other.stats.num_accepted
    assert accepted > 0
