"""Token ids of one answer to its text, without stop strings. Does not know who samples the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.stop import StopMatcher
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """Feed ids with `add`, end with `finish`; each returns new text and the stop string found in it, if any.

    Without a tokenizer, or with one without vocabulary, the text is always empty; stop strings then raise ConfigError.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]):
        if tokenizer is not None and not tokenizer.has_vocabulary:
            tokenizer = None
        if stops and tokenizer is None:
            raise ConfigError("stop strings need a tokenizer, and this model's files hold none; use stop_token_ids")
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer()
        self._stops = StopMatcher(stops)

    def add(self, token_id: int) -> tuple[str, str | None]:
        """Text that became certain with this token, up to the stop string that it completed."""
        return ("", None) if self._detokenizer is None else self._stops.feed(self._detokenizer.add(token_id))

    def finish(self) -> tuple[str, str | None]:
        """The text held back, and the stop string in it if there is one after all."""
        if self._detokenizer is None:
            return "", None
        text, stop = self._stops.feed(self._detokenizer.flush())
        return text + self._stops.flush(), stop
