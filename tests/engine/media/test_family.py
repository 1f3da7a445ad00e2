"""What rows of pictures see, as the masks of transformers' composites have it."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from ktransformers.engine.media.family import PictureFamily, _read
from ktransformers.errors import UnsupportedError
from ktransformers.media.records import Sight
from tests.support.engines.picture_engines import IMAGE_TOKEN, picture_composite


@pytest.mark.parametrize("name", ["qwen3_vl", "kimi_k25", "mistral3", "glm4v_moe", "granite4_vision", "gemma4"])
def test_most_see_what_is_before(name: str) -> None:
    family = PictureFamily.of(picture_composite(name).config)
    assert family.sight is Sight.NOTHING
    assert family.token_id == (0 if name == "gemma4" else IMAGE_TOKEN)  # whose layers look up the pad token there


@pytest.mark.parametrize(("name", "sight"), [("paligemma", Sight.PROMPT), ("molmo2", Sight.PICTURES)])
def test_some_see_more(name: str, sight: Sight) -> None:
    family = PictureFamily.of(CONFIG_MAPPING[name]())
    assert (family.sight, family.ends_in_full) == (sight, True)


def test_some_see_the_whole_picture() -> None:
    assert PictureFamily.of(picture_composite("gemma3").config) == PictureFamily(IMAGE_TOKEN, Sight.PICTURE, True, True)
    config = picture_composite("gemma4", use_bidirectional_attention="vision").config
    assert PictureFamily.of(config) == PictureFamily(0, Sight.PICTURE, False, True)
    assert PictureFamily.of(CONFIG_MAPPING["gemma4_unified"]()).ends_in_windows


_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]}
VALUES = {"hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": _ROPE}}}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ovis2", "embeddings of its tower for tokens around pictures"),
        ("instructblip", r"a tower that reads the prompt, too \(qformer_input_ids\)"),
        ("hunyuan_vl", "turns positions of pictures along 4 axes, and 3 are known"),
        ("llama", "no class for images and text of model type llama"),
    ],
)
def test_what_is_refused(name: str, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        PictureFamily.of(CONFIG_MAPPING[name](**VALUES.get(name, {})))


def test_windows_that_a_picture_widens() -> None:
    """As older versions of transformers have Gemma 3: what the window or the picture shows."""
    rows, columns = torch.arange(16)[:, None], torch.arange(16)
    pictures = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 2, 2, 2, 2, 2, 2, 2, 0])
    same = (pictures[:, None] == pictures) & (pictures > 0)
    causal, near = columns <= rows, columns > rows - 4
    assert _read({"sliding_attention": (causal & near) | same}, pictures) == (False, True, True)
    assert _read({"sliding_attention": causal & near, "full_attention": causal | same}, pictures) == (
        True,
        False,
        False,
    )
    assert _read({"full_attention": causal & (columns % 3 > 0)}, pictures) is None
