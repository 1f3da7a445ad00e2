"""Keys and values in fewer bits through whole models: exact in themselves, and as far from fp32 as their types are.

Weights are fp32, so that nothing else is rounded.
"""

from __future__ import annotations

import functools
import logging
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from benchmarks.sequence import SequenceRunner
from ktransformers.cache.paged import LayerShape, PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.plan.kv_types import KV_DTYPES, KvTypes
from ktransformers.errors import ConfigError
from ktransformers.kernels import reference
from ktransformers.kernels.types import QuantType
from ktransformers.operators.layers.cpu import FusedLayer
from ktransformers.operators.layers.traced import decoder_layers
from tests.support.checks.products import product
from tests.support.engines.runners import fused_runner, random_ids, runner_of
from tests.support.gguf.writer import write_gguf
from tests.support.models.attention_families import config_of
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.latent_models import BLOCK_VALUES, latent_model
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import random_model, tiny_model, write_safetensors

NARROW = ("bf16", "int8", "fp8")
NUM_TOKENS = 60


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    """By what is particular to its attention."""
    if name in ("gemma4-shared", "llama4"):  # layers that read another's cache; chunks of positions
        return random_model(config_of(name), seed=1)
    if name == "qwen3_next":  # a recurrent family
        return recurrent_model(name, seed=1)
    if name == "deepseek_v32":  # latent, and chosen by an indexer
        return latent_model(name, seed=1)
    return tiny_model(name, seed=1, **(BLOCK_VALUES if name == "minimax_m3_vl_text" else {}))


def logits_in(runner: SequenceRunner, ids: list[int], size: int) -> torch.Tensor:
    """In steps of `size` tokens."""
    cuts = [(at, min(at + size, len(ids))) for at in range(0, len(ids), size)]
    return torch.cat([runner.forward(ids[a:b], a, range(b - a)) for a, b in cuts])


FAMILIES = (
    *("qwen3_moe", "gpt_oss", "gemma2", "gemma4-shared", "llama4", "deepseek_v3"),
    *("deepseek_v32", "minimax_m3_vl_text", "qwen3_next"),
)
STEPS = {"bf16": 2.0**-8, "int8": 1 / 127, "fp8": 2.0**-3}
"""Between two neighbours of a type, relative to the number, or to the largest of a head."""


@pytest.mark.every(4)
@product(strength=1, name=FAMILIES, kv_type=NARROW)
def test_steps_do_not_matter_and_results_are_near(name: str, kv_type: str) -> None:
    model = model_of(name)
    ids = random_ids(model.config.get_text_config().vocab_size, NUM_TOKENS)
    runner = runner_of(model, kv_type=kv_type)
    whole = logits_in(runner, ids, NUM_TOKENS)
    paged = [shape for shape in runner.cache.shapes if shape.has_pages]
    assert {shape.dtype for shape in paged} == {KV_DTYPES[kv_type]}
    for size in (1, 7, 32):
        assert torch.equal(logits_in(runner, ids, size), whole), size
    exact = logits_in(runner_of(model), ids, NUM_TOKENS)
    off = ((whole - exact).norm(dim=-1) / exact.norm(dim=-1)).median()
    # A rounding is off by less than half a step, and a few layers add up. Rows for which other experts or positions are
    # chosen differ by more.
    assert 0 < off <= 8 * STEPS[kv_type]


