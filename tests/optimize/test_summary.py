"""A plan's summary and the bound on decoding, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ktransformers.cache.paged import LayerShape
from ktransformers.models.facts import ModelFacts
from ktransformers.optimize.decode_bound import DecodeReads, LayerReads
from ktransformers.optimize.summary import ModelSize, Summary, SummaryPart, summarize
from tests.support.engines.fake_operators import EXPERTS_RULE, meta_model, plan_with

# qwen3_moe with 2 layers: hidden 64, 4 heads and 2 KV heads of 32, 8 experts, 4 used, 96 wide, 160 words
ATTENTION = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 2 * 32  # q; k and v; o; norms of q and k
EXPERTS = 8 * (2 * 96 * 64 + 64 * 96)  # gate and up; down
ROUTER_AND_NORMS = 8 * 64 + 2 * 64
TABLE = 160 * 64
LAST_NORM = 64


def summary_of(model_type: str = "qwen3_moe", **config_values: object) -> Summary:
    model = meta_model(model_type, **config_values)
    shapes = [LayerShape(2, 32, 32)] * 2
    plan = plan_with(model, EXPERTS_RULE, extra_bytes={"kv cache": {"cpu": 4096}, "workspace": {"cpu": 5}})
    return summarize(
        plan,
        model,
        facts=ModelFacts.of(model.config),
        name="x",
        shapes=shapes,
        cache_tokens=8,
        chunk_size=4,
        disk_bytes=None,
    )


def test_parameters() -> None:
    size = summary_of().size
    total = 2 * (ATTENTION + EXPERTS + ROUTER_AND_NORMS) + 2 * TABLE + LAST_NORM
    active = 2 * (ATTENTION + EXPERTS // 2 + ROUTER_AND_NORMS) + TABLE + LAST_NORM
    assert size == ModelSize(parameters=total, active=active, layers=2, experts=8, top_k=4)


def test_a_tied_table_counts_once_and_is_the_head() -> None:
    size = summary_of(tie_word_embeddings=True).size
    assert size.parameters == 2 * (ATTENTION + EXPERTS + ROUTER_AND_NORMS) + TABLE + LAST_NORM
    assert size.active == 2 * (ATTENTION + EXPERTS // 2 + ROUTER_AND_NORMS) + TABLE + LAST_NORM


def test_dense_models_use_all_but_the_table() -> None:
    size = summary_of("llama").size
    assert (size.experts, size.top_k) == (0, 0)
    assert size.parameters - size.active == TABLE


def test_top_k_may_differ_between_layers() -> None:
    size = summary_of("hunyuan_v1_moe", moe_topk=[2, 4]).size
    one = summary_of("hunyuan_v1_moe", moe_topk=[2, 2]).size
    assert size.top_k == 4
    assert size.active - one.active == EXPERTS // 4  # two more experts of eight, in one layer


def test_parts_and_bits() -> None:
    summary = summary_of()
    assert summary.parts == (
        SummaryPart("experts", ("cpu",), 2 * 4 * EXPERTS, ("F32",)),
        SummaryPart("attention", ("cpu",), 2 * 4 * ATTENTION, ("F32",)),
        SummaryPart("dense and shared", ("cpu",), 4 * (2 * ROUTER_AND_NORMS + LAST_NORM), ("F32",)),
        SummaryPart("embeddings and head", ("cpu",), 2 * 4 * TABLE, ("F32",)),
        SummaryPart("cache", ("cpu",), 4096),
        SummaryPart("work space", ("cpu",), 5),
    )
    assert summary.bits_per_weight == 32
    assert summary.context_len == 512


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_token_reads_the_active_parameters_and_the_cache(is_tied: bool) -> None:
    summary = summary_of(tie_word_embeddings=is_tied)
    weights = 4 * (2 * (ATTENTION + EXPERTS // 2 + ROUTER_AND_NORMS) + TABLE + LAST_NORM)
    cache = 2 * 4 * 8 * 2 * (32 + 32)  # layers, bytes, tokens, KV heads, keys and values
    reads = summary.reads
    assert reads.bytes_per_token() == {"cpu": weights}
    assert reads.bytes_per_token(8) == {"cpu": weights + cache}
    assert reads.tokens_per_s({"cpu": 1e9}) == pytest.approx(1e9 / weights, rel=1e-12)
    assert reads.tokens_per_s({"cpu": 1e9}, 8) == pytest.approx(1e9 / (weights + cache), rel=1e-12)
    assert reads.tokens_per_s({"cuda:0": 1e9}) is None


def test_devices_work_one_after_another_but_for_shared_experts() -> None:
    layer = LayerReads(alone={"cuda:0": 400.0}, routed={"cpu": 60.0}, shared={"cuda:0": 100.0})
    bandwidth = {"cpu": 10.0, "cuda:0": 100.0}
    assert layer.seconds(bandwidth) == 4.0 + 6.0
    assert replace(layer, shared={"cuda:0": 900.0}).seconds(bandwidth) == 4.0 + 9.0
    assert replace(layer, routed={"cuda:0": 60.0}).seconds(bandwidth) == 4.0 + 0.6 + 1.0
    assert replace(layer, shared={}).seconds(bandwidth) == 4.0 + 6.0
    shapes = (LayerShape(1, 1, 1, place="cuda:0"), LayerShape(1, 2, 1, is_latent=True))
    reads = DecodeReads((layer, LayerReads(alone={"cpu": 5.0})), shapes, (None, None))
    assert reads.bytes_per_token(10) == {"cpu": 65 + 80, "cuda:0": 500 + 80}
    assert reads.tokens_per_s(bandwidth, 10) == pytest.approx(1 / (10.0 + 0.5 + 8.0 + 0.8), rel=1e-12)


def test_a_sliding_window_bounds_what_is_read() -> None:
    reads = summary_of("gpt_oss").reads  # a window of 16 tokens in the first of two layers
    assert reads.windows == (16, None)
    assert reads.cache_bytes(100) == {"cpu": (16 + 100) * 4 * 2 * 64}


def test_shared_experts_are_told_from_routed_ones() -> None:
    outside, first = summary_of("qwen2_moe").reads.layers[:2]
    assert outside.routed == outside.shared == {}
    assert first.shared == {"cpu": 4 * (3 * 64 * 96 + 64)}  # gate, up, down, and the gate of the whole
    assert first.routed == {"cpu": 4 * EXPERTS * 2 / 8}
