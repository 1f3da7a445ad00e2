"""The keywords of LLM and AsyncLLM: what they mean, and what is said of those that mean nothing. Loads no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.engine.api.async_llm import AsyncLLM
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.api.llm_options import LLMOptions, llm_options
from ktransformers.errors import ConfigError, UnsupportedError
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_EYES

DEMO = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))


def options(**keywords: Any) -> LLMOptions:
    return llm_options(None, None, None, keywords)


def test_where_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def paths(model: Any = None, gguf_path: Any = None, model_path: Any = None) -> tuple[Path | None, Path | None]:
        config = llm_options(model, gguf_path, model_path, {}).config
        return config.model_path, config.gguf_path

    folder = DEMO_CHECKPOINT
    assert paths() == (DEMO_EYES, DEMO)
    assert paths(str(DEMO)) == paths(DEMO) == paths(gguf_path=str(DEMO)) == (None, DEMO)
    assert paths(folder) == paths(model_path=str(folder)) == (folder, None)
    assert paths(folder, DEMO) == paths(model_path=folder, gguf_path=DEMO) == (folder, DEMO)
    asked = []
    monkeypatch.setattr(
        "ktransformers.engine.api.llm_options.locate_model",
        lambda name: asked.append(name) or EngineConfig(gguf_path=DEMO),
    )
    assert paths("org/name:Q4_K_M") == (None, DEMO)
    assert asked == ["org/name:Q4_K_M"]
    with pytest.raises(ConfigError, match="model and model_path both name a model"):
        paths(folder, None, folder)
    with pytest.raises(ConfigError, match="model must be a path or a name, got 5"):
        paths(5)
    (tmp_path / "x").write_text("")


def test_vllms_keywords() -> None:
    made = options(
        max_model_len=4096,
        max_num_seqs=3,
        max_num_batched_tokens=100,
        block_size=32,
        enforce_eager=True,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        dtype="auto",
        quantization=None,
        trust_remote_code=True,
        seed=7,
    )
    config = EngineConfig(
        model_path=DEMO_EYES,
        gguf_path=DEMO,
        cache_lens=4096,
        chunk_size=100,
        use_cuda_graph=False,
        trust_remote_code=True,
    )
    assert made == LLMOptions(config, max_batch_size=3, page_size=32, seed=7)
    assert options(max_model_len=None, max_num_batched_tokens=None, enforce_eager=False) == options()
    assert options(max_batch_size=3, page_size=32).page_size == 32
    assert options(optimize_config_path="rules.yaml").config.optimize_config_path == Path("rules.yaml")


@pytest.mark.parametrize(
    ("keywords", "error", "says"),
    [
        ({"cache_len": 5}, ConfigError, "^LLM has no keyword cache_len; did you mean cache_lens[?]$"),
        ({"max_modellen": 5}, ConfigError, "did you mean max_model_len[?]"),
        ({"gguf": "x"}, ConfigError, "did you mean gguf_path[?]"),
        ({"xyzzy": 5}, ConfigError, "^LLM has no keyword xyzzy$"),
        ({"dtype": "bfloat16"}, UnsupportedError, "dtype='bfloat16' is not supported: .*cpu_quant"),
        ({"gpu_memory_utilization": 0.9}, UnsupportedError, "gpu_memory_utilization=0.9 .*GiB here, as gpu_memory=20"),
        ({"quantization": "awq"}, UnsupportedError, "cpu_quant='q4_k'"),
        ({"max_model_len": 5, "cache_lens": 6}, ConfigError, "max_model_len and cache_lens are the same"),
        ({"enforce_eager": True, "use_cuda_graph": True}, ConfigError, "enforce_eager and use_cuda_graph are the same"),
        ({"max_batch_size": 0}, ConfigError, "max_batch_size must be a number from 1 to 65536, got 0"),
        ({"page_size": "8"}, ConfigError, "page_size must be a whole number, got '8'"),
        ({"cache_lens": "8192"}, ConfigError, "cache_lens must be a whole number, got '8192'"),
    ],
)
def test_what_is_refused(keywords: dict[str, Any], error: type[Exception], says: str) -> None:
    for make in (LLM, AsyncLLM):
        with pytest.raises(error, match=says):
            make(**keywords)
