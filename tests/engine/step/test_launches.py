"""How many kernels a decode step launches for a decoder layer on a GPU: each costs 2 us or more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.layers.gpu import LayerStack
from ktransformers.operators.recognize.layer import LayerSpec, PartKind, PartSpec, recognize_layer
from ktransformers.system.shipped_rules import shipped_path
from tests.support.checks.launches import counted_launches
from tests.support.engines.gpu_engines import gpu_engine
from tests.support.engines.one_sequence import StaticEngine
from tests.support.models.recurrent_models import recurrent_config, recurrent_model
from tests.support.models.tiny_models import tiny_config, tiny_model, write_safetensors

pytest.importorskip("triton")

# Norm (with the addition before it), q k v, rotation and cache write, attention, o_proj, norm, router.
QWEN3_MOE = {
    "_rms_norm_kernel": 2,
    "torch linear": 2,
    "_rope_kernel": 1,
    "decode_kernel": 1,
    "_product_kernel": 1,
}
# Norm, both compressions, their norms and the cache write, q_b, k_b and rotation, attention and its reduction, v_b,
# o_proj, norm, router, gate and up of the shared expert (with the activation, where they are quantized), down.
DEEPSEEK_V3 = {
    "_rms_norm_kernel": 2,
    "torch linear": 5,
    "_norm_kernel": 1,
    "_heads_kernel": 2,
    "decode_kernel": 1,
    "reduce_kernel": 1,
    "_product_kernel": 1,
    "_activation_kernel": 1,
}
# As deepseek_v3, with one product for the query; its complex angles are taken apart once a step, not in every layer.
DEEPSEEK_V2 = {**DEEPSEEK_V3, "torch linear": 4}
# As qwen3_moe, and the shared expert: its gate and up, activation, down, and the score that weighs it.
QWEN2_MOE = {**QWEN3_MOE, "torch linear": 5, "_activation_kernel": 1}

# As qwen3_moe, and the shared experts: gate and up, activation, down.
GLM4_MOE = {**QWEN3_MOE, "torch linear": 4, "_activation_kernel": 1}

# As qwen3_moe, and ids in int64: its block is transformers' own.
GPT_OSS = {**QWEN3_MOE, "torch to": 1}


# What stands around a mixer where the MoE block and its parts are ours, its results added by the norm that follows: two
# norms, router, gate and up of the shared expert, activation, down, and the score that weighs it.
_AROUND = {"_rms_norm_kernel": 2, "_product_kernel": 1, "_activation_kernel": 1, "torch linear": 3}
# All projections, convolution, scan with its gates and its norm, out_proj.
DELTA_NET = {**_AROUND, "torch linear": 5, "conv_kernel": 1, "rows_kernel": 1}
# Queries with their gates, keys and values, norms and rotation and cache write, attention, gates, o_proj.
GATED_ATTENTION = {**_AROUND, "torch linear": 5, "_rope_kernel": 1, "decode_kernel": 1, "_gate_heads_kernel": 1}
# As a Gated DeltaNet, with second products for both gates and without the score.
KIMI = {**_AROUND, "torch linear": 6, "conv_kernel": 1, "rows_kernel": 1}

_PLACE = "kwargs: {generate_device: cuda, prefill_device: cuda}"
_BLOCKS = f"""
- match: {{name: "[.]mlp$"}}
  replace: {{class: ktransformers.operators.moe.KMoEBlock, {_PLACE}}}
- match: {{name: "[.]shared_expert$"}}
  replace: {{class: ktransformers.operators.mlp.KMLP, {_PLACE}}}
"""


def launches_of_a_step(model_type: str, layers: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of one row, without the routed experts."""
    folder.mkdir()
    write_safetensors(tiny_model(model_type, seed=1, layers=layers), folder)
    return launches_of_one_row(gpu_engine(folder), monkeypatch)


def launches_of_one_row(engine: StaticEngine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    engine.runner.forward([1, 2, 3], 0, [2])
    with counted_launches(monkeypatch) as counts:
        engine.runner.forward([4], 3, [0])
    return counts


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("qwen3_moe", QWEN3_MOE),
        ("deepseek_v3", DEEPSEEK_V3),
        ("deepseek_v2", DEEPSEEK_V2),
        ("qwen2_moe", QWEN2_MOE),
        ("glm4_moe", GLM4_MOE),
        ("gpt_oss", GPT_OSS),
    ],
)
def test_launches_for_a_layer(
    model_type: str, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KTransformersExperts, "submit", lambda self, hidden_states, *args, **kwargs: hidden_states)
    monkeypatch.setattr(KTransformersExperts, "collect", lambda self, ticket: ticket)
    fewer = launches_of_a_step(model_type, 2, tmp_path / "fewer", monkeypatch)
    more = launches_of_a_step(model_type, 3, tmp_path / "more", monkeypatch)
    assert dict(more - fewer) == expected


