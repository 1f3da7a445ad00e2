"""Pictures from their bytes to the answer: the tokens of transformers' processor and composite, greedily."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from transformers import PreTrainedModel

from ktransformers import LLM, SamplingParams
from ktransformers.errors import UnsupportedError
from ktransformers.media import processing
from tests.support.pictures.folders import FAMILIES, tiny_tokenizer, write_folder
from tests.support.pictures.towers import tiny_with_tower

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NAMES = ("qwen3_vl", "qwen3_5_moe", "gemma3", "granite4_vision", "ernie4_5_vl_moe", "paligemma", "idefics3")


def drawing(width: int = 90, height: int = 70, fill: str = "red") -> Image.Image:
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse((8, 6, width - 20, height - 9), fill=fill)
    return image


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def folder_of(name: str, folder: Path) -> tuple[Path, PreTrainedModel]:
    """A model's folder, whole, and the model."""
    family = FAMILIES[name]
    if name == "gemma3":
        family = replace(family, settings={"image_seq_length": 4})  # as the model's config has it
    ids = tiny_tokenizer(family).convert_tokens_to_ids
    long = {"max_position_embeddings": 1024}
    model = tiny_with_tower(name, image_token=ids(family.config_token), vocab_size=320, text_values=long)
    for where in ("start", "end"):
        if f"image_{where}_token" in family.named:  # which ERNIE's config names, too
            setattr(model.config, f"image_{where}_token_id", ids(family.named[f"image_{where}_token"]))
    write_folder(folder, name, family)
    model.save_pretrained(folder)  # over a config that has the type and the token alone
    return folder, model


def conversation(*images: Any) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is "}]
    for image in images:
        parts += [{"type": "image", "image": image}, {"type": "text", "text": " and this?"}]
    return [{"role": "user", "content": parts}]


def wanted(folder: Path, model: PreTrainedModel, images: list[Image.Image]) -> list[int]:
    """What transformers answers."""
    processor = processing._load(folder)  # transformers', with something in the place of its processor of videos
    text = processor.tokenizer.apply_chat_template(conversation(*images), tokenize=False, add_generation_prompt=True)
    if "PaliGemma" in type(processor).__name__:
        text = text.removesuffix("\n")  # which it writes itself
    given = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    given.pop("labels", None)
    with torch.no_grad():
        made = model.generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return made[0, given["input_ids"].shape[1] :].tolist()


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of tensors in ERNIE's processor
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, model = folder_of(name, tmp_path / "model")
    one, two = drawing(), drawing(64, 120, "blue")
    with LLM(folder, cache_lens=1024, cpu_infer=1, self_check=False) as llm:
        for images in ([one], [one, two], [two]):
            (output,) = llm.chat(conversation(*map(png, images)), GREEDY)
            assert list(output.token_ids) == wanted(folder, model, images)
        many = [one, two] * 5
        first, again = (llm.chat(conversation(*map(png, many)), GREEDY)[0] for _ in range(2))
        assert again.stats.cached_len > first.stats.cached_len  # from pages that are kept
        assert list(first.token_ids) == list(again.token_ids) == wanted(folder, model, many)


def test_one_picture_in_all_forms(tmp_path: Path) -> None:
    folder, _ = folder_of("qwen3_vl", tmp_path / "model")
    image = drawing()
    path = tmp_path / "drawing.png"
    path.write_bytes(png(image))
    url = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
    of_url = [{"role": "user", "content": [
        {"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": " and this?"},
    ]}]  # fmt: skip
    with LLM(folder, cache_lens=1024, cpu_infer=1, self_check=False) as llm:
        asked = [conversation(form) for form in (image, path, str(path), png(image))]
        answers = [llm.chat(one, GREEDY)[0].token_ids for one in [*asked, of_url]]
    assert all(answer == answers[0] for answer in answers)


def test_without_its_tower_a_model_says_so(tmp_path: Path) -> None:
    folder, _ = folder_of("qwen3_vl", tmp_path / "model")
    options: dict[str, Any] = {"cache_lens": 512, "cpu_infer": 1, "self_check": False, "tower_device": "none"}
    with LLM(folder, **options) as llm, pytest.raises(UnsupportedError, match="no pictures: --tower_device none"):
        llm.chat(conversation(drawing()), GREEDY)
