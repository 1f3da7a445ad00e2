"""Draft models: answers are those without one, `==`; a model that drafts for itself is right all the time."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Engine, build_engine, plan_model
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.scheduler.drafting.prompt_lookup import PromptLookup
from tests.support.engines.drafter_steps import equal_steps
from tests.support.engines.paged_loop import Answer, PagedLoop, scheduler_config
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model, write_safetensors

PARAMS: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    {"temperature": 1.2, "top_k": 20, "seed": 7, "logprobs": 0, "min_tokens": 20},
    {"temperature": 0.8, "seed": 8, "logit_bias": {3: 4.0, 9: -5.0}, "prompt_logprobs": 1},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "seed": 6},
]
PLAIN = 4
"""The first so many are drafted without a mistake where the model drafts for itself."""


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps take the same, whatever else the machine does: as many are drafted as may be."""
    equal_steps(monkeypatch)
    monkeypatch.setattr(PromptLookup, "chances", lambda self, most: ())  # nothing is copied


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    kinds = {"moe": ("qwen3_moe", 0), "latent": ("deepseek_v3", 0), "other": ("qwen3_moe", 1)}
    return {name: write_safetensors(tiny_model(kind, seed=seed), root / name) for name, (kind, seed) in kinds.items()}


def engine_of(folder: Path, draft: Path | None = None, **changes: object) -> Engine:
    values: dict[str, object] = {"cpu_infer": 1, "cache_lens": 1024, "self_check": False, "speculative_tokens": 4}
    config = EngineConfig(model_path=folder, draft_model=draft, **(values | changes))  # type: ignore[arg-type]
    return build_engine(config, page_size=16, max_batch_size=8)


def loop_of(engine: Engine, **changes: object) -> PagedLoop:
    config = engine.scheduler_config
    values = {"max_drafts": config.max_drafts, "drafter": config.drafter}
    values |= {"chunk_size": 64, "max_batch_size": 4}
    return PagedLoop(scheduler_config(engine, **(values | changes)), lambda: engine.executor)


def params_of(count: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=40, ignore_eos=True, **one) for one in PARAMS[:count]]  # type: ignore[arg-type]


def asked(params: Sequence[SamplingParams], seed: int = 1) -> Iterator[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    for one in params:
        yield [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 90))], one


def answers_of(loop: PagedLoop, params: Sequence[SamplingParams]) -> list[tuple[object, ...]]:
    for prompt, one in asked(params):
        loop.add(prompt, one)
    loop.drain()
    return told(list(loop.answers.values()))


def told(answers: Sequence[Answer]) -> list[tuple[object, ...]]:
    return [(one.token_ids, one.logprobs, one.prompt_logprobs, one.reason) for one in answers]


@pytest.mark.parametrize("kind", ["moe", "latent"])
def test_a_model_that_drafts_for_itself_is_never_wrong(kind: str, folders: dict[str, Path]) -> None:
    """Greedy and sampled: each token is drawn by the number that the target's sampler takes."""
    params = params_of(PLAIN)
    with closing(engine_of(folders[kind], speculative="off")) as engine:
        plain = answers_of(loop_of(engine), params)
    with closing(engine_of(folders[kind], folders[kind])) as engine:
        assert engine.config.drafter == "draft"
        loop = loop_of(engine)
        assert answers_of(loop, params) == plain
    stats = loop.scheduler.stats()
    assert stats.num_accepted == stats.num_drafted > 20 * PLAIN


def test_another_model_is_wrong_and_changes_nothing(folders: dict[str, Path]) -> None:
    params = params_of(len(PARAMS))
    with closing(engine_of(folders["moe"], speculative="off")) as engine:
        plain = answers_of(loop_of(engine), params)
    with closing(engine_of(folders["moe"], folders["other"])) as engine:
        loop = loop_of(engine)
        assert answers_of(loop, params) == plain
    stats = loop.scheduler.stats()
    assert 0 <= stats.num_accepted < 0.5 * stats.num_drafted


@pytest.mark.parametrize("seed", [1, 2])
def test_preempted_suspended_and_after_a_loss_answers_are_the_same(seed: int, folders: dict[str, Path]) -> None:
    """The cache is too small for all, so that pages change hands; prompts share prefixes."""
    params = params_of(PLAIN)
    with closing(engine_of(folders["moe"], speculative="off", cache_lens=144)) as engine:
        plain = answers_of(loop_of(engine), params)
    with closing(engine_of(folders["moe"], folders["moe"], cache_lens=144)) as engine:

        def restarted() -> object:
            engine.executor.reset()
            return engine.executor

        loop = loop_of(engine)
        loop._make = restarted  # type: ignore[assignment]
        for prompt, one in asked(params):
            loop.add(prompt, one)
        loop.disturb(random.Random(seed))
        assert told(list(loop.answers.values())) == plain
        again = loop_of(engine)
        engine.executor.reset()
        assert answers_of(again, params) == plain
        assert again.scheduler.stats().num_preemptions > 0
        assert engine.executor.num_runs <= 4


