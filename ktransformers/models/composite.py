"""Finds the language model's part of a config for images and text. Knows no modules."""

from __future__ import annotations

import re
from collections.abc import Collection

from transformers import PretrainedConfig

from ktransformers.errors import ConfigError

__all__ = ["VISION_EXPERTS", "num_heads_of", "take_text_config", "text_config_of"]

VISION_EXPERTS = "vision_moe"
"""The part of a block whose router and experts are for rows that show pictures, where a family has such (ERNIE 4.5 VL);
a text config has them built where it says `has_vision_moe`."""

_HEAD = re.compile(r"(.*\.)?lm_head\.weight|(.*language_model\.)?output\.weight")  # not attn_output.weight


def text_config_of(whole: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the language model in `whole`, which is `whole` itself where that is no composite.

    Raises ConfigError for one that is no config.
    """
    text = whole.get_text_config(decoder=True)
    if not isinstance(text, PretrainedConfig):
        raise ConfigError(
            f"the model's config names a part for text (text_config, decoder ...) that is no config, but {text!r:.60}; "
            f"a {whole.model_type} model has none"
        )
    return text


def num_heads_of(part: object) -> int:
    """Return the heads of a tower's attention, by the tower's config; 0: it does not say."""
    return int(getattr(part, "num_attention_heads", None) or getattr(part, "num_heads", None) or 0)


def take_text_config(
    whole: PretrainedConfig, stored: Collection[str], *, shows_pictures: bool = False
) -> PretrainedConfig:
    """Return `text_config_of(whole)`, in which is set whether the model's head is its embedding table, and whether
    experts for pictures are built.

    stored: names of all tensors in the files. It is the composite's to say, and of no account where the files hold a
    head.
    """
    text = text_config_of(whole)
    if text is not whole:
        has_head = any(_HEAD.fullmatch(name) for name in stored)
        text.tie_word_embeddings = bool(getattr(whole, "tie_word_embeddings", False)) and not has_head
        if shows_pictures and isinstance(getattr(text, "moe_intermediate_size", None), list | tuple):
            text.has_vision_moe = True
    return text
