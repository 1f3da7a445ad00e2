"""What can be known to be wrong with a request before it is queued. Knows the model's facts, not how it is run."""

from __future__ import annotations

from ktransformers.config import EngineConfig
from ktransformers.engine.checks import check_prompt
from ktransformers.engine.opened import folder_without_tokenizer
from ktransformers.errors import ConfigError
from ktransformers.server.backend.base import GenerationRequest, ModelInfo

__all__ = ["check_request", "check_tokenizer"]


def check_tokenizer(config: EngineConfig) -> None:
    """Raises ConfigError for a model's folder without tokenizer, before its weights are read: it could serve no text.

    A GGUF that says itself that it has no vocabulary is served, for requests with token ids.
    """
    folder = folder_without_tokenizer(config)
    if folder is not None:
        raise ConfigError(
            f"{folder} holds no tokenizer (tokenizer.json, tokenizer_config.json), so requests could carry no text; "
            "copy them there from the original model, or pass its folder as --model_path and the weights as --gguf_path"
        )


def check_request(model: ModelInfo, request: GenerationRequest) -> None:
    """Raises ConfigError for values that this model cannot take, ContextLengthError for a prompt that can never fit."""
    check_prompt(
        request.prompt_ids,
        request.params,
        max_len=model.max_len,
        vocab_size=model.vocab_size,
        has_vocabulary=model.tokenizer.has_vocabulary,
        limit="the model takes at most" if model.is_models_limit else "the server takes",
        remedy="shorten the prompt"
        + ("" if model.is_models_limit else ", or start the server with a larger --cache_lens"),
    )
