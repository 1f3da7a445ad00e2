"""Files of architectures that the `gguf` package does not know, and of some that it does: each is its model.

Against `transformers` in fp32, from the file alone. The prompt is longer than every window and top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import config_of_model
from ktransformers.engine.model.text_models import causal_class
from ktransformers.errors import KTransformersError
from ktransformers.kernels.types import QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf_config import config_from_gguf
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from ktransformers.weights.gguf.newer_names import NEWER, NewerNames
from ktransformers.weights.gguf.source import GGUFSource
from tests.models.gguf.test_gguf_architectures import check_hostile
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.newer import write_newer
from tests.support.gguf.newer_metadata import METADATA
from tests.support.models.agreement import TOLERANCE, logits_of, prompt
from tests.support.models.latent_models import BLOCK_VALUES
from tests.support.models.pooled_models import pooled_values
from tests.support.models.tiny_models import NUM_EXPERTS, WINDOW, random_model, tiny_config

FULL, SLIDING = "full_attention", "sliding_attention"
_EXPERTS: dict[str, object] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED: dict[str, object] = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}
_INDEXED: dict[str, object] = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 8}
_LAGUNA: dict[str, object] = {
    **_EXPERTS,
    "layers": 5,
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_attention_heads_per_layer": [4, 8, 8, 8, 4],
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL],
    "sliding_window": WINDOW,
    "shared_expert_intermediate_size": 48,
    "moe_routed_scaling_factor": 2.5,
    "rope_parameters": {
        FULL: {**_YARN, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
    },
}
_COHERE: dict[str, object] = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "layers": 4,
    "head_dim": 32,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "prefix_dense_intermediate_size": 128,
    "sliding_window": WINDOW,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
}
_GRANITE: dict[str, object] = {
    "layers": 4,
    "layer_types": [FULL, SLIDING, FULL, SLIDING],
    "layer_rope_theta": [0.0, 10000.0, 10000.0, 10000.0],
    "sliding_window": WINDOW,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.125,
    "logits_scaling": 4.0,
}
_LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "partial_rotary_factor": 0.5,
}
CASES: Mapping[str, tuple[str, str, dict[str, object]]] = {
    "laguna": ("laguna", "laguna", _LAGUNA),
    "laguna, gates of elements": ("laguna", "laguna", {**_LAGUNA, "gating": "per-element"}),
    "mellum": (
        "mellum",
        "mellum",
        {
            "layers": 3,
            "layer_types": [FULL, SLIDING, FULL],
            "rope_parameters": {FULL: _YARN, SLIDING: {"rope_type": "default", "rope_theta": 1000.0}},
        },
    ),
    "cohere2moe": (
        "cohere2moe",
        "cohere2_moe",
        {**_COHERE, "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
    "cohere2_moe": ("cohere2_moe", "cohere2_moe", {**_COHERE, "rms_norm_eps": 1e-5}),
    "hy_v3": ("hy_v3", "hy_v3", {**_EXPERTS, "layers": 3, "head_dim": 32, "num_shared_experts": 2}),
    "minimax-m3": ("minimax-m3", "minimax_m3_vl_text", {**BLOCK_VALUES, "shared_intermediate_size": 64}),
    "deepseek32": (
        "deepseek32",
        "deepseek_v32",
        {**_ROUTED, **_LATENT, **_INDEXED, "layers": 3, "n_group": 2, "topk_group": 1},
    ),
    "bailingmoe3": (
        "bailingmoe3",
        "bailing_hybrid",
        {
            **_LATENT,
            "layers": 4,
            "moe_intermediate_size": 32,
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "head_dim": 32,
            "layer_group_size": 2,
            "num_mtp_layers": 0,
        },
    ),
    "granite_swa": ("granite_swa", "granite_swa", _GRANITE),
    "granite_swa with experts": (
        "granite_swa",
        "granitemoe_swa",
        {**_GRANITE, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
    ),
    "mistral4": (
        "mistral4",
        "mistral4",
        {
            **_ROUTED,
            **_LATENT,
            "layers": 3,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "step35": (
        "step35",
        "step3p5",
        {
            **_ROUTED,
            "layers": 4,
            "head_dim": 32,
            "num_sliding_attention_heads": 8,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "sliding_window": WINDOW,
            "share_expert_dim": 48,
            "moe_router_scaling_factor": 3.0,
            "swiglu_limits": [0.0, 0.0, 0.5, 0.0],
            "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.5],
            "rope_parameters": {
                FULL: _LLAMA3,
                SLIDING: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "glm5-next": ("glm5-next", "glm5_next_text", {**pooled_values("glm5_next_text"), "layers": 4}),
    "hy_v4": (
        "hy_v4",
        "hy_v4",
        {
            **_ROUTED,
            **_LATENT,
            **_INDEXED,
            "layers": 4,
            "indexer_types": ["full", "full", "shared", "full"],
            "swiglu_limit": 0.5,
            "hc_mult": 3,
        },
    ),
    "chatglm": (
        "chatglm",
        "glm",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "exaone": ("exaone", "llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "minicpm3": ("minicpm3", "minicpm3", {**_LATENT, "v_head_dim": 16}),
    "youtu": ("deepseek2", "youtu", _LATENT),
}


def built(name: str) -> PreTrainedModel:
    _, model_type, values = CASES[name]
    config: PretrainedConfig = tiny_config(model_type, **{"pad_token_id": 0, **values})  # type: ignore[arg-type]
    model = random_model(config, 1, make=lambda given: causal_class(given)._from_config(given, dtype=torch.float32))
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("A_log"):
                tensor.copy_(tensor - 1.0)  # states forget neither all nor nothing
    return model


def check_engine(model: PreTrainedModel, path: Path) -> None:
    ids = prompt(model.config.vocab_size, 60)
    engine = static_engine(EngineConfig(gguf_path=path, cache_lens=80, cpu_infer=1))
    want, got = logits_of(model, ids), engine.runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def shapes_of(opened: GGUFModel) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in opened.tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_of_the_file_agrees(name: str, tmp_path: Path) -> None:
    model = built(name)
    path = write_newer(model, tmp_path / "m.gguf", CASES[name][0])
    opened = open_gguf(path)
    config = config_of_model(opened)
    assert config.model_type == model.config.model_type
    assert ModelFacts.of(config).layers == ModelFacts.of(model.config).layers
    check_engine(model, path)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CASES)
def test_no_value_of_a_key_is_taken_amiss(name: str, tmp_path: Path) -> None:
    check_hostile(open_gguf(write_newer(built(name), tmp_path / "m.gguf", CASES[name][0])))


@pytest.mark.parametrize("name", ["granite_swa", "mellum"])
def test_fused_queries_and_keys_are_put_in_order(name: str, tmp_path: Path) -> None:
    """llama.cpp's --fuse-qkv joins what is permuted already."""
    model = built(name)
    check_engine(model, write_newer(model, tmp_path / "m.gguf", CASES[name][0], fused_qkv=True))


