"""Checks of a model's folder before its weights are read. Limits checks requests."""

from __future__ import annotations

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import folder_without_tokenizer
from ktransformers.errors import ConfigError

__all__ = ["check_tokenizer"]


def check_tokenizer(config: EngineConfig) -> None:
    """Raise ConfigError for a model's folder without tokenizer, before its weights are read: it could serve no text.

    A GGUF that says itself that it has no vocabulary is served, for requests with token ids.
    """
    folder = folder_without_tokenizer(config)
    if folder is not None:
        raise ConfigError(
            f"{folder} holds no tokenizer (tokenizer.json, tokenizer_config.json), so requests could carry no text; "
            "copy them there from the original model, or pass its folder as --model_path and the weights as --gguf_path"
        )
