"""Table of the fields that /v1/responses knows, and what becomes of each (server/http/fields.py says how). Knows no
model.

What says how an answer is drawn, and what other programs call it, is as in the other two routes of OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktransformers.errors import FieldError
from ktransformers.server.api.openai.fields import CONSTRAINT_FIELDS, GENERATION_FIELDS
from ktransformers.server.http.fields import FieldTable, hint, honour, inside, mapped, refuse, within, without_effect

__all__ = ["TABLE"]


def _named_schema(value: Any) -> Mapping[str, Any]:
    """Chat completions have the schema one level deeper."""
    if not isinstance(value, dict):
        raise FieldError("it must be an object", "")
    return value


def _response_format(value: Any) -> Mapping[str, Any]:
    """OpenAI's is text.format here; those of other programs are what they are in chat completions."""
    if isinstance(value, dict) and value.get("type") in ("json", "regex", "grammar"):
        found = next((value[key] for key in _VALUES if value.get(key) is not None), None)
        if found is None:
            raise FieldError("it says no value", "")
        return {f"guided_{value['type']}": found}
    return {"text": {"format": value}}


def _truncation(value: object) -> Mapping[str, str]:
    """vLLM's number of tokens that a prompt is cut to; -1 is as many as fit."""
    if value != -1:
        raise FieldError('a conversation is cut to what fits alone: use -1, or truncation "auto"', "")
    return {"truncation": "auto"}


def _transforms(value: object) -> Mapping[str, str]:
    """OpenRouter's list of what may be done to a conversation that is too long."""
    return {"truncation": "auto"} if isinstance(value, list) and "middle-out" in value else {}


_VALUES = ("value", "pattern", "grammar", "schema")

_FORMAT: FieldTable = {
    **dict.fromkeys(("type", "name", "description", "schema", "strict"), honour()),
    "json_schema": mapped(_named_schema),
}

TABLE: FieldTable = {
    **GENERATION_FIELDS,
    **CONSTRAINT_FIELDS,
    **dict.fromkeys(
        (
            "input", "instructions", "previous_response_id", "store", "tool_choice", "parallel_tool_calls",
            "truncation", "max_output_tokens", "top_logprobs", "chat_template_kwargs",
        ),
        honour(),
    ),
    "tools": honour([]),
    "include": honour([]),
    "text": within({"format": within(_FORMAT, {"type": "text"}), "verbosity": honour()}),
    "reasoning": within(dict.fromkeys(("effort", "summary", "generate_summary"), honour())),
    # Shown in the response, without effect on the answer.
    **dict.fromkeys(("metadata", "user", "safety_identifier", "prompt_cache_key", "service_tier"), honour()),
    # Other names.
    "max_tokens": mapped("max_output_tokens", -1, -2),
    "max_completion_tokens": mapped("max_output_tokens", -1, -2),
    "response_format": mapped(_response_format),
    "truncate_prompt_tokens": mapped(_truncation),
    "transforms": mapped(_transforms, []),
    "reasoning_effort": mapped(lambda value: {"reasoning": {"effort": value}}, ""),
    "extra_body": inside({}),
    **dict.fromkeys(
        (
            "stream_options", "max_tool_calls", "prompt_cache_retention", "prompt_cache_options", "client_metadata",
            "request_id",
        ),
        hint(),
    ),
    "return_speed": without_effect(),
    "background": refuse("a stream, or wait for the answer", False),
    "conversation": refuse("previous_response_id"),
    "prompt": refuse("instructions and input, with the prompt's text"),
    "n": refuse("several requests", 1),
    "context_management": refuse("a shorter input", []),
    "format": refuse("text.format", ""),
    # How answers are drawn, as nobody asks for it here.
    "logit_bias": refuse("/v1/chat/completions", {}),
    "min_tokens": refuse("/v1/chat/completions", 0),
    "stop_token_ids": refuse("/v1/chat/completions", []),
    "skip_special_tokens": refuse("/v1/chat/completions", True),
    "include_stop_str_in_output": refuse("/v1/chat/completions", False),
    "allowed_token_ids": refuse("/v1/chat/completions"),
}  # fmt: skip
"""POST /v1/responses. max_tool_calls counts calls of tools that run on the server."""
