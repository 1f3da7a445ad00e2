"""Renders a conversation through a model's own chat template, in transformers' sandbox and within limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import UndefinedError

from ktransformers.errors import ConversationError, reason_of
from ktransformers.tokenizer.template_limits import TEMPLATE_ERRORS, limited

__all__ = ["Message", "Render", "rendered"]

Message = Mapping[str, Any]
"""One turn: `role`, `content`, and what the model's template knows (`tool_calls`, `reasoning_content`, ...)."""

Render = Callable[..., str]
"""From messages, tools and the options of `apply_chat_template` to text. Raises ConversationError."""


def rendered(
    backend: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> str:
    """Return the text that the template of a Hugging Face tokenizer makes of a conversation.

    options: variables of the template, `add_generation_prompt` and `continue_final_message`. A template that is written
    for conversations with tools gets an empty list of them. Raises ConversationError when the template refuses the
    conversation or exceeds its limits.
    """
    turns = [dict(message) for message in messages]

    def made_with(shown: Sequence[Mapping[str, object]] | None) -> str:
        with limited():
            return str(backend.apply_chat_template(turns, tools=shown, tokenize=False, **options))

    try:
        try:
            return made_with(list(tools) if tools else None)
        except (TypeError, UndefinedError):  # as of a loop over nothing
            if tools:
                raise
            return made_with([])
    except TEMPLATE_ERRORS as error:
        why = reason_of(error)
        raise ConversationError(f"the model's chat template refuses this conversation: {why}") from error
