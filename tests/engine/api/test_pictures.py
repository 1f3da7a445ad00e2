"""Whether a model reads pictures, what its processor's folder is, and where a session's pictures are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.api.pictures import Pictures, why_no_pictures
from ktransformers.engine.sequence.prompts import PromptIds
from ktransformers.errors import UnsupportedError
from ktransformers.media.reader import ChildReader
from ktransformers.media.records import MediaItem, media_ids
from ktransformers.tokenizer.loading import load_tokenizer
from tests.support.models.demo import DEMO_GGUF
from tests.support.pictures.folders import FAMILIES, write_folder

DIGEST = bytes(range(32))


def test_which_models_read_pictures(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "gemma3", FAMILIES["gemma3"])
    config = EngineConfig(model_path=folder)
    assert why_no_pictures(config) is None
    assert why_no_pictures(EngineConfig(gguf_path=folder / "a.gguf")) is None
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    assert "holds no processor_config.json or preprocessor_config.json" in str(why_no_pictures(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert why_no_pictures(config) == "its type, 'qwen3_moe', has no tower for pictures"
    (folder / "config.json").write_text("{")
    assert "cannot be read" in str(why_no_pictures(config))
    (folder / "config.json").unlink()
    assert "no config.json" in str(why_no_pictures(config))


def test_a_text_model_has_no_store_and_is_named(tmp_path: Path) -> None:
    pictures = Pictures(EngineConfig(gguf_path=tmp_path / "m.gguf"))
    assert pictures.config.picture_folder is None
    with pytest.raises(UnsupportedError, match=f"{tmp_path.name} reads text only, no pictures: its folder holds no"):
        pictures.require()
    pictures.close()


def test_a_model_of_pictures_has_a_folder_until_it_is_closed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "gemma3", FAMILIES["gemma3"])
    pictures = Pictures(EngineConfig(model_path=folder))
    store = pictures.config.picture_folder
    assert store is not None
    assert store.stat().st_mode & 0o777 == 0o700
    tokenizer = load_tokenizer(folder, None)
    pictures.attach(tokenizer)
    assert pictures.reader is not None
    assert pictures.reader._starting is not None  # before anyone has sent a picture
    pictures.close()
    assert pictures.reader.child.process is None
    assert not store.exists()


def test_nothing_starts_for_a_model_without_a_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "model", "gemma3", FAMILIES["gemma3"])
    tokenizer = load_tokenizer(folder, None)
    monkeypatch.setattr(ChildReader, "start_ahead", lambda reader: pytest.fail("it starts"))
    for config, has_tower in (
        (EngineConfig(model_path=folder), False),
        (EngineConfig(model_path=folder, tower_device="none"), True),
    ):
        pictures = Pictures(config)
        pictures.attach(tokenizer, has_tower=has_tower)
        assert pictures.reader is None
        pictures.close()


def test_a_tokenizer_in_another_form_goes_beside_the_processor(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "gemma3", FAMILIES["gemma3"])
    tokenizer = load_tokenizer(folder, None)
    (folder / "tokenizer.json").rename(folder / "tokenizer.other")
    pictures = Pictures(EngineConfig(model_path=folder))
    pictures.attach(tokenizer)
    assert pictures.reader is not None
    assert pictures.reader.placeholder == "<start_of_image>"
    pictures.close()


def test_a_session_says_where_its_pictures_stand(tmp_path: Path) -> None:
    item = MediaItem(DIGEST, 1, 2)
    ids = PromptIds([1, *media_ids(DIGEST, 2), 2], [item])
    with LLM(DEMO_GGUF, cpu_infer=1, cache_lens=256) as llm:
        llm.save_session(tmp_path / "one.safetensors", ids)
        saved = llm.load_session(tmp_path / "one.safetensors")
        assert saved.media == (item,)
        assert list(saved.token_ids) == ids
        with pytest.raises(UnsupportedError, match="reads text only"):
            llm.continue_answer(saved, SamplingParams(max_tokens=2))
