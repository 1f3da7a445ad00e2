"""Pictures in models that several processes compute: they come with the driver's steps."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.media.records import Sight
from tests.support.engines.cut_models import HARDWARE
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.picture_engines import ComposedPictures, Prompt, picture_composite, picture_engine
from tests.support.engines.picture_steps import logits_of
from tests.support.models.agreement import TOLERANCE

ANSWER = [11, 12]


def shown(pictures: ComposedPictures) -> Prompt:
    return pictures.prompt([5, 9, 17], pictures.picture("a", 2, 3), [60, 61], pictures.picture("b", 2, 2), [70, 71])


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "granite4_vision", "ernie4_5_vl_moe"])
def test_stages_compute_what_one_process_does(name: str, tmp_path: Path) -> None:
    model = picture_composite(name)
    found = []
    for num_stages in (1, 2):
        engine, pictures = picture_engine(model, tmp_path / str(num_stages), pipeline=num_stages, self_check=False)
        with closing(engine):
            prompt = shown(pictures)
            cuts = [len(prompt.ids)] if pictures.family.sight is not Sight.NOTHING else [5, 5, 7]
            found.append(logits_of(engine, prompt, ANSWER, cuts))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "ernie4_5_vl_moe"])
def test_parts_of_all_layers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    engine, pictures = picture_engine(
        picture_composite(name), tmp_path, fake_hardware(2), HARDWARE, tensor_parallel=2, self_check=False
    )
    with closing(engine):
        prompt = shown(pictures)
        want = pictures.logits(prompt, ANSWER)
        got = logits_of(engine, prompt, ANSWER, [5, 5, 7])
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
