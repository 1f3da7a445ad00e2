"""Configs as models of autumn 2026 are published with: the model runs, or is refused by name and with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ktransformers.engine.model.skeleton import check_model_type, load_hf_config
from ktransformers.errors import UnsupportedError
from ktransformers.models.composite import text_config_of
from ktransformers.models.facts import ModelFacts
from ktransformers.models.families import NOT_IN_TRANSFORMERS
from ktransformers.models.synthetic_shapes import find_shape
from tests.support.models.agreement import engine_of, prompt
from tests.support.models.composites import tiny_composite

CODE = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
K3_TEXT = {"model_type": "kimi_linear", "hidden_act": "situ", "attn_res_block_size": 12}
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"model_type": "kimi_k3", "auto_map": CODE, "text_config": K3_TEXT}, r"'kimi_k3' .*residuals across blocks"),
    ({"model_type": "xing4_0", "auto_map": CODE}, r"'xing4_0' .* between hyper-connections"),
    ({"model_type": "telechat4", "auto_map": CODE}, r"'telechat4' .* between hyper-connections"),
    ({"model_type": "inkling_text"}, r"has learned of distances \(rel_extent\)"),
    ({"model_type": "inkling_mm_model"}, r"has learned of distances \(rel_extent\)"),
    ({"model_type": "inkling2"}, r"has learned of distances \(rel_extent\)"),
    (K3_TEXT, r"residuals across blocks of layers \(attn_res_block_size\)"),
    ({"model_type": "kimi_linear", "routed_expert_hidden_size": 3584}, r"experts in a narrower space"),
    ({"model_type": "nemotron3_5_asr"}, r"no language model that answers in text"),
]
RUN = {
    "bailing_hybrid": {"architectures": ["BailingMoeV3ForCausalLM"], "auto_map": CODE},
    "muse_spark": {},
    "muse_glimmer": {},
    "nemotron_h": {"architectures": ["NemotronHForCausalLM"], "auto_map": CODE},
    "step3p5": {"architectures": ["Step3p5ForCausalLM"], "auto_map": CODE},
    "step3p7": {"architectures": ["Step3p7ForConditionalGeneration"], "auto_map": CODE},
    "deepseek_v4": {"architectures": ["DeepseekV4ForCausalLM"], "expert_dtype": "fp4", "num_hash_layers": 3},
}

V4_FLASH: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
}
"""config.json of DeepSeek-V4-Flash-0731, whose last ratios are of layers for multi-token prediction."""


def facts_of(folder: Path, values: dict[str, object]) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps(values))
    config = load_hf_config(folder)
    check_model_type(text_config_of(config), trust_remote_code=False)
    return ModelFacts.of(config)


@pytest.mark.parametrize(("values", "why"), REFUSED)
def test_the_reason_is_said(values: dict[str, object], why: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=why):
        facts_of(tmp_path, values)


@pytest.mark.parametrize("model_type", RUN)
def test_a_class_of_transformers_is_taken(model_type: str, tmp_path: Path) -> None:
    assert facts_of(tmp_path, {"model_type": model_type, **RUN[model_type]}).num_layers > 0


def test_v4_flash_is_its_synthetic_shape(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, V4_FLASH)
    assert facts.quantization is not None
    assert (facts.quantization.method, facts.quantization.block) == ("fp8", (128, 128))
    shape = find_shape("deepseek-v4-flash").config()
    assert facts.layers == ModelFacts.of(shape).layers
    published, made = load_hf_config(tmp_path).to_dict(), shape.to_dict()
    files = {"_name_or_path", "dtype", "expert_dtype", "quantization_config", "topk_method", "rope_parameters"}
    differing = {name for name in published if published[name] != made.get(name)}
    assert differing - files == {"bos_token_id", "eos_token_id"}
    for kind, values in made["rope_parameters"].items():
        assert {name: published["rope_parameters"][kind][name] for name in values} == values


def test_clef_is_known_by_the_file_of_its_head(tmp_path: Path) -> None:
    (tmp_path / "joint_head_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"joint_head_config\.json: the model \(Clef\) .* writes no text"):
        facts_of(tmp_path, {"model_type": "qwen3_5"})


def test_transformers_still_lacks_them() -> None:
    """A new version that has one fails here: then its line moves to FAMILIES."""
    from transformers import CONFIG_MAPPING

    assert [name for name in NOT_IN_TRANSFORMERS if name in CONFIG_MAPPING] == []


def test_step_3_5_alone(tmp_path: Path) -> None:
    """The language model of Step 3.7 under its own config, and names that transformers' table has for the whole."""
    model = tiny_composite("step3p7", seed=1)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    text = {name: one for name, one in stored.items() if name.startswith(("model.", "lm_head."))}
    text = {name: one for name, one in text.items() if "vision" not in name and "projector" not in name}
    assert any(".moe.gate_proj.weight" in name for name in text)
    safetensors.torch.save_file(text, file)
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Step3p5ForCausalLM"]}))
    ids = prompt(160)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0]
    got = engine_of(tmp_path).runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= 5e-5 * want.abs().max()
