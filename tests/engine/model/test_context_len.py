"""How long a sequence may be: what the model was made for bounds every cache, and messages say who the limit is."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.batch_loop import BatchLoop
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.load.reference import build_reference_engine
from ktransformers.errors import ContextLengthError
from ktransformers.models.facts import ModelFacts
from ktransformers.server.backend.base import ModelInfo
from tests.support.models.tiny_models import tiny_config, tiny_model, write_safetensors


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **values}}


@pytest.mark.parametrize(
    ("values", "context"),
    [
        (rope(rope_type="default"), 512),
        # The config's limit counts the scaling already (DeepSeek) or does not (Qwen2.5 as its guide says).
        (rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128), 512),
        (rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=512), 2048),
        (rope(rope_type="dynamic", factor=2.0), 1024),
        (rope(rope_type="linear", factor=2.0), 1024),
        (
            rope(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=256,
            ),
            512,
        ),
    ],
)
def test_context_of_a_config(values: dict[str, Any], context: int) -> None:
    assert ModelFacts.of(tiny_config("llama", **values)).context_len == context


def test_a_config_that_does_not_say() -> None:
    assert ModelFacts.of(tiny_config("llama", max_position_embeddings=0)).context_len is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tiny_model("llama", seed=1), tmp_path_factory.mktemp("model"))


GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def test_a_cache_beyond_the_models_positions_is_cut(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Upstream's commands have --cache_lens 32768 whatever the model."""
    engine = build_engine(EngineConfig(model_path=folder, cpu_infer=1, cache_lens=32768))
    said = [record.getMessage() for record in caplog.records if "--cache_lens" in record.getMessage()]
    assert said == [
        "--cache_lens 32768: the model takes 512 tokens, prompt and answer together; the cache holds as many"
    ]
    with LLM.from_engine(engine) as llm:
        assert (engine.config.cache_lens, llm.max_len, engine.cache.num_slots) == (512, 512, 512)
        with pytest.raises(ContextLengthError, match=r"is 512 tokens \(what the model takes\).*shorten the prompt$"):
            llm.generate([list(range(3, 103)) * 6], GREEDY)


def test_a_small_cache_can_be_larger(folder: Path) -> None:
    engine = build_engine(EngineConfig(model_path=folder, cpu_infer=1, cache_lens=64))
    message = r"is 64 tokens \(set by --cache_lens\).*make the cache larger with cache_lens"
    with LLM.from_engine(engine) as llm, pytest.raises(ContextLengthError, match=message):
        llm.generate([list(range(3, 103))], GREEDY)


def test_the_reference_backend_is_bounded_too(folder: Path) -> None:
    engine = build_reference_engine(EngineConfig(model_path=folder, cache_lens=32768))
    with closing(BatchLoop(lambda report: engine)) as loop:
        assert loop.config.max_len == 512
        with pytest.raises(ContextLengthError, match=r"is 512 tokens \(what the model takes\).*shorten the prompt$"):
            loop.check(list(range(3, 103)) * 6, GREEDY)


@pytest.mark.parametrize(("is_models_limit", "says"), [(True, False), (False, True)])
def test_the_service_advises_a_larger_cache_where_that_helps(is_models_limit: bool, says: bool) -> None:
    from ktransformers.tokenizer import Tokenizer

    info = ModelInfo(Tokenizer(None), 64, 160, (), SamplingParams(), None, "fake", is_models_limit=is_models_limit)
    with pytest.raises(ContextLengthError) as error:
        info.limits.check(range(100), GREEDY)
    assert ("--cache_lens" in str(error.value)) is says
