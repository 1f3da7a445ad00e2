"""Towers in llama.cpp's projector files, beside the GGUF of a language model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import OpenedModel, open_model
from ktransformers.engine.model.tower import OpenedTower, open_mmproj
from ktransformers.errors import ConfigError, FormatError, TensorMismatchError, UnsupportedError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.models.gguf.mmproj import composite_from_mmproj, projector_of
from ktransformers.operators.exact import NativeMathMode
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.gguf.mmproj import mmproj_beside
from tests.engine.media.test_towers import FIRST, SECOND, SIZES, prompt_of
from tests.support.gguf.mmproj import PROJECTOR_OF, write_mmproj
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import fill_randomly, tiny_config
from tests.support.pictures.towers import IMAGE_TOKEN, encoder_over, heard, picture, save_picture, tiny_with_tower

TEXTS = {
    "qwen3_vl": ("qwen3", "qwen3vl"),
    "gemma3": ("gemma3_text", "gemma3"),
    "kimi_k25": ("deepseek_v3", "deepseek2"),
}
AS_TEXT = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "glm4v_moe": "glm4_moe",
}
SECTIONS = [4, 2, 2]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def projector(name: str, folder: Path) -> Path:
    """The projector file of a tiny composite."""
    model = tiny_with_tower(name, seed=3)
    model.save_pretrained(folder / "saved")
    path = folder / "mmproj-F32.gguf"
    write_mmproj(path, model, name, folder / "saved")
    return path


def written(name: str, folder: Path) -> Path:
    """The GGUF of a language model, beside the projector file of a composite that has one like it."""
    projector(name, folder)
    text_type, arch = TEXTS[name]
    text = AutoModelForCausalLM.from_config(tiny_config(text_type))
    fill_randomly(text, 1)
    sections = SECTIONS if name.startswith("qwen") else ()
    return write_gguf(text, folder / "model.gguf", arch=arch, sections=sections)


def opened(path: Path, **settings: object) -> OpenedModel:
    return open_model(EngineConfig(gguf_path=path, picture_folder=path.parent, **settings))  # type: ignore[arg-type]


def check_features(tower: OpenedTower, model: PreTrainedModel, name: str, folder: Path, pool: WorkerPool) -> None:
    """A tower gives, of two pictures, what the composite hands to its language model, bit for bit."""
    encoder = encoder_over(tower, folder, pool)
    for digest, size in zip((FIRST, SECOND), SIZES, strict=True):
        tensors = picture(name, model, *size)
        save_picture(folder, digest, tensors)
        got = encoder.features(digest)
        with NativeMathMode(pool):
            want = heard(model, [IMAGE_TOKEN] * len(got.hidden), **tensors)
        assert torch.equal(got.hidden, want["inputs_embeds"][0])
        layers = want.get("deepstack_visual_embeds") or []
        assert all(torch.equal(one, other) for one, other in zip(got.by_layer.values(), layers, strict=True))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", PROJECTOR_OF)
def test_features(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    """The numbers are those of the composite that the file was made of, bit for bit."""
    file = open_gguf(projector(name, tmp_path))
    model = tiny_with_tower(name, seed=3)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("soft_emb_norm.weight"):  # rounded as it is stored, 1 larger
            parameter.data = (parameter.data + 1.0) - 1.0
    shapes = {stored: tensor.shape for stored, tensor in file.tensors.items()}
    text = tiny_config(AS_TEXT[name]) if name in AS_TEXT else model.config.text_config
    whole = composite_from_mmproj(file.metadata, shapes, text, SECTIONS)
    assert type(whole) is type(model.config)
    tower = open_mmproj(whole, file)
    assert tower.stored_names() == frozenset(file.tensors)  # nothing is left over
    for name_of, tensor in model.state_dict().items():
        if name_of in tower.model.state_dict():
            assert torch.equal(tower.source.dense(name_of), tensor), name_of
    check_features(tower, model, name, tmp_path, pool)


@pytest.mark.parametrize("name", TEXTS)
def test_beside_a_language_model(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    path = written(name, tmp_path)
    model = tiny_with_tower(name, seed=3)
    found = opened(path)
    assert found.tower is not None
    assert found.facts.composite_type == name
    encoder = encoder_over(found.tower, tmp_path, pool)
    tensors = picture(name, model, *SIZES[0])
    save_picture(tmp_path, FIRST, tensors)
    ids, media = prompt_of(model, name, [SIZES[0]])
    positions = encoder.positions(ids, media)
    if name == "qwen3_vl":
        tokens = [IMAGE_TOKEN if token >= 1 << 30 else token for token in ids]
        assert positions is not None
        assert torch.equal(positions, heard(model, tokens, **tensors)["position_ids"][-3:, 0])
        assert found.hf_config.rope_parameters["mrope_section"] == SECTIONS
    else:
        assert positions is None
    text = open_model(EngineConfig(gguf_path=path))
    assert text.tower is None
    assert text.facts.composite_type is None
    assert text.model.state_dict().keys() == found.model.state_dict().keys()


def test_a_named_projector_that_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written("gemma3", tmp_path)
    named = tmp_path / "mmproj-F32.gguf"
    assert opened(path, mmproj=named, tower_device="none").tower is None
    line = f"--mmproj {named} is left unread: --tower_device none leaves the tower out"
    assert [record.getMessage() for record in caplog.records].count(line) == 1
    caplog.clear()
    assert opened(path, tower_device="none").tower is None  # which nobody named
    assert "left unread" not in caplog.text


def test_a_folder_with_both_is_one_model(tmp_path: Path) -> None:
    written("gemma3", tmp_path)
    found = open_model(EngineConfig(gguf_path=tmp_path, picture_folder=tmp_path))
    assert found.tower is not None
    assert [file.name for file in found.files] == ["model.gguf"]


def test_no_tower_is_wanted_or_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written("gemma3", tmp_path)
    assert opened(path, tower_device="none").tower is None
    assert "no pictures" not in caplog.text
    (tmp_path / "mmproj-F32.gguf").unlink()
    assert opened(path).tower is None
    assert f"no pictures: no projector file (mmproj-*.gguf) is beside {path}" in caplog.text


def test_which_of_several_is_taken(tmp_path: Path) -> None:
    for name in ("mmproj-model-F32.gguf", "mmproj-Q8_0.gguf", "model-mmproj-BF16.gguf", "mmproj-F16.gguf", "a.gguf"):
        (tmp_path / name).touch()
        found = mmproj_beside(tmp_path / "a.gguf")
        assert found is not None
    assert found.name == "model-mmproj-BF16.gguf"
    found.unlink()
    assert mmproj_beside(tmp_path / "a.gguf") == tmp_path / "mmproj-F16.gguf"
    assert mmproj_beside(tmp_path / "Q4_K_M" / "a.gguf") == tmp_path / "mmproj-F16.gguf"


def clip(path: Path, kind: str) -> Path:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", kind)
    writer.add_tensor("v.patch_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_projectors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that is named is refused; one that is found leaves the model with text, and the log says why."""
    path = written("gemma3", tmp_path)
    other = clip(tmp_path / "mmproj-F32.gguf", "ldpv2")
    with pytest.raises(UnsupportedError, match="projectors of type 'ldpv2' are not read here; qwen2vl_merger, "):
        opened(path, mmproj=other)
    with caplog.at_level(logging.WARNING):
        assert opened(path).tower is None
    assert "no pictures: " in caplog.text
    assert "'ldpv2'" in caplog.text


