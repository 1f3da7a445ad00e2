"""Tool calls that an answer is forced to make: a grammar of these tools, from where the reasoning ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ktransformers.core import Constraint, ConstraintKind
from ktransformers.errors import ConfigError, FieldError, UnsupportedError
from ktransformers.server.answers.constraints import has_own_thoughts, reasoning_of
from ktransformers.server.answers.requests import Conversation, Tool, ToolChoice
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.http.fields import schema_place
from ktransformers.tokenizer import Tokenizer

__all__ = ["forced_calls", "reason_of_refusal"]

_FIELD = "tool_choice"


def forced_calls(
    tokenizer: Tokenizer, conversation: Conversation, choice: ToolChoice, prompt_ids: Sequence[int]
) -> dict[str, Any]:
    """Return the SamplingParams fields that force an answer to call the tools of `choice`, after no more than
    reasoning.

    Raises FieldError for tools that cannot be spelled, or not as strictly as they say, UnsupportedError for a format of
    calls without a grammar.
    """
    tools = _chosen(conversation.tools, choice)
    if not tools:
        raise FieldError(f"{_FIELD}: a call is required, and there are no tools", _FIELD)
    budget = conversation.reasoning_budget
    constraint = _constraint(tokenizer, tools, choice, budget)
    if has_own_thoughts(tokenizer):
        return {"constraint": constraint}
    return {"constraint": constraint, "reasoning": reasoning_of(tokenizer, prompt_ids, budget)}


def reason_of_refusal(model: ModelInfo, conversation: Conversation, choice: ToolChoice) -> FieldError | None:
    """Return which tool's schema the grammar cannot follow, after the whole was refused; None: none of them alone."""
    grammars = model.tokenizer.grammars(model.vocab_size, model.eos_token_ids)
    for tool in _chosen(conversation.tools, choice):
        try:
            grammars.check(_constraint(model.tokenizer, [tool], choice, None))
        except ConfigError as error:
            return FieldError(f"{_FIELD}: calls of {tool.name[:64]!r} cannot be forced: {error}", _FIELD)
    return None


def _chosen(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    return [tool for tool in tools if choice.name in (None, tool.name)]


def _constraint(tokenizer: Tokenizer, tools: Sequence[Tool], choice: ToolChoice, budget: int | None) -> Constraint:
    schemas: Mapping[str, Mapping[str, Any] | None] = {tool.name: tool.parameters for tool in tools}
    parallel = choice.max_calls != 1
    try:
        grammar = tokenizer.tool_grammar(schemas, parallel=parallel, max_thoughts=budget)
    except ConfigError as error:
        raise FieldError(f"{_FIELD}: {error}", _FIELD) from error
    if grammar is None:
        raise UnsupportedError(
            f"{_FIELD}: calls in this model's own format ({tokenizer.tool_format}) cannot be forced; use auto, or "
            "start the server with --tool_format"
        )
    for tool in tools:
        if tool.strict and grammar.widened.get(tool.name):
            raise FieldError(
                f"{_FIELD}: calls of {tool.name[:64]!r} cannot be forced: it is strict, and arguments cannot be "
                f"held to {grammar.widened[tool.name][0]}: leave that out, or strict, and the rest is followed",
                _FIELD,
            )
    places = (schema_place(f"tools.{name}", *one) for name, found in grammar.widened.items() for one in found)
    return Constraint(ConstraintKind.TOOL_CALLS, grammar.text, widened=tuple(places))