def test_a_cached_prefix_is_there_for_the_draft_model_too(folders: dict[str, Path]) -> None:
    prompt, params = list(range(3, 90)), SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with closing(engine_of(folders["moe"], folders["moe"])) as engine:
        loop = loop_of(engine)
        first = loop.add(prompt, params)
        loop.drain()
        answer = loop.answers[first].token_ids
        second = loop.add([*prompt, *answer, 5, 6], params)  # the next turn of a chat
        loop.drain()
        assert loop.answers[second].last is not None
        assert loop.answers[second].last.cached_len >= 112
        stats = loop.scheduler.stats()
        assert stats.num_accepted == stats.num_drafted > 30


def test_a_prefix_that_the_draft_model_lacks_only_makes_it_worse(folders: dict[str, Path]) -> None:
    prompt, params = list(range(3, 90)), SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with closing(engine_of(folders["moe"], folders["moe"])) as engine:
        loop = loop_of(engine)
        drafter, engine.executor.drafter = engine.executor.drafter, None
        first = loop.add(prompt, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, max_drafts=0))
        loop.drain()
        engine.executor.drafter = drafter
        second = loop.add(prompt, params)
        loop.drain()
        assert loop.answers[second].token_ids == loop.answers[first].token_ids
        assert loop.answers[second].last is not None
        assert loop.answers[second].last.cached_len == 80


def test_who_wants_no_drafts_has_none(folders: dict[str, Path]) -> None:
    with closing(engine_of(folders["moe"], folders["moe"])) as engine:
        loop = loop_of(engine)
        loop.add(range(3, 40), SamplingParams(max_tokens=30, max_drafts=0))
        loop.drain()
        assert loop.scheduler.stats().num_drafted == 0
        assert engine.executor.drafter is not None
        assert engine.executor.drafter._runs == {}  # type: ignore[attr-defined]


def test_a_longer_context_than_the_draft_models_is_no_error(tmp_path: Path, folders: dict[str, Path]) -> None:
    model = tiny_model("qwen3_moe", seed=1)
    model.config.max_position_embeddings = 64
    short = write_safetensors(model, tmp_path)
    params = params_of(2)
    with closing(engine_of(folders["moe"], speculative="off")) as engine:
        plain = answers_of(loop_of(engine), params)
    with closing(engine_of(folders["moe"], short)) as engine:
        assert answers_of(loop_of(engine), params) == plain


def test_the_draft_model_is_in_the_plan(folders: dict[str, Path]) -> None:
    config = EngineConfig(model_path=folders["moe"], cpu_infer=1, cache_lens=1024)
    alone = plan_model(config)
    both = plan_model(EngineConfig(model_path=folders["moe"], draft_model=folders["moe"], cpu_infer=1, cache_lens=1024))
    assert "draft model" not in alone.extra_bytes
    own = alone.weight_bytes["cpu"] + alone.extra_bytes["kv cache"]["cpu"]
    assert both.extra_bytes["draft model"] == {"cpu": own}


def test_what_cannot_draft_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    recurrent = write_safetensors(recurrent_model("qwen3_next"), tmp_path)
    with pytest.raises(UnsupportedError, match=r"--draft_model .* \(qwen3_next\) has recurrent layers"):
        engine_of(folders["moe"], recurrent)
    with pytest.raises(ConfigError, match=r"--draft_model .*nowhere does not exist"):
        engine_of(folders["moe"], tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="name it with --draft_model"):
        engine_of(folders["moe"], speculative="draft")
    with pytest.raises(ConfigError, match="--speculative ngram uses no draft model: leave --draft_model out"):
        engine_of(folders["moe"], folders["moe"], speculative="ngram")
    with pytest.raises(ConfigError, match="--pipeline goes with draft tokens from the text alone"):
        engine_of(folders["moe"], folders["moe"], pipeline=2)


@pytest.mark.parametrize("name", ["Qwen3DSparkModel", "DFlashDraftModel", "LlamaForCausalLMEagle3"])
def test_a_head_for_another_model_is_no_draft_model(tmp_path: Path, folders: dict[str, Path], name: str) -> None:
    """Named as published checkpoints name their classes, whose configs are those of usual models otherwise."""
    shutil.copytree(folders["moe"], tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [name]}))
    with pytest.raises(UnsupportedError, match=f"--draft_model .*{name} is a head .*--speculative ngram"):
        engine_of(folders["moe"], tmp_path / "head")


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 32, VOCAB_SIZE + 16])
def test_models_of_one_tokenizer_may_be_padded_differently(
    vocab_size: int, tmp_path: Path, folders: dict[str, Path]
) -> None:
    other = write_safetensors(tiny_model("qwen3_moe", seed=1, vocab_size=vocab_size), tmp_path)
    params = params_of(2)
    with closing(engine_of(folders["moe"], speculative="off")) as engine:
        plain = answers_of(loop_of(engine), params)
    with closing(engine_of(folders["moe"], other)) as engine:
        loop = loop_of(engine)
        assert answers_of(loop, params) == plain
        assert loop.scheduler.stats().num_drafted > 0
