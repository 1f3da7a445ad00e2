"""Towers in the model's own GGUF, as Ollama writes it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from torch import nn
from transformers import PreTrainedModel

from ktransformers import LLM
from ktransformers.config import EngineConfig
from ktransformers.engine.api.pictures import why_no_pictures
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.model.tower import open_mmproj
from ktransformers.errors import FormatError, UnsupportedError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.models.gguf.mmproj import composite_from_mmproj
from ktransformers.models.gguf.mmproj_processor import mmproj_processor
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from ktransformers.weights.gguf.mmproj import mmproj_inside
from tests.engine.api.test_chat_with_pictures import GREEDY, conversation, drawing, png, wanted
from tests.engine.api.test_gguf_with_pictures import both
from tests.engine.media.test_mmproj import AS_TEXT, SECTIONS, check_features
from tests.support.gguf.ollama_towers import ARCH_OF, write_ollama
from tests.support.models.tiny_models import tiny_config
from tests.support.pictures.towers import tiny_with_tower


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def written(name: str, folder: Path) -> tuple[GGUFModel, PreTrainedModel]:
    model = tiny_with_tower(name, seed=3)
    model.save_pretrained(folder / "saved")
    return open_gguf(write_ollama(folder / "model.gguf", model, name, folder / "saved")), model


@pytest.mark.parametrize("name", ARCH_OF)
def test_features(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    """The numbers are those of the composite that the file was made of, bit for bit."""
    stored, model = written(name, tmp_path)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("soft_emb_norm.weight"):  # rounded as it is stored, 1 larger
            parameter.data = (parameter.data + 1.0) - 1.0
    for module in model.modules():
        if name == "mistral3" and hasattr(module, "gate_proj"):  # as published, which the file does not say
            module.act_fn = nn.SiLU()
    file = mmproj_inside(stored)
    assert file is not None
    shapes = {stored_name: tensor.shape for stored_name, tensor in file.tensors.items()}
    text = tiny_config(AS_TEXT[name]) if name in AS_TEXT else model.config.text_config
    tower = open_mmproj(composite_from_mmproj(file.metadata, shapes, text, SECTIONS), file)
    assert tower.stored_names() == frozenset(file.tensors)  # nothing is left over
    check_features(tower, model, name, tmp_path, pool)


@pytest.mark.parametrize("name", ARCH_OF)
def test_its_processor(name: str, tmp_path: Path) -> None:
    stored, _ = written(name, tmp_path)
    file = mmproj_inside(stored)
    assert file is not None
    made = mmproj_processor(file.metadata)
    is_clips = name in ("qwen2_5_vl", "mistral3")
    assert made.image["image_mean"] == pytest.approx([0.48145466, 0.4578275, 0.40821073] if is_clips else [0.5] * 3)
    if name.startswith("qwen3"):
        assert made.image["size"] == {"shortest_edge": 65536, "longest_edge": 1 << 24}
    if name == "gemma3":
        assert made.text["image_seq_length"] == 4


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_answers_are_those_of_the_composite(name: str, tmp_path: Path) -> None:
    whole, text, model = both(name, tmp_path)
    (text.parent / "mmproj-F32.gguf").unlink()
    path = tmp_path / "blob.gguf"
    write_ollama(path, model, name, whole, text)
    processor = whole / "preprocessor_config.json"
    values = json.loads(processor.read_text()) | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if name == "qwen3_vl":
        values["size"] = {"shortest_edge": 65536, "longest_edge": 1 << 24}
    processor.write_text(json.dumps(values))
    one, two = drawing(), drawing(64, 120, "blue")
    with LLM(path, cache_lens=1024, cpu_infer=1, self_check=False) as llm:
        for images in ([one], [one, two]):
            (output,) = llm.chat(conversation(*map(png, images)), GREEDY)
            assert list(output.token_ids) == wanted(whole, model, images)


def rewritten(source: GGUFModel, path: Path, arch: str, without: str = "") -> Path:
    """The file under another architecture, and without a tensor."""
    writer, old = gguf.GGUFWriter(path, arch), source.architecture
    for key, value in source.metadata.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            kind = gguf.GGUFValueType.UINT32 if isinstance(value, int) else gguf.GGUFValueType.FLOAT32
            writer.add_key_value(key.replace(f"{old}.", f"{arch}."), value, kind)
    for name, tensor in source.tensors.items():
        if name != without:
            writer.add_tensor(name, source.raw(name).data.numpy().view("f4").reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_others_are_refused_by_name(tmp_path: Path) -> None:
    stored, _ = written("gemma3", tmp_path)
    other = rewritten(stored, tmp_path / "other.gguf", "gemma3n")
    with pytest.raises(UnsupportedError, match=r"is not read for 'gemma3n', only for qwen25vl, gemma3, .*mistral3"):
        mmproj_inside(open_gguf(other))
    assert str(why_no_pictures(EngineConfig(gguf_path=other))).startswith(f"{other}: the tower for pictures in it, as")
    damaged = GGUFModel([stored.files[0]])
    damaged.metadata = {**stored.metadata, "gemma3.mm.tokens_per_image": "many"}
    with pytest.raises(FormatError, match=r"gemma3\.mm\.tokens_per_image is 'many', and must be a number above 0"):
        mmproj_inside(damaged)


def test_a_part_of_one_leaves_the_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As before such towers were read."""
    whole, text, model = both("gemma3", tmp_path)
    stored = open_gguf(write_ollama(tmp_path / "blob.gguf", model, "gemma3", whole, text))
    del stored.files[0].tensors["v.post_layernorm.weight"]  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO), pytest.MonkeyPatch.context() as patch:
        patch.setattr("ktransformers.engine.model.opened.open_gguf", lambda path: GGUFModel(stored.files))
        opened = open_model(EngineConfig(gguf_path=tmp_path / "blob.gguf", picture_folder=tmp_path))
    assert opened.tower is None
    assert "no pictures: the files hold only a part of the model's tower for pictures: " in caplog.text


def test_qwens_under_the_name_of_its_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen25vl")
    writer.add_array("qwen25vl.rope.mrope_section", [16, 24, 24])
    writer.add_uint32("qwen25vl.block_count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = open_gguf(tmp_path / "model.gguf")
    assert stored.architecture == "qwen2vl"
    assert stored.metadata["qwen2vl.block_count"] == 2
    assert list(stored.metadata["qwen2vl.rope.dimension_sections"]) == [16, 24, 24]  # type: ignore[arg-type]
    assert not any(key.startswith("qwen25vl") for key in (*stored.metadata, *stored.files[0].value_types))
