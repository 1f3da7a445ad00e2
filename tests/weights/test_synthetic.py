"""Random weights: their numbers by gguf's own decoder, their memory, their names."""

from __future__ import annotations

import itertools
import math

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from ktransformers.engine.model.skeleton import build_skeleton
from ktransformers.errors import TensorMismatchError
from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.models.facts import ModelFacts
from ktransformers.weights import synthetic
from ktransformers.weights.source import ExpertsLayout
from ktransformers.weights.synthetic import SyntheticSource, random_blocks, skewed_gain
from tests.support.models.tiny_models import tiny_config

LAYOUT = ExpertsLayout(num_experts=6, hidden_size=512, intermediate_size=256)
KEY = "model.layers.0.mlp.experts"


def source_of(**shapes: tuple[int, ...]) -> SyntheticSource:
    return SyntheticSource(
        {name.replace("__", "."): shape for name, shape in shapes.items()}, ModelFacts.of(Qwen3MoeConfig())
    )


def decoded(raw: RawTensor) -> np.ndarray:
    values: np.ndarray = gguf.quants.dequantize(raw.data.numpy().reshape(raw.rows, raw.row_bytes), raw.qtype)
    return values


@pytest.mark.parametrize(
    ("qtype", "nbytes", "spread"),
    [
        # fp16 scale, 6-bit scale in 0 .. 63, quant in 0 .. 15 around 7.5: root mean squares multiplied
        (QuantType.Q4_K, 144, 1e-4 * math.sqrt(63 * 127 / 6) * math.sqrt((16**2 - 1) / 12)),
        # fp16 scale, 8-bit scale in -128 .. 127, quant in -32 .. 31
        (QuantType.Q6_K, 210, 2e-5 * math.sqrt((256**2 + 2) / 12) * math.sqrt((64**2 + 2) / 12)),
        (QuantType.Q8_0, 34, 2e-4 * math.sqrt((256**2 + 2) / 12)),
        # scales of 1/256 and 1/128, numbers 0, 1/2, 1, 3/2, 2, 3, 4, 6; without the spread of the others' scales
        (QuantType.MXFP4, 17, math.sqrt((2**-16 + 2**-14) / 2 * (0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8 / 1.01)),
    ],
)
def test_blocks_have_zero_mean_and_the_spread_of_their_parts(qtype: QuantType, nbytes: int, spread: float) -> None:
    count = 4096
    out = np.empty(count * nbytes, np.uint8)
    random_blocks(out, qtype, (1, 2))
    values = gguf.quants.dequantize(out.reshape(count, nbytes), qtype).astype(np.float64)
    assert np.isfinite(values).all()
    # Given the scales, weights are independent with mean 0 (Q6_K, Q8_0: half a step beside, with the scale's random
    # sign), so the mean of n of them is within five of its standard deviations.
    assert abs(values.mean()) < 5 * values.std() / math.sqrt(values.size)
    # fp16 scales vary by 10 %, which adds 0.5 %. A block's mean square has a standard deviation of less than its mean,
    # that of 4096 blocks less than 1/64 of it, the root half of that: 2 % is two and a half of them at the very least.
    assert values.std() == pytest.approx(spread * math.sqrt(1.01), rel=0.02)
    assert (values.std(axis=1) > 0).all()


def test_gpt_oss_has_biases_and_mxfp4() -> None:
    config = tiny_config("gpt_oss")
    source = SyntheticSource(
        {"lm_head.weight": (8, 256), "model.layers.0.self_attn.o_proj.weight": (8, 256)}, ModelFacts.of(config)
    )
    assert {source.tensor(name).qtype for name in source.stored_names()} == {QuantType.Q8_0}
    layout = ExpertsLayout(num_experts=6, hidden_size=96, intermediate_size=32, has_bias=True)
    info, weights = source.find_experts(KEY, layout), source.experts(KEY, layout)
    assert info is not None
    assert weights.gate is not None
    parts = [*weights.gate, *weights.up, *weights.down]
    biases = [weights.gate_bias, weights.up_bias, weights.down_bias]
    assert {raw.qtype for raw in parts} == {QuantType.MXFP4}
    assert [tuple(bias.shape) for bias in biases if bias is not None] == [(6, 32), (6, 32), (6, 96)]
    assert info.nbytes == sum(raw.nbytes for raw in parts) + 4 * 6 * (32 + 32 + 96)
    assert "MXFP4 and Q8_0" in source.describe()


def test_gain_scales_all_weights() -> None:
    plain, large = np.empty(144 * 64, np.uint8), np.empty(144 * 64, np.uint8)
    random_blocks(plain, QuantType.Q4_K, (3,))
    random_blocks(large, QuantType.Q4_K, (3,), gain=64.0)
    small, big = (gguf.quants.dequantize(b.reshape(64, 144), QuantType.Q4_K) for b in (plain, large))
    # Scales of the plain ones are about 1e-4 and above 2^-15, where fp16 keeps 10 bits; those of the large ones 11.
    assert big.std() == pytest.approx(64 * small.std(), rel=2**-9)


def test_experts_differ_and_share_no_memory() -> None:
    source = source_of()
    layers = [source.experts(KEY.replace("0", str(i)), LAYOUT) for i in range(2)]
    parts = [raw for layer in layers for part in (layer.gate, layer.up, layer.down) for raw in part or ()]
    assert len(parts) == 2 * 3 * 6
    spans = sorted((raw.data.data_ptr(), raw.nbytes) for raw in parts)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert len({raw.data.numpy().tobytes() for raw in parts}) == len(parts)
    assert [raw.shape for raw in (parts[0], parts[6], parts[12])] == [(256, 512), (256, 512), (512, 256)]


def test_facts_are_those_of_the_tensors() -> None:
    info = source_of().find_experts(KEY, LAYOUT)
    assert info is not None
    assert info.gate is not None
    assert (info.gate.resident_type, info.down.resident_type) == (QuantType.Q4_K, QuantType.Q6_K)
    weights = source_of().experts(KEY, LAYOUT)
    for fact, part in ((info.gate, weights.gate), (info.up, weights.up), (info.down, weights.down)):
        assert part is not None
        assert fact.nbytes == sum(raw.nbytes for raw in part)
        assert {raw.qtype for raw in part} == {fact.resident_type}
    assert info.nbytes == 6 * 256 * 512 * (144 + 144 + 210) // 256


def test_a_tensor_follows_from_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_CHUNK", 1000)
    shapes = {"model__a__weight": (64, 512), "model__b__weight": (64, 512)}
    one, other = source_of(**shapes).tensor("model.a.weight"), source_of(**shapes).tensor("model.b.weight")
    assert not torch.equal(one.data, other.data)
    monkeypatch.setattr(synthetic, "usable_cores", lambda: 5)
    again = source_of(**shapes)
    assert torch.equal(again.tensor("model.b.weight").data, other.data)
    assert torch.equal(again.tensor("model.a.weight").data, one.data)


@pytest.mark.parametrize(
    ("name", "shape", "qtype"),
    [
        ("lm_head.weight", (8, 512), QuantType.Q6_K),
        ("model.embed_tokens.weight", (8, 512), QuantType.Q4_K),
        ("model.layers.0.self_attn.q_proj.weight", (8, 512), QuantType.Q4_K),
        ("model.layers.0.mlp.down_proj.weight", (8, 10944), QuantType.Q8_0),  # no multiple of 256
        ("model.layers.0.mlp.down_proj.weight", (8, 40), QuantType.F32),  # nor of 32
        ("model.layers.0.mlp.gate.weight", (8, 512), QuantType.F32),
        ("model.layers.0.mlp.gate_proj.weight", (8, 512), QuantType.Q4_K),
        ("model.layers.0.mlp.gate.e_score_correction_bias", (8,), QuantType.F32),
        ("model.norm.weight", (512,), QuantType.F32),
    ],
)
def test_types(name: str, shape: tuple[int, ...], qtype: QuantType) -> None:
    source = SyntheticSource({name: shape}, ModelFacts.of(Qwen3MoeConfig()))
    info, raw = source.find(name), source.tensor(name)
    assert info is not None
    assert (raw.qtype, raw.shape, raw.nbytes) == (qtype, shape, info.nbytes)
    assert (info.resident_type, info.stored_type, info.stored_names) == (qtype, qtype.name, (name,))
    dense = source.dense(name)
    assert torch.equal(dense.reshape(raw.rows, -1), torch.from_numpy(decoded(raw)).float().reshape(raw.rows, -1))


def test_vectors_and_embeddings() -> None:
    source = source_of(model__norm__weight=(64,), a__bias=(4096,), model__embed_tokens__weight=(256, 512))
    assert torch.equal(source.dense("model.norm.weight"), torch.ones(64))
    assert 0 < source.dense("a.bias").abs().max() < 0.01
    assert source.dense("model.embed_tokens.weight").std() > 10  # what layers add is of order 1


def test_latent_attention_has_both_forms_of_kv_b_proj() -> None:
    config = tiny_config("deepseek_v3", hidden=256)
    model = build_skeleton(config)
    source = SyntheticSource({name: tuple(t.shape) for name, t in model.state_dict().items()}, ModelFacts.of(config))
    prefix = "model.layers.1.self_attn"
    shapes = {part: source.find(f"{prefix}.{part}_proj.weight") for part in ("kv_b", "k_b", "v_b")}
    assert {part: info and info.shape for part, info in shapes.items()} == {
        "kv_b": (4 * (32 + 32), 32),
        "k_b": (4, 32, 32),
        "v_b": (4, 32, 32),
    }
    ignorable = {name for name in source.stored_names() if source.ignorable(name)}
    assert ignorable == {
        f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in ("kv_b", "k_b", "v_b")
    }
    assert not any("experts." in name and "shared" not in name for name in source.stored_names())


def test_what_cannot_be_made_is_refused() -> None:
    source = source_of()
    assert source.find("model.nothing.weight") is None
    with pytest.raises(TensorMismatchError, match=r"model\.nothing\.weight"):
        source.tensor("model.nothing.weight")
    with pytest.raises(TensorMismatchError, match="is not FP8"):
        source.fp8("model.nothing.weight")


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (32, 4), (16, 2)])
def test_longer_rows_of_a_quarter_have_most_picks(num_experts: int, top_k: int) -> None:
    """On other numbers than those that the gain was found with."""
    logits = np.random.default_rng(1).standard_normal((4000, num_experts))
    logits[:, : num_experts // 4] *= skewed_gain(num_experts, top_k)
    chosen = np.argsort(-logits, axis=1)[:, :top_k]
    assert abs((chosen < num_experts // 4).mean() - 0.7) < 0.03


def test_every_token_has_experts_of_its_own() -> None:
    facts = ModelFacts.of(tiny_config("deepseek_v4"))
    name, shape = "model.layers.0.mlp.gate.tid2eid", (50, 6)
    source = SyntheticSource({name: shape}, facts)
    info, table = source.find(name), source.dense(name)
    assert info is not None
    assert (info.resident_type, table.shape) == (QuantType.F32, shape)
    assert all(len(set(row)) == 6 and set(row) <= set(range(8)) for row in table.tolist())
    assert len({tuple(row) for row in table.tolist()}) > 1