@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.BF16])
def test_experts_of_gate_and_up_stay_in_their_type(qtype: QuantType, tmp_path: Path) -> None:
    opened = open_gguf(write_newer(built("granite_swa with experts"), tmp_path / "m.gguf", "granite_swa", qtype=qtype))
    source = GGUFSource(opened, ModelFacts.of(config_of_model(opened)))
    assert opened.tensors["blk.0.ffn_gate_up_exps.weight"].qtype is qtype
    assert source.find("model.layers.0.shared_mlp.input_linear.weight") is not None


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("laguna", {"expert_weights_norm": False}, "does not normalize"),
    ("laguna", {"expert_gating_func": 1}, "no known model"),
    ("laguna", {"attention.head_count": np.array([4, 8, 8, 8, 3])}, "neither one a head nor one an element"),
    ("mellum", {"expert_gating_func": 2}, "no known model"),
    ("hy_v3", {"expert_feed_forward_length": 33}, "not as wide as the routed"),
    ("minimax-m3", {"attention.indexer.block_size": None}, "lacks minimax-m3.attention.indexer.block_size"),
    ("bailingmoe3", {"kda.safe_gate": False}, "no lower bound"),
    ("bailingmoe3", {"swiglu_clamp_exp": [1.0] * 4}, "swiglu_clamp_exp"),
    ("step35", {"attention.head_count": np.array([4, 8, 4, 4])}, "do not follow its windows"),
    ("step35", {"swiglu_clamp_exp": [1.0, float("nan"), 1.0, 1.0]}, "4 numbers are needed"),
    ("glm5-next", {"swiglu_clamp_exp": [1.0, 2.0, 1.0, 1.0]}, "do not clamp at one value"),
    ("hy_v4", {"attention.indexer.types": None}, "without indexers"),
    ("cohere2moe", {"logit_scale": None}, "lacks cohere2moe.logit_scale"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_no_known_model_is_refused(name: str, change: dict[str, object], message: str, tmp_path: Path) -> None:
    arch = CASES[name][0]
    opened = open_gguf(write_newer(built(name), tmp_path / "m.gguf", arch))
    metadata = opened.metadata | {f"{arch}.{key}": value for key, value in change.items()}
    said = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(KTransformersError, match=message):
        config_from_gguf(said, shapes_of(opened), {"rope_freqs.weight": [1.0] * 16})


def test_dense_layers_are_counted_by_tensors(tmp_path: Path) -> None:
    """A file that does not say leading_dense_block_count, as of Solar Open, has as many as it has."""
    opened = open_gguf(write_newer(built("deepseek32"), tmp_path / "m.gguf", "deepseek32"))
    metadata = {key: value for key, value in opened.metadata.items() if not key.endswith("leading_dense_block_count")}
    wanted = config_of_model(opened)
    assert config_from_gguf(metadata, shapes_of(opened)).mlp_layer_types == wanted.mlp_layer_types


def test_growth_of_mistral4_is_read(tmp_path: Path) -> None:
    opened = open_gguf(write_newer(built("mistral4"), tmp_path / "m.gguf", "mistral4"))
    config = config_from_gguf({**opened.metadata, "mistral4.attention.temperature_scale": 0.5}, shapes_of(opened))
    assert config.rope_parameters["llama_4_scaling_beta"] == 0.5


def test_every_newer_architecture_is_written() -> None:
    assert set(NEWER) <= set(METADATA)


def test_names_of_other_modules_are_none() -> None:
    names = NewerNames("laguna", ())
    assert names.get_name("model.layers.3.self_attn.q_proj.weight", (".weight",)) == "blk.3.attn_q.weight"
    assert names.get_name("model.layers.3.self_attn.sinks") == "blk.3.attn_sinks"
    assert names.get_name("model.layers.3.mixer.weight", (".weight",)) is None
    assert names.get_name("score.weight", (".weight",)) is None
