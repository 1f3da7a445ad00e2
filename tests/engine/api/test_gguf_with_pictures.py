"""Pictures of GGUFs: a language model and llama.cpp's projector file answer as the composite that they were made of."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import is_torchvision_available

from ktransformers import LLM
from ktransformers.config import EngineConfig
from ktransformers.engine.api.pictures import Pictures, _tower_key, why_no_pictures
from ktransformers.engine.api.projector import write_processor
from ktransformers.engine.model.tower import open_mmproj
from ktransformers.errors import ConfigError, FormatError, UnsupportedError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.media.processing import Processor
from ktransformers.models.gguf.mmproj import composite_from_mmproj
from ktransformers.models.gguf.mmproj_processor import mmproj_processor
from ktransformers.tokenizer.loading import load_tokenizer
from ktransformers.tokenizer.tokenizer import Tokenizer
from ktransformers.weights.gguf.file import open_gguf
from tests.engine.api.test_chat_with_pictures import GREEDY, conversation, drawing, png, wanted
from tests.engine.media.test_mmproj import AS_TEXT, SECTIONS, clip
from tests.support.gguf.mmproj import PROJECTOR_OF, write_mmproj
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_config
from tests.support.pictures.folders import (
    FAMILIES,
    TORCHVISION_FAMILIES,
    PictureFamily,
    tiny_tokenizer,
    write_folder,
)
from tests.support.pictures.towers import encoder_over, save_picture, tiny_with_tower

MEAN, STD = [0.5, 0.25, 0.125], [0.5, 0.25, 0.75]
"""As the files have them."""

_GLM5 = {"image_processor_type": "Glm5NextImageProcessor", "patch_size": 14, "merge_size": 2}
_LFM2 = {"image_processor_type": "Lfm2VlImageProcessor"}
_MINIMAX = {"image_processor_type": "MiniMaxM3VLImageProcessor"}
_ALL = {
    **FAMILIES,
    **TORCHVISION_FAMILIES,
    "qwen3_vl_moe": FAMILIES["qwen3_vl"],
    "glm4v_moe": FAMILIES["glm46v"],
    "glm5_next": replace(FAMILIES["glm46v"], processor="Glm5NextProcessor", image=_GLM5),
    "lfm2_vl": replace(
        FAMILIES["glm46v"],
        processor="Lfm2VlProcessor",
        image=_LFM2,
        tokens=("<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        config_token="<image>",
        writes="<image>",
    ),
    "minimax_m3_vl": replace(
        FAMILIES["glm46v"],
        processor="MiniMaxM3VLProcessor",
        image=_MINIMAX,
        tokens=(
            *("<|im_start|>", "<|im_end|>", "]<]image[>[", "]<]video[>[", "]<]start of image[>["),
            "]<]end of image[>[",
        ),
        config_token="]<]image[>[",
        writes="]<]image[>[",
    ),
}
ONE_OF_EACH = {kind: name for name, kind in reversed(PROJECTOR_OF.items())}.values()
_TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_vl": ("qwen3", "qwen3vl", {}),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {"layer_types": ["sliding_attention"] * 2, "query_pre_attn_scalar": 16},  # as such a file has them
    ),
    "glm4v_moe": ("glm4_moe", "glm4moe", {"use_qk_norm": False}),
    "idefics3": ("llama", "llama", {}),
}


def family_of(name: str) -> PictureFamily:
    """A family whose pictures are as the projector file says."""
    family = _ALL[name]
    image = {**family.image, "image_mean": MEAN, "image_std": STD}
    if name.startswith("qwen3"):
        image["size"] = {"shortest_edge": 8 * 32**2, "longest_edge": 4096 * 32**2}
    if name == "glm4v_moe":  # whose processor counts two frames
        image["size"] = {"shortest_edge": 2 * 8 * 28**2, "longest_edge": 2 * 4096 * 28**2}
    return replace(family, image=image, settings={"image_seq_length": 4} if name == "gemma3" else family.settings)


def vocabulary(family: PictureFamily) -> dict[str, Any]:
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
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def both(name: str, folder: Path) -> tuple[Path, Path, PreTrainedModel]:
    """A composite's folder, its GGUF beside its projector file in another, and the composite."""
    family, (text_type, arch, values) = family_of(name), _TEXTS[name]
    token = tiny_tokenizer(family).convert_tokens_to_ids(family.config_token)
    model = tiny_with_tower(name, image_token=token, vocab_size=320, text_values=values)
    whole, files = write_folder(folder / "whole", name, family), folder / "files"
    model.save_pretrained(whole)
    files.mkdir()
    write_mmproj(files / "mmproj-F32.gguf", model, name, whole)
    text = as_text(model, text_type)
    sections = (4, 2, 2) if name.startswith(("qwen", "glm")) else ()
    written = vocabulary(family)
    return whole, write_gguf(text, files / "model.gguf", arch=arch, sections=sections, vocabulary=written), model


