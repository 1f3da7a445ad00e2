"""Prompts with pictures: the ids that transformers' own processors make, with pseudo-ids in the pictures' positions."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ktransformers.errors import ConfigError, ContextLengthError, ConversationError, UnsupportedError
from ktransformers.media import processing
from ktransformers.media.picture import ReadPicture, media_items
from ktransformers.media.records import media_ids
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.loading import load_tokenizer
from tests.support.pictures.folders import (
    FAMILIES,
    GEMMA,
    MISTRAL,
    STRINGS,
    TORCHVISION_FAMILIES,
    LocalReader,
    write_folder,
)


def png(width: int, height: int, colour: tuple[int, int, int] = (10, 200, 30)) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(data, "PNG")
    return data.getvalue()


SENT = (png(80, 120), png(200, 60, (1, 2, 3)))
IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


CONVERSATION = [
    {"role": "user", "content": [text("What is this? "), IMAGE]},
    {"role": "assistant", "content": "A frog."},
    {"role": "user", "content": [IMAGE, text("And that?")]},
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By family: tokenizer, reader, folder; each made once."""
    made: dict[str, tuple[Tokenizer, LocalReader, Path]] = {}

    def open_family(name: str) -> tuple[Tokenizer, LocalReader, Path]:
        if name not in made:
            family = FAMILIES.get(name) or TORCHVISION_FAMILIES[name]
            folder = write_folder(tmp_path_factory.mktemp(name), name, family)
            tokenizer, reader = load_tokenizer(folder, None), LocalReader(folder)
            tokenizer.use_pictures(reader)
            made[name] = (tokenizer, reader, folder)
        return made[name]

    return open_family


def as_tokens(tokenizer: Tokenizer, reader: LocalReader, ids: list[int], pictures: list[ReadPicture]) -> list[int]:
    """The ids with the token of positions in place of pseudo-ids, each of which must be the one that belongs there."""
    wanted = [one for picture in pictures for one in media_ids(picture.digest, picture.num_positions)]
    (position,) = reader.position_token_ids
    assert [one for one in ids if one >= 1 << 30] == wanted
    return [position if one >= 1 << 30 else one for one in ids]


def reference_ids(folder: Path, messages: list[dict[str, Any]], sent: Sequence[bytes] = SENT) -> list[int]:
    """What transformers makes of the same pictures: its template, its expansion, its tokenizer."""
    processor = processing._load(folder)
    rendered = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if type(processor).__name__ == "PaliGemmaProcessor":
        rendered = rendered.removesuffix("\n")  # which it writes itself
    images = [Image.open(io.BytesIO(data)) for data in sent]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy, about transformers
        made = processor(
            text=[rendered],
            images=images,
            return_tensors="pt",
            text_kwargs={"add_special_tokens": False, "padding": False},
        )
    ids: list[int] = made["input_ids"][0].tolist()
    return ids


@pytest.mark.parametrize("name", [*FAMILIES, *TORCHVISION_FAMILIES])
def test_ids_are_those_of_transformers(name: str, opened: Any) -> None:
    if name in TORCHVISION_FAMILIES:
        pytest.importorskip("torchvision")
    tokenizer, reader, folder = opened(name)
    sent, messages = (SENT[:1], CONVERSATION[:1]) if name == "paligemma" else (SENT, CONVERSATION)  # one question
    pictures = [reader.read(data) for data in sent]
    ids = tokenizer.apply_chat_template(messages, pictures=pictures)
    assert as_tokens(tokenizer, reader, ids, pictures) == reference_ids(folder, messages, sent)
    items = media_items(ids, pictures)
    assert [item.digest for item in items] == [picture.digest for picture in pictures]
    assert all(ids[item.start] >= 1 << 30 and ids[item.end - 1] >= 1 << 30 for item in items)
    assert all(one.end <= other.start for one, other in pairwise(items))


