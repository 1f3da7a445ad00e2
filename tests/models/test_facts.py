"""Facts against values read by hand, against the modules that transformers builds, and hostile values."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import ktransformers
from ktransformers.engine.model.skeleton import check_kinds
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.models.facts import (
    DeltaFacts,
    ExpertFacts,
    LatentFacts,
    LayerFacts,
    LayerKind,
    ModelFacts,
    Quantization,
)
from ktransformers.models.registry import TESTED_TYPES, routed_experts
from ktransformers.models.synthetic_shapes import find_shape
from tests.support.engines.fake_operators import meta_model
from tests.support.models.attention_families import config_of
from tests.support.models.family_models import family_config
from tests.support.models.pooled_models import POOLED_TYPES
from tests.support.models.recurrent_models import RECURRENT_TYPES
from tests.support.models.recurrent_shapes import RECURRENT, recurrent_config
from tests.support.models.tiny_models import MODEL_TYPES, UNROTATED_TYPES, WINDOWED_TYPES, tiny_config
from tests.support.oracles.deepseek_v41 import MODEL_TYPE as WITH_AN_ORACLE

# Shapes that the config says by layer, or not at all: their caches are of the sizes of their modules. LongCat counts
# attentions as layers, of which a module of its list has two. Recurrent layers have tests of their own below.
OF_THEIR_OWN = {
    "cohere_compass_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt_neox",
    "laguna",
    "llama4_text",
    "longcat_flash",
    "mimo_v2_flash",
}
_ELSEWHERE = {*RECURRENT_TYPES, *POOLED_TYPES, WITH_AN_ORACLE}
FAMILIES = sorted({*MODEL_TYPES, *WINDOWED_TYPES, *UNROTATED_TYPES, *TESTED_TYPES} - OF_THEIR_OWN - _ELSEWHERE)
FULL, SLIDING, LATENT = LayerKind.FULL, LayerKind.SLIDING, LayerKind.LATENT


def attention(kind: LayerKind, kv_heads: int, head_dim: int, v_head_dim: int = 0, window: int | None = None) -> Any:
    word = "sliding_attention" if kind is SLIDING else "full_attention"
    return LayerFacts(kind, word, 4, kv_heads, head_dim, v_head_dim or head_dim, window)


WINDOWS = [attention(SLIDING, 2, 16, window=16), attention(FULL, 2, 16)]
BY_HAND = {  # layers without their experts, top_k, width of an expert and of the shared ones, layers with experts
    "llama": ([attention(FULL, 2, 16)] * 2, None),
    "mistral": ([attention(SLIDING, 2, 32, window=16)] * 2, None),
    "ministral3": ([attention(SLIDING, 2, 32, window=16)] * 2, None),
    "qwen3": ([attention(FULL, 2, 32)] * 2, None),
    "gemma2": (WINDOWS, None),
    "gemma3_text": (WINDOWS, None),
    "olmo3": (WINDOWS, None),
    "smollm3": ([attention(FULL, 2, 16)] * 2, None),
    "mixtral": ([attention(SLIDING, 2, 16, window=16)] * 2, (2, 96, 0, [0, 1])),
    "qwen2_moe": ([attention(FULL, 2, 16)] * 2, (2, 96, 96, [0, 1])),
    "qwen3_moe": ([attention(FULL, 2, 32)] * 2, (4, 96, 0, [0, 1])),
    "olmoe": ([attention(FULL, 2, 16)] * 2, (2, 96, 0, [0, 1])),
    "deepseek_v2": ([attention(LATENT, 4, 48, 32)] * 2, (2, 96, 192, [1])),
    "deepseek_v3": ([attention(LATENT, 4, 48, 32)] * 2, (4, 96, 96, [1])),
    "glm4_moe": ([attention(FULL, 2, 32)] * 2, (2, 96, 96, [1])),
    "gpt_oss": ([attention(SLIDING, 2, 32, window=16), attention(FULL, 2, 32)], (2, 96, 0, [0, 1])),
    "granitemoe": ([attention(FULL, 2, 16)] * 2, (2, 96, 0, [0, 1])),
    "ernie4_5_moe": ([attention(FULL, 2, 16)] * 2, (2, 96, 192, [1])),
    "phimoe": ([attention(FULL, 2, 16)] * 2, (2, 96, 0, [0, 1])),
    "dots1": ([attention(FULL, 2, 32)] * 2, (2, 96, 96, [1])),
    "minimax_m2": ([attention(FULL, 2, 32)] * 2, (2, 96, 0, [0, 1])),
    "hunyuan_v1_moe": ([attention(FULL, 2, 16)] * 2, (2, 96, 0, [0, 1])),
    "exaone_moe": (WINDOWS, (2, 96, 96, [1])),
    "afmoe": (WINDOWS, (2, 96, 96, [1])),
    "mellum": (WINDOWS, (2, 96, 96, [0, 1])),
}


@pytest.mark.parametrize("model_type", BY_HAND)
def test_facts_are_those_read_by_hand(model_type: str) -> None:
    layers, experts = BY_HAND[model_type]
    facts = ModelFacts.of(tiny_config(model_type))
    found = [(one.kind, one.word, one.num_heads, one.num_kv_heads) for one in facts.layers]
    assert found == [(one.kind, one.word, one.num_heads, one.num_kv_heads) for one in layers]
    found = [(one.head_dim, one.v_head_dim, one.window) for one in facts.layers]
    assert found == [(one.head_dim, one.v_head_dim, one.window) for one in layers]
    assert [index for index, one in enumerate(facts.layers) if one.has_experts] == (experts[3] if experts else [])
    if experts is None:
        assert facts.experts is None
    else:
        assert facts.experts == ExpertFacts(8, (experts[0],) * 2, *experts[1:3])
    assert (facts.model_type, facts.vocab_size, facts.hidden_size, facts.num_layers) == (model_type, 160, 64, 2)
    assert (facts.context_len, facts.eos_token_ids, facts.is_tied) == (512, (2,), False)
    assert facts.is_of_transformers


def test_facts_of_published_shapes() -> None:
    facts = ModelFacts.of(find_shape("deepseek-v3").config())
    assert facts.latent == LatentFacts(rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128, is_interleaved=True)
    assert facts.layers[3] == LayerFacts(LATENT, "full_attention", 128, 128, 192, 128, has_experts=True)
    assert [one.has_experts for one in facts.layers] == [False] * 3 + [True] * 58
    assert (facts.experts, facts.intermediate_size) == (ExpertFacts(256, (8,) * 61, 2048, 2048), 18432)
    assert (facts.context_len, facts.architecture) == (163840, "DeepseekV3ForCausalLM")
    facts = ModelFacts.of(find_shape("gpt-oss-20b").config())
    assert {(one.kind, one.window) for one in facts.layers[::2]} == {(SLIDING, 128)}
    assert {(one.kind, one.window) for one in facts.layers[1::2]} == {(FULL, None)}
    assert facts.experts == ExpertFacts(32, (4,) * 24, 2880)
    facts = ModelFacts.of(find_shape("deepseek-v2-lite").config())
    assert facts.latent is not None
    assert facts.latent.q_rank is None


_LAYER = re.compile(r"layers\.(\d+)\.")


def seen_attention(module: Any) -> tuple[int, int, int]:
    """(KV heads, head_dim of keys, of values) by the modules' own sizes."""
    if hasattr(module, "kv_b_proj"):
        nope = module.kv_b_proj.out_features // module.num_heads - module.v_head_dim
        rope = module.kv_a_proj_with_mqa.out_features - module.kv_lora_rank
        return module.num_heads, nope + rope, module.v_head_dim
    if hasattr(module, "qkv_proj"):
        rows = module.qkv_proj.out_features - module.o_proj.in_features
        return rows // 2 // module.head_dim, module.head_dim, module.head_dim
    if hasattr(module, "kv_proj"):  # one vector is key and value
        return module.kv_proj.out_features // module.head_dim, module.head_dim, module.head_dim
    kv_heads = module.k_proj.out_features // module.head_dim
    return kv_heads, module.head_dim, module.v_proj.out_features // kv_heads


