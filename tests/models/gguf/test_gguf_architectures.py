"""Every architecture that the installed `gguf` package knows: a tiny file of it is read, or a reason is recorded."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import KTransformersError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.config import FACTOR_TENSORS, config_from_gguf
from ktransformers.models.gguf.families import FAMILIES
from ktransformers.models.gguf.fields import rotary_share
from ktransformers.models.gguf.metadata import Metadata
from ktransformers.models.gguf.recurrent import RECURRENT_FAMILIES
from ktransformers.models.gguf.refused import REFUSED, check_architecture
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from tests.support.checks.source_checks import check_whole_model
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.newer_metadata import METADATA
from tests.support.gguf.writer import ARCH_OF, write_gguf
from tests.support.models.agreement import TOLERANCE, logits_of, prompt
from tests.support.models.tiny_models import MODEL_TYPES, NUM_EXPERTS, tiny_config, tiny_model

_HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_SLIDING = {"sliding_window": 16}
_NO_WINDOW = {"sliding_window": None}
MORE_TYPES: dict[str, dict[str, object]] = {
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "layers": 6, "layer_types": None},
    "stablelm": {"rope_parameters": _HALF_ROTATED, "use_qkv_bias": True, "use_parallel_residual": False},
    "nemotron": {"rope_parameters": _HALF_ROTATED, "mlp_bias": True},
    "gpt_neox": {"rope_parameters": _HALF_ROTATED, "use_parallel_residual": True},
    "phi": {"rope_parameters": _HALF_ROTATED},
    "phi3": _SLIDING,
    "gpt2": {"n_inner": 96, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "gpt_bigcode": {"n_inner": 96, "tie_word_embeddings": True},
    "starcoder2": {},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True},
    "cohere2": {**_SLIDING, "layers": 4, "logit_scale": 0.25, "tie_word_embeddings": True, "head_dim": 32},
    "olmo": {"clip_qkv": 0.75},
    "olmo2": {},
    "olmo3": {},
    "glm4": {
        "head_dim": 32,
        "attention_bias": True,
        "rope_parameters": _HALF_ROTATED,
    },
    "jais2": {},
    "exaone4": {**_SLIDING, "layers": 4, "head_dim": 32},
    "granite": {"embedding_multiplier": 6.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125},
    "arcee": {},
    "ernie4_5": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "smollm3": {"layers": 4, "no_rope_layers": None},
    "seed_oss": {"head_dim": 32, "attention_bias": True},
    "ministral3": _NO_WINDOW,
    "granitemoeshared": {
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 6.0,
    },
    "exaone_moe": {"layers": 3},
    "afmoe": {"layers": 4, "layer_types": None, "mup_enabled": True},
    "llama4_text": {
        "head_dim": 32,
        "layers": 4,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
    },
    "glm_moe_dsa": {
        "layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 8,
    },
    "mimo_v2_flash": {
        "layers": 3,
        "head_dim": 32,
        "v_head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "attention_value_scale": 0.75,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 50000.0), ("sliding_attention", 10000.0))
        },
    },
    "gemma4_text": {
        "layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 16,
        "rope_parameters": None,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": NUM_EXPERTS,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
}
"""Families beyond MODEL_TYPES, which test_gguf_config.py reads: config values with which every feature is on."""
SAME_AS = {
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
    "minicpm": "granite",
    "bailingmoe": "granitemoeshared",
    "bailingmoe2": "glm4_moe",
}
"""Architectures that compute what a family of another name does."""
_GEMMA4_E4B: dict[str, object] = {
    **MORE_TYPES["gemma4_text"],
    "layers": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 160,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "enable_moe_block": False,
    "num_experts": None,
}
_MINICPM = {**MORE_TYPES["granite"], "attention_multiplier": 16**-0.5}


TESTED_ELSEWHERE = {"deepseek4", *METADATA}
"""Architectures whose files other modules of tests write."""


def models() -> list[tuple[str, str]]:
    """(architecture, model type) of all files that are written here."""
    own = [(ARCH_OF[model_type], model_type) for model_type in MORE_TYPES]
    return [*own, *SAME_AS.items()]


def built(model_type: str, values: dict[str, object]) -> PreTrainedModel:
    model = tiny_model(model_type, **values)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):  # 1 is added to some in the file: they must not lose bits by that
                tensor.copy_((tensor * 1024).round() / 1024)
    return model


def test_every_architecture_has_an_entry() -> None:
    """A new architecture in a newer gguf package fails here by name: add it to FAMILIES or REFUSED."""
    known = {name for arch, name in gguf.MODEL_ARCH_NAMES.items() if arch is not gguf.MODEL_ARCH.MMPROJ}
    assert set(FAMILIES) | set(REFUSED) >= known
    assert set(FAMILIES) & set(REFUSED) == set()
    tested = {arch for arch, _ in models()} | {ARCH_OF[model_type] for model_type in MODEL_TYPES}
    assert tested | TESTED_ELSEWHERE | set(RECURRENT_FAMILIES) == set(FAMILIES)  # the latter: test_gguf_recurrent.py


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    listed = page.split("These architectures are read:")[1].split(".\n")[0]
    assert listed.replace("`", "").replace("\n", " ").strip().split(", ") == sorted(FAMILIES)


@pytest.mark.parametrize("arch", sorted(REFUSED))
def test_refusals_say_why(arch: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{arch}' are not supported: {REFUSED[arch]}"):
        check_architecture(arch, FAMILIES)


def values_of(arch: str, model_type: str) -> dict[str, object]:
    ling = {
        **MORE_TYPES["granitemoeshared"],
        "head_dim": 32,
        "attention_multiplier": 32**-0.5,
        "embedding_multiplier": 1.0,
    }
    special = {
        "minicpm": _MINICPM,
        "bailingmoe": ling,
        "bailingmoe2": {"attention_bias": False, "n_group": 4, "topk_group": 2},
    }
    return special.get(arch) or MORE_TYPES.get(model_type, {})


def facts_of(config: PretrainedConfig) -> ModelFacts:
    """Of a plain model with as many layers and heads where those of `config` cannot run yet: names need no more."""
    try:
        return ModelFacts.of(config)
    except UnsupportedError:
        layers, tied = config.num_hidden_layers, config.tie_word_embeddings
        return ModelFacts.of(tiny_config("llama", layers=layers, tie_word_embeddings=tied))


def check_file(model: PreTrainedModel, path: Path, arch: str) -> PretrainedConfig:
    """The config from metadata alone computes the same logits, and every tensor comes back as it was."""
    experts = "gate_up" if arch == "gemma4" else "merged"
    opened = open_gguf(write_gguf(model, path, arch=arch, experts=experts))
    config = config_of_model(opened)
    assert config.model_type == model.config.model_type
    rebuilt = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    assert {n: p.shape for n, p in rebuilt.state_dict().items()} == {n: p.shape for n, p in model.state_dict().items()}
    rebuilt.load_state_dict(model.state_dict())
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        assert torch.equal(rebuilt(tokens).logits, model(tokens).logits)
    for module in rebuilt.modules():
        if type(module).__name__ == "Llama4TextExperts":  # says nothing of its layout, [E, in, out]
            module.is_transposed = True
    check_whole_model(GGUFSource(opened, facts_of(config)), rebuilt)
    check_hostile(opened)
    return config


def check_hostile(opened: GGUFModel) -> None:
    """Whatever one key says, there is a config or an error that a user understands."""
    shapes = {name: tensor.shape for name, tensor in opened.tensors.items()}
    factors = {name: [1.0, 2.0] for name in FACTOR_TENSORS if name in shapes}
    keys = [key for key in opened.metadata if key.startswith(f"{opened.architecture}.")]
    for key in keys:
        for value in (None, 0, -1, 1 << 40, "x", True, 0.5, -1e300, np.array(["x"]), np.array([1, -2]), [0.5] * 8, []):
            with contextlib.suppress(KTransformersError):
                config_from_gguf(dict(opened.metadata) | {key: value}, shapes, factors)


@pytest.mark.every(5)
@pytest.mark.parametrize(("arch", "model_type"), models())
def test_a_file_is_its_model(arch: str, model_type: str, tmp_path: Path) -> None:
    check_file(built(model_type, values_of(arch, model_type)), tmp_path / "m.gguf", arch)


def test_gemma4_with_inputs_by_layer(tmp_path: Path) -> None:
    """As E2B and E4B: shared keys and values, wider MLPs above them, embeddings for each layer."""
    check_file(built("gemma4_text", _GEMMA4_E4B), tmp_path / "m.gguf", "gemma4")


@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.BF16])
def test_rows_of_fused_tensors_stay_in_their_type(qtype: QuantType, tmp_path: Path) -> None:
    model = built("glm4_moe", {"attention_bias": True})
    path = write_gguf(model, tmp_path / "m.gguf", dense_qtype=qtype, arch="bailingmoe2")
    opened = open_gguf(path)
    source = GGUFSource(opened, ModelFacts.of(config_of_model(opened)))
    whole = source.stored_bytes("blk.0.attn_qkv.weight")
    assert whole is not None
    parts = [source.tensor(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
    assert torch.equal(torch.cat([part.data for part in parts]), whole.flatten())
    assert {part.qtype for part in parts} == {opened.tensors["blk.0.attn_qkv.weight"].qtype}


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3", "exaone_moe", "mimo_v2_flash"])
def test_blocks_of_prediction_are_left_aside(model_type: str, tmp_path: Path) -> None:
    """Written by the converter behind the model's own blocks and counted in block_count."""
    model = built(model_type, values_of(ARCH_OF[model_type], model_type))
    config = check_file(model, tmp_path / "plain.gguf", ARCH_OF[model_type])
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf", prediction_blocks=1))
    again = config_of_model(opened)
    assert again.num_hidden_layers == config.num_hidden_layers
    facts = ModelFacts.of(again)
    assert (facts.num_layers, facts.num_prediction_layers) == (config.num_hidden_layers, 1)
    extra = [name for name in opened.tensors if name.startswith(f"blk.{config.num_hidden_layers}.")]
    assert len(extra) == 3
    check_whole_model(GGUFSource(opened, facts), model)
    own = {name: tensor.shape for name, tensor in opened.tensors.items() if name not in extra}
    without = config_from_gguf(opened.metadata, own)  # of a checkpoint that left them out: counted all the same
    assert without.num_hidden_layers == config.num_hidden_layers


