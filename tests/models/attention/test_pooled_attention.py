"""Families whose attention sees pools of positions that an indexer chooses, between recurrent layers.

Logits are those of `transformers` in fp32 (why 5e-5: tests/models/test_agreement.py), in prompts longer than what is
chosen; and the same bits however a sequence is cut, packed or resumed.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen4_exp.modeling_qwen4_exp import _build_layer_multipliers

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import ConfigError, RuleError, TensorMismatchError, UnsupportedError
from ktransformers.models.ngram_hash import hash_multipliers
from ktransformers.operators.attention.indexer import log_dense
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.fake_operators import inlined_rules
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.sequential import Session
from tests.support.models.made import Made, logits_in, logits_of
from tests.support.models.pooled_models import EOS, POOLED_TYPES, pooled_model
from tests.support.models.tiny_models import VOCAB_SIZE, write_safetensors

TOLERANCE = 5e-5
PROMPT_LEN, NUM_STEPS = 64, 16
PAGE = 8


def some_ids(count: int, seed: int = 7) -> list[int]:
    """Some of them ends of texts, which n-grams do not cross."""
    ids = torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [EOS if at % 13 in (5, 7) else token for at, token in enumerate(ids)]


def config_of(folder: Path, **settings: object) -> EngineConfig:
    return EngineConfig(model_path=folder, **{"cache_lens": 512, "cpu_infer": 1, **settings})  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=POOLED_TYPES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    model = pooled_model(request.param)
    made = Made(model, config_of(write_safetensors(model, tmp_path_factory.mktemp(request.param))), PAGE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def qwen4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(pooled_model("qwen4_exp_text"), tmp_path_factory.mktemp("qwen4"))


@pytest.mark.exhaustive
def test_agrees_with_transformers_whatever_the_steps(made: Made) -> None:
    ids = some_ids(PROMPT_LEN + NUM_STEPS)
    want = logits_of(made.model, ids)
    assert made.engine.plan.unmatched == ()
    got = logits_in(made.engine, ids, [PROMPT_LEN, *[1] * NUM_STEPS])
    assert float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max())
    for sizes in ([80], [7] * 12, [1] * 80, [63, 2, 15]):
        assert torch.equal(logits_in(made.engine, ids, sizes), got), sizes


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("glm5_next_text", {"linear_lower_bound": None, "attention_bias": True, "norm_topk_prob": False}),
        ("glm5_next_text", {"index_kpool": 1, "index_topk": 12, "qk_nope_head_dim": 24}),
        ("qwen4_exp_text", {"ple_layer_ids": None, "attention_bias": True, "output_gate_type": None}),
        ("qwen4_exp_text", {"ngram_size": 5, "ple_embed_dim": 48, "ple_conv_kernel_size": 3, "split_ngram_parts": 1}),
        ("qwen4_exp_text", {"eos_token_id": [5, EOS], "norm_topk_prob": False, "indexer_compress_ratio": 2}),
        ("qwen4_exp_text", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_other_settings_agree_too(model_type: str, values: dict[str, object], tmp_path: Path) -> None:
    if "rope_parameters" in values:
        values = {**values, "rope_parameters": {"rope_theta": 10000.0, **values["rope_parameters"]}}  # type: ignore[dict-item]
    model, ids = pooled_model(model_type, seed=3, **values), some_ids(PROMPT_LEN)
    write_safetensors(model, tmp_path)
    want = logits_of(model, ids)
    with closing(static_engine(config_of(tmp_path))) as engine:
        got = logits_in(engine, ids, [60, 1, 1, 1, 1])
        assert torch.equal(logits_in(engine, ids, [7] * 10), got)
    assert float((got - want).abs().max()) <= TOLERANCE * float(want.abs().max())


# Many sequences.


def alone(made: Made, prompt: list[int], count: int) -> list[int]:
    session = Session(made.engine.runner, chunk_size=512, has_prefix_cache=False)
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
    return [event.token_id for event in session.generate(prompt, params) if event.token_id is not None]


def paged_loop(made: Made, **changes: int) -> PagedLoop:
    paged = made.paged
    values = {"num_pages": 200, "num_states": 12, **changes}

    def executor() -> PagedExecutor:
        cache = PagedCache(paged.cache.shapes, values["num_pages"], PAGE, values["num_states"])
        runner = ModelRunner(ForwardPass(paged.executor.runner.model, paged.pool))  # type: ignore[attr-defined]
        return PagedExecutor(runner, cache, paged.pool, paged.model.vocab_size)

    sizes = {"page_size": PAGE, "chunk_size": 64, "max_batch_size": 8, "snapshot_interval": 64, **values}
    return PagedLoop(replace(scheduler_config(paged), **sizes), executor)  # type: ignore[arg-type]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [pytest.param({"chunk_size": 7}, marks=pytest.mark.exhaustive), {"num_pages": 40, "max_batch_size": 5}],
)
def test_many_sequences_are_each_alone(made: Made, changes: dict[str, int]) -> None:
    """With prefixes that are shared, in short steps, and where few pages make some of them begin again."""
    rng, shared = random.Random(3), some_ids(150, seed=1)
    prompts = [shared[: rng.choice((1, 66, 70, 130, 150))] + some_ids(rng.randint(1, 20), seed=i) for i in range(6)]
    loop, names, count = paged_loop(made, **changes), [], 24 if "num_pages" in changes else 8
    for prompt in prompts:
        names.append(loop.add(prompt, SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)))
        loop.step()
    while loop.step():
        pass
    for name, prompt in zip(names, prompts, strict=True):
        assert loop.answers[name].token_ids == alone(made, prompt, count)
    stats = loop.scheduler.stats()
    assert stats.prefix_hit_len > 0
    assert (stats.num_preemptions > 0) == ("num_pages" in changes)


@pytest.mark.exhaustive
def test_another_engine_goes_on_where_one_died(made: Made) -> None:
    loop, prompts = paged_loop(made), [some_ids(90, seed=i) for i in range(3)]
    names = [loop.add(prompt, SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)) for prompt in prompts]
    for _ in range(20):
        loop.step()
    loop.crash()
    while loop.step():
        pass
    for name, prompt in zip(names, prompts, strict=True):
        assert loop.answers[name].token_ids == alone(made, prompt, 30)


def test_a_page_holds_whole_pools(made: Made) -> None:
    with pytest.raises(ConfigError, match=r"--page_size 6: the model's indexer chooses 4 tokens together"):
        build_engine(made.config, page_size=6, max_batch_size=2)


# What is chosen.


def test_off_attends_to_all_positions(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    ids = some_ids(PROMPT_LEN)
    sparse, name = logits_of(made.model, ids), made.model.config.model_type
    kinds = {"glm5_next_text": {"index_topk": PROMPT_LEN}, "qwen4_exp_text": {"indexer_budget": PROMPT_LEN}}
    dense = logits_of(pooled_model(name, **kinds[name]), ids)
    log_dense.cache_clear()
    with caplog.at_level(logging.WARNING), closing(static_engine(replace(made.config, sparse_attention="off"))) as one:
        got = one.runner.forward(ids, 0, range(PROMPT_LEN))
        assert [shape.index_dim for shape in one.runner.cache.shapes] == [0] * 4
    assert (got - dense).abs().max() <= TOLERANCE * dense.abs().max()
    assert (got - sparse).abs().max() > 0.01 * dense.abs().max()
    assert len([message for message in caplog.messages if "sparse_attention" in message]) == 1


def test_what_covers_all_positions_chooses_them_all(made: Made) -> None:
    """19 of 19: 16 in pools, and the 3 behind."""
    ids = some_ids(19)
    with closing(static_engine(replace(made.config, sparse_attention="off"))) as dense:
        want = dense.runner.forward(ids, 0, range(19))
    assert torch.equal(made.engine.runner.forward(ids, 0, range(19)), want)


@pytest.mark.parametrize(
    ("file", "model_type"), [("Glm5Next.yaml", POOLED_TYPES[0]), ("Qwen4Exp.yaml", POOLED_TYPES[1])]
)
def test_rules_without_the_indexer_are_refused(file: str, model_type: str, tmp_path: Path) -> None:
    write_safetensors(pooled_model(model_type), tmp_path)
    path = tmp_path / "rules.yaml"
    path.write_text(inlined_rules(file).replace("self_attn\\\\.indexer$", "self_attn\\\\.nothing$"))
    with pytest.raises((UnsupportedError, RuleError), match="add a rule with class KPooledIndexer"):
        static_engine(config_of(tmp_path, optimize_config_path=path))


def test_rows_that_see_nothing_are_refused(tmp_path: Path) -> None:
    write_safetensors(pooled_model("glm5_next_text", index_kpool_always_select_tail=False), tmp_path)
    with pytest.raises(RuleError, match="no indexer that KPooledIndexer knows; --sparse_attention off"):
        static_engine(config_of(tmp_path))


# Embeddings of n-grams.


@pytest.mark.parametrize("sizes", [(248320, 3, 0, 1234), (160, 5, 2, 7), (1, 2, 1, 0)])
def test_multipliers_are_those_of_transformers(sizes: tuple[int, int, int, int]) -> None:
    assert hash_multipliers(*sizes) == _build_layer_multipliers(*sizes).tolist()


def test_tables_lie_in_the_parts_of_the_files(qwen4: Path) -> None:
    stored = load_file(qwen4 / "model.safetensors")
    parts = [name for name in stored if ".ngram_embedding.shard_" in name]
    assert len(parts) == 2 * 12
    with closing(static_engine(config_of(qwen4))) as engine:
        table = engine.runner.model.get_submodule("model.layers.2.ple")._parts  # type: ignore[union-attr]
        assert len(table) == 12
        assert engine.runner.cache.states is not None
        assert "ngram_tokens" in engine.runner.cache.states.layer(2)
        assert "recurrent" in engine.runner.cache.states.layer(2)


def test_other_multipliers_in_the_files_are_refused(qwen4: Path, tmp_path: Path) -> None:
    stored = load_file(qwen4 / "model.safetensors")
    name = next(name for name in stored if name.endswith("layers.2.ple.ple_embedding.layer_multipliers"))
    save_file({**stored, name: stored[name] + 2}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((qwen4 / "config.json").read_bytes())
    with pytest.raises(TensorMismatchError, match=r"layer_multipliers is not what the model's config gives"):
        static_engine(config_of(tmp_path))


@pytest.mark.parametrize("operator", ["KPerLayerEmbedding", "KRecurrent"])
def test_parts_of_a_layer_keep_their_states_on_one_device(operator: str, qwen4: Path, tmp_path: Path) -> None:
    before, _, after = inlined_rules("Qwen4Exp.yaml").partition(operator)
    path = tmp_path / "rules.yaml"
    path.write_text(before + operator + after.replace("device: cuda", "device: cpu", 2))
    with pytest.raises((UnsupportedError, RuleError), match="place both on one device"):
        static_engine(config_of(qwen4, optimize_config_path=path), hardware=fake_hardware(1))
