"""Text to ids, within limits of length and, where a tokenizer brings patterns of its own, of time."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.system.asked_process import AnswerTimeout
from ktransformers.tokenizer.pattern_limits import TimedEncoder, why_not_trusted
from ktransformers.tokenizer.shortening import text_too_long

__all__ = ["TextEncoder"]

_log = logging.getLogger(__name__)


class TextEncoder:
    """Encodes texts by a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        own = why_not_trusted(tokenizer)
        if own:
            _log.info("the tokenizer has %s: texts get a limit of time", own)
        self.timed = TimedEncoder(tokenizer) if own else None

    @cached_property
    def max_token_chars(self) -> int:
        """The most characters of text of one token, as tokens are spelled: at least as many as it really has.

        Tokens for what a vocabulary does not know are excepted: some melt any number of characters into one.
        """
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, add_special_tokens: bool, max_len: int | None = None) -> list[int]:
        """Return the token ids of `text`.

        add_special_tokens adds the model's BOS. max_len: most tokens that are of use; a text that must have more is
        refused before it is looked at. The work is done without the interpreter's lock: on a thread of its own it keeps
        no other thread waiting.

        Raises ContextLengthError for a text with more tokens than max_len; ConfigError for a string that is not Unicode
        text (lone surrogates), or that the tokenizer gives up on.
        """
        if max_len is not None and len(text) > max_len * self.max_token_chars:
            least = -(-len(text) // self.max_token_chars)
            raise text_too_long(f"{len(text)} characters, which are {least} tokens or more", least, max_len)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"the text is not valid Unicode: {error.reason} at character {error.start}"
                ) from error
        ids = self._ids(text, add_special_tokens)
        if isinstance(ids, str):
            raise ConfigError(f"the tokenizer gives up on this text of {len(text)} characters: {ids[:200]}")
        if max_len is not None and len(ids) > max_len:
            raise text_too_long(f"{len(ids)} tokens", len(ids), max_len)
        return ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int] | str:
        """The ids, or why the tokenizer gave up."""
        try:
            if self.timed is not None:
                return self.timed.encode(text, add_special_tokens)
            # Unlike `encode`, this lets other threads run in every version of the library, and computes no offsets.
            encode = self._tokenizer.encode_batch_fast
            return list(encode([text], add_special_tokens=add_special_tokens)[0].ids)
        except BaseException as error:
            # What panics in Rust is no Exception, so that nobody takes it for one; here it is about this text alone.
            if not isinstance(error, AnswerTimeout) and type(error).__name__ != "PanicException":
                raise
            return str(error)
