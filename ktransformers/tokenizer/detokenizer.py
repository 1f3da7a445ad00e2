"""Converts token ids to text, one token at a time, never half a character.

Almost every tokenizer of a language model spells tokens as bytes, in one of two ways: byte-level (each character of a
token stands for a byte; GPT-2) or SentencePiece ("▁" for a space, `<0xE4>` for single bytes). For these a token is
looked up as bytes and an incremental UTF-8 decoder does the rest: constant work per token, and the pieces concatenate
to the decoding of the whole by construction. Any other decoder goes through a sliding window of full decodings.
Does not know models, stop strings or chat.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from tokenizers import Tokenizer
from typing_extensions import override

__all__ = ["ByteDetokenizer", "Detokenizer", "TokenBytes", "WindowDetokenizer", "token_bytes_of"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the others move to 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(moved)}


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # an added token is spelled as plain text
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.match(token)
    return bytes.fromhex(match[1]) if match else token.replace("\u2581", " ").encode()


class TokenBytes:
    """The bytes of each token id, looked up once. Unknown ids are empty. `strips_space`: see ByteDetokenizer."""

    def __init__(self, tokenizer: Tokenizer, spell: Callable[[str], bytes], strips_space: bool):
        self._tokenizer, self._spell, self.strips_space = tokenizer, spell, strips_space
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._known[token_id] = b"" if token is None else self._spell(token)
        return found


def token_bytes_of(tokenizer: Tokenizer) -> TokenBytes | None:
    """Return how `tokenizer` spells its tokens as bytes, or None when its decoder is of neither known kind."""
    if tokenizer.decoder is None:
        return None
    described = json.loads(tokenizer.decoder.__getstate__())
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(tokenizer, _from_byte_level, strips_space=False)
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaces = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
        strips = [(step["content"], step["start"], step["stop"]) for step in steps if step["type"] == "Strip"]
        if replaces == [({"String": "\u2581"}, " ")] and strips in ([], [(" ", 1, 0)]):
            return TokenBytes(tokenizer, _from_sentencepiece, strips_space=bool(strips))
    return None


class Detokenizer(ABC):
    """A detokenizer of one stream of tokens.

    Feed ids with `add`, end with `flush`; the returned pieces are the text, in order.
    """

    @abstractmethod
    def add(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is unfinished."""

    @abstractmethod
    def flush(self) -> str:
        """Return the text that is left at the end: U+FFFD for an unfinished character, otherwise nothing."""

    def all(self, token_ids: Iterable[int]) -> str:
        """Return the text of a whole sequence."""
        return "".join([*map(self.add, token_ids), self.flush()])


class ByteDetokenizer(Detokenizer):
    """A detokenizer that decodes tokens as bytes through an incremental UTF-8 decoder. Ids in `skipped` have no text.

    A malformed sequence becomes U+FFFD per maximal subpart (Unicode chapter 3, table 3-8). SentencePiece texts begin
    with a space that is not part of the text (`strips_space`); it is dropped once.
    """

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int] = frozenset()):
        self._bytes, self._skipped = token_bytes, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._must_strip = token_bytes.strips_space

    @override
    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        spelled = self._bytes[token_id]
        if self._must_strip and spelled:
            spelled, self._must_strip = spelled.removeprefix(b" "), False
        return self._decoder.decode(spelled)

    @override
    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """A detokenizer that decodes the last few tokens with and without the new ones.

    It is for decoders that are not a map from tokens to bytes.
    Text that ends in U+FFFD is held back for up to MAX_HELD tokens, because it is usually an unfinished character.
    """

    MAX_HELD = 8

    def __init__(self, decode: Callable[[list[int]], str], skipped: frozenset[int] = frozenset()):
        self._decode, self._skipped = decode, skipped
        self._done: list[int] = []  # tokens whose text was returned and that give the new ones their context
        self._held: list[int] = []

    @override
    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        text = self._new_text()
        if not text or (text.endswith("\ufffd") and len(self._held) <= self.MAX_HELD):
            return ""
        self._done, self._held = self._held, []
        return text

    @override
    def flush(self) -> str:
        text = self._new_text() if self._held else ""
        self._done, self._held = [], []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._done) if self._done else ""
        return self._decode(self._done + self._held)[len(before) :]
