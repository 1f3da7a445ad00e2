"""GGUFSource: every parameter of every family is found with exactly its values, and nothing stored is left over."""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.kernels.types import QuantType as T
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.gguf import source as gguf_source
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from ktransformers.weights.quantize.write import quantize
from ktransformers.weights.source import ExpertsLayout
from tests.support.checks.source_checks import check_whole_model, expected_experts, layout_of, values_of
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import add_metadata, gguf_tensors, write_gguf
from tests.support.models.low_bits import encode
from tests.support.models.tiny_models import MODEL_TYPES, MOE_TYPES, tiny_model


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_tensor_is_found_and_equal(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    source = GGUFSource(open_gguf(write_gguf(model, tmp_path / "m.gguf")), ModelFacts.of(model.config))
    check_whole_model(source, model)
    assert "GGUF" in source.describe()


# Families that the engine may meet through --model_path, beside those with a config of their own making.
OTHER_TYPES: dict[str, dict[str, object]] = {
    "arcee": {},
    "ernie4_5": {},
    "gemma2": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16, "rope_parameters": None},
    "glm4": {"head_dim": 16},
    "granite": {},
    "granitemoeshared": {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "hunyuan_v1_dense": {"head_dim": 16},
    "olmo2": {},
    "seed_oss": {"head_dim": 16},
    "smollm3": {},
}


@pytest.mark.parametrize("model_type", OTHER_TYPES)
def test_every_tensor_of_other_families(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, **OTHER_TYPES[model_type])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(1024).round_().div_(1024)  # so that adding and subtracting 1 is exact
    check_whole_model(GGUFSource(open_gguf(write_gguf(model, tmp_path / "m.gguf")), ModelFacts.of(model.config)), model)


@pytest.mark.parametrize("experts", ["single", "gate_up"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_in_other_layouts(model_type: str, experts: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    check_whole_model(
        GGUFSource(open_gguf(write_gguf(model, tmp_path / "m.gguf", experts=experts)), ModelFacts.of(model.config)),
        model,
    )


def test_shards_and_folder(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    first = write_gguf(model, tmp_path / "m.gguf", shard_max_tensors=9)
    assert first.name.startswith("m-00001-of-0000")
    for path in (first, tmp_path, sorted(tmp_path.iterdir())[-1]):
        check_whole_model(GGUFSource(open_gguf(path), ModelFacts.of(model.config)), model)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_mla_split_and_whole(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    whole = GGUFSource(open_gguf(write_gguf(model, tmp_path / "whole.gguf", kv_b="whole")), ModelFacts.of(model.config))
    check_whole_model(whole, model)
    key = "model.layers.1.self_attn."
    assert whole.find(key + "k_b_proj.weight") is None
    split = GGUFSource(open_gguf(write_gguf(model, tmp_path / "split.gguf")), ModelFacts.of(model.config))
    c = model.config
    kv_b = model.state_dict()[key + "kv_b_proj.weight"].reshape(c.num_attention_heads, -1, c.kv_lora_rank)
    k_b, v_b = split.tensor(key + "k_b_proj.weight"), split.tensor(key + "v_b_proj.weight")
    assert torch.equal(values_of(k_b), kv_b[:, : c.qk_nope_head_dim].transpose(1, 2))
    assert torch.equal(values_of(v_b), kv_b[:, c.qk_nope_head_dim :])
    info = split.find(key + "k_b_proj.weight")
    assert info is not None
    assert info.stored_names == ("blk.1.attn_k_b.weight",)


@pytest.mark.parametrize("qtype", [T.Q8_0, T.Q4_0, T.Q4_K, T.Q6_K, T.BF16, T.F16, T.Q5_0, T.Q4_1], ids=lambda t: t.name)
def test_quantized_rows_are_unpermuted_without_dequantizing(qtype: T, tmp_path: Path) -> None:
    """The blocks that come back are those that quantizing the unpermuted matrix gives."""
    model = tiny_model("mixtral", hidden=256)
    source = GGUFSource(open_gguf(write_gguf(model, tmp_path / "m.gguf", qtype, qtype)), ModelFacts.of(model.config))
    plain = model.state_dict()
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        raw = source.tensor(name)
        matrix = plain[name].numpy()
        stored = encode(matrix, qtype).view(np.uint8)
        assert (values_of(raw).numpy() == gguf.quants.dequantize(stored, qtype)).all()
        assert torch.equal(source.dense(name), values_of(raw))
    layout = layout_of(model, "model.layers.0.mlp.experts")
    weights = source.experts("model.layers.0.mlp.experts", layout)
    info = source.find_experts("model.layers.0.mlp.experts", layout)
    assert info is not None
    assert info.up.stored_type == qtype.name
    assert weights.up[3].qtype is info.up.resident_type


def test_native_types_are_views_of_the_map(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", hidden=256)
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf", T.Q4_K, T.Q6_K))
    source = GGUFSource(opened, ModelFacts.of(model.config))
    start = opened.files[0].data.data_ptr()
    end = start + opened.files[0].data.numel()
    weights = source.experts("model.layers.0.mlp.experts", layout_of(model, "model.layers.0.mlp.experts"))
    raws = [*weights.gate, *weights.up, *weights.down, source.tensor("model.layers.0.self_attn.q_proj.weight")]
    assert all(start <= raw.data.data_ptr() < end for raw in raws)


def test_tied_embeddings(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", tie_word_embeddings=True)
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf"))
    info = GGUFSource(opened, ModelFacts.of(model.config)).find("lm_head.weight")
    assert info is not None
    assert info.stored_names == ("token_embd.weight",)
    model.config.tie_word_embeddings = False
    assert GGUFSource(opened, ModelFacts.of(model.config)).find("lm_head.weight") is None


@pytest.mark.parametrize("model_type", MOE_TYPES[:3])
def test_quantize_while_loading(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, hidden=256)
    key = "model.layers.1.mlp.experts"
    layout = layout_of(model, key)
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf", T.BF16))
    source = GGUFSource(opened, ModelFacts.of(model.config))
    info, weights = source.find_experts(key, layout, T.Q4_K), source.experts(key, layout, T.Q4_K)
    assert info is not None
    for part in ("gate", "up", "down"):
        wanted = expected_experts(model, key, layout)[part].to(torch.bfloat16).float()
        assert getattr(info, part).resident_type is T.Q4_K
        for raw, matrix in zip(getattr(weights, part), wanted, strict=True):
            assert (raw.data.numpy() == quantize(matrix.numpy(), T.Q4_K).reshape(-1)).all()
    quantized = GGUFSource(open_gguf(write_gguf(model, tmp_path / "q.gguf", T.Q8_0)), ModelFacts.of(model.config))
    stays = quantized.find_experts(key, layout, T.Q4_K)
    assert stays is not None
    assert stays.up.resident_type is T.Q8_0


def test_missing_and_wrong_tensors_are_named(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    source = GGUFSource(open_gguf(write_gguf(model, tmp_path / "m.gguf")), ModelFacts.of(model.config))
    assert source.find("model.layers.0.nothing.weight") is None
    with pytest.raises(TensorMismatchError, match=r"model\.layers\.7\.self_attn\.q_proj\.weight"):
        source.tensor("model.layers.7.self_attn.q_proj.weight")
    layout = layout_of(model, "model.layers.0.mlp.experts")
    wrong = ExpertsLayout(layout.num_experts * 2, layout.hidden_size, layout.intermediate_size)
    with pytest.raises(TensorMismatchError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        source.experts("model.layers.0.mlp.experts", wrong)
    with pytest.raises(TensorMismatchError, match=r"model\.layers\.9\.mlp\.experts"):
        source.experts("model.layers.9.mlp.experts", layout)


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match="rwkv7"):
        GGUFSource(open_gguf(tmp_path / "m.gguf"), ModelFacts.of(tiny_model("llama").config))


def test_transcoding_is_said_once_per_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3_moe")
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf", T.Q5_0, T.Q4_1))
    held = {T.Q5_0: T.Q8_0, T.Q4_1: T.F32}  # as if no kernel read them
    monkeypatch.setattr(gguf_source, "resident_type", lambda qtype, _: held.get(qtype, qtype))
    with caplog.at_level(logging.WARNING):
        GGUFSource(opened, ModelFacts.of(model.config))
    assert [record.getMessage() for record in caplog.records] == [
        "10 tensors of type Q4_1 are held as F32 (same values, more bytes)",
        "6 tensors of type Q5_0 are held as Q8_0 (same values, more bytes)",
    ]


def test_types_that_are_no_weights_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.ones((2, 2), dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_q\.weight.*I32"):
        GGUFSource(open_gguf(tmp_path / "m.gguf"), ModelFacts.of(tiny_model("llama").config))


OTHER_PARTS = {
    "v.blk.0.attn_q.weight": (8, 8), "v.patch_embd.weight": (4, 3, 2, 2), "mm.input_projection.weight": (8, 8),
    "a.blk.0.ffn_up.bias": (8,), "mtp.layers.0.norm.weight": (8,), "v.blk.0.attn_q.bias": (8,),
}  # fmt: skip


def test_parts_for_images_in_the_same_file_are_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Ollama writes them: the text model's config and tensors are those of the file without them."""
    model = tiny_model("qwen3")
    plain = open_gguf(write_gguf(model, tmp_path / "plain.gguf"))
    path = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    add_metadata(writer, model)
    writer.add_uint32("qwen3.vision.block_count", 1)
    for name, values in gguf_tensors(model):
        writer.add_tensor(name, np.ascontiguousarray(values))
    for name, shape in OTHER_PARTS.items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = open_gguf(path)
    config = config_of_model(whole)
    assert config.to_dict() == config_of_model(plain).to_dict()
    with caplog.at_level(logging.INFO):
        source = GGUFSource(whole, ModelFacts.of(config))
    assert "6 tensors for images and sound are left aside" in caplog.text
    assert {name for name in source.stored_names() if source.ignorable(name)} == set(OTHER_PARTS)
    check_whole_model(source, model)
    engine = static_engine(EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1))  # and nothing is left over
    want = static_engine(EngineConfig(gguf_path=plain.files[0].path, cache_lens=64, cpu_infer=1))
    ids = list(range(3, 12))
    assert torch.equal(engine.runner.forward(ids, 0, [8]), want.runner.forward(ids, 0, [8]))
