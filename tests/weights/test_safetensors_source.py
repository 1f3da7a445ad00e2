"""SafetensorsSource: published layouts of every family, FP8 with scales, indexes, and quantizing while loading."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ktransformers.errors import FormatError, TensorMismatchError, UnsupportedError
from ktransformers.kernels import reference
from ktransformers.kernels.types import OwnType
from ktransformers.kernels.types import QuantType as T
from ktransformers.models.facts import ModelFacts
from ktransformers.weights import experts
from ktransformers.weights.quantize.write import quantize
from ktransformers.weights.safetensors.file import open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from ktransformers.weights.source import ExpertsLayout
from tests.support.checks.source_checks import check_whole_model, expected_experts, expert_keys, layout_of, values_of
from tests.support.models.tiny_models import MODEL_TYPES, tiny_model, write_safetensors

EXPERTS, INNER, HIDDEN = 4, 160, 192  # no multiples of FP8's blocks of 128


def open_model(folder: Path, config: object) -> SafetensorsSource:
    return SafetensorsSource(open_safetensors(folder), ModelFacts.of(config))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_tensor_is_found_and_equal(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    source = open_model(write_safetensors(model, tmp_path), model.config)
    check_whole_model(source, model)
    assert "safetensors" in source.describe()


@pytest.mark.parametrize("model_type", ["afmoe", "exaone_moe", "flex_olmo", "granitemoeshared", "hy_v3", "jamba"])
def test_families_without_a_line_of_their_own(model_type: str, tmp_path: Path) -> None:
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    model = tiny_model(model_type, moe_intermediate_size=32, num_experts_per_tok=2, head_dim=16, **counts)
    assert expert_keys(model)
    check_whole_model(open_model(write_safetensors(model, tmp_path), model.config), model)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    layout = ExpertsLayout(3, 8, 6, has_gate=False)
    stored = {f"model.layers.1.mixer.experts.{e}.up_proj.weight": torch.randn(6, 8) for e in range(3)}
    stored |= {f"model.layers.1.mixer.experts.{e}.down_proj.weight": torch.randn(8, 6) for e in range(3)}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    source = open_model(tmp_path, tiny_model("llama").config)
    key = "model.layers.1.mixer.experts"
    info, weights = source.find_experts(key, layout), source.experts(key, layout)
    assert info is not None
    assert info.gate is None
    assert weights.gate is None
    assert set(info.stored_names) == set(stored)
    for expert in range(3):
        assert torch.equal(values_of(weights.up[expert]), stored[f"{key}.{expert}.up_proj.weight"])
        assert torch.equal(values_of(weights.down[expert]), stored[f"{key}.{expert}.down_proj.weight"])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_bf16_in_several_files(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type).to(torch.bfloat16)
    source = open_model(write_safetensors(model, tmp_path, max_shard_size="200KB"), model.config)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check_whole_model(source, model)


def test_bf16_matrices_are_views_of_the_map(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe").to(torch.bfloat16)
    opened = open_safetensors(write_safetensors(model, tmp_path))
    source = SafetensorsSource(opened, ModelFacts.of(model.config))
    start = opened.files[0].data.data_ptr()
    end = start + opened.files[0].data.numel()
    key = expert_keys(model)[0]
    weights = source.experts(key, layout_of(model, key))
    raws = [*weights.gate, *weights.up, *weights.down, source.tensor("model.layers.0.self_attn.q_proj.weight")]
    assert all(start <= raw.data.data_ptr() < end for raw in raws)


def test_names_without_the_base_models_prefix(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", tie_word_embeddings=True)
    write_safetensors(model.model, tmp_path)
    check_whole_model(open_model(tmp_path, model.config), model)


def test_tied_embeddings(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    source = open_model(write_safetensors(model, tmp_path), model.config)
    info = source.find("lm_head.weight")
    assert info is not None
    assert info.stored_names == ("model.embed_tokens.weight",)
    model.config.tie_word_embeddings = False
    assert open_model(tmp_path, model.config).find("lm_head.weight") is None


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_quantize_while_loading(model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(model_type, hidden=256).to(torch.bfloat16)
    source = open_model(write_safetensors(model, tmp_path), model.config)
    key = expert_keys(model)[0]
    layout = layout_of(model, key)
    wanted = expected_experts(model, key, layout)
    for qtype in (T.Q4_K, T.Q8_0):
        info, weights = source.find_experts(key, layout, qtype), source.experts(key, layout, qtype)
        assert info is not None
        for part in ("gate", "up", "down"):
            assert getattr(info, part).resident_type is qtype
            for raw, matrix in zip(getattr(weights, part), wanted[part], strict=True):
                assert (raw.data.numpy() == quantize(matrix.float().numpy(), qtype).reshape(-1)).all()


def test_rows_too_short_for_k_quants_fall_back_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen3_moe").to(torch.bfloat16)  # rows of 64 and 96
    source = open_model(write_safetensors(model, tmp_path), model.config)
    key = expert_keys(model)[0]
    experts._resident.cache_clear()  # it says each fallback once per process
    with caplog.at_level(logging.WARNING):
        info = source.find_experts(key, layout_of(model, key), T.Q5_K)
        source.experts(key, layout_of(model, key), T.Q5_K)
    assert info is not None
    assert info.down.resident_type is info.up.resident_type is T.Q8_0
    assert sorted(record.getMessage() for record in caplog.records) == [
        "expert rows of 64 weights cannot be Q5_K; they are held as Q8_0",
        "expert rows of 96 weights cannot be Q5_K; they are held as Q8_0",
    ]
    with pytest.raises(UnsupportedError, match="Q2_K"):
        source.find_experts(key, layout_of(model, key), T.Q2_K)


def fp8_experts(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A qwen3_moe layer's FP8 experts and one FP8 linear; returns what they stand for."""
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    shapes = {
        "mlp.experts.%d.gate_proj": (INNER, HIDDEN),
        "mlp.experts.%d.up_proj": (INNER, HIDDEN),
        "mlp.experts.%d.down_proj": (HIDDEN, INNER),
    }
    names = [(p % e, s) for p, s in shapes.items() for e in range(EXPERTS)] + [("self_attn.q_proj", (HIDDEN, INNER))]
    for name, (rows, cols) in names:
        weight = torch.randn((rows, cols), generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand((-(-rows // 128), -(-cols // 128)), generator=generator)
        values = torch.empty(rows, cols)
        for r in range(0, rows, 128):
            for c in range(0, cols, 128):
                block = (slice(r, r + 128), slice(c, c + 128))
                values[block] = weight[block].float() * scale[r // 128, c // 128]
        full = f"model.layers.0.{name}.weight"
        stored |= {full: weight, f"{full}_scale_inv": scale}
        wanted[full] = values
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    return wanted


def test_fp8_with_block_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = fp8_experts(tmp_path)
    with caplog.at_level(logging.INFO):
        source = open_model(tmp_path, tiny_model("qwen3_moe").config)
    assert [r.getMessage() for r in caplog.records] == ["13 FP8 matrices are computed with as they are"]
    name = "model.layers.0.self_attn.q_proj.weight"
    info = source.find(name)
    assert info is not None
    assert (info.stored_type, info.resident_type, info.nbytes) == ("F8_E4M3", T.BF16, HIDDEN * INNER * 2)
    assert info.stored_names == (name, name + "_scale_inv")
    assert info.is_fp8
    fp8 = source.fp8(name)
    assert torch.equal(reference.dequantize(fp8), wanted[name])
    assert (info.as_fp8().resident_type, info.as_fp8().nbytes) == (fp8.qtype, fp8.nbytes)
    assert fp8.nbytes == HIDDEN * INNER + 4 * 2 * 2
    assert torch.equal(source.dense(name), wanted[name])
    assert torch.equal(values_of(source.tensor(name)), wanted[name].bfloat16().float())
    layout = ExpertsLayout(EXPERTS, HIDDEN, INNER)
    for quantize_to, decoded in ((None, None), (T.Q8_0, T.Q8_0)):
        weights = source.experts("model.layers.0.mlp.experts", layout, quantize_to)
        for part in ("gate", "up", "down"):
            for expert, raw in enumerate(getattr(weights, part)):
                want = wanted[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"]
                if decoded is None:
                    assert torch.equal(reference.dequantize(raw), want)
                else:
                    assert (raw.data.numpy() == quantize(want.numpy(), decoded).reshape(-1)).all()
    found = source.find_experts("model.layers.0.mlp.experts", layout)
    assert found is not None
    assert {part.resident_type for part in (found.gate, found.up, found.down)} == {OwnType.F8_E4M3}
    assert found.nbytes == 3 * EXPERTS * (HIDDEN * INNER + 4 * 2 * 2)
    assert set(found.stored_names) | set(info.stored_names) == set(source.stored_names())


def test_fp8_matrices_are_views_of_the_map(tmp_path: Path) -> None:
    fp8_experts(tmp_path)
    opened = open_safetensors(tmp_path)
    source = SafetensorsSource(opened, ModelFacts.of(tiny_model("qwen3_moe").config))
    start = opened.files[0].data.data_ptr()
    weights = source.experts("model.layers.0.mlp.experts", ExpertsLayout(EXPERTS, HIDDEN, INNER))
    matrices = [*weights.gate, *weights.up, *weights.down, source.fp8("model.layers.0.self_attn.q_proj.weight")]
    assert all(start <= matrix.values.data_ptr() < start + opened.files[0].data.numel() for matrix in matrices)


def test_fp8_per_tensor_and_per_row_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(6, 8).to(torch.float8_e4m3fn)
    rows = torch.rand(6, 1)
    safetensors.torch.save_file(
        {
            "a.weight": weight,
            "a.weight_scale": torch.tensor(0.5),
            "b.weight": weight.clone(),
            "b.weight_scale": rows,
            "c.weight": weight[:, :6].contiguous(),
            "c.weight_scale": torch.tensor(0.5),
        },
        tmp_path / "model.safetensors",
    )
    with caplog.at_level(logging.WARNING):
        source = open_model(tmp_path, tiny_model("llama").config)
    assert "1 of 1 matrices of few bits are held in floats" in caplog.text
    assert torch.equal(source.dense("a.weight"), weight.float() * 0.5)
    assert torch.equal(source.dense("b.weight"), weight.float() * rows)
    assert torch.equal(reference.dequantize(source.fp8("a.weight")), weight.float() * 0.5)
    for name in ("b.weight", "c.weight"):  # a scale per row; rows that are no multiple of 4
        info = source.find(name)
        assert info is not None
        assert not info.is_fp8
        assert info.resident_type is T.F32
        with pytest.raises(TensorMismatchError, match=name):
            source.fp8(name)


def test_fp8_without_or_with_wrong_scales_is_refused(tmp_path: Path) -> None:
    weight = torch.randn(200, 8).to(torch.float8_e4m3fn)
    safetensors.torch.save_file(
        {"a.weight": weight, "b.weight": weight.clone(), "b.weight_scale_inv": torch.rand(3, 1)},
        tmp_path / "model.safetensors",
    )
    source = open_model(tmp_path, tiny_model("llama").config)
    with pytest.raises(TensorMismatchError, match=r"a\.weight_scale_inv"):
        source.dense("a.weight")
    with pytest.raises(TensorMismatchError, match=r"b\.weight.*\[3, 1\].*needs \[2, 1\]"):
        source.dense("b.weight")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.bool])
def test_types_that_are_no_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    safetensors.torch.save_file({"a.weight": torch.ones(2, 2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"a\.weight"):
        open_model(tmp_path, tiny_model("llama").config).find("a.weight")


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_safetensors(model, tmp_path)
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(UnsupportedError, match=r"bitsandbytes.*are\); use"):
        open_model(tmp_path, model.config)


def test_missing_experts_are_named(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    write_safetensors(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.layers.0.mlp.experts.5.up_proj.weight"]
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"] = torch.zeros(3, 3)
    safetensors.torch.save_file(tensors, path)
    source = open_model(tmp_path, model.config)
    for layer, what in ((0, r"missing are \[5\]"), (1, r"experts\.2\.down_proj\.weight.*\[3, 3\]")):
        key = f"model.layers.{layer}.mlp.experts"
        with pytest.raises(TensorMismatchError, match=what):
            source.experts(key, layout_of(model, key))
    with pytest.raises(TensorMismatchError, match=r"model\.layers\.5\.mlp\.experts"):
        source.experts("model.layers.5.mlp.experts", layout_of(model, "model.layers.0.mlp.experts"))


@pytest.mark.parametrize("target", ["../x.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "x.bin", "..", ""])
def test_an_index_may_not_point_outside_its_folder(target: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))
    with pytest.raises(FormatError, match="is not the name of a"):
        open_safetensors(tmp_path)


def test_an_index_must_agree_with_its_files(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}))
    with pytest.raises(FormatError, match="'b'"):
        open_safetensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    with pytest.raises(FormatError, match=r"y\.safetensors of the 2 files .* missing"):
        open_safetensors(tmp_path)
    for broken in ("[]", "{", '{"weight_map": 3}', '{"a": 1, "a": 2}', "[" * 100_000):
        index.write_text(broken)
        with pytest.raises(FormatError):
            open_safetensors(tmp_path)
