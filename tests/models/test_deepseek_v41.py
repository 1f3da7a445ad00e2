"""DeepSeek-V4.1 against an oracle in plain torch (tests/support/oracles/deepseek_v41.py): transformers has no class."""

from __future__ import annotations

import itertools
import json
import logging
import random
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Engine, build_engine, plan_model
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.model.skeleton import build_skeleton, load_hf_config
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.models.deepseek_v41.configuration import DeepseekV41Config
from ktransformers.models.deepseek_v41.hashing import EngramLayout, alike_tokens, table_rows, token_map
from ktransformers.models.facts import LayerKind, ModelFacts
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.models.agreement import INT8_TOLERANCE
from tests.support.oracles.deepseek_v41 import (
    VOCAB_SIZE,
    Oracle,
    published_config,
    published_shapes,
    random_tensors,
    text_config,
    write_published,
)

LENGTH = 44  # five windows; eleven blocks of entries, of which three are candidates, and five entries of these chosen
TOLERANCE = 1e-5
"""Of the largest logit. Both sides are fp32 and add up in other orders: seven layers are off by some 1e-6; another
entry that is chosen, or another input, moves logits by more than 1e-3."""
IDS = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
PAGE = 8


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_tensors(text_config())


@pytest.fixture(scope="module")
def folder(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("v41")
    write_published(made, tensors, text_config(), quantized=False)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    config = EngineConfig(model_path=folder, cache_lens=50 * PAGE, cpu_infer=1)
    with closing(build_engine(config, page_size=PAGE, max_batch_size=8)) as made:
        yield made


@pytest.fixture(scope="module")
def want(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return Oracle(text_config(), tensors).logits(IDS)


def test_logits_at_once_in_chunks_and_token_by_token(folder: Path, want: torch.Tensor) -> None:
    with closing(static_engine(EngineConfig(model_path=folder, cache_lens=LENGTH, cpu_infer=1))) as engine:
        got = engine.runner.forward(IDS, 0, range(LENGTH))
        steps = [*range(0, 28, 7), *range(28, LENGTH + 1)]
        rows = [engine.runner.forward(IDS[at:end], at, range(end - at)) for at, end in itertools.pairwise(steps)]
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert torch.equal(torch.cat(rows), got)


@pytest.mark.parametrize(
    "broken", ["layers.1.engram.embed.weight", "layers.6.attn.indexer.wq_b.weight", "layers.6.hc_ffn_base"]
)
def test_the_oracle_reads_it(broken: str, tensors: dict[str, torch.Tensor], want: torch.Tensor) -> None:
    """The prompt is long enough for what is rare to move logits by far more than the tolerance."""
    noise = torch.randn(tensors[broken].shape, generator=torch.Generator().manual_seed(2))
    got = Oracle(text_config(), {**tensors, broken: tensors[broken] + 0.5 * noise}).logits(IDS)
    assert (got - want).abs().max() > 100 * TOLERANCE * want.abs().max()


def test_fp4_and_fp8_as_published(tmp_path: Path) -> None:
    """Experts in FP4, matrices in FP8 by 32 x 32, tables in FP8 by rows, all under exponents, the rest in BF16.

    Rows go to all experts and see all entries: activations in front of FP4 are rounded to int8, and where that changes
    a choice, logits are others.
    """
    text = text_config(index_topk=64, candidate_source_layer_id=-1, num_experts_per_tok=8)
    stored = random_tensors(text, seed=3)
    write_published(tmp_path, stored, text, quantized=True)
    want = Oracle(text, stored).logits(IDS)

    def forward(num_threads: int) -> torch.Tensor:
        settings = EngineConfig(model_path=tmp_path, cache_lens=LENGTH, cpu_infer=num_threads)
        with closing(static_engine(settings)) as engine:
            types = {entry.key: entry.quant_types for entry in engine.plan.entries}
            assert "MXFP4" in str(types["model.layers.0.mlp.experts"])
            return engine.runner.forward(IDS, 0, range(LENGTH))

    got = forward(1)
    assert (got - want).abs().max() <= INT8_TOLERANCE * want.abs().max()
    assert torch.equal(forward(2), got)


def executor(engine: Engine) -> PagedExecutor:
    """A fresh one over an empty cache."""
    model: Any = engine.executor
    cache = PagedCache(engine.cache.shapes, engine.cache.num_pages, PAGE)
    runner = ModelRunner(ForwardPass(model.runner.model, engine.pool))
    return PagedExecutor(runner, cache, engine.pool, engine.model.vocab_size)


def test_batches_prefix_hits_and_lost_engines_change_nothing(engine: Engine) -> None:
    random_ids = random.Random(4)
    shared = [random_ids.randrange(VOCAB_SIZE) for _ in range(19)]
    prompts = [shared[:length] + [random_ids.randrange(VOCAB_SIZE) for _ in range(7)] for length in (19, 0, 18)]
    params = [SamplingParams(seed=i, max_tokens=6, logprobs=2, temperature=1.0, ignore_eos=True) for i in range(3)]
    alone = []
    for prompt, one in zip(prompts, params, strict=True):
        loop = PagedLoop(scheduler_config(engine, chunk_size=64, max_batch_size=1), lambda: executor(engine))
        name = loop.add(prompt, one)
        loop.drain()
        alone.append(loop.answers[name])
    loop = PagedLoop(scheduler_config(engine, chunk_size=16, max_batch_size=2), lambda: executor(engine))
    names = [loop.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    while loop.step():
        if loop.num_steps == 6:
            loop.crash()
    again = loop.add(prompts[0] + alone[0].token_ids, params[1])
    loop.drain()
    for name, want in zip(names, alone, strict=True):
        assert loop.answers[name].token_ids == want.token_ids
        assert loop.answers[name].logprobs == want.logprobs
    assert loop.scheduler.stats().prefix_hit_len > 0
    fresh = PagedLoop(scheduler_config(engine, chunk_size=64), lambda: executor(engine))
    name = fresh.add(prompts[0] + alone[0].token_ids, params[1])
    fresh.drain()
    assert loop.answers[again].last.cached_len >= 2 * PAGE  # type: ignore[union-attr]
    assert loop.answers[again].token_ids == fresh.answers[name].token_ids
    assert loop.answers[again].logprobs == fresh.answers[name].logprobs


def test_hashes_are_those_of_the_published_code() -> None:
    """Numbers that the published model's own code gives for a small tokenizer (frozen in the tests of
    NVIDIA's NeMo Automodel), and the rows of the published tables, which are sums of the primes."""
    vocab = {"[UNK]": 0, " The": 1, "the": 2, "THE": 3, "\u00e9": 4, "E": 5, " ": 6, "x": 7, "\ufffd": 8}
    numbers = alike_tokens(Tokenizer(models.WordLevel(vocab, unk_token="[UNK]")))
    assert numbers == [0, 1, 1, 1, 2, 2, 3, 4, 5]
    config = DeepseekV41Config(
        num_hidden_layers=15,
        engram_layer_ids=[1, 14],
        engram_num_embeddings=[113, 253],
        engram_vocab_size=11,
        engram_n_heads=2,
        engram_compressed_vocab_size=6,
    )
    ids = [numbers[token] for token in (2, 3, 1, 7, 5, 6)]
    back = [torch.tensor([numbers[2]] * lag + ids[: len(ids) - lag]) for lag in range(4)]
    got = [table_rows(EngramLayout.of(config, layer), back).tolist() for layer in (1, 14)]
    assert got[0][2:] == [
        [6, 13, 35, 57, 80, 103],
        [10, 13, 39, 43, 71, 100],
        [3, 22, 34, 48, 78, 97],
        [4, 19, 31, 55, 76, 94],
    ]
    assert got[1][2:] == [
        [22, 42, 98, 150, 171, 200],
        [3, 34, 100, 141, 191, 245],
        [28, 64, 84, 121, 184, 200],
        [5, 42, 106, 115, 181, 220],
    ]
    sizes = [384006168, 384016682]
    published = DeepseekV41Config(num_hidden_layers=15, engram_layer_ids=[1, 14], engram_num_embeddings=sizes)
    assert [sum(map(sum, EngramLayout.of(published, layer).primes)) for layer in (1, 14)] == sizes


WIDE = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1048576,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_sinkhorn_iters": 20,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
}
"""What the published config says, where the tiny one says something else."""


def test_the_published_config(tmp_path: Path) -> None:
    values = published_config()
    values["text_config"] |= {**WIDE, "num_hidden_layers": 40}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_hf_config(tmp_path)
    facts = ModelFacts.of(config)
    assert facts.num_layers == 40
    assert {layer.kind for layer in facts.layers[:2]} == {LayerKind.SLIDING}
    assert {layer.kind for layer in facts.layers[2:]} == {LayerKind.COMPRESSED}
    assert (facts.context_len, facts.num_streams, facts.eos_token_ids) == (1048576, 4, (1,))
    sources = [config.kv_source(layer) for layer in range(40)]
    assert sources == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert [config.index_source(layer) for layer in (23, 24, 27, 39)] == [20, 24, 24, 36]
    assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_a_plan_of_the_published_shapes_from_headers(tmp_path: Path) -> None:
    """Three layers, with a table of 98 GB: a header, and nothing behind it."""
    values = published_config()
    text = {**values["text_config"], **WIDE, "num_hidden_layers": 3, "kv_source_layer_ids": [2]}
    text |= {"index_source_layer_ids": [2], "candidate_source_layer_id": -1, "engram_layer_ids": [1]}
    text["engram_num_embeddings"] = text["engram_num_embeddings"][:1]
    values["text_config"] = text
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    write_header(tmp_path / "model.safetensors", text)
    plan = plan_model(EngineConfig(model_path=tmp_path, experts_from="ram"))
    needs = {entry.key: entry.nbytes for entry in plan.entries}
    assert sum(needs["model.layers.1.engram"].values()) < 1 << 20  # the table stays in its file
    experts = sum(needs["model.layers.1.mlp.experts"].values())
    assert experts == 384 * 3 * 2304 * 5120 * 17 // 32  # 4.25 bits


def write_header(file: Path, text: dict[str, Any]) -> None:
    """A safetensors file of the published tensors and types, without their bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in published_shapes(text).items():
        for key, dtype, dims, width in _stored(name, shape):
            nbytes = width * torch.Size(dims).numel()
            header[key] = {"dtype": dtype, "shape": list(dims), "data_offsets": [end, end + nbytes]}
            end += nbytes
    written = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(written)) + written)
        out.truncate(8 + len(written) + end)


def _stored(name: str, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Name, type, shape and bytes of an element of what a tensor is stored as."""
    scale = name.replace(".weight", ".scale")
    if ".ffn.experts." in name:
        return [(name, "I8", (shape[0], shape[1] // 2), 1), (scale, "F8_E8M0", (shape[0], shape[1] // 32), 1)]
    if name.endswith("engram.embed.weight"):
        return [(name, "F8_E4M3", shape, 1), (scale, "F8_E8M0", (shape[0], shape[1] // 32), 1)]
    if any(part in name for part in (".wq_", ".attn.wkv.", ".wo_", ".shared_experts.", ".engram.wkv.")):
        return [(name, "F8_E4M3", shape, 1), (scale, "F8_E8M0", (-(-shape[0] // 32), -(-shape[1] // 32)), 1)]
    is_fp32 = name.endswith(("_fn", "_base", "_scale", "_sink", "bias", "bias_vl"))
    return [(name, "F32" if is_fp32 else "BF16", shape, 4 if is_fp32 else 2)]


def test_all_runs_on_the_cpu_where_a_gpu_is(folder: Path) -> None:
    plan = plan_model(EngineConfig(model_path=folder), hardware=fake_hardware(1))
    assert {entry.placement.generate_device for entry in plan.entries} == {"cpu"}
    assert {entry.placement.prefill_device for entry in plan.entries} == {"cpu"}


def test_what_is_left_unread_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ktransformers"):
        open_model(EngineConfig(model_path=folder))
    count = 4 + text_config()["num_hidden_layers"]  # a tensor of each part, and biases for rows of pictures
    assert f"{count} tensors are left unread: layers that draft (DSpark), and what reads pictures" in caplog.text


def test_other_tokenizers_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, by which .* n-grams are looked up"):
        token_map(str(tmp_path), 5)
    with pytest.raises(ConfigError, match=r"tokens read differently, .* engram_compressed_vocab_size 5; they do not"):
        token_map(str(folder), 5)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"gate_temp": 2.0}, "gate_temp divides the router's logits"),
        ({"compress_ratios": [0, 0, 2, 1, 1, 1, 1]}, "layer 3 reads entries of 1 tokens"),
        ({"kv_source_layer_ids": [4]}, "layer 2 reads entries of 2 tokens"),
        ({"candidate_topk_blocks": 1}, "leaves 1 entries of which index_topk"),
        ({"engram_num_embeddings": [9]}, "has not a number for each"),
        ({"engram_num_embeddings": [606, 606]}, "says 606 rows for layer 1, whose hashes need 660"),
        ({"engram_n_heads": 9}, "whose 3 x 9 hashes have 101 each"),
    ],
)
def test_a_config_that_is_not_right_is_refused(values: dict[str, Any], why: str, tmp_path: Path) -> None:
    written = published_config()
    written["text_config"] |= values
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=why):
        build_skeleton(load_hf_config(tmp_path))


def test_what_needs_other_cuts_is_refused(folder: Path) -> None:
    with pytest.raises((UnsupportedError, ConfigError), match="2: the model has 1 layers that 6 more cannot be parted"):
        build_engine(EngineConfig(model_path=folder, pipeline=2, cpu_infer=1))


def test_transformers_still_lacks_the_family() -> None:
    """A new version that has it fails here: then see whether its class takes the place of ours."""
    assert "deepseek_v41" not in CONFIG_MAPPING_NAMES
