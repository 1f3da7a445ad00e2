"""Every name of upstream's rule files means a class of today; other names are errors that help."""

from __future__ import annotations

import pytest
from torch import nn

from ktransformers.operators.attention.gqa import KAttention
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.attention.rope import KRotaryEmbedding
from ktransformers.operators.base import Operator
from ktransformers.operators.experts.block import KMoEBlock
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.router import KRouter
from ktransformers.operators.layers.model import KModel
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.linear.mlp import KMLP
from ktransformers.operators.norm import KRMSNorm
from ktransformers.optimize.aliases import (
    OPERATOR_ALIASES,
    NameProblem,
    legacy_names,
    match_class,
    operator_class,
    undriven_hardware,
)

OPERATORS: dict[type[Operator], str] = {
    # Copied from the table of names that existing rule files use; the prefix is ktransformers.operators.
    KTransformersLinear: "linear.KTransformersLinear linear.KTransformerLinear",
    KTransformersExperts: "experts.KTransformersExperts experts.KTransformersExpertsV2 experts.KGlm4Experts "
    "experts.KTransformersMLPExpert",
    KMoEBlock: "experts.KDeepseekV2MoE experts.KDeepseekV3MoE experts.KDeepseekV3MoEV2 experts.KQwen2MoeSparseMoeBlock "
    "experts.KQwen2MoeSparseMoeBlockV2 experts.KQwen3MoeSparseMoeBlock experts.KQwen3MoeSparseMoeBlockV2 "
    "experts.KMistralSparseMoEBlock experts.KGlm4MoeMoE experts.KHunyuanMoE "
    # of the first releases
    "experts.KMisrtalSparseMoEBlock experts.DeepseekV2MoEInjected experts.Qwen2MoeSparseMoeBlockInjected",
    KRouter: "gate.KMoEGate gate.KMoEGateQwen2Moe",
    KMLAAttention: "attention.KDeepseekV2Attention attention.DeepseekV2AttentionInjected "
    "balance_serve_attention.flashinfer_attn",
    KAttention: "attention.KLlamaAttention balance_serve_attention.KQwen2MoeAttention "
    "balance_serve_attention.KQwen3MoeAttention balance_serve_attention.KGlm4MoeAttention "
    "attention.KHunYuanAttention balance_serve_attention.KHunYuanAttention",
    KModel: "models.KDeepseekV2Model models.KQwen2MoeModel models.KQwen3MoeModel models.KHunyuanModel "
    "layer_wise_prefill.DeepseekV2ModelPerLayerPrefill layer_wise_prefill.Qwen2MoeModelPerLayerPrefill "
    "layer_wise_prefill.KQwen2MoeModel",
    KRotaryEmbedding: "RoPE.RotaryEmbedding RoPE.RotaryEmbeddingV2 RoPE.RotaryEmbeddingV3 RoPE.YarnRotaryEmbedding "
    "RoPE.YarnRotaryEmbeddingV3 RoPE.KQwen3MoeRotaryEmbedding RoPE.KHunYuanRotaryEmbedding",
    KRMSNorm: "layernorm.RMSNorm layernorm.KQwen2MoeRMSNorm layernorm.KQwen3MoeRMSNorm layernorm.KGlm4MoeRMSNorm "
    "layernorm.KHunYuanRMSNorm",
    KMLP: "mlp.kDeepseekV3MLP mlp.KQwen2MoeMLP mlp.KGlm4MoeMLP mlp.KHunYuanMLP",
}

MODELS = {
    # upstream's name after ktransformers.models.: class of transformers
    "modeling_deepseek.DeepseekV2YarnRotaryEmbedding": "DeepseekV2RotaryEmbedding",
    "modeling_deepseek.DeepseekV2MoE": "DeepseekV2Moe",
    "modeling_deepseek.MoEGate": "DeepseekV2TopkRouter",
    "modeling_deepseek.DeepseekV2RMSNorm": "DeepseekV2RMSNorm",
    "modeling_deepseek.DeepseekV2MLP": "DeepseekV2MLP",
    "modeling_deepseek_v3.DeepseekV3RotaryEmbedding": "DeepseekV3RotaryEmbedding",
    "modeling_deepseek_v3.DeepseekV3MoE": "DeepseekV3MoE",
    "modeling_deepseek_v3.MoEGate": "DeepseekV3TopkRouter",
    "modeling_deepseek_v3.DeepseekV3RMSNorm": "DeepseekV3RMSNorm",
    "modeling_deepseek_v3.DeepseekV3MLP": "DeepseekV3MLP",
    "modeling_qwen2_moe.Qwen2MoeRotaryEmbedding": "Qwen2MoeRotaryEmbedding",
    "modeling_qwen2_moe.Qwen2MoeSparseMoeBlock": "Qwen2MoeSparseMoeBlock",
    "modeling_qwen2_moe.Qwen2MoeRMSNorm": "Qwen2MoeRMSNorm",
    "modeling_qwen2_moe.Qwen2MoeMLP": "Qwen2MoeMLP",
    "modeling_qwen3_moe.Qwen3MoeRotaryEmbedding": "Qwen3MoeRotaryEmbedding",
    "modeling_qwen3_moe.Qwen3MoeSparseMoeBlock": "Qwen3MoeSparseMoeBlock",
    "modeling_qwen3_moe.Qwen3MoeRMSNorm": "Qwen3MoeRMSNorm",
    "modeling_qwen3_moe.Qwen3MoeMLP": "Qwen3MoeMLP",
    "modeling_mixtral.MixtralRotaryEmbedding": "MixtralRotaryEmbedding",
    "modeling_mixtral.MixtralSparseMoeBlock": "MixtralSparseMoeBlock",
    "modeling_glm4_moe.Glm4MoeMoE": "Glm4MoeMoE",
    "modeling_glm4_moe.Glm4MoeRMSNorm": "Glm4MoeRMSNorm",
    "modeling_hunyuan.HunYuanMoE": "HunYuanMoEV1Moe",
    "modeling_hunyuan.HunYuanMLP": "HunYuanMoEV1MLP",
    "modeling_hunyuan.HunYuanRMSNorm": "HunYuanMoEV1RMSNorm",
    "modeling_hunyuan.HunYuanAttention": "HunYuanMoEV1Attention",
    "modeling_hunyuan.HunYuanDynamicNTKAlphaRotaryEmbedding": "HunYuanMoEV1RotaryEmbedding",
    "modeling_llama.LlamaRotaryEmbedding": "LlamaRotaryEmbedding",
    "modeling_llama.LlamaRMSNorm": "LlamaRMSNorm",
}


