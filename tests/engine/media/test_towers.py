"""Towers of saved composites give what transformers' composite hands to its language model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.media.encoder import TowerEncoder
from ktransformers.engine.media.features import PictureFeatures
from ktransformers.engine.media.towers import TowerPlace, blocks_of
from ktransformers.engine.model.opened import open_model
from ktransformers.errors import EngineError, TensorMismatchError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.media.records import MediaItem, media_ids
from ktransformers.operators.device import CPU
from ktransformers.operators.exact import NativeMathMode
from tests.support.models.fp8_models import to_fp8
from tests.support.pictures.towers import (
    IMAGE_TOKEN,
    TOWERS,
    encoder_over,
    heard,
    picture,
    save_picture,
    tiny_with_tower,
)

TOLERANCE = 1e-5  # of the largest element: both sides sum the same fp32 products, in another order
SIZES = ((2, 3), (4, 2))
FIRST, SECOND = bytes(range(32)), bytes(range(1, 33))
WITH_POSITIONS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_moe", "glm4v_moe", "ernie4_5_vl_moe")
WITH_DEEPSTACK = {"qwen3_vl": [0, 1], "qwen3_vl_moe": [0, 1], "granite4_vision": [-1, 0], "granite_docling": [0, 1]}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def encoder_of(folder: Path, pool: WorkerPool, place: TowerPlace | None = None) -> TowerEncoder:
    opened = open_model(EngineConfig(model_path=folder, picture_folder=folder))
    assert opened.tower is not None
    return encoder_over(opened.tower, folder, pool, place)


def is_equal(got: PictureFeatures, want: PictureFeatures) -> bool:
    pairs = zip((got.hidden, *got.by_layer.values()), (want.hidden, *want.by_layer.values()), strict=True)
    return all(torch.equal(one, other) for one, other in pairs) and [*got.by_layer] == [*want.by_layer]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", TOWERS)
def test_features_are_what_the_language_model_gets(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    model = tiny_with_tower(name, seed=1)
    model.save_pretrained(tmp_path)
    encoder = encoder_of(tmp_path, pool)
    for digest, size in zip((FIRST, SECOND), SIZES, strict=True):
        tensors = picture(name, model, *size)
        save_picture(tmp_path, digest, tensors)
        got = encoder.features(digest)
        ids = [3, *[IMAGE_TOKEN] * len(got.hidden), 4]
        plain = heard(model, ids, **tensors)
        with NativeMathMode(pool):
            same = heard(model, ids, **tensors)
        shown = got.hidden
        if encoder.family.added_to is not None:
            shown = shown + model.get_input_embeddings().weight[IMAGE_TOKEN].detach()
        assert (encoder.family.added_to == IMAGE_TOKEN) == (name == "molmo2")
        assert torch.equal(shown, same["inputs_embeds"][0, 1:-1])
        assert (shown - plain["inputs_embeds"][0, 1:-1]).abs().max() <= TOLERANCE * got.hidden.abs().max()
        layers = dict(enumerate(same.get("deepstack_visual_embeds") or []))
        layers |= {layer - 1: one for layer, one in (same.get("deepstack_features") or {}).items()}
        assert [*got.by_layer] == [*layers] == WITH_DEEPSTACK.get(name, [])
        assert all(torch.equal(one, layers[layer]) for layer, one in got.by_layer.items())
        assert encoder.features(digest).hidden is got.hidden


def with_bf16_files(folder: Path, model: PreTrainedModel) -> None:
    """Save a model with its tower in bf16, and give it those numbers."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    stored = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: tensor.bfloat16() for name, tensor in stored.items()}, path)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


