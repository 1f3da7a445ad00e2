"""Towers on a real GPU: whole, and with weights that come from RAM block by block, which leaves the numbers alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.media.features import PictureFeatures
from ktransformers.engine.media.towers import TowerPlace
from ktransformers.engine.model.opened import open_model
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.device import Devices
from tests.support.pictures.towers import IMAGE_TOKEN, encoder_over, heard, picture, save_picture, tiny_with_tower

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DIGEST = bytes(range(32))
TOLERANCE = 0.05  # of the largest element, for some layers in bf16


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.close()


def computed(folder: Path, pool: WorkerPool, *, is_streamed: bool) -> tuple[PictureFeatures, int]:
    """The features of the picture, computed twice, and the bytes that the tower keeps on the GPU."""
    before = torch.cuda.memory_allocated()
    opened = open_model(EngineConfig(model_path=folder, picture_folder=folder))
    assert opened.tower is not None
    place = TowerPlace(Devices()["cuda:0"], is_streamed=is_streamed)
    encoder = encoder_over(opened.tower, folder, pool, place, max_bytes=0)
    first = encoder.features(DIGEST)
    encoder._kept.clear()
    second = encoder.features(DIGEST)
    assert torch.equal(first.hidden, second.hidden)
    torch.cuda.synchronize()
    return second, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "mistral3"])
def test_streamed_and_whole_are_the_same(name: str, tmp_path: Path, pool: WorkerPool) -> None:
    model = tiny_with_tower(name, seed=1)
    model.save_pretrained(tmp_path)
    tensors = picture(name, model, 2, 3)
    save_picture(tmp_path, DIGEST, tensors)
    whole, kept_whole = computed(tmp_path, pool, is_streamed=False)
    streamed, kept_streamed = computed(tmp_path, pool, is_streamed=True)
    assert torch.equal(whole.hidden, streamed.hidden)
    assert all(
        torch.equal(one, other) for one, other in zip(whole.by_layer.values(), streamed.by_layer.values(), strict=True)
    )
    assert kept_streamed < kept_whole
    want = heard(model, [IMAGE_TOKEN] * len(whole.hidden), **tensors)["inputs_embeds"][0]
    assert (whole.hidden - want).abs().max() <= TOLERANCE * want.abs().max()
