"""Kimi K2: DeepSeek-V3 by another name. Its published config.json names Python files of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.model.skeleton import load_hf_config
from ktransformers.errors import ConfigError
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.config import config_from_gguf
from ktransformers.models.registry import default_optimize_rules
from ktransformers.system.shipped_rules import shipped_path
from ktransformers.tokenizer import load_tokenizer
from ktransformers.weights.gguf.file import open_gguf
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.presets import deepseek_v3
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.tiny_models import tiny_model, write_safetensors

# What the hub's config.json of the model says, sizes aside.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "seq_aux": True,
    "transformers_version": "4.48.3",
}


def test_published_config_runs_as_deepseek_v3(tmp_path: Path) -> None:
    rope = {name: value for name, value in PUBLISHED["rope_scaling"].items() if name != "type"}
    values = {name: PUBLISHED[name] for name in ("n_group", "topk_group", "routed_scaling_factor")}
    twin = tiny_model(
        "deepseek_v3", seed=5, rope_parameters={**rope, "rope_type": "yarn", "rope_theta": 50000.0}, **values
    )
    write_safetensors(twin, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    dropped = ("rope_parameters", "rope_interleave")
    published = {name: value for name, value in written.items() if name not in dropped} | PUBLISHED
    (tmp_path / "config.json").write_text(json.dumps(published))

    engine = static_engine(EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1))
    try:
        assert Path(engine.plan.rule_file) == shipped_path("DeepSeek-V3-Chat.yaml")
        ids = list(range(3, 40))
        got = engine.runner.forward(ids, 0, range(len(ids)))
    finally:
        engine.close()
    with torch.no_grad():
        want = twin(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_the_models_own_python_files_are_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | {"num_hidden_layers": 2}))
    for is_trusted in (False, True):
        config = load_hf_config(tmp_path, trust_remote_code=is_trusted)
        assert (config.model_type, config.num_hidden_layers) == ("deepseek_v3", 2)
        assert default_optimize_rules(ModelFacts.of(config)) == shipped_path("DeepSeek-V3-Chat.yaml")


def test_gguf_of_the_published_size() -> None:
    changes: dict[str, object] = {
        "attention__head_count": 64,
        "expert_count": 384,
        "expert_weights_scale": 2.827,
        "leading_dense_block_count": 1,
        "rope__freq_base": 50000.0,
        "rope__scaling__factor": 32.0,
        "context_length": 131072,
    }
    for groups in ({"expert_group_count": 1, "expert_group_used_count": 1}, dict.fromkeys(GROUPS)):
        config = config_from_gguf(*deepseek_v3(**changes, **groups))
        assert (config.model_type, config.n_routed_experts) == ("deepseek_v3", 384)
        assert (config.n_group, config.topk_group, config.first_k_dense_replace) == (1, 1, 1)


GROUPS = ("expert_group_count", "expert_group_used_count")


def test_a_tokenizer_that_needs_python_files_gives_way_to_the_gguf_files(tmp_path: Path) -> None:
    """The model's folder has a tokenizer in Python only; the GGUF beside it has the same one as data."""
    metadata = open_gguf(DEMO_GGUF).metadata
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    assert load_tokenizer(tmp_path, metadata).encode("Hello") == load_tokenizer(None, metadata).encode("Hello")
    with pytest.raises(ConfigError) as error:
        load_tokenizer(tmp_path, None)
    assert "--trust_remote_code" in str(error.value)
    assert "trust_remote_code=True" not in str(error.value)
    assert "\n" not in str(error.value)


TOKENIZER = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "tokenizer_class": "TikTokenTokenizer",
    "model_max_length": 1000,
}
