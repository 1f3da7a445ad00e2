"""Answers with draft tokens and without: the same tokens and log probabilities, `==`, whatever is drafted.

Drafts here are the answer itself with wrong tokens in it, so that every number of them is accepted, over any step.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig, bundled_model
from ktransformers.core import Constraint, ConstraintKind, SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.sequence.outputs import RequestOutput
from tests.support.engines.drafter_steps import equal_steps
from tests.support.engines.known_drafts import KnownDrafts, answers_of, told
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.models.latent_models import latent_model
from tests.support.models.pooled_models import POOLED_TYPES, pooled_model
from tests.support.models.recurrent_models import RECURRENT_TYPES, recurrent_model
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model, write_safetensors

MAX_DRAFTS = 4
PARAMS: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "seed": 6},
    {"temperature": 1.2, "top_k": 20, "seed": 7, "logprobs": 0, "min_tokens": 20},
    {"temperature": 0.8, "seed": 8, "logit_bias": {3: 4.0, 9: -5.0}, "prompt_logprobs": 1},
]
ATTENTION_TYPES = ("deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_moe", "deepseek_v4")
LATENT_TYPES = ("deepseek_v32", "longcat_flash")


def tiny(model_type: str, folder: Path) -> EngineConfig:
    if model_type in RECURRENT_TYPES:
        model = recurrent_model(model_type)
    elif model_type in LATENT_TYPES:
        model = latent_model(model_type)
    elif model_type in ATTENTION_TYPES:
        model = tiny_model(model_type)
    else:
        model = pooled_model(model_type)
    return EngineConfig(model_path=write_safetensors(model, folder), cpu_infer=1, cache_lens=1024, self_check=False)


@pytest.mark.every(3)
@pytest.mark.parametrize("model_type", [*ATTENTION_TYPES, *LATENT_TYPES, *POOLED_TYPES, *RECURRENT_TYPES])
def test_drafting_changes_no_answer(model_type: str, tmp_path: Path) -> None:
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **one) for one in PARAMS]  # type: ignore[arg-type]
    with closing(build_engine(tiny(model_type, tmp_path), page_size=16, max_batch_size=8)) as engine:
        config = scheduler_config(engine, num_states=engine.cache.num_states, chunk_size=64, max_batch_size=3)
        plain = answers_of(PagedLoop(config, lambda: engine.executor), params, VOCAB_SIZE)
        engine.executor.reset()
        loop = PagedLoop(replace(config, max_drafts=MAX_DRAFTS), lambda: engine.executor)
        known = {f"r{i}": one.token_ids for i, one in enumerate(plain)}
        loop.scheduler._drafts = drafts = KnownDrafts(loop.config, known, random.Random(3))
        assert told(answers_of(loop, params, VOCAB_SIZE)) == told(plain)
    stats = loop.scheduler.stats()
    assert stats.num_accepted > 40
    assert stats.num_drafted > stats.num_accepted
    assert drafts.num_wrong > 10


PROMPTS = [
    "Write this again:\ndef add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n",
    "Count: 1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8 1 2 3",
    "Tell a story about a cat.",
]
SCHEMA = (
    '{"type": "object", "properties": {"names": {"type": "array", "items": {"type": "string"}}}, "required": ["names"]}'
)
ASKED: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "logprobs": 0},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "constraint": Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA), "ignore_eos": False},
    {"temperature": 0.0, "stop": ("return", "4 5 6")},
    {"temperature": 0.9, "seed": 11, "n": 2},
    {"temperature": 0.0, "min_tokens": 30, "ignore_eos": False},
]


def outputs(speculative: str, draft_model: Path | None = None) -> list[RequestOutput]:
    found: list[RequestOutput] = []
    with LLM(cpu_infer=1, speculative=speculative, draft_model=draft_model) as llm:
        for asked in ASKED:
            params = SamplingParams(**({"max_tokens": 60, "ignore_eos": True} | asked))  # type: ignore[arg-type]
            found += llm.generate(PROMPTS, params)
    return found


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    return outputs("off")


@pytest.mark.parametrize("speculative", ["ngram", "draft"])
def test_the_bundled_model_says_the_same_with_drafts_and_without(
    speculative: str, plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By prompt lookup, and by a draft model, which is the same one."""
    equal_steps(monkeypatch)
    drafted = outputs(speculative, bundled_model("") if speculative == "draft" else None)
    for one, other in zip(plain, drafted, strict=True):
        assert (one.token_ids, one.text, one.logprobs) == (other.token_ids, other.text, other.logprobs)
        assert one.finish_reason == other.finish_reason
        assert one.stats.num_drafted == one.stats.num_accepted == 0
        assert 0 <= other.stats.num_accepted <= other.stats.num_drafted
    assert sum(one.stats.num_accepted for one in drafted) > 100


def test_where_rows_of_several_tokens_may_differ_nothing_is_drafted_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), LLM(cpu_infer=1, cpu_prefill="bf16") as llm:
        assert llm._batches.config.max_drafts == 0
    assert "no draft tokens: --cpu_prefill bf16 rounds steps of many rows in another way" in caplog.text
    with LLM(cpu_infer=1, cpu_prefill="bf16", speculative="ngram") as llm:
        assert llm._batches.config.max_drafts == 7
