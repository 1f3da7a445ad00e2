"""The tokens that a constraint allows, one after the other, over one model's vocabulary. llguidance reads the grammars.

A token stands for its bytes (`Tokenizer.token_bytes`), so a grammar accepts exactly the texts that the detokenizer
writes. Control tokens stand for themselves: no text matches them, and a Lark grammar names them as <|name|>. Knows no
requests and no reasoning; see engine/sampling/constraints.py.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ktransformers.core import Constraint, ConstraintKind
from ktransformers.errors import ConfigError
from ktransformers.tokenizer.schemas import JSON_OPTIONS, SchemaError, Widened, core_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["MAX_CONSTRAINT_CHARS", "Grammars", "Matcher", "Words", "core_of_text", "pack_ids"]

MAX_CONSTRAINT_CHARS = 1 << 18
"""Longest text of a constraint: reading one as long as this takes some tenths of a second."""

_MAX_TOOL_GRAMMAR_CHARS = 1 << 20
"""The same of tools, whose grammar is several times as long as their schemas; it is read faster than a schema."""

Words = npt.NDArray[np.uint32]
"""Bits [ceil(V / 32)], one per token; token 0 is the lowest bit of the first word."""

_MAX_LEVELS = 1000
"""How deep what a constraint refers to may lie within each other: llguidance goes down on the stack, which ends the
process at about twice as many on a thread with 8 MiB of it."""

_MAX_REASON_CHARS = 400

_MAX_ROW = 8000
"""Places of a grammar that may be open at once: four for each property that may be left out, in all alternatives."""

logger = logging.getLogger(__name__)


def pack_ids(token_ids: Iterable[int], vocab_size: int) -> Words:
    """Return the bits of some tokens as a mask, uint32 [ceil(vocab_size / 32)].

    Ids that the vocabulary does not have are left out.
    """
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    ids = np.array([i for i in token_ids if 0 <= i < vocab_size], np.int64)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return words


class Matcher:
    """The state of one answer in its grammar. One thread at a time."""

    def __init__(self, matcher: LLMatcher, ends: Words, name: str):
        self._matcher, self._ends, self._name = matcher, ends, name

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance the answer by these tokens. What they do not fit shows in `allowed`."""
        if token_ids:
            self._matcher.consume_tokens(list(token_ids))

    def allowed(self) -> Words:
        """Return a mask of the tokens that may come next.

        End tokens may come where the grammar accepts. Where it can go no further they are the only ones. Raises
        ConfigError when the answer does not fit, or the grammar turned out to be too much to follow.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: len(self._ends)].copy()
        if self._matcher.is_error():
            raise ConfigError(f"no answer can follow the {self._name} any further: {_shortened(self._matcher)}")
        return words | self._ends if (words & self._ends).any() else words  # the grammar knows one of them


class Spelled(Protocol):
    """The part of a Tokenizer that grammars need."""

    @property
    def has_vocabulary(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def added_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes:
        """Return the bytes that this token stands for."""
        ...

    def encode(self, text: str, /, add_special_tokens: bool) -> list[int]:
        """Return the token ids of `text`."""
        ...


class Grammars:
    """Reads constraints for one vocabulary. vocab_size: logits of a row. eos_token_ids: end an answer.

    What is needed of the tokenizer is prepared when it is first asked for. Any number of threads.
    """

    def __init__(self, tokenizer: Spelled, vocab_size: int, eos_token_ids: Sequence[int]):
        self.tokenizer, self.vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._prepared: LLTokenizer | None = None

    def check(self, constraint: Constraint) -> Words:
        """Return a mask of the tokens that an answer may begin with.

        Raises ConfigError for a constraint that is wrong, too large, never ends, or asks for what cannot be enforced.
        """
        matcher = self.matcher(constraint)
        words = matcher.allowed()
        if not words.any():
            raise ConfigError(f"no answer could follow the {_NAMES[constraint.kind]}")
        # What is forced by a first token, and never ends or is too much to follow, shows behind it.
        begins = np.unpackbits((words & ~self.ends).view(np.uint8), bitorder="little").nonzero()[0]
        matcher.consume(begins[:1].tolist())
        matcher.allowed()
        return words

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return a matcher at the start of an answer. Raises as `check`."""
        from llguidance import LLMatcher

        grammar = _grammar(constraint)
        made = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=_limits())
        if made.is_error():
            reason = _shortened(made, is_ours=constraint.kind is ConstraintKind.TOOL_CALLS)
            raise ConfigError(f"the {_NAMES[constraint.kind]} cannot be followed: {reason}")
        return Matcher(made, self.ends, _NAMES[constraint.kind])

    @functools.cached_property
    def ends(self) -> Words:
        """The mask of end tokens."""
        return pack_ids(self._eos_token_ids, self.vocab_size)

    @functools.cached_property
    def break_ids(self) -> frozenset[int]:
        """The ids of tokens that are line breaks and nothing else."""
        known = range(min(self.tokenizer.vocab_size, self.vocab_size))
        return frozenset(i for i in known if (text := self.tokenizer.token_bytes(i)) and not text.strip(b"\r\n"))

    @functools.cached_property
    def breaks(self) -> Words:
        """The mask of tokens that are line breaks and nothing else."""
        return pack_ids(self.break_ids, self.vocab_size)

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._prepared is None:
                self._prepared = self._prepare()
            return self._prepared

    def _prepare(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        ends = [token_id for token_id in self._eos_token_ids if 0 <= token_id < self.vocab_size]
        if not self.tokenizer.has_vocabulary:
            raise ConfigError("constraints are about text, and this model's files hold no vocabulary")
        if not ends:
            raise ConfigError("constraints need an end token, and this model's files name none")
        wrapper = TokenizerWrapper(_Vocabulary(self.tokenizer, self.vocab_size, ends[0]))
        return LLTokenizer(wrapper, eos_token=ends[0])


class _Vocabulary:
    """The tokenizer as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Spelled, vocab_size: int, eos_token_id: int):
        known = min(tokenizer.vocab_size, vocab_size)
        self.tokens = [tokenizer.token_bytes(i) if i < known else b"" for i in range(vocab_size)]
        # Tags that are tokens of their own are no text either: parsers read them as tags wherever they stand.
        self.special_token_ids = [i for i in sorted(tokenizer.added_ids) if i < vocab_size]
        self.eos_token_id = eos_token_id
        self._encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


_NAMES = {
    ConstraintKind.JSON_OBJECT: "JSON object",
    ConstraintKind.JSON_SCHEMA: "JSON schema",
    ConstraintKind.REGEX: "regular expression",
    ConstraintKind.CHOICE: "list of choices",
    ConstraintKind.GRAMMAR: "grammar",
    ConstraintKind.TOOL_CALLS: "grammar of tool calls",
}


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=_MAX_ROW, verbose_errors=False)


def _shortened(matcher: LLMatcher, *, is_ours: bool = False) -> str:
    """The reason of an error. is_ours: without the lines of the grammar, which no client has seen."""
    said = matcher.get_error().replace("<non-verbose/>", "").replace("NoExtensionBias", "nothing fits it")
    reason = " ".join((said.partition("\n")[0] if is_ours else said).split())
    return reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[:_MAX_REASON_CHARS]}..."


def _grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's own form. Raises ConfigError."""
    from llguidance import LLMatcher, regex_to_lark

    kind, text = constraint.kind, constraint.text
    limit = _MAX_TOOL_GRAMMAR_CHARS if kind is ConstraintKind.TOOL_CALLS else MAX_CONSTRAINT_CHARS
    if len(text) > limit:
        raise ConfigError(f"the {_NAMES[kind]} has {len(text)} characters; at most {limit} are read")
    match kind:
        case ConstraintKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS)
        case ConstraintKind.JSON_SCHEMA:
            return _of_schema(text)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'd')}/")  # \d is [0-9]
        case ConstraintKind.CHOICE:
            return _of_choices(text)
        case ConstraintKind.GRAMMAR:
            return _of_lark(text)
        case ConstraintKind.TOOL_CALLS:  # what of it a request may nest was looked at when it was written
            return LLMatcher.grammar_from_lark(text)