def test_longrope_of_phi3(tmp_path: Path) -> None:
    """128k models: factors are tensors, and the file's context length is the longer one."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 24,
        "partial_rotary_factor": 1.0,
    }
    values = {"rope_parameters": rope, "max_position_embeddings": 96, "original_max_position_embeddings": 24}
    model = built("phi3", {**values, "sliding_window": None})
    config = check_file(model, tmp_path / "m.gguf", "phi3")
    assert config.rope_parameters["long_factor"] == rope["long_factor"]


def test_longrope_of_phimoe_needs_the_config(tmp_path: Path) -> None:
    model = built("phi3", {"sliding_window": None})
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf"))
    metadata = {name.replace("phi3.", "phimoe."): value for name, value in opened.metadata.items()}
    metadata |= {"general.architecture": "phimoe", "phimoe.expert_count": 4, "phimoe.expert_used_count": 2}
    shapes = {name: tensor.shape for name, tensor in opened.tensors.items()} | {"rope_factors_long.weight": (8,)}
    with pytest.raises(UnsupportedError, match=r"short_mscale.*--model_path"):
        config_from_gguf(metadata, shapes)


def test_rotation_of_llama4_scout(tmp_path: Path) -> None:
    """Wavelengths beyond 8192 positions are divided by 16, with no transition."""
    model = built("llama4_text", values_of("llama4", "llama4_text"))
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf"))
    shapes = {name: tensor.shape for name, tensor in opened.tensors.items()} | {"rope_freqs.weight": (16,)}
    wavelengths = [2 * math.pi * 10000.0 ** (i / 16) for i in range(16)]
    factors = [16.0 if length > 8192 else 1.0 for length in wavelengths]
    assert set(factors) == {1.0, 16.0}
    rope = config_from_gguf(opened.metadata, shapes, {"rope_freqs.weight": factors}).rope_parameters
    wanted = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    assert rope == {**wanted, "rope_theta": 10000.0, "original_max_position_embeddings": 8192}


CHANGES: list[tuple[str, str, dict[str, object], str]] = [
    ("afmoe", "afmoe", {"expert_weights_norm": False}, "does not normalize"),
    ("exaone-moe", "exaone_moe", {"expert_gating_func": 1}, "no known model"),
    ("exaone-moe", "exaone_moe", {"attention.sliding_window_pattern": np.array([True])}, "3 counts are needed"),
    ("bailingmoe", "granitemoeshared", {"expert_weights_norm": False}, "another router"),
    ("bailingmoe", "granitemoeshared", {"leading_dense_block_count": 1}, "dense layers"),
    ("starcoder", "gpt_bigcode", {"attention.head_count_kv": 4}, "more than one head"),
    ("minicpm", "granite", {"expert_count": 8}, "MiniCPM-MoE"),
    ("mistral3", "ministral3", {"expert_count": 8}, "mistral3 with experts"),
    ("glm4", "glm4", {"rope.dimension_sections": np.array([8, 12, 12, 0])}, "GLM-4V"),
    ("mimo2", "mimo_v2_flash", {"attention.head_count_kv": np.array([2, 3, 2])}, "not doubled"),
    ("mimo2", "mimo_v2_flash", {"attention.head_count_kv": np.array([2, 0, 2])}, "at least 1"),
    ("gemma4", "gemma4_text", {"attention.head_count_kv": np.array([2, 1, 2, 2, 2, 1])}, "do not follow"),
    ("gemma2", "gemma2", {"attention.layer_norm_rms_epsilon": None}, "lacks gemma2.attention.layer_norm_rms_epsilon"),
    ("phi2", "phi", {"attention.layer_norm_epsilon": None}, "lacks phi2.attention.layer_norm_epsilon"),
]


@pytest.mark.parametrize(("arch", "model_type", "change", "message"), CHANGES, ids=lambda value: str(value)[:40])
def test_what_is_no_known_model_is_refused(
    arch: str, model_type: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    model = built(model_type, values_of(arch, model_type))
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf", arch=arch))
    metadata = opened.metadata | {f"{arch}.{key}": value for key, value in change.items()}
    shapes = {name: tensor.shape for name, tensor in opened.tensors.items()}
    with pytest.raises(KTransformersError, match=message):
        config_from_gguf({key: value for key, value in metadata.items() if value is not None}, shapes)


def test_a_period_of_windows(tmp_path: Path) -> None:
    """Some files give the pattern by one number: every so many layers one sees all positions."""
    model = built("exaone4", values_of("exaone4", "exaone4"))
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf"))
    shapes = {name: tensor.shape for name, tensor in opened.tensors.items()}
    config = config_from_gguf(opened.metadata | {"exaone4.attention.sliding_window_pattern": 2}, shapes)
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2


RUN = (
    "gemma3",
    "phi3",
    "gpt2",
    "starcoder",
    "olmo",
    "mistral3",
    "cohere2",
    "exaone-moe",
    "afmoe",
    "bailingmoe",
    "bailingmoe2",
)
"""What converters change most, and windows: those that this program computes from their file."""


@pytest.mark.parametrize(("arch", "model_type"), [pair for pair in models() if pair[0] in RUN])
def test_an_engine_of_the_file_agrees(arch: str, model_type: str, tmp_path: Path) -> None:
    model = built(model_type, values_of(arch, model_type))
    path = write_gguf(model, tmp_path / "m.gguf", arch=arch)
    engine = static_engine(EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1))
    ids = prompt(model.config.vocab_size, 48)  # longer than the windows
    want, got = logits_of(model, ids), engine.runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def test_shares_of_rotation_come_back() -> None:
    """Of heads of any size: what transformers computes from the share is what the file says."""
    for size in range(2, 520, 2):
        for turning in range(2, size + 1, 2):
            share = rotary_share(Metadata({"general.architecture": "x", "x.rope.dimension_count": turning}, {}), size)
            assert int(size * share) == turning