@pytest.mark.parametrize("model_type", FAMILIES)
def test_facts_agree_with_the_modules(model_type: str) -> None:
    model = meta_model(model_type, layers=4, hidden=128)
    facts = ModelFacts.of(model.config)
    experts: dict[int, tuple[int, ...]] = {}
    seen: set[int] = set()
    shared: set[int] = set()
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if layer is None:
            continue
        index = int(layer[1])
        one, down = facts.layers[index], module._parameters.get("down_proj")
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
            seen.add(index)
            assert seen_attention(module) == (one.num_kv_heads, one.head_dim, one.v_head_dim)
            if hasattr(module, "o_a_proj"):  # a linear layer for each group of heads
                assert module.o_a_proj.in_features * module.o_a_proj.n_groups == one.num_heads * one.v_head_dim
                continue
            assert module.o_proj.in_features == one.num_heads * one.v_head_dim
        if down is not None and down.dim() == 3:
            experts[index] = tuple(down.shape)
        if isinstance(module, nn.Linear) and re.search(r"\.shared_(expert|experts|mlp)\.down_proj$", name):
            shared.add(module.in_features)
    assert seen == set(range(facts.num_layers))
    assert set(experts) == {index for index, one in enumerate(facts.layers) if one.has_experts}
    for num_experts, *sides in experts.values():
        assert facts.experts is not None
        assert num_experts == facts.experts.num_experts
        assert sorted(sides) == sorted((facts.hidden_size, facts.experts.intermediate_size))
    if model_type != "hunyuan_v1_moe":  # its config does not say that a dense MLP stands beside the experts
        assert shared <= {facts.experts.shared_intermediate_size if facts.experts is not None else 0}
    assert facts.vocab_size == model.get_input_embeddings().num_embeddings


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("qwen3_next", [LayerKind.RECURRENT] * 3 + [FULL]),
        ("kimi_linear", [LayerKind.RECURRENT] * 3 + [LATENT]),
        ("llama4_text", [LayerKind.CHUNKED] * 3 + [FULL]),
        ("deepseek_v32", [LATENT] * 4),
    ],
)
def test_kinds_of_layers_by_their_words(model_type: str, kinds: list[LayerKind]) -> None:
    words = {"kimi_linear": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}}
    facts = ModelFacts.of(CONFIG_MAPPING[model_type](num_hidden_layers=4, **words.get(model_type, {})))
    assert [one.kind for one in facts.layers] == kinds
    assert facts.experts is not None