def test_what_only_the_last_picture_of_a_prompt_has(opened: Any) -> None:
    """PaliGemma's <bos>, which stands behind all pictures."""
    tokenizer, reader, folder = opened("paligemma")
    messages = [{"role": "user", "content": [IMAGE, IMAGE, text("Which is larger?")]}]
    pictures = [reader.read(data) for data in SENT[:2]]
    assert [one.closing for one in pictures] == ["<bos>"] * 2
    ids = tokenizer.apply_chat_template(messages, pictures=pictures)
    assert as_tokens(tokenizer, reader, ids, pictures) == reference_ids(folder, messages, SENT[:2])
    assert tokenizer.decode([one for one in ids if one < 1 << 30], skip_special_tokens=False).count("<bos>") == 1
    assert not any(opened(name)[1].read(SENT[0]).closing for name in ("qwen3_vl", "gemma3", "idefics3"))


def rendered(tokenizer: Tokenizer, reader: LocalReader, messages: list[dict[str, Any]], count: int) -> str:
    """The prompt as text, each picture as [picture]."""
    picture = reader.read(SENT[0])
    ids = tokenizer.apply_chat_template(messages, pictures=[picture] * count)
    back = as_tokens(tokenizer, reader, ids, [picture] * count)
    return tokenizer.decode(back, skip_special_tokens=False).replace(picture.text, "[picture]")


@pytest.fixture
def qwen(opened: Any) -> Any:
    """A tokenizer of its own, whose template can be changed."""
    _, reader, folder = opened("qwen3_vl")
    tokenizer = load_tokenizer(folder, None)
    tokenizer.use_pictures(reader)
    return tokenizer, reader


