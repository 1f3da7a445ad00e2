"""Who comes from the reference documents, or from upstream, finds each thing under its name and in its place."""

import importlib
import inspect
import subprocess
import sys

import pytest
from transformers import DeepseekV2Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from ktransformers.cache.paged import KDeepSeekV3Cache, KGQACache, LayerShape, PagedCache
from ktransformers.cache.static import StaticCache
from ktransformers.config import EngineConfig
from ktransformers.engine.api import generate, llm
from ktransformers.errors import UnsupportedError
from ktransformers.local_chat import custom_models, default_optimize_rules
from ktransformers.models.facts import ModelFacts
from ktransformers.optimize.aliases import match_class, operator_class
from ktransformers.server.backend.base import BackendInterfaceBase
from ktransformers.server.backend.interfaces import transformers
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
from ktransformers.server.backend.interfaces.ktransformers import KTransformersInterface
from ktransformers.server.backend.interfaces.transformers import TransformersInterface
from ktransformers.server.utils.create_interface import BACKENDS, create_interface, interface_class
from ktransformers.system.shipped_rules import RULES_DIR

PLACES = {
    "ktransformers.cache.paged": "KDeepSeekV3Cache KGQACache",
    "ktransformers.cache.static": "StaticCache",
    "ktransformers.engine.api.generate": "prefill_and_generate",
    "ktransformers.engine.load.stages": "optimize_and_load_gguf",
    "ktransformers.engine.step.cuda_graph_runner": "CUDAGraphRunner",
    "ktransformers.local_chat": "custom_models default_optimize_rules main",
    "ktransformers.profiling.runtime": "CpuProfilingRuntime",
    "ktransformers.server.backend.base": "BackendInterfaceBase",
    "ktransformers.server.backend.interfaces.balance_serve": "BalanceServeInterface",
    "ktransformers.server.backend.interfaces.ktransformers": "KTransformersInterface",
    "ktransformers.server.backend.interfaces.transformers": "TransformersInterface",
    "ktransformers.server.main": "main",
    "ktransformers.server.utils.create_interface": "create_interface",
    "ktransformers.util.cuda_graph_runner": "CUDAGraphRunner",
    "ktransformers.util.utils": "prefill_and_generate",
}
CHAIN = ("inference", "prefill", "generate", "decode_one_tokens")
RULE_FILES = (
    "DeepSeek-V2-Chat",
    "DeepSeek-V3-Chat-serve",
    "Mixtral",
    "Qwen2-57B-A14B-Instruct",
    "Qwen2-serve",
    "Qwen3Moe-ktransformers",
    "Qwen3Moe-serve",
)
MATCHED = {
    "modeling_deepseek": "DeepseekV2YarnRotaryEmbedding DeepseekV2MoE MoEGate DeepseekV2RMSNorm DeepseekV2MLP",
    "modeling_deepseek_v3": "DeepseekV3RotaryEmbedding DeepseekV3MoE MoEGate DeepseekV3RMSNorm DeepseekV3MLP",
    "modeling_qwen2_moe": "Qwen2MoeRotaryEmbedding Qwen2MoeSparseMoeBlock Qwen2MoeRMSNorm Qwen2MoeMLP",
    "modeling_qwen3_moe": "Qwen3MoeRotaryEmbedding Qwen3MoeSparseMoeBlock Qwen3MoeRMSNorm Qwen3MoeMLP",
    "modeling_mixtral": "MixtralRotaryEmbedding MixtralSparseMoeBlock",
}
REPLACING = {
    "linear": "KTransformersLinear",
    "experts": "KTransformersExperts KTransformersExpertsV2 KGlm4Experts KDeepseekV2MoE KDeepseekV3MoE "
    "KDeepseekV3MoEV2 KQwen2MoeSparseMoeBlock KQwen2MoeSparseMoeBlockV2 KQwen3MoeSparseMoeBlock "
    "KQwen3MoeSparseMoeBlockV2 KMistralSparseMoEBlock KGlm4MoeMoE",
    "gate": "KMoEGate KMoEGateQwen2Moe",
    "attention": "KDeepseekV2Attention KLlamaAttention",
    "balance_serve_attention": "flashinfer_attn KQwen2MoeAttention KQwen3MoeAttention KGlm4MoeAttention",
    "models": "KDeepseekV2Model KQwen2MoeModel KQwen3MoeModel",
    "RoPE": "RotaryEmbedding RotaryEmbeddingV2 RotaryEmbeddingV3 YarnRotaryEmbedding YarnRotaryEmbeddingV3 "
    "KQwen3MoeRotaryEmbedding",
    "layernorm": "RMSNorm KQwen2MoeRMSNorm KQwen3MoeRMSNorm KGlm4MoeRMSNorm",
    "mlp": "kDeepseekV3MLP KQwen2MoeMLP KGlm4MoeMLP",
}