def rounded_attention(kv_type: str) -> Any:
    """Attention of transformers whose keys and values are what a cache of that type keeps of them."""

    def attend(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        kept = []
        for rows in (key, value):
            codes, scales = reference.quantize_kv(rows[0].transpose(0, 1), KV_DTYPES[kv_type])
            numbers = codes.float() if scales is None else codes.float() * scales
            kept.append(numbers.transpose(0, 1)[None])
        return sys.modules[type(module).__module__].eager_attention_forward(module, query, *kept, *args, **kwargs)

    return attend


@product(strength=1, name=["qwen3_moe", "gpt_oss", "gemma2"], kv_type=NARROW)
def test_logits_are_those_of_transformers_with_rounded_keys_and_values(name: str, kv_type: str) -> None:
    """A key that lies between two codes may go either way after other sums: what differs by that is a small part of
    what rounding changes at all."""
    model, ids = model_of(name), random_ids(160, NUM_TOKENS)
    AttentionInterface.register("rounded", rounded_attention(kv_type))
    AttentionMaskInterface.register("rounded", eager_mask)
    before = model.config._attn_implementation
    with torch.no_grad():
        exact = model(torch.tensor([ids])).logits[0]
        model.set_attn_implementation("rounded")
        try:
            want = model(torch.tensor([ids])).logits[0]
        finally:
            model.set_attn_implementation(before)
    got = logits_in(runner_of(model, kv_type=kv_type), ids, 16)
    assert (want - exact).norm() > 1e-4 * exact.norm()
    assert (got - want).norm() <= 0.2 * (want - exact).norm()


@pytest.mark.parametrize("kv_type", NARROW)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fused_layers_write_and_read_the_same(family: str, kv_type: str) -> None:
    ids = random_ids(160, NUM_TOKENS)
    fused, plain = fused_runner(model_of(family), kv_type), runner_of(model_of(family), kv_type=kv_type)
    assert all(isinstance(layer, FusedLayer) and layer.attention for layer in decoder_layers(fused.model))
    got, want = (logits_in(runner, ids, NUM_TOKENS) for runner in (fused, plain))
    exact = logits_in(runner_of(model_of(family)), ids, NUM_TOKENS)
    assert (got - want).norm() <= 0.2 * (want - exact).norm()  # as above: angles are multiplied in another order
    assert torch.equal(logits_in(fused, ids, 7), got)
    assert list(fused.cache.tensors()) == list(plain.cache.tensors())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_type", ["int8", "fp8"])
def test_a_batch_on_pages_is_what_each_prompt_gives_alone(kv_type: str) -> None:
    prompts = [random_ids(500, count, seed=count) for count in (5, 30, 64, 90)]
    prompts.append(prompts[-1][:70] + prompts[0])  # shares whole pages with another
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=10, logprobs=1, ignore_eos=True)
    config = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=256, kv_type=kv_type)
    with closing(LLM.from_engine(build_engine(config))) as llm:
        alone = [llm.generate([prompt], sampling)[0] for prompt in prompts]
    options: Any = {"cache_lens": 512, "max_batch_size": 3, "chunk_size": 24, "page_size": 8, "kv_type": kv_type}
    with closing(LLM(DEMO_GGUF, cpu_infer=2, **options)) as llm:
        together = llm.generate(prompts, sampling)
        again = llm.generate(prompts[-1:], sampling)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.logprobs for one in together] == [one.logprobs for one in alone]
    assert again[0].token_ids == alone[-1].token_ids


def test_the_plan_counts_what_is_kept(tmp_path: Path) -> None:
    path = write_gguf(model_of("deepseek_v3"), tmp_path / "latent.gguf", QuantType.Q8_0, QuantType.Q8_0)
    sizes = {}
    for kv_type in ("auto", "fp32", *NARROW):
        for name, file in (("grouped", DEMO_GGUF), ("latent", path)):
            config = EngineConfig(gguf_path=file, kv_type=kv_type, cache_lens=256).resolved()
            sizes[name, kv_type] = plan_model(config).extra_bytes["kv cache"]["cpu"] // 256
    # Four layers with 2 heads of 64 for keys and values; two layers of 32 + 16.
    grouped, latent = 4 * 2 * 2 * 64, 2 * (32 + 16)
    assert sizes == {
        **{("grouped", kv_type): 4 * grouped for kv_type in ("auto", "fp32")},
        **{("latent", kv_type): 4 * latent for kv_type in ("auto", "fp32")},
        ("grouped", "bf16"): 2 * grouped,
        ("latent", "bf16"): 2 * latent,
        **{("grouped", kv_type): grouped + 4 * 4 * 2 * 2 for kv_type in ("int8", "fp8")},
        **{("latent", kv_type): latent + 4 * 2 * 2 for kv_type in ("int8", "fp8")},
    }


def test_compressed_attention_keeps_its_rows_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_safetensors(tiny_model("deepseek_v4", seed=1), tmp_path)
    sizes = {}
    with caplog.at_level(logging.WARNING):
        for kv_type in ("auto", "int8"):
            plan = plan_model(EngineConfig(model_path=tmp_path, cache_lens=64, kv_type=kv_type).resolved())
            sizes[kv_type] = plan.extra_bytes["kv cache"]
    assert sizes["auto"] == sizes["int8"]
    assert [message for message in caplog.messages if "kv_type" in message] == [
        "--kv_type int8: all layers keep keys and values in float32 (compressed attention, whose entries are made of "
        "what is kept)"
    ]


