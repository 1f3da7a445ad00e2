"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WrapValidator, model_validator

from ktransformers.server.api.openai.schemas.base import Body, TokenId, quick_ids
from ktransformers.server.api.openai.schemas.messages import ChatMessage, FunctionTool

__all__ = ["DetokenizeBody", "TokenizeBody"]


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation through the model's chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        of_messages = (self.tools, self.chat_template_kwargs, self.add_generation_prompt)
        if self.prompt is not None and any(field is not None for field in of_messages):
            raise ValueError("tools, chat_template_kwargs and add_generation_prompt belong to messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens belongs to prompt; a chat template writes its own special tokens")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(quick_ids)]
