"""Answers that grammars of tool calls let through: drawn at random, and read by the formats' own parsers."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
from transformers import AddedToken

from ktransformers.core import Constraint, ConstraintKind
from ktransformers.tokenizer.grammars import Grammars
from ktransformers.tokenizer.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import TOOL_FORMATS, ArgumentsPiece, CallStarted, ReasoningPiece, TextPiece
from tests.support.checks.tool_answers import FORMAT_OF, TEMPLATES, TOOLS
from tests.support.engines.fake_runner import byte_tokenizer

__all__ = ["called", "check_calls", "forced", "grammars_of", "takes", "tokenizer_of", "wander"]


@functools.cache
def tokenizer_of(name: str, are_special: bool) -> Tokenizer:
    """are_special: the format's tags are tokens of their own, which text in a grammar does not match."""
    form = FORMAT_OF.get(name, name)
    template = TEMPLATES / f"{name}.jinja"
    backend = byte_tokenizer(template.read_text() if template.exists() else "").backend
    if are_special:
        tags = TOOL_FORMATS[form].tokens
        backend.backend_tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    tokenizer = Tokenizer(backend)
    tokenizer.use_tool_format(form)
    return tokenizer


def grammars_of(tokenizer: Tokenizer) -> Grammars:
    return tokenizer.grammars(tokenizer.vocab_size, tokenizer.eos_token_ids)


def forced(tokenizer: Tokenizer, tools: Any, **more: Any) -> Constraint:
    grammar = tokenizer.tool_grammar(tools, **more)
    assert grammar is not None
    return Constraint(ConstraintKind.TOOL_CALLS, grammar.text)


def takes(tokenizer: Tokenizer, text: str, tools: Any = TOOLS, **more: Any) -> bool:
    """Whether the grammar lets this be the whole answer."""
    matcher = grammars_of(tokenizer).matcher(forced(tokenizer, tools, **more))
    for token_id in (*tokenizer.encode(text), *tokenizer.eos_token_ids):
        if not matcher.allowed()[token_id // 32] >> (token_id % 32) & 1:
            return False
        matcher.consume([token_id])
    return True


def wander(tokenizer: Tokenizer, constraint: Constraint, draw: random.Random) -> str:
    """An answer of a model that knows nothing: any token that may come next, blanks less often."""
    matcher, ids, ends = grammars_of(tokenizer).matcher(constraint), list[int](), tokenizer.eos_token_ids
    while len(ids) < 6000:
        words = matcher.allowed()
        may = [at for at in range(tokenizer.vocab_size) if words[at // 32] >> (at % 32) & 1]
        some = [at for at in may if tokenizer.token_bytes(at).strip()] if draw.random() < 0.95 else may
        # Calls without an end would follow each other.
        token_id = next((at for at in ends if at in may), None) if draw.random() < 0.7 else None
        if token_id is None:
            token_id = draw.choice(some or may)
        if token_id in ends:
            return tokenizer.decode(ids)
        ids.append(token_id)
        matcher.consume([token_id])
    raise AssertionError(f"no end: {tokenizer.decode(ids)[:300]}")


def called(tokenizer: Tokenizer, text: str, tools: Any) -> list[tuple[str, Any]]:
    """The calls that the answer is, and nothing else: names and arguments."""
    parser = tokenizer.answer_parser(tokenizer.encode("x"), tools)
    events = [*parser.feed(text), *parser.flush()]
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        assert not isinstance(event, TextPiece), (text, event)
        if isinstance(event, CallStarted):
            calls.append((event.name, []))
        elif isinstance(event, ArgumentsPiece):
            calls[-1][1].append(event.text)
        assert not isinstance(event, ReasoningPiece) or tokenizer.tool_format == "harmony"
    return [(name, json.loads("".join(pieces))) for name, pieces in calls]


def check_calls(tokenizer: Tokenizer, text: str, tools: Any, *, parallel: bool) -> None:
    """The answer is calls of the tools and nothing else."""
    calls = called(tokenizer, text, tools)
    assert calls, text
    assert parallel or len(calls) == 1, text
    for name, arguments in calls:
        assert name in tools, text
        jsonschema.validate(arguments, tools[name] or {"type": "object"})