PLACES = {
    "cpu": TowerPlace(),
    "streamed": TowerPlace(CPU, is_streamed=True),
    "gpu in fp32": TowerPlace(replace(CPU, name="cuda:0", is_gpu=True)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llama4"])
def test_places_and_types(name: str, place: str, tmp_path: Path, pool: WorkerPool) -> None:
    """Weights in bf16 are widened where they are computed with; wherever they are kept, the numbers are the same."""
    model = tiny_with_tower(name, seed=2)
    with_bf16_files(tmp_path, model)
    tensors = picture(name, model, *SIZES[0])
    save_picture(tmp_path, FIRST, tensors)
    encoder = encoder_of(tmp_path, pool, PLACES[place])
    got = encoder.features(FIRST)
    ids = [IMAGE_TOKEN] * len(got.hidden)
    if place.startswith("gpu"):  # whose products are torch's
        want = heard(model, ids, **tensors)
    else:
        with NativeMathMode(pool):
            want = heard(model, ids, **tensors)
    assert torch.equal(got.hidden, want["inputs_embeds"][0])
    kept = {parameter.dtype for parameter in encoder._tower.model.parameters()}
    assert kept == {torch.float32 if place.startswith("gpu") else torch.bfloat16}  # nothing widened is left behind


def test_at_most_two_blocks_are_there_at_a_time(tmp_path: Path, pool: WorkerPool) -> None:
    model = tiny_with_tower("qwen3_vl", seed=2)
    with_bf16_files(tmp_path, model)
    save_picture(tmp_path, FIRST, picture("qwen3_vl", model, 2, 2))
    encoder = encoder_of(tmp_path, pool, PLACES["streamed"])
    blocks = blocks_of(encoder._tower.model)
    assert len(blocks) == 5  # three layers, two mergers for deepstack
    widened: list[int] = []

    def count(*_: object) -> None:
        widened.append(sum(next(block.parameters()).dtype is torch.float32 for block in blocks))

    for block in blocks:
        block.register_forward_hook(count)
    encoder.features(FIRST)
    assert len(widened) == 5
    assert max(widened) <= 1  # the others are copied beside it, and swapped in when they run


def test_a_failure_leaves_the_weights_as_they_were(tmp_path: Path, pool: WorkerPool) -> None:
    model = tiny_with_tower("qwen3_vl", seed=2)
    with_bf16_files(tmp_path, model)
    good = picture("qwen3_vl", model, 2, 2)
    save_picture(tmp_path, FIRST, good)
    save_picture(tmp_path, SECOND, {**good, "pixel_values": good["pixel_values"][:-1]})
    encoder = encoder_of(tmp_path, pool)
    with pytest.raises(EngineError, match=f"the model's tower fails on picture {SECOND.hex()[:12]}: "):
        encoder.features(SECOND)
    assert {parameter.dtype for parameter in encoder._tower.model.parameters()} == {torch.bfloat16}
    assert is_equal(encoder.features(FIRST), encoder_of(tmp_path, pool).features(FIRST))


def test_a_picture_that_is_not_there(tmp_path: Path, pool: WorkerPool) -> None:
    model = tiny_with_tower("gemma3", seed=1)
    model.save_pretrained(tmp_path)
    encoder = encoder_of(tmp_path, pool)
    with pytest.raises(EngineError, match="is no longer there: send it again"):
        encoder.features(FIRST)
    (tmp_path / f"{FIRST.hex()}.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(EngineError, match="cannot be read: "):
        encoder.features(FIRST)


def test_results_are_kept_within_a_bound(tmp_path: Path, pool: WorkerPool) -> None:
    """The one that was not asked for longest goes first; the latest one stays however large it is."""
    model = tiny_with_tower("gemma3", seed=1)
    model.save_pretrained(tmp_path)
    opened = open_model(EngineConfig(model_path=tmp_path, picture_folder=tmp_path))
    assert opened.tower is not None
    one = 4 * 64 * 4  # four rows
    encoder = encoder_over(opened.tower, tmp_path, pool, max_bytes=2 * one)
    digests = [bytes([n]) * 32 for n in range(3)]
    for n, digest in enumerate(digests):
        save_picture(tmp_path, digest, picture("gemma3", model, 1, 1, seed=n))
    first, second = encoder.features(digests[0]), encoder.features(digests[1])
    assert encoder.features(digests[0]).hidden is first.hidden
    third = encoder.features(digests[2])
    assert encoder.features(digests[0]).hidden is first.hidden
    assert encoder.features(digests[2]).hidden is third.hidden
    again = encoder.features(digests[1])
    assert again.hidden is not second.hidden
    assert is_equal(again, second)


def prompt_of(model: PreTrainedModel, name: str, sizes: list[tuple[int, int]]) -> tuple[list[int], list[MediaItem]]:
    """Some tokens, and pictures with tokens around them."""
    ids, media = [3, 4, 5], []
    for digest, size in zip((FIRST, SECOND), sizes, strict=False):
        count = size[0] * size[1]
        media.append(MediaItem(digest, len(ids), count))
        ids += [*media_ids(digest, count), 6, 7]
    return ids, media


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_positions(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    model = tiny_with_tower(name, seed=1)
    model.save_pretrained(tmp_path)
    pictures = [picture(name, model, *size) for size in SIZES]
    for digest, tensors in zip((FIRST, SECOND), pictures, strict=True):
        save_picture(tmp_path, digest, tensors)
    encoder = encoder_of(tmp_path, pool)
    for count in (1, 2):
        ids, media = prompt_of(model, name, list(SIZES[:count]))
        together = {key: torch.cat([each[key] for each in pictures[:count]]) for key in pictures[0]}
        want = heard(model, [IMAGE_TOKEN if token >= 1 << 30 else token for token in ids], **together)["position_ids"]
        got = encoder.positions(ids, media)
        assert got is not None
        assert got.dtype is torch.int64
        assert got.shape == (3, len(ids))
        assert torch.equal(got, want[-3:, 0])
    assert encoder.positions([3, 4, 5], []) is None


def test_positions_are_numbered_through_elsewhere(tmp_path: Path, pool: WorkerPool) -> None:
    model = tiny_with_tower("gemma3", seed=1)
    model.save_pretrained(tmp_path)
    assert encoder_of(tmp_path, pool).positions(*prompt_of(model, "gemma3", [(2, 2)])) is None


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_a_damaged_tower_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    model = tiny_with_tower("qwen3_vl", seed=1)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = safetensors.torch.load_file(path)
    name = next(name for name in stored if name.endswith("visual.blocks.1.attn.proj.weight"))
    if damage == "missing":
        del stored[name]
    else:
        stored[name] = stored[name][:-1].clone()
    safetensors.torch.save_file(stored, path)
    with pytest.raises(TensorMismatchError, match=r"visual\.blocks\.1\.attn\.proj\.weight (is missing|has shape)"):
        open_model(EngineConfig(model_path=tmp_path, picture_folder=tmp_path))
    assert open_model(EngineConfig(model_path=tmp_path)).tower is None  # text alone is read


def test_files_without_a_tower_read_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_with_tower("qwen3_vl", seed=1)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: stored[name] for name in stored if "visual" not in name}, path)
    with caplog.at_level(logging.INFO):
        assert open_model(EngineConfig(model_path=tmp_path, picture_folder=tmp_path)).tower is None
    assert "no pictures: the files hold no tensors of the model's tower" in caplog.text


def test_tensors_for_sound_alone_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_with_tower("qwen3_vl", seed=1)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        open_model(EngineConfig(model_path=tmp_path, picture_folder=tmp_path))
    assert "left unread" not in caplog.text


def test_a_tower_in_bf16_beside_text_in_fp8(tmp_path: Path, pool: WorkerPool) -> None:
    model = tiny_with_tower("qwen3_vl_moe", seed=2)
    with_bf16_files(tmp_path, model)
    path, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    stored = safetensors.torch.load_file(path)
    matrices = [name for name in stored if re.search(r"language_model\..*\.self_attn\.[qkvo]_proj\.weight$", name)]
    assert len(matrices) == 8
    for name in matrices:
        stored[name], stored[f"{name}_scale_inv"], _ = to_fp8(stored[name].float())
    safetensors.torch.save_file(stored, path)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = picture("qwen3_vl_moe", model, *SIZES[0])
    save_picture(tmp_path, FIRST, tensors)
    got = encoder_of(tmp_path, pool).features(FIRST)
    with NativeMathMode(pool):
        want = heard(model, [IMAGE_TOKEN] * len(got.hidden), **tensors)
    assert torch.equal(got.hidden, want["inputs_embeds"][0])