@pytest.mark.parametrize("columns", [80, 128, 160, 192, 256])
def test_codes_that_a_gpu_gets_wrong_are_not_kept(columns: int, caplog: pytest.LogCaptureFixture) -> None:
    """Values of two parts of 128 columns or more; on the CPU, and of latents, all are kept."""
    gpu = LayerShape(2, columns, columns, place="cuda:0", dtype=torch.bfloat16, row_dtype=torch.bfloat16)
    shapes = [gpu, replace(gpu, place="cpu"), replace(gpu, is_latent=True)]
    types = KvTypes("int8", {})
    kept = [shape.dtype is torch.int8 for shape in types.applied(shapes)]
    assert kept == [columns not in (160, 192), True, True]
    with caplog.at_level(logging.WARNING):
        types.report(shapes)
    why = f"(values of {columns} columns, whose codes a GPU's kernel gets wrong)"
    said = f"--kv_type int8: layers 0 keep keys and values in bfloat16 {why}"
    assert caplog.messages == ([] if kept[0] else [said])


def test_what_is_not_done_is_said(caplog: pytest.LogCaptureFixture) -> None:
    cpu = LayerShape(2, 8, 8)
    gpu = LayerShape(2, 8, 8, place="cuda:0", dtype=torch.bfloat16, row_dtype=torch.bfloat16)
    shapes = [gpu, gpu, cpu, gpu, LayerShape.without_pages()]
    types = KvTypes("fp32", {})
    with caplog.at_level(logging.WARNING):
        assert types.applied(shapes) == shapes
        types.report(shapes)
        KvTypes("bf16", {}).report(shapes)
        KvTypes("auto", {2: "no matter"}).report(shapes)
        KvTypes("int8", {}).report(shapes[-1:])
    assert caplog.messages == [
        "--kv_type fp32: layers 0-1, 3 keep keys and values in bfloat16 (on a GPU)",
        "--kv_type int8 has no effect: the model keeps no keys and values",
    ]
    with pytest.raises(ConfigError, match="--kv_type int4 is not one of auto, fp32, bf16, int8, fp8"):
        EngineConfig(gguf_path=DEMO_GGUF, kv_type="int4").resolved()


def test_a_cache_lists_its_scales() -> None:
    grouped = LayerShape(2, 8, 4, dtype=torch.int8, index_dim=6)
    latent = LayerShape(1, 10, 7, is_latent=True, dtype=torch.float8_e4m3fn)
    shapes = [grouped, LayerShape(2, 8, 4, dtype=torch.int8, shares=0), latent, LayerShape(2, 8, 4)]
    cache = PagedCache(shapes, num_pages=3, page_size=4)
    found = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in cache.tensors().items()}
    assert found == {
        "0.keys": ((2, 8), torch.int8),
        "0.values": ((2, 4), torch.int8),
        "0.key_scales": ((2, 1), torch.float32),
        "0.value_scales": ((2, 1), torch.float32),
        "0.index_keys": ((6,), torch.float32),
        "2.keys": ((1, 10), torch.float8_e4m3fn),
        "2.key_scales": ((1, 2), torch.float32),
        "3.keys": ((2, 8), torch.float32),
        "3.values": ((2, 4), torch.float32),
    }
    assert sum(tensor.nbytes for tensor in cache.tensors().values()) == cache.nbytes
    assert cache.scales(1)[0] is cache.scales(0)[0]
    keys, values = cache.scales(2)
    assert keys is not None
    assert values is not None
    assert values.data_ptr() == keys.data_ptr()
    assert cache.scales(3) == (None, None)


def test_the_automatic_cache_holds_more(tmp_path: Path) -> None:
    """Where memory decides: a quarter of what is free, in positions of fewer bytes."""
    from ktransformers.engine.plan.cache_plan import CachePlan

    opened = open_model(EngineConfig(gguf_path=DEMO_GGUF).resolved())
    plan = plan_model(EngineConfig(gguf_path=DEMO_GGUF).resolved())
    plan.capacity["cpu"] = plan.weight_bytes["cpu"] + 4 * (8 << 20)
    shape = LayerShape(2, 64, 64)
    chosen = {}
    for kv_type in ("fp32", "bf16", "int8"):
        shapes = KvTypes(kv_type, {}).applied([shape] * 4)
        chosen[kv_type] = CachePlan(16, 8).num_slots(opened, plan, shapes)
    nbytes = {"fp32": 4096, "bf16": 2048, "int8": 1088}
    assert chosen == {name: (8 << 20) // count // 8 * 8 for name, count in nbytes.items()}
