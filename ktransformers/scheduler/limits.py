"""Checks a request before anything is computed for it: the one place for every way in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError, ContextLengthError, PromptError, UnsupportedError
from ktransformers.media.records import MediaItem, Sight, is_media_id, whole_stretches

__all__ = ["Limits", "tokens_beside"]

_TOO_LONG = {
    Sight.PICTURE: ("a picture takes", "send a smaller one"),
    Sight.PICTURES: ("the pictures of the prompt take, with all that is between them,", "send fewer or smaller ones"),
    Sight.PROMPT: ("the prompt takes, with its pictures,", "shorten it"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of what a request may ask of a loaded model.

    max_len: most tokens of prompt and answer together. is_models_limit: whether that is what the model takes; else
    set_by names the option that sets it, and remedy says in words how it is made larger. has_head: whether the model
    generates text. num_extra_ids: ids behind the vocabulary that prompts may have. max_picture_len: most positions that
    one step computes, for what picture_sight says that it has to.
    """

    max_len: int
    vocab_size: int
    is_models_limit: bool
    has_vocabulary: bool = True
    has_head: bool = True
    set_by: str = "--cache_lens"
    remedy: str = "start with a larger --cache_lens"
    num_extra_ids: int = 0
    max_picture_len: int = 0
    picture_sight: Sight = Sight.NOTHING

    def check(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        prediction_ids: Sequence[int] = (),
        media: Sequence[MediaItem] = (),
    ) -> None:
        """Raise ConfigError for values that the model cannot take, PromptError for a prompt of such, ContextLengthError
        for one that never fits, UnsupportedError for text that is asked of a model without an output head.

        prediction_ids, media: see scheduler.records.Request; there may be as many as of a prompt of the former.
        """
        if not self.has_head and params.pooling is None:
            raise UnsupportedError(
                "this model's files hold no output head (lm_head): it generates no text; ask it for embeddings"
            )
        if not prompt_ids:
            raise PromptError("the prompt is empty: there is nothing to continue")
        if len(prompt_ids) >= self.max_len:
            raise self.too_long(len(prompt_ids))
        if len(prediction_ids) >= self.max_len:
            raise self.long_prediction(len(prediction_ids))
        self._check_pictures(prompt_ids, media)
        named = {
            "the prompt": tokens_beside(prompt_ids, media),
            "the prediction": prediction_ids,  # draft tokens are inputs of the model, as the prompt is
            "logit_bias": tuple(params.logit_bias),
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for where, token_ids in named.items():
            end = self.vocab_size + (self.num_extra_ids if where == "the prompt" else 0)
            for token_id in token_ids and (min(token_ids), max(token_ids)):
                if not 0 <= token_id < end:
                    raise ConfigError(f"{where} names token {token_id}; this model's ids are 0 to {end - 1}")
        for token_id, bias in params.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise ConfigError(f"logit_bias of token {token_id} must be in [-100, 100], got {bias}")
        if params.stop and not self.has_vocabulary:
            raise ConfigError("stop strings need a tokenizer, and this model's files hold none; use stop_token_ids")

    def _check_pictures(self, prompt_ids: Sequence[int], media: Sequence[MediaItem]) -> None:
        stretches, most = whole_stretches(prompt_ids, media, self.picture_sight), self.max_picture_len
        longest = max((end - start for start, end in stretches), default=0)
        if longest > most:
            what, less = _TOO_LONG[self.picture_sight]
            raise PromptError(
                f"{what} {longest} positions, which this model computes in one step, and steps have {most}: "
                f"{less}, or start with a larger --chunk_size"
            )

    def long_prediction(self, num_tokens: int) -> ConfigError:
        """Make the error for a prediction of so many tokens. It is no ContextLengthError: no conversation that gets
        shorter helps."""
        most = self.max_len - 1
        return ConfigError(f"the prediction has {num_tokens} tokens, and no answer has more than {most}: shorten it")

    def too_long(self, prompt_len: int, what: str = "prompt", *, has_answer: bool = True) -> ContextLengthError:
        """Make the error for a prompt of so many tokens, at least. what: what its sender calls it.

        has_answer: whether there is an answer that it has to leave room for.

        It begins as OpenAI's does: programs that shorten conversations by themselves know it by these words.
        """
        limit = "what the model takes" if self.is_models_limit else f"set by {self.set_by}"
        remedy = f"shorten the {what}" + ("" if self.is_models_limit else f", or {self.remedy}")
        together = ", for prompt and answer together" if has_answer else ""
        consequence = ", which leaves no room for an answer" if has_answer else ""
        return ContextLengthError(
            f"This model's maximum context length is {self.max_len} tokens ({limit}){together}. "
            f"However, the {what} has {prompt_len} tokens{consequence}: {remedy}",
            prompt_len=prompt_len,
            max_len=self.max_len,
        )


def tokens_beside(prompt_ids: Sequence[int], media: Sequence[MediaItem]) -> Sequence[int]:
    """Return the ids of a prompt that stand for tokens. Raises ConfigError for items that are no stretches of it, one
    behind the other."""
    if not media:
        return prompt_ids
    found, end = list[int](), 0
    for item in media:
        if not end <= item.start < item.end <= len(prompt_ids):
            raise ConfigError(
                f"a picture stands at positions {item.start} to {item.end - 1} of a prompt of {len(prompt_ids)}; "
                f"the one before it ends at {end - 1}"
            )
        found += prompt_ids[end : item.start]
        found += [one for one in prompt_ids[item.start : item.end] if not is_media_id(one)]
        end = item.end
    return [*found, *prompt_ids[end:]]