def _of_schema(text: str) -> str:
    from llguidance import LLMatcher

    core, widened = core_of_text(text)
    _log_widened(tuple(one.keyword for one in widened))
    try:
        return LLMatcher.grammar_from_json_schema(core, overrides=JSON_OPTIONS)
    except ValueError as error:  # more within each other than its reader goes into
        raise ConfigError(f"the JSON schema cannot be read: {error}") from error


def core_of_text(text: str) -> tuple[str, tuple[Widened, ...]]:
    """Return a request's JSON schema in keywords that grammars follow, and where it takes more than was asked.

    Raises ConfigError for what is no schema, and for one that cannot be followed.
    """
    if len(text) > MAX_CONSTRAINT_CHARS:
        raise ConfigError(f"the JSON schema has {len(text)} characters; at most {MAX_CONSTRAINT_CHARS} are read")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise ConfigError("a JSON schema must be an object")
    try:
        core = core_schema(schema)
    except SchemaError as error:
        raise SchemaError(error.at, error.keyword, error.reason, "the JSON schema cannot be followed: ") from error
    return core.text, core.widened


@functools.cache
def _log_widened(keywords: tuple[str, ...]) -> None:
    """Once for each list of them; requests to a server are named there (server/answers/constraints.py)."""
    if keywords:
        logger.warning("answers are not held to all of a JSON schema; left out: %s", ", ".join(dict.fromkeys(keywords)))


def _of_choices(text: str) -> str:
    from llguidance import LLMatcher

    choices = json.loads(text)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


def _of_lark(text: str) -> str:
    """Lark as llguidance has it; llama.cpp's GBNF is rewritten."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    _check_levels("grammar", text.count("::="))
    try:
        lark = any_to_lark(text)
    except Exception as error:  # whatever the rewriting stumbles over, it is about this text
        raise ConfigError(f"the grammar is no GBNF that could be read: {error}") from error
    rules = sum(":" in line for line in lark.splitlines())
    _check_levels("grammar", rules + lark.count("(") + lark.count("$ref") * _depth_of_text(lark))
    return LLMatcher.grammar_from_lark(lark)


def _check_levels(what: str, levels: int) -> None:
    if levels > _MAX_LEVELS:
        raise ConfigError(
            f"the {what} has parts that may lie {levels} levels within each other; at most {_MAX_LEVELS} do"
        )


def _depth_of_text(text: str) -> int:
    """Most braces and brackets that are open at once, those in strings counted too."""
    depth = deepest = 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        deepest = max(deepest, depth)
    return deepest
