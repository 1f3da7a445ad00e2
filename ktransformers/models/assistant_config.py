"""The config of an assistant of Gemma 4, by its config.json or the metadata of its GGUF."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ktransformers.errors import FormatError
from ktransformers.models.composite import text_config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["GGUF_ARCH", "GGUF_WIDTH", "assistant_config", "config_of_assistant", "is_assistant"]

GGUF_ARCH, GGUF_WIDTH = "gemma4-assistant", "embedding_length_out"
"""What llama.cpp's converter calls it, and the width of its target. Its files leave the clusters of tokens out, and
score all tokens."""

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def is_assistant(config: PretrainedConfig) -> bool:
    """Whether it is the config of a Gemma 4 assistant."""
    return config.model_type in _TYPES


def assistant_config(whole: PretrainedConfig) -> PretrainedConfig:
    """Return the config of an assistant's decoder, whose head is not bounded."""
    made = copy.deepcopy(text_config_of(whole))
    made.tie_word_embeddings, made.final_logit_softcapping = False, None
    return made


def config_of_assistant(metadata: Mapping[str, object], text: PretrainedConfig) -> PretrainedConfig:
    """Return the config of an assistant by its GGUF's metadata. text: of its decoder. Raises FormatError."""
    from transformers import CONFIG_MAPPING

    width = metadata.get(f"{GGUF_ARCH}.{GGUF_WIDTH}")
    if not isinstance(width, int) or width < 1:
        raise FormatError(f"the GGUF file's {GGUF_ARCH}.{GGUF_WIDTH} is {width!r:.40}, not the width of its target")
    text.vocab_size_per_layer_input = 0
    try:
        made: PretrainedConfig = CONFIG_MAPPING[_TYPES[0]](text_config=text, backbone_hidden_size=width)
    except Exception as error:  # whatever a config class does with values that do not fit each other
        raise FormatError(f"the GGUF file's metadata make no valid assistant: {error!s:.200}") from error
    return made
