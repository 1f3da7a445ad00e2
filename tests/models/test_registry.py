"""Default rule files per architecture, and tensors that may stay unread."""

from __future__ import annotations

import pytest

from ktransformers.models.facts import ModelFacts
from ktransformers.models.registry import custom_models, default_optimize_rules, ignorable_tensors
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines.fake_operators import meta_model
from tests.support.models.tiny_models import DENSE_TYPES, MOE_TYPES, tiny_config

NAMED = {
    "deepseek_v2": "DeepSeek-V2-Lite-Chat.yaml",
    "deepseek_v3": "DeepSeek-V3-Chat.yaml",
    "mixtral": "Mixtral.yaml",
    "glm4_moe": "Glm4Moe.yaml",
    "dots1": "Dots1.yaml",
    "ernie4_5_moe": "Ernie4_5_Moe.yaml",
    "hunyuan_v1_moe": "Hunyuan-A13B.yaml",
    "qwen2_moe": "Qwen2-57B-A14B-Instruct.yaml",
    "qwen3_moe": "Qwen3Moe-ktransformers.yaml",
}


@pytest.mark.parametrize("model_type", [*DENSE_TYPES, *MOE_TYPES])
def test_default_rules(model_type: str) -> None:
    expected = NAMED.get(model_type, "default-dense.yaml" if model_type in DENSE_TYPES else "default-moe.yaml")
    model = meta_model(model_type)
    facts = ModelFacts.of(model.config)
    assert default_optimize_rules(facts, model) == shipped_path(expected)
    assert default_optimize_rules(facts) == shipped_path(expected)  # the config's own words lead to the same file


def test_low_rank_query_of_deepseek_v2() -> None:
    config = tiny_config("deepseek_v2", q_lora_rank=64)
    assert default_optimize_rules(ModelFacts.of(config)) == shipped_path("DeepSeek-V2-Chat.yaml")


def test_files_exist() -> None:
    for family in custom_models.values():
        for name in (family.rules, family.rules_without_q_lora):
            assert name is None or shipped_path(name).is_file()


def test_declared_tensors_are_ignorable() -> None:
    is_ignorable = ignorable_tensors(meta_model("ernie4_5_moe"))
    assert is_ignorable("model.mtp_block.0.mlp.down_proj.weight")
    assert not is_ignorable("model.norm.weight")
    is_ignorable = ignorable_tensors(meta_model("deepseek_v3"))
    assert is_ignorable("model.layers.61.eh_proj.weight")
    assert not is_ignorable("model.layers.1.mlp.gate.weight")
