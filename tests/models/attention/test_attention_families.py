"""Families with shapes by layer, shared keys and values, chunks, gates and factors, against `transformers` in fp32.

64 tokens with windows and chunks of 16, then 16 steps of one. Tolerance: sums of some hundred products, a few layers
deep, see test_agreement; a layer that reads another's cache, or a border of chunks, is off by 0.1 and more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.attention_families import CASES, config_of
from tests.support.models.tiny_models import WINDOW, random_model, write_safetensors

PROMPT_LEN, ANSWER_LEN = 4 * WINDOW, 16
TOLERANCE = 5e-5


def model_of(name: str) -> PreTrainedModel:
    model = random_model(config_of(name), seed=1)
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):  # Gemma 4's; 1 would not show
                buffer.fill_(0.7)
    return model


def engine_of(model: PreTrainedModel, folder: Path) -> StaticEngine:
    write_safetensors(model, folder)
    return static_engine(EngineConfig(model_path=folder, cache_lens=96, cpu_infer=2, self_check=False))


def in_chunks(engine: StaticEngine, ids: list[int], size: int) -> torch.Tensor:
    starts = range(0, len(ids), size)
    return torch.cat([engine.runner.forward(ids[at : at + size], at, range(len(ids[at : at + size]))) for at in starts])


@pytest.mark.every(5)
@pytest.mark.parametrize("name", CASES)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    engine = engine_of(model, tmp_path)
    ids = torch.randint(3, 160, (PROMPT_LEN + ANSWER_LEN,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    try:
        got = [engine.runner.forward(ids[:PROMPT_LEN], 0, range(PROMPT_LEN))]
        got += [engine.runner.forward(ids[at : at + 1], at, [0]) for at in range(PROMPT_LEN, len(ids))]
        whole = torch.cat(got)
        assert (whole - want).abs().max() <= TOLERANCE * want.abs().max()
        for size in (7, WINDOW + 1):
            assert torch.equal(in_chunks(engine, ids, size), whole), f"chunks of {size}"
    finally:
        engine.close()


def test_layers_that_share_keys_and_values_take_no_memory(tmp_path: Path) -> None:
    engine = engine_of(model_of("gemma4-shared"), tmp_path)
    cache, planned = engine.runner.cache, engine.plan.extra_bytes["kv cache"]
    engine.close()
    shapes = [cache.shape(layer) for layer in range(5)]
    assert [shape.shares for shape in shapes] == [None, None, 0, 0, 1]
    assert cache.layer(2)[0] is cache.layer(0)[0]
    assert cache.layer(4)[1] is cache.layer(1)[1]
    # 96 positions; a sliding layer has 2 heads of 16, a full one 2 of 44; keys and values in fp32.
    assert planned == {"cpu": 96 * 2 * (16 + 44) * 2 * 4}
    assert cache.nbytes == planned["cpu"]
    assert [shape.nbytes(1) for shape in shapes] == [2 * 16 * 2 * 4, 2 * 44 * 2 * 4, 0, 0, 0]
    assert [shape.read_nbytes(1) for shape in shapes[2:]] == [2 * 16 * 2 * 4, 2 * 16 * 2 * 4, 2 * 44 * 2 * 4]


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["gemma4-shared", "gemma4-moe", "llama4", "laguna", "nemotron"])
def test_a_batch_on_pages_is_what_each_prompt_gives_alone(name: str, tmp_path: Path) -> None:
    """Steps of 12 tokens on pages of 8, so that prompts, chunks of positions and pages have other borders."""
    write_safetensors(model_of(name), tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 160, (length,), generator=generator).tolist() for length in (41, 9, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    settings = {"cache_lens": 192, "cpu_infer": 2, "self_check": False}
    with LLM.from_engine(build_engine(EngineConfig(model_path=tmp_path, **settings))) as alone:  # type: ignore[arg-type]
        want = [alone.generate([prompt], params)[0].token_ids for prompt in prompts]
    with LLM(tmp_path, max_batch_size=3, chunk_size=12, page_size=8, **settings) as llm:  # type: ignore[arg-type]
        got = [output.token_ids for output in llm.generate(prompts, params)]
    assert got == want
