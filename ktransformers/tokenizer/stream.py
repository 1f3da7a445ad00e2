"""Converts the token ids of one answer to its text, up to a stop string. Does not know who samples the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.stop import StopMatcher
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """The text of one answer.

    Feed ids with `add`, end with `finish`; each returns new text and the stop string in it, if any.
    min_tokens: stop strings are looked for behind so many tokens. include_stop: the text ends with the stop string.

    Without a tokenizer, or with one without vocabulary, the text is always empty; stop strings then raise ConfigError.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        if tokenizer is not None and not tokenizer.has_vocabulary:
            tokenizer = None
        if stops and tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and this model's files hold none; use stop_token_ids")
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer(skip_special_tokens)
        self._stops = StopMatcher(stops)
        self._num_free, self._include_stop = min_tokens, include_stop

    def add(self, token_id: int) -> tuple[str, str | None]:
        """Return the text that became certain with this token, up to the stop string that it completed, and that."""
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.add(token_id)
        if self._num_free:
            self._num_free -= 1
            return text, None
        return self._found(*self._stops.feed(text))

    def finish(self) -> tuple[str, str | None]:
        """Return the text held back, and the stop string in it if there is one after all."""
        if self._detokenizer is None:
            return "", None
        text, stop = self._found(*self._stops.feed(self._detokenizer.flush()))
        return text + self._stops.flush(), stop

    def _found(self, text: str, stop: str | None) -> tuple[str, str | None]:
        return (text + stop if stop is not None and self._include_stop else text), stop
