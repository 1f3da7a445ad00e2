"""Renders a conversation through a model's own chat template, in transformers' sandbox and within limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

    options: variables of the template, `add_generation_prompt` and `continue_final_message`. Raises ConversationError
    when the template refuses the conversation or exceeds its limits.
    """
    try:
        with limited():
            text = backend.apply_chat_template(
                [dict(message) for message in messages], tools=list(tools) if tools else None, tokenize=False, **options
            )
    except TEMPLATE_ERRORS as error:
        why = reason_of(error)
        raise ConversationError(f"the model's chat template refuses this conversation: {why}") from error
    return str(text)