def pairs(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(place, name) for place, names in table.items() for name in names.split()]


@pytest.mark.parametrize(("place", "name"), pairs(PLACES))
def test_every_name_is_where_the_documents_say(place: str, name: str) -> None:
    assert hasattr(importlib.import_module(place), name)


@pytest.mark.parametrize(("place", "name"), pairs(PLACES))
def test_no_name_is_another_things(place: str, name: str) -> None:
    """One thing has one name: a class or function is called what it is imported as."""
    made = getattr(importlib.import_module(place), name)
    assert not (inspect.isclass(made) or inspect.isfunction(made)) or made.__name__ == name


def test_backends_inherit_as_the_documents_draw_it() -> None:
    assert KTransformersInterface.__bases__ == (TransformersInterface,)
    assert TransformersInterface.__bases__ == BalanceServeInterface.__bases__ == (BackendInterfaceBase,)
    for name in CHAIN:
        assert callable(getattr(KTransformersInterface, name))
    assert "inference" in BackendInterfaceBase.__abstractmethods__
    assert all(inspect.isasyncgenfunction(one.inference) for one in (TransformersInterface, BalanceServeInterface))


def test_interfaces_are_made_by_their_flag() -> None:
    assert BACKENDS == ("balance_serve", "ktransformers", "transformers")
    for name in BACKENDS:
        made = create_interface(name, EngineConfig())
        assert (type(made), made.name) == (interface_class(name), name)
    with pytest.raises(UnsupportedError, match="--backend_type exllamav2 is not one of balance_serve, ktransformers"):
        create_interface("exllamav2", EngineConfig())


def test_making_one_interface_imports_no_other_ones_engine() -> None:
    program = (
        "import sys\nfrom ktransformers.server.utils import create_interface\nassert 'torch' not in sys.modules\n"
        "create_interface.interface_class('balance_serve')\n"
        "print([name for name in sys.modules if 'interfaces.' in name])"
    )
    got = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "['ktransformers.server.backend.interfaces.balance_serve']"


def test_each_layer_of_a_paged_cache_is_the_cache_of_its_attention() -> None:
    gqa, latent = LayerShape(2, 96, 96), LayerShape(1, 576, 512, is_latent=True)
    paged, static = PagedCache([gqa, latent, gqa], num_pages=2, page_size=4), StaticCache([latent], 8)
    assert [type(layer) for layer in paged._layers] == [KGQACache, KDeepSeekV3Cache, KGQACache]
    assert [type(layer) for layer in static._layers] == [KDeepSeekV3Cache]


def test_chat_and_the_single_backends_run_the_documents_loop() -> None:
    assert llm.prefill_and_generate is generate.prefill_and_generate  # which chat runs
    assert transformers.prefill_and_generate is generate.prefill_and_generate
    assert importlib.import_module("ktransformers.util.utils").prefill_and_generate is generate.prefill_and_generate


@pytest.mark.parametrize(
    ("config", "rules"),
    [
        (DeepseekV2Config(), "DeepSeek-V2-Chat"),
        (Qwen2MoeConfig(), "Qwen2-57B-A14B-Instruct"),
        (Qwen3MoeConfig(), "Qwen3Moe-ktransformers"),
        (MixtralConfig(), "Mixtral"),
    ],
)
def test_models_and_rules_are_those_of_the_documents(config, rules: str) -> None:
    assert config.model_type in custom_models
    assert default_optimize_rules(ModelFacts.of(config)) == RULES_DIR / f"{rules}.yaml"


@pytest.mark.parametrize("name", RULE_FILES)
def test_rule_files_are_where_the_documents_say(name: str) -> None:
    assert (RULES_DIR / f"{name}.yaml").is_file()


@pytest.mark.parametrize(("module", "name"), pairs(MATCHED))
def test_classes_that_rules_match_are_classes_of_transformers(module: str, name: str) -> None:
    assert match_class(f"ktransformers.models.{module}.{name}")


@pytest.mark.parametrize(("module", "name"), pairs(REPLACING))
def test_operators_that_rules_name_exist(module: str, name: str) -> None:
    assert operator_class(f"ktransformers.operators.{module}.{name}")