def test_lists_with_a_number_for_each_layer() -> None:
    facts = ModelFacts.of(tiny_config("hunyuan_v1_moe", moe_topk=[2, 4]))
    assert (facts.top_k(0), facts.top_k(1), facts.top_k(), facts.top_k(7)) == (2, 4, 4, 0)
    assert ModelFacts.of(tiny_config("llama")).top_k() == 0


def test_scaled_rotations_of_a_wrong_type_extend_nothing() -> None:
    rope = {"factor": 2.0, "rope_type": ["linear"], "original_max_position_embeddings": "128"}
    assert ModelFacts.of(hostile(rope_parameters=rope)).context_len == 512


def test_quantization_and_ties() -> None:
    said = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    facts = ModelFacts.of(tiny_config("qwen3_moe", quantization_config=said, tie_word_embeddings=True))
    assert (facts.quantization, facts.is_tied) == (Quantization("fp8", (128, 64)), True)
    assert facts.longest_sequence(100) == 100
    assert facts.longest_sequence(1000) == 512


class Hostile(SimpleNamespace):
    """A config with any values, as a class that comes with its model may have."""

    def get_text_config(self, decoder: bool = False) -> Hostile:
        return self


def hostile(**values: object) -> Any:
    plain = {"hidden_size": 64, "vocab_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Hostile(**{"model_type": "x", "max_position_embeddings": 512, **plain, **values})


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"hidden_size": None}, "says no hidden_size"),
        ({"vocab_size": 0}, "vocab_size 0, which no model has"),
        ({"vocab_size": "many"}, "vocab_size 'many'; a number is needed"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers 1048576, which no model has"),
        ({"num_hidden_layers": True}, "num_hidden_layers True; a number is needed"),
        ({"num_attention_heads": 0}, "num_attention_heads 0, which no model has"),
        ({"num_attention_heads": -4}, "num_attention_heads -4, which no model has"),
        ({"num_key_value_heads": [2]}, "num_key_value_heads for 1 layers, and 2 layers"),
        ({"num_key_value_heads": [2, "x"]}, "num_key_value_heads 'x'; a number is needed"),
        ({"head_dim": 1 << 40}, "head_dim 1099511627776, which no model has"),
        ({"head_dim": 0.5}, "head_dim 0.5; a number is needed"),
        ({"sliding_window": -1}, "sliding_window -1, which no model has"),
        ({"layer_types": ["full_attention"]}, "layer_types for 1 layers, and 2 layers"),
        ({"layer_types": [{}, {}]}, "layer_types .*; a list of names is needed"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok 9, but there are 8 experts"),
        ({"num_experts": 8, "moe_k": [2, -1]}, "moe_k -1, which no model has"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers '1'; a number is needed"),
        ({"kv_lora_rank": 16}, "says no qk_nope_head_dim"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings inf; a number is needed"),
        ({"rope_parameters": {"factor": -1.0}}, "scales RoPE by -1.0"),
        ({"eos_token_id": "x"}, "eos_token_id 'x'"),
        ({"quantization_config": 4}, "quantization_config 4; an object"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}}, "weight_block_size 128"),
    ],
)
def test_hostile_values_are_refused_by_name(values: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ModelFacts.of(hostile(**values))
    facts = ModelFacts.of(hostile())
    assert facts.layers == (LayerFacts(FULL, "full_attention", 4, 4, 16, 16),) * 2
    assert not facts.is_of_transformers


@pytest.mark.parametrize("name", RECURRENT)
def test_families_with_recurrent_layers(name: str) -> None:
    """Which layers route, and the heads of Gated DeltaNet, against the modules that transformers builds."""
    config = recurrent_config(name)
    facts = ModelFacts.of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    routed = {int(_LAYER.findall(key)[0]) for key in routed_experts(model)}
    assert {index for index, layer in enumerate(facts.layers) if layer.has_experts} == routed
    assert (facts.experts is None) == (not routed)
    mixers = [module for module in model.modules() if hasattr(module, "head_v_dim")]
    assert (facts.delta is None) == (not mixers)
    for mixer in mixers:
        heads = DeltaFacts(mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
        assert facts.delta == heads


def test_what_is_no_decoder_of_one_config() -> None:
    with pytest.raises(UnsupportedError, match="is an encoder-decoder"):
        ModelFacts.of(CONFIG_MAPPING["bart"]())
    config = CONFIG_MAPPING["llama"](num_hidden_layers=3, per_layer_config={1: {"skip": ["mlp"]}})
    with pytest.raises(UnsupportedError, match="without some of their parts"):
        ModelFacts.of(config)


def test_latents_of_several_sizes() -> None:
    facts = ModelFacts.of(family_config("dots3_note_text"))
    full, sliding = facts.layers[:2]
    assert facts.latent == LatentFacts(64, 32, 24, 16, 20, is_interleaved=True)  # the largest of each
    assert full == LayerFacts(LATENT, "indexed_attention", 4, 4, 32, 16, None)
    assert sliding == LayerFacts(LATENT, "sliding_attention", 2, 2, 32, 20, 16, has_experts=True)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"n_recurrent_loops": 3}, r"llama runs some of its layers 3 times for each token \(n_recurrent_loops\)"),
        (
            {"num_kv_shared_layers": 2},
            r"no keys and values of their own \(num_kv_shared_layers 2\): it drafts",
        ),
        ({"num_kv_shared_layers": 5}, "drafts for another model"),
        ({"n_recurrent_loops": 1, "num_kv_shared_layers": 1}, None),
        ({"n_recurrent_loops": None, "num_kv_shared_layers": None}, None),
    ],
)
def test_layers_without_a_cache_of_one_per_layer(values: dict[str, object], reason: str | None) -> None:
    config = CONFIG_MAPPING["llama"](num_hidden_layers=2, **values)
    if reason is None:
        assert ModelFacts.of(config).num_layers == 2
        return
    with pytest.raises(UnsupportedError, match=reason):
        check_kinds(ModelFacts.of(config))


