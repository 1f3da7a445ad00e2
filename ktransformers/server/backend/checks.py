"""What can be known to be wrong with a request before it is queued. Knows the model's facts, not how it is run."""

from __future__ import annotations

from ktransformers.engine.checks import check_prompt
from ktransformers.server.backend.base import GenerationRequest, ModelInfo

__all__ = ["check_request"]


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