def as_text(model: PreTrainedModel, text_type: str) -> PreTrainedModel:
    """The language model of a composite, as one by itself."""
    config = {**model.config.text_config.to_dict(), "model_type": text_type}
    text: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[text_type].from_dict(config))
    state = {f"model.{key}": value for key, value in model.get_decoder().state_dict().items()}
    text.load_state_dict({**state, "lm_head.weight": model.get_output_embeddings().weight})
    return text


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of GLM's processor with tensors
@pytest.mark.parametrize("name", _TEXTS)
def test_answers_are_those_of_the_composite(name: str, tmp_path: Path) -> None:
    whole, gguf, model = both(name, tmp_path)
    one, two = drawing(), drawing(64, 120, "blue")
    with LLM(gguf, cache_lens=1024, cpu_infer=1, self_check=False) as llm:
        for images in ([one], [one, two], [two]):
            (output,) = llm.chat(conversation(*map(png, images)), GREEDY)
            assert list(output.token_ids) == wanted(whole, model, images)


def loaded(family: PictureFamily, without: str = "") -> Tokenizer:
    """The tokenizer of a GGUF. without: a token that its vocabulary has by another name, "<unused0>"."""
    written = vocabulary(family)
    tokens = ["<unused0>" if token == without else token for token in written["tokenizer.ggml.tokens"]]
    return load_tokenizer(None, {**written, "tokenizer.ggml.tokens": tokens})


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_projector_has_its_processor(name: str, tmp_path: Path) -> None:
    """Its sizes are the file's, and a picture has as many positions as the tower has rows for it."""
    model = tiny_with_tower(name)
    model.save_pretrained(tmp_path / "saved")
    write_mmproj(tmp_path / "mmproj-F32.gguf", model, name, tmp_path / "saved")
    file = open_gguf(tmp_path / "mmproj-F32.gguf")
    processor = mmproj_processor(file.metadata)
    write_processor(tmp_path, processor, loaded(family_of(name)))
    try:
        ours = Processor(tmp_path, lambda note: None)
    except ConfigError as error:
        if "torchvision" in str(error) and not is_torchvision_available():
            pytest.skip("this family's processor is written for torchvision alone")
        raise
    kind = ours._processor.image_processor
    assert type(kind).__name__.removesuffix("Pil") == processor.image["image_processor_type"]
    assert (list(kind.image_mean), list(kind.image_std)) == (MEAN, STD)
    for setting in ("patch_size", "merge_size", "min_patches", "max_patches"):
        if setting in processor.image:
            assert getattr(kind, setting) == processor.image[setting]
    if "size" in processor.image:
        assert dict(kind.size) == processor.image["size"]
    made = ours.process(drawing(90, 140), "auto")
    digest = bytes(32)
    save_picture(tmp_path, digest, made.tensors)
    shapes = {stored: tensor.shape for stored, tensor in file.tensors.items()}
    text = tiny_config(AS_TEXT[name]) if name in AS_TEXT else model.config.text_config
    tower = open_mmproj(composite_from_mmproj(file.metadata, shapes, text, SECTIONS), file)
    with closing(WorkerPool(1)) as pool:
        features = encoder_over(tower, tmp_path, pool).features(digest)
    assert len(features.hidden) == made.num_positions


def test_sizes_that_a_file_names(tmp_path: Path) -> None:
    metadata = {
        "clip.projector_type": "qwen3vl_merger", "clip.vision.patch_size": 16, "clip.vision.image_size": 768,
        "clip.vision.spatial_merge_size": 2, "clip.vision.image_min_pixels": 4096,
        "clip.vision.image_max_pixels": 1 << 20,
    }  # fmt: skip
    found = mmproj_processor(metadata)
    assert found.image["size"] == {"shortest_edge": 4096, "longest_edge": 1 << 20}
    assert found.image["image_mean"] == found.image["image_std"] == [0.5] * 3


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        ({}, (8, 4096)),
        ({"min": 0, "max": 0}, (8, 4096)),
        ({"min": 4}, (4, 4096)),
        ({"min": 5000}, (5000, 5000)),
        ({"max": 5}, (5, 5)),
        ({"min": 64, "max": 256}, (64, 256)),
        ({"min": 2, "max": 1}, None),
    ],
)
def test_pixels_that_a_file_names(bounds: dict[str, int], found: tuple[int, int] | None) -> None:
    """In positions of 32 x 32 pixels, of Qwen's, and in patches of a quarter, of Kimi's, which only has a largest."""
    metadata = {
        "clip.vision.patch_size": 16, "clip.vision.image_size": 768, "clip.vision.spatial_merge_size": 2,
        **{f"clip.vision.image_{end}_pixels": count * 32 * 32 for end, count in bounds.items()},
    }  # fmt: skip
    for kind in ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "kimik25"):
        file = {**metadata, "clip.projector_type": kind}
        if found is None:
            with pytest.raises(FormatError, match="image_min_pixels is 2048, more than image_max_pixels, 1024"):
                mmproj_processor(file)
        elif kind == "kimik25":
            assert mmproj_processor(file).image["max_patches"] == 4 * found[1]
        else:
            size = mmproj_processor(file).image["size"]
            assert size == {"shortest_edge": found[0] * 32 * 32, "longest_edge": found[1] * 32 * 32}


