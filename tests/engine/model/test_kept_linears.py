"""Linear layers that a rule file leaves alone keep the bits of the file, as those that it replaces do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from ktransformers.kernels.types import QuantType
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import INT8_TOLERANCE, dequantized, logits_of
from tests.support.models.tiny_models import tiny_model, write_safetensors

EXPERTS_ONLY = r"""
- match: {name: 'mlp\.experts$'}
  replace: {class: ktransformers.operators.experts.KTransformersExperts}
- match: {name: 'layers\.0\.self_attn'}
  replace: {class: default, kwargs: {generate_device: cpu}}
  recursive: false
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "experts_only.yaml"
    path.write_text(EXPERTS_ONLY)
    return path


def test_quantized_linears(rules: Path, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=3, hidden=256)
    path = write_gguf(model, tmp_path / "m.gguf", QuantType.Q8_0, QuantType.Q8_0)
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1, optimize_config_path=rules)
    engine = static_engine(config)
    entries = {entry.key: entry for entry in engine.plan.entries}
    for key in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj", "lm_head"):
        rows, cols = model.get_submodule(key).weight.shape
        assert entries[key].quant_types == ("Q8_0",)
        assert entries[key].total_bytes < 1.2 * rows * cols
    assert entries["model.layers.0.self_attn.q_proj"].rule == 2
    assert entries["model.layers.1.self_attn.q_proj"].rule is None
    ids = list(range(3, 30))
    want = logits_of(dequantized(model, QuantType.Q8_0, QuantType.Q8_0), ids)
    got = engine.runner.forward(ids, 0, range(len(ids)))
    engine.close()
    assert (got - want).abs().max() <= INT8_TOLERANCE * want.abs().max()


def test_bf16_linears(rules: Path, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=3).to(torch.bfloat16)
    plan = plan_model(EngineConfig(model_path=write_safetensors(model, tmp_path), optimize_config_path=rules))
    entries = {entry.key: entry for entry in plan.entries}
    projection = entries["model.layers.1.self_attn.q_proj"]
    assert projection.quant_types == ("BF16",)
    assert projection.total_bytes < 3 * model.model.layers[1].self_attn.q_proj.weight.numel()


def test_fp32_linears_and_tied_heads_stay_as_they_are(rules: Path, tmp_path: Path) -> None:
    plan = plan_model(
        EngineConfig(model_path=write_safetensors(tiny_model("qwen3_moe"), tmp_path / "a"), optimize_config_path=rules)
    )
    assert all(entry.is_kept for entry in plan.entries if entry.hf_class == "Linear")
    tied = tiny_model("qwen3_moe", tie_word_embeddings=True).to(torch.bfloat16)
    plan = plan_model(EngineConfig(model_path=write_safetensors(tied, tmp_path / "b"), optimize_config_path=rules))
    entries = {entry.key: entry for entry in plan.entries}
    assert entries["lm_head"].is_kept
    assert entries["lm_head"].total_bytes == 0  # the embedding's memory


def test_on_a_gpu(rules: Path, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=3, hidden=256)
    path = write_gguf(model, tmp_path / "m.gguf", QuantType.Q8_0, QuantType.Q8_0)
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1, optimize_config_path=rules)
    plan = plan_model(config, hardware=fake_hardware())
    entries = {entry.key: entry for entry in plan.entries}
    projection = entries["model.layers.1.self_attn.q_proj"]
    assert set(projection.nbytes) == {"cuda:0"}
    assert projection.nbytes["cuda:0"] < 1.5 * model.model.layers[1].self_attn.q_proj.weight.numel()
    assert set(entries["model.layers.0.self_attn.q_proj"].nbytes) == {"cpu"}
