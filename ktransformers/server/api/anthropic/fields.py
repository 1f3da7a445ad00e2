"""The fields of /v1/messages and /v1/messages/count_tokens, and what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktransformers.server.api.anthropic.errors import THREAD_CODE
from ktransformers.server.api.sampling_fields import SAMPLING_FIELDS, SCHEDULING_FIELDS
from ktransformers.server.http.fields import FieldTable, hint, honour, mapped, refuse, within

__all__ = ["TABLE"]


def _stops(value: Any) -> Mapping[str, Any]:
    return {"stop_sequences": [value] if isinstance(value, str) else value}


_CLEAR_NOTHING = {"type": "clear_thinking_20251015", "keep": "all"}

TABLE: FieldTable = {
    **dict.fromkeys(("model", "messages", "max_tokens"), honour()),
    "system": honour([]),
    "stream": honour(),
    "stop_sequences": honour([]),
    "tools": honour([]),
    "tool_choice": honour(),
    "thinking": honour(),
    "output_config": within({"effort": honour(), "format": honour()}),
    # Claude Code's clears nothing.
    "context_management": honour({}, {"edits": []}, {"edits": [_CLEAR_NOTHING]}),
    # Extensions.
    **dict.fromkeys(("chat_template_kwargs", "truncation"), honour()),
    "parallel_tool_calls": honour(True),
    **SAMPLING_FIELDS,
    **SCHEDULING_FIELDS,
    # Who asks and for what, how fast, where, for whose money, and what may be kept: nothing about the answer.
    **dict.fromkeys(
        (
            "metadata",
            "service_tier",
            "speed",
            "cache_control",
            "diagnostics",
            "inference_geo",
            "user_profile_id",
            "workspace_id",
            "billing_policy",
            "fallbacks",
            "fallback_credit_token",
            "betas",
            "anthropic_beta",
            "anthropic_version",
        ),
        hint(),
    ),
    # Names of other programs and of older versions.
    "output_format": mapped(lambda value: {"output_config": {"format": value}}),
    "stop": mapped(_stops, [], ""),
    "max_tokens_to_sample": mapped("max_tokens"),
    "max_completion_tokens": mapped("max_tokens"),
    # What happens at Anthropic's, and not here.
    "container": refuse("tools of your own: this server runs no code"),
    "mcp_servers": refuse("tools of your own: this server calls none", []),
    "thread": refuse("messages alone: this server keeps no conversations", code=THREAD_CODE),
    "prefill": refuse("a last message of the role assistant"),
    "prompt": refuse("messages"),
    "response_format": refuse("output_config.format", {"type": "text"}),
    "n": refuse("several requests", 1),
    "logprobs": refuse("/v1/chat/completions", False, 0),
    "top_logprobs": refuse("/v1/chat/completions", 0),
    "logit_bias": refuse("/v1/chat/completions", {}),
}
