"""Constraints on answers as requests name them, in every dialect: OpenAI's, vLLM's, llama.cpp's, Ollama's.

    response_format      {"type": "json_object"} | {"type": "json_schema", "json_schema": {"schema": ...}} | text
    text.format, output_config.format    the same with the schema beside the type: /v1/responses, Anthropic
    structured_outputs   {"json": schema} | {"regex": ...} | {"choice": [...]} | {"grammar": ...} | {"json_object": ...}
    guided_json, guided_regex, guided_choice, guided_grammar     the same, one field each
    json_schema, grammar (Lark or GBNF)                          llama.cpp's
    response_format, grammar     {"type": "json" | "regex", "value": ...}: TGI's; {"type": "regex", "pattern": ...}:
                                 Together's; {"type": "grammar", "grammar": ...}: Fireworks'
    format               "json" | schema                         Ollama's

And where in an answer they begin: behind its reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ktransformers.core import Constraint, ConstraintKind, ReasoningSpec
from ktransformers.errors import ConfigError, FieldError
from ktransformers.server.http.fields import schema_place
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.grammars import core_of_text

__all__ = ["CONSTRAINT_FIELDS", "beside_tools", "constraint_of", "has_own_thoughts", "reasoning_of"]

_ALONE = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}

_FORMATS = ("response_format", "text.format", "output_config.format")

CONSTRAINT_FIELDS = (*_FORMATS, "structured_outputs", "format", *_ALONE)
"""Fields of bodies that `constraint_of` reads."""

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
_HARMONY_END = r"<\|channel\|>final[^<]*(<\|constrain\|>[^<]*)?<\|message\|>"
_HARMONY_CLOSING = "<|end|><|start|>assistant<|channel|>final<|message|>"
_CALL_TOKENS = (
    "<tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<|tool_calls_section_begin|>",
    "<minimax:tool_call>",
    "<tool_calls>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<|tool_call>",
)
"""Tokens that a call of a tool begins with, by family; harmony's ends with one."""


