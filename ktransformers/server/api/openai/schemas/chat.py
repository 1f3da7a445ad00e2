"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from ktransformers.server.api.field_types import Choice, Whole
from ktransformers.server.api.openai.schemas.generation import GenerationFields
from ktransformers.server.api.openai.schemas.messages import (
    ChatMessage,
    ChatTool,
    FunctionDefinition,
)

__all__ = ["ChatBody"]


class ChatBody(GenerationFields):
    """The body of POST /v1/chat/completions. functions, function_call: what tools and tool_choice were before.

    enable_thinking, reasoning_effort, thinking_budget: for models that can reason; what the chat template does not
    know is named in the response's header. continue_final_message: the answer goes on from the last message,
    inside its reasoning when that is all it has.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionDefinition], Field(fail_fast=True)] | None = None
    function_call: Choice | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    # Extensions.
    enable_thinking: bool | None = None
    thinking_budget: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        last = self.messages[-1]
        return bool(self.continue_final_message or last.prefix or last.partial)

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ; send one of them")
        if self.tools is not None and self.functions is not None:
            raise ValueError("functions is the old name of tools; send one of them")
        if self.continues and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.continues and self.messages[-1].role != "assistant":
            raise ValueError("an answer can only go on from a message whose role is assistant")
        return self