@pytest.mark.parametrize("key", ["clip.projector_type", "clip.audio.projector_type"])
def test_one_for_sound(key: str) -> None:
    with pytest.raises(UnsupportedError, match=r"for sound, which no model takes here"):
        projector_of({"general.architecture": "clip", key: "ultravox"})


def test_one_of_another_model(tmp_path: Path) -> None:
    path = written("gemma3", tmp_path)
    (tmp_path / "other").mkdir()
    other = projector("qwen3_vl", tmp_path / "other")
    with pytest.raises(UnsupportedError, match=r"of qwen3_vl, .* and the language model is a gemma3_text"):
        opened(path, mmproj=other)


def test_a_part_of_a_tower(tmp_path: Path) -> None:
    path = written("gemma3", tmp_path)
    model = tiny_with_tower("gemma3", seed=3)
    blocks = model.model.vision_tower.encoder.layers
    del blocks[2]  # while the config, and so the metadata, have three
    model.save_pretrained(tmp_path / "part")
    write_mmproj(tmp_path / "mmproj-F32.gguf", model, "gemma3", tmp_path / "part")
    with pytest.raises(TensorMismatchError, match=r"encoder\.layers\.2\.\S+ is missing"):
        opened(path)


def test_safetensors_have_their_own(tmp_path: Path) -> None:
    model = tiny_with_tower("gemma3", seed=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"--mmproj .* goes with a GGUF"):
        open_model(EngineConfig(model_path=tmp_path, mmproj=projector("gemma3", tmp_path), picture_folder=tmp_path))


def test_a_language_model_without_sections(tmp_path: Path) -> None:
    file = open_gguf(projector("qwen3_vl", tmp_path))
    shapes = {stored: tensor.shape for stored, tensor in file.tensors.items()}
    with pytest.raises(FormatError, match=r"rope\.dimension_sections"):
        composite_from_mmproj(file.metadata, shapes, tiny_config("qwen3"), [])