@pytest.mark.parametrize(
    ("word", "kind"),
    [("deepseek_sparse_attention", FULL), ("indexed_attention", FULL), ("recurrent", LayerKind.RECURRENT)],
)
def test_kinds_of_layers_by_the_names_of_several_versions(word: str, kind: LayerKind) -> None:
    config = CONFIG_MAPPING["llama"](num_hidden_layers=2)
    config.layer_types = [word, word]
    assert [layer.kind for layer in ModelFacts.of(config).layers] == [kind, kind]


def test_experts_in_a_config_of_their_own() -> None:
    facts = ModelFacts.of(family_config("dbrx"))
    assert facts.experts == ExpertFacts(8, (2,) * 4, 96)
    assert all(layer.has_experts and layer.num_kv_heads == 2 for layer in facts.layers)


def test_biases_by_distance_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"inkling_text adds .* learned of distances \(rel_extent\)"):
        ModelFacts.of(CONFIG_MAPPING["inkling_text"]())


def test_layers_of_different_shapes_and_layers_that_share() -> None:
    facts = ModelFacts.of(config_of("gemma4-shared"))
    sliding = LayerFacts(SLIDING, "sliding_attention", 4, 2, 16, 16, 16)
    full = LayerFacts(FULL, "full_attention", 4, 2, 44, 44)
    assert facts.layers == (
        sliding,
        full,
        replace(sliding, shares=0),
        replace(sliding, shares=0),
        replace(full, shares=1),
    )
    facts = ModelFacts.of(config_of("gemma4-moe"))
    assert [layer.num_kv_heads for layer in facts.layers] == [2, 1, 2, 2, 1]
    assert facts.experts == ExpertFacts(8, (2,) * 5, 96)


def test_chunks() -> None:
    facts = ModelFacts.of(config_of("llama4"))
    assert [(layer.kind, layer.window) for layer in facts.layers] == [(LayerKind.CHUNKED, 16), (FULL, None)] * 2
    assert facts.experts == ExpertFacts(8, (1,) * 4, 96)


CONFIG_FIELDS = re.compile(
    r"\b(num_local_experts|n_routed_experts|moe_num_experts|num_experts_per_tok|moe_topk|num_attention_heads|"
    r"num_key_value_heads|max_position_embeddings|tie_word_embeddings|num_nextn_predict_layers|"
    r"(?<!self\.)layer_types|rope_interleave|get_text_config)\b(?!\":)"  # a key is written, not asked for
)


def test_nobody_else_asks_a_config() -> None:
    """A family that says known things under another name, or by layer, is a change in one file."""
    package = Path(ktransformers.__file__).parent
    asking = {
        f"{path.relative_to(package)}: {found[0]}"
        for path in package.rglob("*.py")
        if (found := CONFIG_FIELDS.search(path.read_text())) and path.relative_to(package).parts[0] != "models"
    }
    assert asking == set()
