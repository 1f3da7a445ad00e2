"""Families whose latent attention sees positions that an indexer chooses, in prompts longer than it chooses.

That they agree with `transformers`, and that chunks change nothing, is in test_latent_families.py.
"""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.cache.paged import LayerShape
from ktransformers.config import EngineConfig
from ktransformers.core import Phase, SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.errors import ConfigError, RuleError, UnsupportedError
from ktransformers.operators.attention.indexer import KIndexer, log_dense
from ktransformers.operators.context import ForwardContext
from tests.support.engines.fake_operators import inlined_rules
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.engines.runners import fused_runner, random_ids, runner_of
from tests.support.models.latent_models import BLOCK_VALUES, INDEXED_TYPES, latent_model
from tests.support.models.tiny_models import tiny_model, write_safetensors

TOLERANCE = 5e-5
PROMPT_LEN = 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(latent_model("deepseek_v32", seed=1), tmp_path_factory.mktemp("deepseek_v32"))


def engine_of(folder: Path, **settings: object) -> StaticEngine:
    return static_engine(EngineConfig(model_path=folder, cache_lens=96, cpu_infer=1, **settings))  # type: ignore[arg-type]


def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def test_the_keys_of_the_indexer_are_part_of_the_cache() -> None:
    runner = runner_of(latent_model("glm_moe_dsa", seed=1), 96)
    assert [shape.index_dim for shape in runner.cache.shapes] == [24, 24, 0, 0]  # two layers choose as the second one
    assert LayerShape(1, 40, 32, is_latent=True, index_dim=24).nbytes(10) == 4 * 10 * (40 + 24)
    assert runner.cache.index_keys(0).shape == (96, 24)


def test_chosen_blocks_of_grouped_keys_agree_and_chunks_change_nothing() -> None:
    model = tiny_model("minimax_m3_vl_text", seed=1, **BLOCK_VALUES)
    runner = runner_of(model, 96)
    assert [shape.index_dim for shape in runner.cache.shapes] == [0, 16, 16, 0]
    ids = random_ids(160, 80)
    want = logits_of(model, ids)
    steps = [(0, PROMPT_LEN), *((at, at + 1) for at in range(PROMPT_LEN, len(ids)))]
    whole = torch.cat([runner.forward(ids[a:b], a, range(b - a)) for a, b in steps])
    assert (whole - want).abs().max() <= TOLERANCE * want.abs().max()
    cuts = [(at, min(at + 7, len(ids))) for at in range(0, len(ids), 7)]
    assert torch.equal(torch.cat([runner.forward(ids[a:b], a, range(b - a)) for a, b in cuts]), whole)


def test_fused_layers_leave_chosen_blocks_alone() -> None:
    model = tiny_model("minimax_m3_vl_text", seed=1, **BLOCK_VALUES)
    ids = random_ids(160, PROMPT_LEN)
    got = fused_runner(model).forward(ids, 0, range(PROMPT_LEN))
    want = logits_of(model, ids)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("model_type", INDEXED_TYPES)
def test_two_packed_sequences_equal_each_alone(model_type: str) -> None:
    """One has fewer positions than are chosen, the other more."""
    model = latent_model(model_type, seed=2)
    runner = runner_of(model, 96)
    first, second = random_ids(model.config.vocab_size, 9, 4), random_ids(model.config.vocab_size, 60, 5)
    alone = [runner.forward(ids, 0, range(len(ids))) for ids in (first, second)]

    page, lengths = 16, [len(first), len(second)]
    table = torch.tensor([[5, 0, 0, 0], [3, 1, 4, 2]], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    context = ForwardContext(
        cache=runner.cache,
        pool=runner.pool,
        phase=Phase.PREFILL,
        page_size=page,
        slot_mapping=table[sequence, positions // page].long() * page + positions % page,
        seq_ids=sequence.to(torch.int32),
        kv_lens=(positions + 1).to(torch.int32),
        block_table=table,
    )
    ids = torch.tensor(first + second)
    packed = runner.steps.step(ForwardBatch(ids, positions, context, torch.arange(sum(lengths))))
    assert torch.equal(packed, torch.cat(alone))


@pytest.mark.exhaustive
def test_answers_do_not_depend_on_what_runs_beside(saved: Path) -> None:
    prompts = [random_ids(160, n, seed=n) for n in (5, 30, 64)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    with closing(LLM(saved, cache_lens=512, cpu_infer=2, max_batch_size=3, page_size=16)) as llm:
        together = [output.token_ids for output in llm.generate(prompts, sampling)]
        alone = [llm.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    assert together == alone


def test_off_attends_to_all_positions(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = random_ids(160, PROMPT_LEN)
    model = latent_model("deepseek_v32", seed=1)
    sparse = logits_of(model, ids)
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = PROMPT_LEN
    dense = logits_of(model, ids)
    log_dense.cache_clear()
    with caplog.at_level(logging.WARNING), closing(engine_of(saved, sparse_attention="off")) as engine:
        got = engine.runner.forward(ids, 0, range(PROMPT_LEN))
        indexers = [module for module in engine.runner.model.modules() if isinstance(module, KIndexer)]
        shapes = engine.runner.cache.shapes
    assert (got - dense).abs().max() <= TOLERANCE * dense.abs().max()
    assert (got - sparse).abs().max() > 0.1 * dense.abs().max()
    assert [message for message in caplog.messages if "sparse_attention" in message] == caplog.messages
    assert len(caplog.messages) == 1
    assert [shape.index_dim for shape in shapes] == [0] * 4
    assert all(parameter.is_meta for indexer in indexers for parameter in indexer.parameters())


def test_off_says_where_it_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_safetensors(latent_model("glm4_moe_lite", seed=1), tmp_path)
    with caplog.at_level(logging.WARNING):
        plan_model(EngineConfig(model_path=tmp_path, sparse_attention="off"))
    assert [m for m in caplog.messages if m.startswith("--sparse_attention off has no effect")]
    with pytest.raises(ConfigError, match="--sparse_attention some is not one of on, off"):
        EngineConfig(model_path=tmp_path, sparse_attention="some").resolved()


def test_rules_without_the_indexer_are_refused(saved: Path, tmp_path: Path) -> None:
    rules = inlined_rules("DeepSeek-V32.yaml")
    path = tmp_path / "rules.yaml"
    path.write_text(rules.replace("self_attn\\\\.indexer$", "self_attn\\\\.nothing$"))
    with pytest.raises((UnsupportedError, RuleError), match="add a rule with class KIndexer"):
        engine_of(saved, optimize_config_path=path)