@pytest.mark.parametrize(
    ("kind", "bounds", "image"),
    [
        ("glm4v", {}, {"size": {"shortest_edge": 2 * 8 * 1024, "longest_edge": 2 * 4096 * 1024}}),  # of two frames
        ("glm5v", {}, {"min_image_tokens": 16, "max_image_tokens": 8000}),
        ("glm5v", {"min": 32, "max": 100}, {"min_image_tokens": 32, "max_image_tokens": 100}),
        ("minimax_m3", {}, {"size": {"shortest_edge": 8 * 1024, "longest_edge": 576 * 1024}}),
        ("idefics3", {}, {"size": {"longest_edge": 768}, "max_image_size": {"longest_edge": 768}}),
        ("gemma4v", {}, {"patch_size": 16, "pooling_kernel_size": 3}),
        ("lfm2", {}, {"encoder_patch_size": 16, "downsample_factor": 2}),
    ],
)
def test_sizes_of_other_projectors(kind: str, bounds: dict[str, int], image: dict[str, object]) -> None:
    metadata = {
        "clip.projector_type": kind, "clip.vision.patch_size": 16, "clip.vision.image_size": 768,
        **{f"clip.vision.image_{end}_pixels": count * 32 * 32 for end, count in bounds.items()},
    }  # fmt: skip
    found = mmproj_processor(metadata).image
    assert {key: found[key] for key in image} == image


def test_a_vocabulary_without_the_token_of_pictures(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma's converter drops it, and an unused one stands for it; without any a model says so."""
    files = pair(tmp_path, "gemma3")
    family = family_of("gemma3")
    one, other = (loaded(family, without) for without in ("<image_soft_token>", "<end_of_image>"))
    pictures = Pictures(EngineConfig(gguf_path=files))
    pictures.attach(one)
    assert pictures.reader is not None
    assert pictures.reader.placeholder == "<start_of_image>"
    assert pictures.reader.position_token_ids == {one.token_id("<unused0>")}
    assert pictures.reader.read(png(drawing())).num_positions == 4
    pictures.close()
    pictures = Pictures(EngineConfig(gguf_path=files))
    with caplog.at_level(logging.WARNING):
        pictures.attach(other)
    assert "no pictures: its tokenizer has no <end_of_image>, which" in caplog.text
    with pytest.raises(UnsupportedError, match=r"reads text only, no pictures: its tokenizer has no <end_of_image>"):
        pictures.require()
    pictures.close()


def pair(folder: Path, name: str) -> Path:
    """What begins as a GGUF does, beside a projector file."""
    model = tiny_with_tower(name)
    model.save_pretrained(folder / "saved")
    write_mmproj(folder / "mmproj-F32.gguf", model, name, folder / "saved")
    (folder / "model.gguf").write_bytes(b"GGUF")
    return folder / "model.gguf"


def test_which_ggufs_read_pictures(tmp_path: Path) -> None:
    path = pair(tmp_path, "gemma3")
    assert why_no_pictures(EngineConfig(gguf_path=path)) is None
    assert why_no_pictures(EngineConfig(gguf_path=tmp_path)) is None
    assert why_no_pictures(EngineConfig(model_path=tmp_path)) is None  # which has no safetensors
    (tmp_path / "elsewhere").mkdir()
    projector = (tmp_path / "mmproj-F32.gguf").rename(tmp_path / "elsewhere" / "tower.gguf")
    assert "no config.json" in str(why_no_pictures(EngineConfig(gguf_path=path)))
    assert why_no_pictures(EngineConfig(gguf_path=path, mmproj=projector)) is None
    clip(projector, "ldpv2")
    with pytest.raises(UnsupportedError, match=r"tower\.gguf: projectors of type 'ldpv2' are not read here; "):
        why_no_pictures(EngineConfig(gguf_path=path, mmproj=projector))
    beside = projector.rename(tmp_path / "mmproj-F32.gguf")
    why_not = why_no_pictures(EngineConfig(gguf_path=path))  # whom nobody has asked for
    assert str(why_not).startswith(f"{beside}: projectors of type 'ldpv2' are not read here; ")
    beside.write_bytes(b"GGUF")
    assert str(beside) in str(why_no_pictures(EngineConfig(gguf_path=path)))


def test_pictures_of_another_projector_are_others(tmp_path: Path) -> None:
    """Their keys and values in files would be taken for the same."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    projector = folder / "mmproj-model.gguf"
    projector.write_bytes(b"GGUF")
    config = EngineConfig(gguf_path=folder / "model.gguf")
    first = _tower_key(config)
    assert first == _tower_key(config) != b""
    projector.write_bytes(b"GGUF of more bytes")
    assert _tower_key(config) != first
    (folder / "model.gguf").rename(folder / "model.safetensors")
    assert _tower_key(EngineConfig(model_path=folder)) == b""
