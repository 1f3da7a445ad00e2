"""Safetensors of every family that can be written become the GGUF that llama.cpp's converter would make of them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.of_config import WRITABLE_FAMILIES
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from tests.support.checks.source_checks import check_whole_model
from tests.support.gguf.converting import contents, quantized, tensors
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.models.fp8_models import write_both
from tests.support.models.tiny_models import tiny_model, write_safetensors

OPENABLE: dict[str, dict[str, object]] = {
    "deepseek_v2": {"q_lora_rank": 32},
    "dots1": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 4},
}
"""Values with which llama.cpp opens tiny models of families whose others it does not."""


@pytest.mark.every(5)
@pytest.mark.parametrize("model_type", WRITABLE_FAMILIES)
def test_a_family_comes_back(model_type: str, tmp_path: Path) -> None:
    """The same tensors as from a writer derived by hand, byte for byte; from them the same model, and its logits."""
    model = tiny_model(model_type, **OPENABLE.get(model_type, {}))
    out = tmp_path / "out.gguf"
    quantized(write_safetensors(model, tmp_path / "model"), out)
    wanted, got = tensors(write_gguf(model, tmp_path / "wanted.gguf")), tensors(out)
    assert got.keys() == wanted.keys()
    for name, (qtype, shape, data) in wanted.items():
        assert got[name][:2] == (qtype, shape), name
        assert (got[name][2] == data).all(), name
    opened = open_gguf(out)
    config = config_of_model(opened)
    assert config.model_type == model_type
    check_whole_model(GGUFSource(opened, ModelFacts.of(config)), model)
    rebuilt = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    rebuilt.load_state_dict(model.state_dict())
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(rebuilt(tokens).logits, model(tokens).logits)


def test_transformers_reads_the_same_numbers(tmp_path: Path) -> None:
    """Its own GGUF loader, on the demo model."""
    pytest.importorskip("accelerate")  # it wants that
    out = tmp_path / "demo.gguf"
    quantized(DEMO_CHECKPOINT, out)
    wanted = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32).state_dict()
    # It does not read the width of experts from a file, so it is given the config.
    config = AutoConfig.from_pretrained(DEMO_CHECKPOINT)
    got = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=out.name, config=config, dtype=torch.float32)
    got = got.state_dict()
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_factors_of_rotation_become_a_tensor(tmp_path: Path) -> None:
    """Against transformers' own frequencies: those of Llama 3 are divided by the factors."""
    model = tiny_model("llama", rope_parameters=LLAMA3, max_position_embeddings=131072)
    out = tmp_path / "out.gguf"
    quantized(write_safetensors(model, tmp_path / "model"), out)
    factors = tensors(out)["rope_freqs.weight"][2].view(np.float32)
    plain = 500000.0 ** (-np.arange(0, 16, 2) / 16)
    assert np.allclose(plain / factors, model.model.rotary_emb.inv_freq.numpy(), rtol=1e-6)
    assert config_of_model(open_gguf(out)).rope_parameters == LLAMA3


def test_metadata_have_the_types_that_llama_cpp_reads(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    quantized(DEMO_CHECKPOINT, out, "q4_k_m")
    found = contents(out)
    kinds = {"qwen3moe.block_count": "UINT32", "qwen3moe.attention.layer_norm_rms_epsilon": "FLOAT32",
             "qwen3moe.rope.freq_base": "FLOAT32", "qwen3moe.expert_used_count": "UINT32",
             "general.file_type": "UINT32", "tokenizer.ggml.add_bos_token": "BOOL",
             "tokenizer.ggml.eos_token_id": "UINT32", "tokenizer.chat_template": "STRING"}  # fmt: skip
    assert {key: found[key][0] for key in kinds} == {key: [kind] for key, kind in kinds.items()}
    assert found["tokenizer.ggml.token_type"][0] == ["ARRAY", "INT32"]
    assert found["general.name"][1] == "checkpoint"
    assert found["general.file_type"][1] == gguf.LlamaFileType.MOSTLY_Q4_K_M
    assert found["general.quantization_version"][1] == gguf.GGML_QUANT_VERSION


def test_fp8_becomes_the_numbers_that_it_stands_for(tmp_path: Path) -> None:
    """The same file as from BF16 weights that hold the same numbers."""
    write_both("qwen3_moe", tmp_path / "fp8", tmp_path / "bf16")
    for kind in ("fp8", "bf16"):
        quantized(tmp_path / kind, tmp_path / f"{kind}.gguf")
    wanted, got = tensors(tmp_path / "bf16.gguf"), tensors(tmp_path / "fp8.gguf")
    assert got.keys() == wanted.keys()
    assert all((got[name][2] == data).all() for name, (_, _, data) in wanted.items())


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"safetensors of gemma2 cannot be written as GGUF; those of llama, "):
        quantized(write_safetensors(tiny_model("gemma2", head_dim=16), tmp_path / "a"), tmp_path / "a.gguf")
    model = tiny_model("qwen3", hidden_act="gelu")
    with pytest.raises(UnsupportedError, match="no keys for what this qwen3 config says: hidden_act 'gelu'"):
        quantized(write_safetensors(model, tmp_path / "b"), tmp_path / "b.gguf")
    assert not (tmp_path / "b.gguf").exists()
