"""config_from_gguf: the config that a file was written from comes back, and absurd metadata do not."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import FormatError, KTransformersError, UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.config import config_from_gguf
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from tests.support.checks.source_checks import check_whole_model
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.presets import deepseek_v3, preset
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import TOLERANCE, logits_of, prompt
from tests.support.models.tiny_models import MODEL_TYPES, random_model, tiny_config, tiny_model

# Fields that a file does not hold, and that do not change what a model computes for these configs.
NOT_STORED = {
    "architectures", "dtype", "transformers_version", "pad_token_id", "num_nextn_predict_layers", "router_jitter_noise",
    "input_jitter_noise", "pretraining_tp", "max_window_layers", "topk_method", "initializer_range", "sliding_window",
    "router_aux_loss_coef", "eod_token_id", "sep_token_id", "head_dim", "_name_or_path", "moe_norm_min",
}  # fmt: skip


def test_a_mistral_without_window_is_a_llama(tmp_path: Path) -> None:
    """As llama.cpp's converter writes it: the same architecture, and no key for a window."""
    path = write_gguf(tiny_model("mistral", sliding_window=None), tmp_path / "m.gguf")
    assert config_of_model(open_gguf(path)).model_type == "llama"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_config_comes_back(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    opened = open_gguf(write_gguf(model, tmp_path / "m.gguf"))
    config = config_of_model(opened)
    wanted, got = model.config.to_dict(), config.to_dict()
    assert config.model_type == model_type
    assert config.architectures == [type(model).__name__]
    assert {k: v for k, v in wanted.items() if k not in NOT_STORED and got.get(k) != v} == {}
    rebuilt = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    assert {n: p.shape for n, p in rebuilt.state_dict().items()} == {n: p.shape for n, p in model.state_dict().items()}
    rebuilt.load_state_dict(model.state_dict())
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(rebuilt(tokens).logits, model(tokens).logits)
    check_whole_model(GGUFSource(opened, ModelFacts.of(config)), rebuilt)


def test_deepseek_v3() -> None:
    config = config_from_gguf(*deepseek_v3())
    got = {key: getattr(config, key) for key in (
        "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank",
        "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "num_experts_per_tok",
        "n_shared_experts", "first_k_dense_replace", "moe_intermediate_size", "intermediate_size", "n_group",
        "topk_group", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps", "vocab_size", "tie_word_embeddings",
    )}  # fmt: skip
    assert list(got.values()) == [
        "deepseek_v3", 61, 128, 128, 1536, 512, 128, 64, 128, 256, 8, 1, 3, 2048, 18432, 8, 4, True, 2.5, 1e-6, 129280,
        False,
    ]  # fmt: skip
    # As in the published config.json.
    assert config.rope_parameters == {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip


def test_deepseek_v3_of_old_files() -> None:
    """Before absorbed MLA the key length was a head's, and expert groups were not written."""
    config = config_from_gguf(
        *deepseek_v3(
            attention__key_length=192,
            attention__value_length=128,
            attention__key_length_mla=None,
            attention__value_length_mla=None,
            attention__head_count_kv=128,
            expert_group_count=None,
            expert_group_used_count=None,
        )
    )
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.n_group, config.topk_group) == (8, 4)


def test_deepseek_v2_lite() -> None:
    metadata, shapes = deepseek_v3(
        embedding_length=2048,
        attention__head_count=16,
        attention__q_lora_rank=None,
        expert_count=64,
        expert_used_count=6,
        expert_shared_count=2,
        expert_feed_forward_length=1408,
        expert_weights_scale=1.0,
        expert_weights_norm=False,
        expert_gating_func=1,
        leading_dense_block_count=1,
        expert_group_count=None,
        expert_group_used_count=None,
        rope__scaling__yarn_log_multiplier=float(np.float32(0.0707)),
    )
    shapes = {name: shape for name, shape in shapes.items() if "exp_probs_b" not in name}
    shapes["token_embd.weight"] = (102400, 2048)
    config = config_from_gguf(metadata, shapes)
    assert config.model_type == "deepseek_v2"
    assert config.q_lora_rank is None
    assert (config.topk_method, config.n_group, config.norm_topk_prob) == ("greedy", 1, False)
    assert config.rope_parameters["mscale_all_dim"] == 0.707


def test_qwen3_30b() -> None:
    shapes = {
        "token_embd.weight": (151936, 2048),
        "ffn_gate_inp.weight": (128, 2048),
        "ffn_gate_exps.weight": (128, 768, 2048),
    }
    keys: dict[str, object] = {
        "context_length": 40960, "embedding_length": 2048, "feed_forward_length": 6144, "attention__head_count": 32,
        "attention__head_count_kv": 4, "attention__key_length": 128, "attention__value_length": 128,
        "attention__layer_norm_rms_epsilon": float(np.float32(1e-6)), "rope__freq_base": 1e6, "expert_count": 128,
        "expert_used_count": 8, "expert_feed_forward_length": 768,
    }  # fmt: skip
    config = config_from_gguf(*preset("qwen3moe", 48, 0, shapes, **keys))
    assert config.model_type == "qwen3_moe"
    assert (config.head_dim, config.num_experts, config.moe_intermediate_size) == (128, 128, 768)
    assert config.norm_topk_prob is True
    assert config.mlp_only_layers == []
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def llama_with_factors(tmp_path: Path, factors: np.ndarray) -> Path:
    model = tiny_model("llama")
    import tests.support.gguf.writer as support

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    support.add_metadata(writer, model)
    for name, values in support.gguf_tensors(model):
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_inferred_from_the_factors(factor: float, tmp_path: Path) -> None:
    wanted = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = tiny_config("llama", rope_parameters=wanted)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    path = llama_with_factors(tmp_path, (plain / scaled).numpy())
    opened = open_gguf(path)
    got = config_of_model(opened)
    assert got.rope_parameters == wanted
    check_whole_model(GGUFSource(opened, ModelFacts.of(got)), random_model(config))


ROTATIONS = [  # head_dim, theta, factor, low, high, original context
    (16, 1e4, 8.0, 1.0, 4.0, 128),
    (64, 5e5, 8.0, 1.0, 4.0, 4096),
    (128, 5e5, 32.0, 1.0, 4.0, 2048),
    (128, 1e6, 2.0, 1.0, 4.0, 32000),
    (64, 1e6, 16.0, 2.0, 8.0, 8192),
    (128, 5e5, 4.0, 1.0, 2.0, 16384),
    (16, 5e5, 16.0, 1.0, 1.0, 65536),
    (32, 1e4, 8.0, 1.0, 4.0, 1 << 20),  # no wavelength is long enough to be scaled by all of the factor
]


@pytest.mark.parametrize(("size", "theta", "factor", "low", "high", "original"), ROTATIONS)
def test_factors_of_any_original_context_give_the_same_rotation(
    size: int, theta: float, factor: float, low: float, high: float, original: int
) -> None:
    """Against transformers' own frequencies, whatever parameters the factors are taken for."""
    rope = {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low,
        "high_freq_factor": high, "original_max_position_embeddings": original,
    }  # fmt: skip
    config = tiny_config("llama", head_dim=size, rope_parameters=rope, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    factors = (1.0 / theta ** (torch.arange(0, size, 2).float() / size) / scaled).tolist()
    check_frequencies(factors, size, theta, scaled)


@pytest.mark.parametrize("factors", [np.linspace(1, 9, 8), np.geomspace(0.5, 64, 8), np.full(8, 4.0), np.ones(8)])
def test_factors_of_any_kind_divide_frequencies(factors: np.ndarray) -> None:
    plain = 1e4 ** -(torch.arange(0, 16, 2).double() / 16)
    check_frequencies(factors.tolist(), 16, 1e4, (plain / torch.from_numpy(factors)).float())


def check_frequencies(factors: list[float], size: int, theta: float, wanted: torch.Tensor) -> None:
    keys: dict[str, object] = {
        "context_length": 131072, "embedding_length": 64, "feed_forward_length": 96, "attention__head_count": 4,
        "attention__key_length": size, "attention__value_length": size, "rope__freq_base": theta,
        "attention__layer_norm_rms_epsilon": float(np.float32(1e-6)),
    }  # fmt: skip
    metadata, shapes = preset("llama", 1, 0, {"token_embd.weight": (160, 64), "attn_norm.weight": (64,)}, **keys)
    shapes["rope_freqs.weight"] = (size // 2,)
    config = config_from_gguf(metadata, shapes, {"rope_freqs.weight": np.float32(factors).tolist()})
    rotary = LlamaRotaryEmbedding(config)
    for length in (8, 131072):  # some kinds of rotation look at the longest position
        _, _ = rotary(torch.zeros(1, 1, 1), torch.tensor([[length - 1]]))
        assert torch.allclose(rotary.inv_freq.double(), wanted.double(), rtol=1e-5)
        assert rotary.attention_scaling == 1.0


def test_an_engine_divides_frequencies_by_factors_of_any_kind(tmp_path: Path) -> None:
    """Against transformers' model with the frequencies put in by hand."""
    factors = np.geomspace(0.5, 64, 8)
    path = llama_with_factors(tmp_path, factors)
    model = tiny_model("llama")
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors).float()
    engine = static_engine(EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1))
    ids = prompt(model.config.vocab_size, 48)
    want, got = logits_of(model, ids), engine.runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_factors_that_are_no_numbers_are_refused(bad: float, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"rope_freqs\.weight"):
        config_of_model(open_gguf(llama_with_factors(tmp_path, np.array([1.0] * 7 + [bad]))))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", None, "general.architecture"),
        ("general.architecture", "rwkv7", "rwkv7.*recurrent"),
        ("qwen3moe.block_count", 3, "3 layers.*tensors of 2"),
        ("qwen3moe.block_count", 1 << 40, "block_count"),
        ("qwen3moe.block_count", -1, "block_count"),
        ("qwen3moe.block_count", None, r"lacks qwen3moe\.block_count"),
        ("qwen3moe.embedding_length", 65, "65.*64 wide"),
        ("qwen3moe.attention.head_count", 0, "head_count"),
        ("qwen3moe.attention.head_count", "4", "head_count"),
        ("qwen3moe.attention.head_count", True, "head_count"),
        ("qwen3moe.attention.head_count_kv", np.array([2, 4]), "differs from layer to layer"),
        ("qwen3moe.attention.layer_norm_rms_epsilon", math.nan, "finite"),
        ("qwen3moe.rope.freq_base", math.inf, "finite"),
        ("qwen3moe.rope.scaling.type", "ntk", "ntk"),
        ("tokenizer.ggml.eos_token_id", 160, "eos_token_id"),
        ("qwen3moe.expert_weights_norm", 1, "boolean"),
    ],
)
def test_absurd_metadata_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    model = open_gguf(write_gguf(tiny_model("qwen3_moe"), tmp_path / "m.gguf"))
    metadata = dict(model.metadata) | {key: value}
    if value is None:
        del metadata[key]
    with pytest.raises((FormatError, UnsupportedError), match=message):
        config_from_gguf(metadata, {name: t.shape for name, t in model.tensors.items()})


def test_equal_per_layer_values_are_one_value(tmp_path: Path) -> None:
    model = open_gguf(write_gguf(tiny_model("qwen3_moe"), tmp_path / "m.gguf"))
    metadata = dict(model.metadata) | {"qwen3moe.attention.head_count_kv": np.array([2, 2], dtype=np.int32)}
    assert config_from_gguf(metadata, {n: t.shape for n, t in model.tensors.items()}).num_key_value_heads == 2


def test_end_of_turn_is_an_end_token_too(tmp_path: Path) -> None:
    model = open_gguf(write_gguf(tiny_model("qwen3_moe"), tmp_path / "m.gguf"))
    shapes = {name: t.shape for name, t in model.tensors.items()}
    assert config_from_gguf(model.metadata, shapes).eos_token_id == 2
    config = config_from_gguf(dict(model.metadata) | {"tokenizer.ggml.eot_token_id": 7}, shapes)
    assert config.eos_token_id == [2, 7]


def test_files_without_embeddings_are_refused() -> None:
    with pytest.raises(KTransformersError, match="token_embd"):
        config_from_gguf({"general.architecture": "llama"}, {})
