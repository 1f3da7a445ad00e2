"""Finds which tokens may come next in an answer that has rules: a constraint, an end of its reasoning, or both.

    opening ──opening tag──> reasoning ──closing tag──────────────────> content ──a tool call's first token──> free
       └──anything else, which is content already                          ↑
                             reasoning too long ──> closing, forced ───────┘

Masks are made on threads of their own, beside the model's step: what may follow a token is asked for as soon as the
token is known, and waited for when the next logits are there. A mask depends on the tokens of the answer alone, so a
run that starts anew, on a new engine perhaps, goes on as before.
"""

from __future__ import annotations

import functools
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto

from ktransformers.core import Constraint, ReasoningSpec, SamplingParams
from ktransformers.errors import ConfigError
from ktransformers.system.cores import usable_cores
from ktransformers.tokenizer.grammars import Grammars, Matcher, Words, pack_ids

__all__ = ["AnswerMask", "check_rules", "mask_of"]

_MAX_BREAKS = 2  # tokens of line breaks behind a closing tag, which belong to the tag

_MAX_END_BYTES = 256  # what ends reasoning is not longer


class _Place(Enum):
    OPENING = auto()
    REASONING = auto()
    CLOSING = auto()
    CONTENT = auto()
    FREE = auto()


def check_rules(grammars: Grammars, params: SamplingParams) -> None:
    """Raise ConfigError for a constraint that cannot be followed. Takes up to some tenths of a second."""
    if params.constraint is None:
        return
    begins = grammars.check(params.constraint) | pack_ids(params.constraint.exit_ids, grammars.vocab_size)
    if params.allowed_token_ids is None:
        return
    allowed = pack_ids(params.allowed_token_ids, grammars.vocab_size)
    if not (begins & allowed).any():
        raise ConfigError("allowed_token_ids and the constraint exclude each other: no answer could begin")
    if not (grammars.ends & allowed).any():
        raise ConfigError("allowed_token_ids and the constraint exclude each other: name an end token too")


def mask_of(grammars: Grammars, params: SamplingParams) -> AnswerMask | None:
    """Make the mask that follows the rules of one answer; None when it has none."""
    has_limit = params.reasoning is not None and params.reasoning.max_tokens is not None
    return AnswerMask(grammars, params) if has_limit or params.constraint is not None else None


@functools.cache
def _workers(process: int) -> ThreadPoolExecutor:
    """Few threads: a mask takes microseconds, and the model's own threads want the cores."""
    return ThreadPoolExecutor(max_workers=min(4, usable_cores()), thread_name_prefix="masks")


