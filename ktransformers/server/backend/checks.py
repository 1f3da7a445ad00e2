"""What can be known to be wrong with a request before it is queued. Knows the model's facts, not how it is run."""

from __future__ import annotations

from ktransformers.config import EngineConfig
from ktransformers.engine.opened import folder_without_tokenizer
from ktransformers.errors import ConfigError, ContextLengthError
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
    prompt_ids, params = request.prompt_ids, request.params
    if not prompt_ids:
        raise ConfigError("the prompt is empty: there is nothing to continue")
    if len(prompt_ids) >= model.max_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens and the server takes {model.max_len} for prompt and answer: no "
            "room for an answer; shorten the prompt, or start the server with a larger --cache_lens",
            prompt_len=len(prompt_ids),
            max_len=model.max_len,
        )
    named = {
        "the prompt": prompt_ids,
        "logit_bias": tuple(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for where, token_ids in named.items():
        for token_id in token_ids and (min(token_ids), max(token_ids)):
            if not 0 <= token_id < model.vocab_size:
                raise ConfigError(f"{where} names token {token_id}; this model's ids are 0 to {model.vocab_size - 1}")
    for token_id, bias in params.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            raise ConfigError(f"logit_bias of token {token_id} must be in [-100, 100], got {bias}")
    if params.stop and not model.tokenizer.has_vocabulary:
        raise ConfigError("stop strings need a tokenizer, and this model's files hold none; use stop_token_ids")
