"""What can be known to be wrong with a request before anything is computed for it."""

from __future__ import annotations

from collections.abc import Sequence

from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError, ContextLengthError

__all__ = ["check_prompt"]


def check_prompt(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_len: int,
    vocab_size: int,
    has_vocabulary: bool,
    limit: str,
    remedy: str,
) -> None:
    """Raises ConfigError for values that this model cannot take, ContextLengthError for a prompt that can never fit.

    max_len: most tokens of prompt and answer together. limit, remedy: who sets it, and what to do, in words.
    """
    if not prompt_ids:
        raise ConfigError("the prompt is empty: there is nothing to continue")
    if len(prompt_ids) >= max_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens and {limit} {max_len} for prompt and answer: no room for an "
            f"answer; {remedy}",
            prompt_len=len(prompt_ids),
            max_len=max_len,
        )
    named = {
        "the prompt": prompt_ids,
        "logit_bias": tuple(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for where, token_ids in named.items():
        for token_id in token_ids and (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise ConfigError(f"{where} names token {token_id}; this model's ids are 0 to {vocab_size - 1}")
    for token_id, bias in params.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            raise ConfigError(f"logit_bias of token {token_id} must be in [-100, 100], got {bias}")
    if params.stop and not has_vocabulary:
        raise ConfigError("stop strings need a tokenizer, and this model's files hold none; use stop_token_ids")