@pytest.mark.parametrize(
    ("operator", "name"), [(op, name) for op, names in OPERATORS.items() for name in names.split()]
)
def test_upstream_operators(operator: type[Operator], name: str) -> None:
    assert operator_class(f"ktransformers.operators.{name}") is operator


@pytest.mark.parametrize("name", sorted(OPERATOR_ALIASES))
def test_every_alias_imports(name: str) -> None:
    assert issubclass(operator_class(name), Operator)


@pytest.mark.parametrize(("name", "expected"), MODELS.items())
def test_upstream_models(name: str, expected: str) -> None:
    found = match_class(f"ktransformers.models.{name}")
    assert found.__name__ == expected
    assert found.__module__.startswith("transformers.models.")


def test_any_class_matches() -> None:
    assert match_class("torch.nn.Linear") is nn.Linear


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("torch.nn.Liner", "torch.nn.Linear"),
        ("transformers.models.qwen3_moee.modeling_qwen3_moe.Qwen3MoeMLP", "transformers.models.qwen3_moe"),
        ("ktransformers.models.modeling_qwen3_mo.Qwen3MoeMLP", "transformers.models.qwen3_moe"),
        (
            "ktransformers.models.modeling_qwen3_moe.Qwen3MoeSparseBlock",
            "ktransformers.models.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ),
    ],
)
def test_unknown_match_class_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(NameProblem) as caught:
        match_class(name)
    assert f"did you mean {hint}?" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["Linear", "torch.nn.functional.linear", "torch..Linear", "torch.nn.Li near", "no_such.X"]
)
def test_no_match_class(name: str) -> None:
    with pytest.raises(NameProblem):
        match_class(name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ktransformers.operators.linear.KTransformersLiner", "ktransformers.operators.linear.KTransformersLinear"),
        ("ktransformers.operators.moe.KTransformersExperts", "ktransformers.operators.experts.KTransformersExperts"),
        ("ktransformers.operator.gate.KMoEGate", "ktransformers.operators.gate.KMoEGate"),
    ],
)
def test_unknown_operator_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(NameProblem) as caught:
        operator_class(name)
    assert f"did you mean {hint}?" in str(caught.value)


def test_user_operators() -> None:
    assert operator_class("tests.support.engines.fake_operators.FakeLinear", trust=True).__name__ == "FakeLinear"
    with pytest.raises(NameProblem, match="not a subclass of"):
        operator_class("tests.support.engines.fake_operators.NotAnOperator", trust=True)
    with pytest.raises(NameProblem, match="is abstract"):
        operator_class("ktransformers.optimize.aliases.Operator", trust=True)


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("ktransformers.operators.ascend.ascend_experts.KExpertsNPU", "Ascend"),
        ("ktransformers.operators.linear.KLinearIPEXLLM", "IPEX"),
        ("ktransformers.operators.linear.KLinearXPU", "XPU"),
    ],
)
def test_other_hardware_is_named(name: str, hardware: str) -> None:
    with pytest.raises(NameProblem, match=f"{hardware}.*does not drive"):
        operator_class(name)


def test_driven_names_are_not_mistaken_for_other_hardware() -> None:
    assert [name for name in OPERATOR_ALIASES if undriven_hardware(name)] == []


def test_legacy_names() -> None:
    gate = "model.layers.0.mlp.gate"
    assert legacy_names("mixtral", gate, r"block_sparse_moe\.gate$") == ("model.layers.0.block_sparse_moe.gate",)
    assert legacy_names("mixtral", gate, r"mlp\.gate$") == (gate,)
    both = legacy_names("mixtral", gate, r"(mlp|block_sparse_moe)\.gate$")
    assert both == ("model.layers.0.block_sparse_moe.gate", gate)
    assert legacy_names("qwen3_moe", gate, r"block_sparse_moe") == (gate,)
