"""Pictures in steps: logits as transformers' whole composite has them, whatever a step's rows are."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError
from ktransformers.media.records import MediaItem, Sight
from tests.support.engines.picture_engines import ComposedPictures, Prompt, picture_composite, picture_engine
from tests.support.engines.picture_steps import logits_of

TOLERANCE = 5e-5  # of the largest logit; both sides multiply the same fp32 numbers
FAMILIES = (
    *("kimi_k25", "mistral3", "mistral3 of mistral4", "gemma3", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v"),
    *("glm4v_moe", "exaone4_5", "step3p7", "gemma4", "qwen3_5", "qwen3_5_moe", "minimax_m3_vl", "glm5_next"),
    *("qwen4_exp", "granite4_vision", "ernie4_5_vl_moe", "paligemma", "paligemma of gemma2"),
    *("granite_docling", "idefics3", "molmo2", "gemma3 beyond its window", "gemma4 of vision"),
)
WINDOW = {"sliding_window": 4}  # shorter than pictures
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "gemma3 beyond its window": ("gemma3", WINDOW),
    "gemma4 of vision": ("gemma4", {**WINDOW, "use_bidirectional_attention": "vision"}),
}


def two_pictures(pictures: ComposedPictures) -> Prompt:
    first, second = pictures.picture("first", 2, 3), pictures.picture("second", 4, 2)
    return pictures.prompt([5, 9, 17, 23, 4], first, [60, 61, 62], second, [70, 71, 72, 73, 74])


def test_tokens_around_pictures_see_them_too(tmp_path: Path) -> None:
    """As Molmo 2's processor says, with ids that the vocabulary of answers does not have."""
    engine, pictures = picture_engine(composite("molmo2"), tmp_path)
    assert engine.model.num_extra_ids == 128
    with closing(engine):
        prompt, start, end = two_pictures(pictures), 170, 171
        one, two = prompt.media
        ids = prompt.ids
        ids = [*ids[: one.start], start, *ids[one.start : one.end], end, 60, start, *ids[two.start : two.end], end, 70]
        lead = MediaItem(one.digest, one.start, one.length + 2)
        wide = Prompt(ids, [lead, MediaItem(two.digest, lead.end + 1, two.length + 2)])
        want = pictures.logits(wide, [11, 12])
        got = logits_of(engine, wide, [11, 12], [len(ids)])
        assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
        again = logits_of(engine, wide, [11, 12], [one.start])  # what is in front may be computed before
        assert torch.equal(again, got)
        engine.scheduler_config.limits.check(ids, SamplingParams(), media=wide.media)
        with pytest.raises(ConfigError, match="names token 288; this model's ids are 0 to 287"):
            engine.scheduler_config.limits.check([288], SamplingParams())


def composite(name: str) -> PreTrainedModel:
    """name: a model type of COMPOSITES, or one of VARIANTS."""
    model_type, values = VARIANTS.get(name, (name, {}))
    return picture_composite(model_type, **values)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_composite(name: str, tmp_path: Path) -> None:
    engine, pictures = picture_engine(composite(name), tmp_path)
    with closing(engine):
        prompt, answer = two_pictures(pictures), [11, 12, 13]
        want = pictures.logits(prompt, answer)
        whole = logits_of(engine, prompt, answer, [len(prompt.ids)])
        assert (whole - want).abs().max() <= TOLERANCE * want.abs().max()
        if pictures.family.sight is Sight.NOTHING:
            assert torch.equal(logits_of(engine, prompt, answer, [4, 1, 2, 1, 1, 2, 9]), whole)
