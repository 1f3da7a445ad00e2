"""Pictures of GGUFs: a language model and llama.cpp's projector file answer as the composite that they were made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ktransformers import LLM
from tests.engine.api.test_chat_with_pictures import GREEDY, conversation, drawing, png, wanted
from tests.support.gguf.mmproj import write_mmproj
from tests.support.gguf.writer import write_gguf
from tests.support.pictures.folders import (
    FAMILIES,
    TORCHVISION_FAMILIES,
    PictureFamily,
    tiny_tokenizer,
    write_folder,
)
from tests.support.pictures.towers import tiny_with_tower

MEAN, STD = [0.5, 0.25, 0.125], [0.5, 0.25, 0.75]
"""As the files have them."""

_ALL = {**FAMILIES, "qwen3_vl_moe": FAMILIES["qwen3_vl"], **TORCHVISION_FAMILIES}
_TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_vl": ("qwen3", "qwen3vl", {}),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {"layer_types": ["sliding_attention"] * 2, "query_pre_attn_scalar": 16},  # as such a file has them
    ),
}


def family_of(name: str) -> PictureFamily:
    """A family whose pictures are as the projector file says."""
    family = _ALL[name]
    image = {**family.image, "image_mean": MEAN, "image_std": STD}
    if name.startswith("qwen3"):
        image["size"] = {"shortest_edge": 8 * 32**2, "longest_edge": 4096 * 32**2}
    return replace(family, image=image, settings={"image_seq_length": 4} if name == "gemma3" else family.settings)


def vocabulary(family: PictureFamily, template: str | None = None) -> dict[str, Any]:
    """A tokenizer as a converter writes it."""
    tokenizer = tiny_tokenizer(family)
    ids = tokenizer.get_vocab()
    tokens = [*sorted(ids, key=ids.__getitem__), "ÿþ"]  # bytes that no text has: a file needs one merge
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in family.tokens else 1 for token in tokens],
        "tokenizer.ggml.merges": ["ÿ þ"],
        "tokenizer.ggml.bos_token_id": ids[family.tokens[0]],
        "tokenizer.ggml.eos_token_id": ids[family.tokens[1]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template or tokenizer.chat_template,
    }


def both(name: str, folder: Path, template: str | None = None) -> tuple[Path, Path, PreTrainedModel]:
    """A composite's folder, its GGUF beside its projector file in another, and the composite."""
    family, (text_type, arch, values) = family_of(name), _TEXTS[name]
    token = tiny_tokenizer(family).convert_tokens_to_ids(family.config_token)
    model = tiny_with_tower(name, image_token=token, vocab_size=320, text_values=values)
    whole, files = write_folder(folder / "whole", name, family), folder / "files"
    model.save_pretrained(whole)
    files.mkdir()
    write_mmproj(files / "mmproj-F32.gguf", model, name, whole)
    text = as_text(model, text_type)
    sections = (4, 2, 2) if name.startswith("qwen") else ()
    written = vocabulary(family, template)
    return whole, write_gguf(text, files / "model.gguf", arch=arch, sections=sections, vocabulary=written), model


def as_text(model: PreTrainedModel, text_type: str) -> PreTrainedModel:
    """The language model of a composite, as one by itself."""
    config = {**model.config.text_config.to_dict(), "model_type": text_type}
    text: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[text_type].from_dict(config))
    state = {f"model.{key}": value for key, value in model.get_decoder().state_dict().items()}
    text.load_state_dict({**state, "lm_head.weight": model.get_output_embeddings().weight})
    return text


@pytest.mark.parametrize("name", _TEXTS)
def test_answers_are_those_of_the_composite(name: str, tmp_path: Path) -> None:
    whole, gguf, model = both(name, tmp_path)
    one, two = drawing(), drawing(64, 120, "blue")
    with LLM(gguf, cache_lens=1024, cpu_infer=1, self_check=False) as llm:
        for images in ([one], [one, two], [two]):
            (output,) = llm.chat(conversation(*map(png, images)), GREEDY)
            assert list(output.token_ids) == wanted(whole, model, images)