def test_a_template_that_knows_strings_gets_the_placeholder_in_the_text(qwen: Any) -> None:
    tokenizer, reader = qwen
    tokenizer.use_chat_template(STRINGS)
    messages = [{"role": "user", "content": [text("What is"), IMAGE, text("this?")]}]
    assert rendered(tokenizer, reader, messages, 1) == (
        "<|im_start|>user\nWhat is\n[picture]\nthis?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_templates_that_take_one_picture_in_a_message(qwen: Any, opened: Any) -> None:
    assert not any(opened(name)[0].takes_one_picture for name in FAMILIES)
    tokenizer, _ = qwen
    assert not tokenizer.takes_one_picture
    loop = "{%- for part in message.content -%}"
    template = tokenizer.backend.chat_template
    assert loop in template
    refusing = "{%- if message.content | selectattr('type', 'equalto', 'image') | list | length > 1 -%}"
    tokenizer.use_chat_template(
        template.replace(loop, f"{refusing}{{{{- raise_exception('one') -}}}}{{%- endif -%}}{loop}")
    )
    assert tokenizer.takes_one_picture
    first = "{%- if part.type == 'image' and not loop.first -%}{%- elif part.type == 'image' -%}"
    tokenizer.use_chat_template(template.replace("{%- if part.type == 'image' -%}", first))
    assert tokenizer.takes_one_picture
    tokenizer.use_chat_template(STRINGS)
    assert not tokenizer.takes_one_picture


def test_a_picture_where_the_template_knows_none_is_written_as_the_users(opened: Any) -> None:
    """Mistral's template raises for lists of the assistant; around a picture of the user's stands nothing there, and
    in the one below vision tokens do."""
    _, reader, folder = opened("qwen3_vl")
    tokenizer = load_tokenizer(folder, None)
    tokenizer.use_pictures(reader)
    tokenizer.use_chat_template(
        MISTRAL.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
        .replace("[INST]", "<|im_start|>")
        .replace("[/INST]", "<|im_end|>")
    )
    messages = [
        {"role": "user", "content": [IMAGE, text("Draw this.")]},
        {"role": "assistant", "content": [text("Here:"), IMAGE]},
        {"role": "user", "content": "Nice."},
    ]
    picture = "<|vision_start|>[picture]<|vision_end|>"
    assert rendered(tokenizer, reader, messages, 2) == (
        f"<|im_start|><|im_start|>{picture}Draw this.<|im_end|>Here:\n{picture}<|im_end|><|im_start|>Nice.<|im_end|>"
    )


def test_pictures_of_tools(qwen: Any) -> None:
    tokenizer, reader = qwen
    messages = [
        {"role": "user", "content": "Take a screenshot."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "shoot", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": [text("done"), IMAGE]},
    ]
    found = rendered(tokenizer, reader, messages, 1)
    assert found.count("<|vision_start|>[picture]<|vision_end|>") == 1
    assert found.index("done") < found.index("[picture]")


def test_turns_that_are_folded_keep_their_pictures(opened: Any) -> None:
    """A template that refuses a system turn, and two turns of the user behind each other."""
    _, reader, folder = opened("gemma3")
    tokenizer = load_tokenizer(folder, None)
    tokenizer.use_pictures(reader)
    refuses = (
        "{%- if messages[0].role == 'system' -%}{{- raise_exception('no system') -}}{%- endif -%}"
        "{%- for message in messages -%}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{- raise_exception('roles must alternate') -}}{%- endif -%}{%- endfor -%}"
    )
    tokenizer.use_chat_template(refuses + GEMMA.replace("PICTURE", "<start_of_image>"))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("One."), IMAGE]},
        {"role": "user", "content": [IMAGE, text("Two.")]},
    ]
    found = rendered(tokenizer, reader, messages, 2)
    order = ["Be brief.", "One.", "[picture]", "Two."]
    places = [found.index(one) for one in order]
    assert places == sorted(places)
    assert found.count("[picture]") == 2
    assert found.count("<start_of_turn>") == 2


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llava", "aya_vision"])
def test_who_spells_a_picture_does_not_forge_one(name: str, opened: Any) -> None:
    tokenizer, reader, _ = opened(name)
    picture = reader.read(SENT[0])
    spelled = f"{picture.text} {reader.placeholder}"
    messages = [{"role": "user", "content": [text(f"It says {spelled}."), IMAGE, text(spelled)]}]
    ids = tokenizer.apply_chat_template(messages, pictures=[picture])
    (item,) = media_items(ids, [picture])
    back = as_tokens(tokenizer, reader, ids, [picture])
    shown = tokenizer.decode(back, skip_special_tokens=False)
    assert shown.count(picture.text.strip()) == 3  # it reads as before
    (position,) = reader.position_token_ids
    assert position not in ids
    assert sum(one >= 1 << 30 for one in ids) == picture.num_positions
    with pytest.raises((ConversationError, ConfigError), match="may be spelled in its texts"):
        tokenizer.apply_chat_template(messages, pictures=[picture], reads_special_tokens=True)
    plain = tokenizer.apply_chat_template([{"role": "user", "content": spelled}])
    assert position not in plain
    assert item.length >= picture.num_positions


def test_what_is_wrong_with_the_pictures_is_said(opened: Any) -> None:
    tokenizer, reader, folder = opened("qwen3_vl")
    picture = reader.read(SENT[0])
    with pytest.raises(ConfigError, match="a conversation with 2 pictures came with 1"):
        tokenizer.apply_chat_template(CONVERSATION, pictures=[picture])
    with pytest.raises(ConfigError, match="a conversation with 0 pictures came with 1"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], pictures=[picture])
    blind = load_tokenizer(folder, None)
    with pytest.raises(UnsupportedError, match="this model reads text only"):
        blind.apply_chat_template(CONVERSATION, pictures=[picture, picture])
    with pytest.raises(ContextLengthError, match="there is room for 20"):
        tokenizer.apply_chat_template(CONVERSATION, pictures=[picture, picture], max_len=20)


def test_a_further_turn_begins_with_the_prompt_before(opened: Any) -> None:
    tokenizer, reader, _ = opened("qwen3_vl")
    pictures = [reader.read(data) for data in SENT]
    first = tokenizer.apply_chat_template(CONVERSATION[:1], pictures=pictures[:1], add_generation_prompt=False)
    whole = tokenizer.apply_chat_template(CONVERSATION, pictures=pictures)
    assert whole[: len(first)] == first