def constraint_of(body: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint that these fields of a body ask for; None when they ask for nothing. Other fields are not
    looked at.

    Raises ConfigError for two constraints at once and for what is none; whether one can be followed, the model's
    Grammars say.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name in CONSTRAINT_FIELDS:
        wanted = _wanted(name, body.get(name))
        if wanted:
            found[name] = wanted
    if len(found) > 1:
        raise ConfigError(f"{' and '.join(found)} both say what the answer must look like: send one of them")
    for name, wanted in found.items():
        try:
            made = Constraint.of(wanted)
        except ConfigError as error:
            raise type(error)(f"{name}: {error}") from error
        return _followed(name, made, body[name]) if made.kind is ConstraintKind.JSON_SCHEMA else made
    return None


def _followed(name: str, asked: Constraint, value: Any) -> Constraint:
    """A schema in keywords that grammars follow. Raises FieldError for one that must be followed whole and cannot."""
    try:
        core, widened = core_of_text(asked.text)
    except ConfigError as error:
        raise FieldError(f"{name}: {error}", name) from error
    if widened and _is_strict(value):
        raise FieldError(
            f"{name}: the schema {_name_of(value)}is strict, and answers cannot be held to {widened[0]}: leave that "
            "out, or strict, and the rest is followed",
            name,
        )
    return replace(asked, text=core, widened=tuple(schema_place(name, *one) for one in widened))


def _said(value: Any) -> Mapping[str, Any]:
    """What says strict and a name: OpenAI's json_schema, or the format itself."""
    inner = value.get("json_schema") if isinstance(value, Mapping) else None
    return inner if isinstance(inner, Mapping) else value if isinstance(value, Mapping) else {}


def _is_strict(value: Any) -> bool:
    return "type" in (value if isinstance(value, Mapping) else {}) and _said(value).get("strict") is True


def _name_of(value: Any) -> str:
    name = _said(value).get("name")
    return f"{name[:64]!r} " if isinstance(name, str) else ""


def _wanted(name: str, value: Any) -> Mapping[str, Any] | None:
    """The same as vLLM's structured_outputs; None for nothing."""
    if value is None:
        return None
    if name in _FORMATS:
        return _of_typed_format(name, value)
    if name == "structured_outputs":
        return _of_structured_outputs(value)
    if name == "format":
        if value == "json":
            return {"json_object": True}
        return {"json": value} if value != "" else None
    if name == "grammar" and isinstance(value, Mapping):
        return _of_typed_format(name, value)
    return {_ALONE[name]: value} if value != "" else None


def _of_structured_outputs(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError("structured_outputs must be an object")
    says_nothing = ("disable_fallback", "disable_any_whitespace")
    return value if any(one for name, one in value.items() if name not in says_nothing) else {}


def _of_typed_format(name: str, value: Any) -> Mapping[str, Any] | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # llama.cpp's
        return {"json_object": True} if schema is None else {"json": schema}
    if kind == "regex":
        return {"regex": _first_of(name, value, "value", "pattern")}
    if kind == "grammar":
        return {"grammar": _first_of(name, value, "grammar", "value")}
    if kind == "json" or (kind == "json_schema" and value.get("value") is not None):
        return {"json": _first_of(name, value, "value", "schema")}
    if kind != "json_schema":
        raise ConfigError(f"{name}.type must be text, json_object or json_schema")
    named = value.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else value.get("schema")
    if schema is None:
        inner = ".json_schema" if name == "response_format" else ""
        raise ConfigError(f"{name}{inner}.schema is missing")
    return {"json": schema}


def _first_of(name: str, value: Mapping[str, Any], *fields: str) -> Any:
    """The first of these fields that says something."""
    found = next((value[field] for field in fields if value.get(field) is not None), None)
    if found is None:
        raise ConfigError(f"{name}.{fields[0]} is missing")
    return found


def beside_tools(tokenizer: Tokenizer, constraint: Constraint) -> Constraint:
    """Return the constraint for an answer that may call tools: an answer that begins with a call is free."""
    ids = [tokenizer.token_id(token) for token in (*_CALL_TOKENS, *(("<|call|>",) if _is_harmony(tokenizer) else ()))]
    return replace(constraint, exit_ids=tuple(token_id for token_id in ids if token_id is not None))


def reasoning_of(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], max_tokens: int | None = None, *, is_inside: bool = False
) -> ReasoningSpec | None:
    """Return how the reasoning of an answer to this prompt is recognized; None when there will be none.

    max_tokens: how long it may get. is_inside: the prompt ends in the middle of it.
    """
    if not tokenizer.has_vocabulary:
        return None
    if _is_harmony(tokenizer):
        return ReasoningSpec(_HARMONY_END, _HARMONY_CLOSING, is_open=True, max_tokens=max_tokens)
    tags = tokenizer.reasoning_tags
    if tags is None:
        return None
    if is_inside or tokenizer.opens_reasoning(prompt_ids):
        return ReasoningSpec(re.escape(tags[1]), tags[1], is_open=True, drops_breaks=True, max_tokens=max_tokens)
    end = tokenizer.decode(prompt_ids[-16:], skip_special_tokens=False)
    opening = tokenizer.encode(tags[0], add_special_tokens=False)
    if end.rstrip().endswith(tags[1]) or not opening or opening[0] not in tokenizer.added_ids:
        return None  # the prompt has closed it; or no token marks its beginning
    return ReasoningSpec(re.escape(tags[1]), tags[1], open_id=opening[0], drops_breaks=True, max_tokens=max_tokens)


def has_own_thoughts(tokenizer: Tokenizer) -> bool:
    """Whether a grammar of tool calls begins with the reasoning, which harmony marks by the head of its message."""
    return _is_harmony(tokenizer) and tokenizer.tool_format == "harmony"


def _is_harmony(tokenizer: Tokenizer) -> bool:
    return all(tokenizer.token_id(token) is not None for token in _HARMONY)
