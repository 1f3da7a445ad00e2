"""Models for images and text: their language part, taken out, computes on text what transformers' composite does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.load.reference import build_reference_engine
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.model.skeleton import build_skeleton, load_hf_config
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.reference import dequantize
from ktransformers.models import facts
from ktransformers.models.composite import take_text_config
from ktransformers.models.facts import ModelFacts, Quantization
from ktransformers.models.registry import routed_experts
from ktransformers.operators.experts.routed import read_layout
from ktransformers.weights.safetensors.file import open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from ktransformers.weights.source import ExpertsLayout
from tests.support.models.agreement import engine_of
from tests.support.models.composites import COMPOSITES, tiny_composite

TOLERANCE = 5e-5  # of the largest logit; both sides multiply the same fp32 numbers
RUN = (
    *("kimi_k25", "mistral3", "mistral3 of mistral4", "gemma3", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v"),
    *("glm4v_moe", "ernie4_5_vl_moe", "granite4_vision", "granite_docling", "idefics3", "molmo2"),
)
"""Those whose layers have operators and caches; of all others the parameters are compared."""


def prompt(length: int = 48) -> list[int]:
    return torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.every(4)
@pytest.mark.parametrize("name", RUN)
def test_logits_of_text(name: str, tmp_path: Path) -> None:
    model = tiny_composite(name, seed=1)
    model.save_pretrained(tmp_path)
    ids = prompt()
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0]
    engine = engine_of(tmp_path)
    got = engine.runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    parts = [engine.runner.forward(ids[at : at + 7], at, range(len(ids[at : at + 7]))) for at in range(0, len(ids), 7)]
    assert torch.equal(torch.cat(parts), got)


def opened(folder: Path) -> tuple[PreTrainedModel, SafetensorsSource]:
    files = open_safetensors(folder)
    whole = load_hf_config(folder)
    model = build_skeleton(take_text_config(whole, files.tensors.keys()))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return model, SafetensorsSource(files, ModelFacts.of(whole), shapes)


def layout_of(module: nn.Module, key: str) -> ExpertsLayout:
    if type(module).__name__ == "Llama4TextExperts":  # its matrices are transposed, and it does not say so
        return ExpertsLayout(module.num_experts, module.hidden_size, module.expert_dim, is_transposed=True)
    return read_layout(module, key)


def check_parameters(folder: Path, model: PreTrainedModel) -> None:
    """Every parameter of the language model is found, with the numbers that it has in the composite `model`."""
    skeleton, source = opened(folder)
    is_whole = not hasattr(model, "model")  # the language part is a causal model of its own
    language: nn.Module = model.language_model.model if is_whole else model.get_decoder()
    head = (model.language_model if is_whole else model).lm_head.weight
    fused = routed_experts(skeleton)
    names = [name for name in skeleton.state_dict() if name.rpartition(".")[0] not in fused]
    assert len(names) > 10
    for name in names:
        inner = name.removeprefix("model.")
        want = head if name == "lm_head.weight" else language.state_dict()[inner]
        assert torch.equal(source.dense(name), want), name
    for key in fused:
        module = language.get_submodule(key.removeprefix("model."))
        layout = layout_of(skeleton.get_submodule(key), key)
        experts = source.experts(key, layout)
        down = torch.stack([dequantize(raw) for raw in experts.down])
        up = torch.stack([dequantize(raw) for raw in experts.up])
        first = module.gate_up_proj if layout.has_gate else module.up_proj
        want = module.down_proj
        if layout.is_transposed:
            first, want = first.transpose(1, 2), want.transpose(1, 2)
        assert torch.equal(down, want)
        if layout.has_gate and layout.is_concatenated:
            assert torch.equal(first, torch.cat([torch.stack([dequantize(raw) for raw in experts.gate]), up], dim=1))
    read = {stored for name in names for stored in source.find(name).stored_names}
    for key in fused:
        read |= set(source.find_experts(key, layout_of(skeleton.get_submodule(key), key)).stored_names)
    assert [name for name in source.stored_names() if name not in read and not source.ignorable(name)] == []


@pytest.mark.parametrize("name", COMPOSITES)
def test_parameters_of_the_language_part(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_check_supported", lambda config: None)  # names are known of more than can run
    model = tiny_composite(name, seed=1)
    model.save_pretrained(tmp_path)
    check_parameters(tmp_path, model)


@pytest.mark.parametrize("name", ["kimi_k25", "qwen3_vl_moe"])
def test_the_reference_takes_the_language_part_too(name: str, tmp_path: Path) -> None:
    model = tiny_composite(name, seed=4)
    model.save_pretrained(tmp_path)
    ids = prompt(16)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0]
    engine = build_reference_engine(EngineConfig(model_path=tmp_path, cache_lens=64))
    got = engine.logits(ids)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.every(4)
@pytest.mark.parametrize("name", ["kimi_k25", "qwen3_5_moe", "glm4v_moe"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "language_model."])
def test_all_names_that_files_have(name: str, prefix: str, tmp_path: Path) -> None:
    model = tiny_composite(name, seed=2)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {}
    for stored, tensor in safetensors.torch.load_file(path).items():
        for known in ("language_model.model.", "model.language_model."):
            if stored.startswith(known):
                renamed[prefix + stored.removeprefix(known)] = tensor
                break
        else:
            renamed[stored] = tensor
    safetensors.torch.save_file(renamed, path)
    check_parameters(tmp_path, model)


def test_tensors_for_images_are_named_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_composite("qwen3_vl", seed=1)
    model.save_pretrained(tmp_path)
    count = sum("visual" in name for name in safetensors.torch.load_file(tmp_path / "model.safetensors"))
    with caplog.at_level(logging.INFO):
        open_model(EngineConfig(model_path=tmp_path))
    assert [r.getMessage() for r in caplog.records if "images" in r.getMessage()] == [
        f"{count} tensors for images and sound are left unread"
    ]


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_composite_says_whether_the_head_is_tied(is_tied: bool, tmp_path: Path) -> None:
    """Its text config may say otherwise; a head in the files counts in any case."""
    model = tiny_composite("qwen3_vl", seed=3)
    model.config.tie_word_embeddings = is_tied
    model.config.text_config.tie_word_embeddings = not is_tied
    model.tie_weights()
    model.save_pretrained(tmp_path)
    ids = prompt(8)
    with torch.no_grad():
        want = model(input_ids=torch.tensor([ids])).logits[0]
    got = engine_of(tmp_path).runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


def test_what_only_the_composite_says() -> None:
    """Its class, how its weights are quantized, where answers end."""
    config = tiny_composite("qwen3_vl_moe").config
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.text_config.eos_token_id, config.eos_token_id = None, [5, 7]
    found = ModelFacts.of(config)
    assert (found.model_type, found.composite_type) == ("qwen3_vl_moe_text", "qwen3_vl_moe")
    assert found.architecture == "Qwen3VLMoeForConditionalGeneration"
    assert found.quantization == Quantization("fp8", (128, 128))
    assert found.eos_token_ids == (5, 7)
    assert ModelFacts.of(config.text_config).composite_type is None


def test_what_answers_in_no_text_is_refused() -> None:
    from transformers import CLIPTextConfig

    with pytest.raises(UnsupportedError, match="clip_text_model is no language model that answers in text"):
        build_skeleton(CLIPTextConfig())


@pytest.mark.parametrize(
    ("stored", "is_tied"),
    [
        (["token_embd.weight", "blk.0.attn_output.weight"], True),
        (["model.layers.0.attention.output.weight"], True),
        (["output.weight"], False),
        (["lm_head.weight"], False),
        (["language_model.lm_head.weight"], False),
        (["language_model.output.weight"], False),
    ],
)
def test_which_tensors_are_heads(stored: list[str], is_tied: bool) -> None:
    """A composite with tied embeddings says so at the top; the attention's outputs are no heads."""
    whole = tiny_composite("gemma3", seed=1).config
    whole.tie_word_embeddings = True
    assert take_text_config(whole, stored).tie_word_embeddings is is_tied