@functools.cache
def _readers(process: int) -> ThreadPoolExecutor:
    """One thread that reads grammars, which may take tenths of a second: masks of other answers do not wait for it."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")


class AnswerMask:
    """The rules of one answer and how far it has got. See TokenMask."""

    def __init__(self, grammars: Grammars, params: SamplingParams):
        self._grammars, self._ignores_eos, self._min_tokens = grammars, params.ignore_eos, params.min_tokens
        self._num_committed = 0
        self._constraint: Constraint | None = params.constraint
        self._reasoning: ReasoningSpec | None = params.reasoning
        self._place = _Place.CONTENT
        if params.reasoning is not None:
            self._place = _Place.REASONING if params.reasoning.is_open else _Place.OPENING
        self._matcher: Matcher | None = None
        self._new: list[int] = []  # tokens that nobody has looked at yet
        self._forced: list[int] = []
        self._tail = b""  # of the reasoning
        self._num_reasoning = self._num_content = self._num_breaks = 0
        self._has_closed = False
        self._next: Future[Words | None] | None = None

    def commit(self, token_id: int) -> None:
        """Take in the next token of the answer."""
        self._new.append(token_id)
        self._num_committed += 1
        self._next = None

    def begin(self) -> None:
        """Start to find out which tokens may come next. Returns at once."""
        if self._next is None:
            is_read = self._constraint is None or self._matcher is not None
            self._next = (_workers if is_read else _readers)(os.getpid()).submit(self._advance)

    def allowed(self) -> Words | None:
        """Return the tokens that may come next, as bits; None: any. Raises KTransformersError when that cannot be
        told."""
        self.begin()
        assert self._next is not None
        return self._next.result()

    # On a thread of _workers, or of _readers until the grammar is read; one call at a time.

    def _advance(self) -> Words | None:
        new, self._new = self._new, []
        if self._constraint is not None and self._matcher is None:
            self._matcher = self._grammars.matcher(self._constraint)
        for token_id in new:
            self._take(token_id)
        if self._place is _Place.REASONING and self._is_too_long:
            self._close()
        return self._words()

    def _take(self, token_id: int) -> None:
        if self._place is _Place.OPENING:
            assert self._reasoning is not None
            is_opened = token_id == self._reasoning.open_id
            self._place = _Place.REASONING if is_opened else _Place.CONTENT
            if is_opened:
                return
        if self._place is _Place.REASONING and self._is_too_long:
            self._close()
        if self._place is _Place.REASONING:
            self._reason(token_id)
        elif self._place is _Place.CLOSING:
            self._forced.pop(0)
            if not self._forced:
                self._place, self._has_closed = _Place.CONTENT, True
        elif self._place is _Place.CONTENT:
            self._write(token_id)

    @property
    def _is_too_long(self) -> bool:
        limit = None if self._reasoning is None else self._reasoning.max_tokens
        return limit is not None and self._num_reasoning >= limit

    def _close(self) -> None:
        assert self._reasoning is not None
        self._forced = self._grammars.tokenizer.encode(self._reasoning.closing, add_special_tokens=False)
        self._place = _Place.CLOSING

    def _reason(self, token_id: int) -> None:
        assert self._reasoning is not None
        self._num_reasoning += 1
        self._tail = self._tail[-_MAX_END_BYTES:] + self._grammars.tokenizer.token_bytes(token_id)
        found = re.search(self._reasoning.end.encode(), self._tail)
        if found is None:
            return
        self._place, self._has_closed = _Place.CONTENT, True
        # A token may hold more than the end of the tag.
        text = self._tail[found.end() :].decode(errors="ignore").lstrip("\r\n")
        for more in self._grammars.tokenizer.encode(text, add_special_tokens=False) if text else ():
            self._write(more)

    def _write(self, token_id: int) -> None:
        is_first = self._num_content == 0
        if self._constraint is None or (is_first and token_id in self._constraint.exit_ids):
            self._place = _Place.FREE
        elif is_first and self._may_break and token_id in self._grammars.break_ids:
            self._num_breaks += 1
        else:
            assert self._matcher is not None
            self._num_content += 1
            self._matcher.consume([token_id])

    @property
    def _may_break(self) -> bool:
        drops_breaks = self._reasoning is not None and self._reasoning.drops_breaks
        return self._has_closed and drops_breaks and self._num_breaks < _MAX_BREAKS

    def _words(self) -> Words | None:
        match self._place:
            case _Place.FREE:
                return None
            case _Place.CLOSING:
                return pack_ids(self._forced[:1], self._grammars.vocab_size)
            case _Place.REASONING:
                return None if self._constraint is None else ~self._grammars.ends | self._exits(self._constraint)
            case _Place.OPENING:
                return self._opening()
            case _Place.CONTENT:
                return self._content()

    def _exits(self, constraint: Constraint) -> Words:
        return pack_ids(constraint.exit_ids, self._grammars.vocab_size)

    def _opening(self) -> Words | None:
        assert self._reasoning is not None
        words = self._content()
        if self._reasoning.open_id is None:
            return words
        tag = pack_ids([self._reasoning.open_id], self._grammars.vocab_size)
        if self._reasoning.max_tokens == 0:
            return ~tag if words is None else words & ~tag
        return None if words is None else words | tag

    def _content(self) -> Words | None:
        if self._matcher is None or self._constraint is None:
            return None
        words = self._matcher.allowed()
        is_short = self._num_committed < self._min_tokens
        if (self._ignores_eos or is_short) and (words & ~self._grammars.ends).any():
            words = words & ~self._grammars.ends
        if self._num_content == 0:
            words = words | (self._exits(self._constraint) & ~self._grammars.ends)
            if self._may_break:
                words = words | self._grammars.breaks
        return words
