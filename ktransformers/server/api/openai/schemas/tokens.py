"""The bodies of POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WrapValidator, model_validator

from ktransformers.server.api.field_types import Choice, TokenId, Whole, quick_ids
from ktransformers.server.api.openai.schemas.base import Body
from ktransformers.server.api.openai.schemas.messages import ChatMessage, ChatTool

__all__ = ["DetokenizeBody", "TokenizeBody"]


_OF_MESSAGES = (
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "enable_thinking",
    "thinking_budget",
    "chat_template_kwargs",
)


class TokenizeBody(Body):
    """The body of POST /tokenize: a text, or a conversation through the model's chat template, with what shapes a
    chat's prompt.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @property
    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self.messages[-1] if self.messages else None
        return last is not None and bool(self.continue_final_message or last.prefix or last.partial)

    @model_validator(mode="after")
    def _is_one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        given = [name for name in _OF_MESSAGES if getattr(self, name) is not None]
        if self.prompt is not None and given:
            raise ValueError(f"{given[0]} belongs to messages")
        if self.continues and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens belongs to prompt; a chat template writes its own special tokens")
        return self


class DetokenizeBody(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(quick_ids)]
