"""A session on real attention, grouped-query and latent: a reused prefix changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.kernels.types import QuantType
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.sequential import Session
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("model_type", "kv_type"),
    [
        *((name, "auto") for name in ("qwen3_moe", "gpt_oss", "deepseek_v3")),
        ("gpt_oss", "fp8"),
        ("deepseek_v3", "int8"),
    ],
)
def test_reused_prefixes_give_the_tokens_and_logprobs_of_a_fresh_cache(
    model_type: str, kv_type: str, tmp_path: Path
) -> None:
    path = write_gguf(tiny_model(model_type, seed=6), tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)
    engine = static_engine(EngineConfig(gguf_path=path, cache_lens=256, cpu_infer=1, kv_type=kv_type))
    ids = torch.randint(0, engine.runner.vocab_size, (90,), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=12, logprobs=2, ignore_eos=True)
    warm = Session(engine.runner, chunk_size=16)
    for prompt in (ids[:40], ids[:80], ids[:55] + ids[60:], ids[:3], ids):
        reused = list(warm.generate(prompt, params))
        fresh = list(Session(engine.runner, chunk_size=256).generate(prompt, params))
        warm.clear()
        list(warm.generate(prompt, params))  # put back what the fresh session overwrote
        assert [event.token_id for event in reused] == [event.token_id for event in fresh]
        assert [event.logprobs for event in reused] == [event.logprobs for event in fresh]
        assert fresh[0].stats.cached_len == 0
    assert reused[0].stats.cached_len == 3
    engine.close()