def launches_of_layers(
    model_type: str, kinds: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """Of one row of layers of such kinds, with MoE blocks of ours behind the first."""
    folder.mkdir()
    blocks: dict[str, object] = {}
    if model_type == "kimi_linear":
        blocks["mlp_layer_types"] = ["dense"] + ["sparse"] * (len(kinds) - 1)
    else:
        rules = folder / "rules.yaml"
        rules.write_text(_BLOCKS + shipped_path("default-moe.yaml").read_text())
    recurrent_model(model_type, num_hidden_layers=len(kinds), layer_types=kinds, **blocks).save_pretrained(folder)
    path = None if model_type == "kimi_linear" else folder / "rules.yaml"
    return launches_of_one_row(gpu_engine(folder, optimize_config_path=path, self_check=False), monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("model_type", "kind", "expected"),
    [
        ("qwen3_next", "linear_attention", DELTA_NET),
        ("qwen3_next", "full_attention", GATED_ATTENTION),
        ("qwen3_5_moe_text", "linear_attention", DELTA_NET),
        ("kimi_linear", "linear_attention", KIMI),
    ],
)
def test_launches_for_a_layer_among_layers_with_a_state(
    model_type: str, kind: str, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KTransformersExperts, "submit", lambda self, hidden_states, *args, **kwargs: hidden_states)
    monkeypatch.setattr(KTransformersExperts, "collect", lambda self, ticket: ticket)
    few = ["linear_attention", "full_attention"]
    fewer = launches_of_layers(model_type, few, tmp_path / "fewer", monkeypatch)
    more = launches_of_layers(model_type, [*few, kind], tmp_path / "more", monkeypatch)
    assert dict(more - fewer) == expected


def usual(mixer: str, mixing: PartKind, kind: PartKind = PartKind.FEED_FORWARD) -> LayerSpec:
    first = PartSpec("input_layernorm", mixer, mixing)
    return LayerSpec((first, PartSpec("post_attention_layernorm", "mlp", kind)))


def layer_of(model_type: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        layer: torch.nn.Module = AutoModelForCausalLM.from_config(tiny_config(model_type)).model.layers[1]
    return layer


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "deepseek_v3", "mixtral", "glm4_moe", "gpt_oss"])
def test_usual_layers_are_recognized(model_type: str) -> None:
    # gpt_oss takes its router's scores beside the result of its feed-forward part.
    kind = PartKind.IN_TUPLE if model_type == "gpt_oss" else PartKind.FEED_FORWARD
    assert recognize_layer(layer_of(model_type)) == usual("self_attn", PartKind.ATTENTION, kind)


@pytest.mark.parametrize(
    ("model_type", "mixer"),
    [("qwen3_next", "linear_attn"), ("qwen3_5_moe_text", "linear_attn"), ("kimi_linear", "self_attn")],
)
def test_layers_with_a_state_are_recognized(model_type: str, mixer: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(recurrent_config(model_type)).model.layers
    assert recognize_layer(layers[1]) == usual(mixer, PartKind.RECURRENT)
    assert recognize_layer(layers[2]) == usual("self_attn", PartKind.ATTENTION)


def test_layers_of_one_part_are_recognized() -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(recurrent_config("nemotron_h")).model.layers
    kinds = [PartKind.RECURRENT, PartKind.FEED_FORWARD, PartKind.ATTENTION, PartKind.FEED_FORWARD, PartKind.RECURRENT]
    assert [recognize_layer(layer) for layer in layers] == [
        LayerSpec((PartSpec("norm", "mixer", kind),)) for kind in kinds
    ]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("model_type", "layers"), [("qwen3_next", 4), ("kimi_linear", 4), ("bailing_hybrid", 4), ("nemotron_h", 5)]
)
def test_layers_with_and_without_a_state_are_one_stack(model_type: str, layers: int, tmp_path: Path) -> None:
    recurrent_model(model_type).save_pretrained(tmp_path)
    modules = gpu_engine(tmp_path, self_check=False).runner.model.modules()
    assert [len(module.layers) for module in modules if isinstance(module, LayerStack)] == [layers]


def test_other_layers_are_left_alone(tmp_path: Path) -> None:
    assert recognize_layer(layer_of("granitemoe")) is None  # multiplies what it adds
    write_safetensors(tiny_model("granitemoe", seed=1), tmp_path)
    modules = gpu_engine(tmp_path).runner.model.modules()
    assert not any(isinstance(module, LayerStack) for module in modules)
