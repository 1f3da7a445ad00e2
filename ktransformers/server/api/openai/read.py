"""From OpenAI's bodies to the requests of server/answers. Knows no model.

Two forms differ from what chat templates want: content parts (templates want one text) and the arguments of earlier
tool calls (JSON as text here, an object there).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.server.answers.constraints import constraint_of
from ktransformers.server.answers.requests import (
    ChatRequest,
    Conversation,
    Message,
    PastCall,
    Sampling,
    TextRequest,
    Tool,
    new_id,
)
from ktransformers.server.api.openai.schemas import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    FunctionTool,
    GenerationFields,
    MessageToolCall,
    TokenizeBody,
)
from ktransformers.server.json_limits import MAX_DEPTH, json_size

__all__ = ["chat_request", "num_prompts", "text_request", "tokenized_conversation"]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for completions whose request names no limit."""


def _arguments(text: str, at: str) -> dict[str, Any]:
    if json_size(text.encode("utf-8", "surrogatepass")).depth > MAX_DEPTH:
        raise ConfigError(f"{at}.function.arguments has more than {MAX_DEPTH} lists and objects within each other")
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{at}.function.arguments is not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"{at}.function.arguments must be a JSON object")
    return arguments


def _call(call: MessageToolCall, at: str) -> PastCall:
    return PastCall(id=call.id, name=call.function.name, arguments=_arguments(call.function.arguments, at))


def _message(message: ChatMessage, index: int) -> Message:
    content = message.content
    return Message(
        role=message.role,
        text="\n".join(part.text for part in content) if isinstance(content, list) else content or "",
        reasoning=message.reasoning_content or message.reasoning or "",
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[
            _call(call, f"messages[{index}].tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())
        ],
    )


def _messages(messages: Sequence[ChatMessage]) -> list[Message]:
    return [_message(message, index) for index, message in enumerate(messages)]


def _tools(tools: Sequence[FunctionTool] | None) -> list[Tool]:
    return [Tool(**dict(tool.function)) for tool in tools or ()]


def _sampling(fields: GenerationFields, max_tokens: int | None, **more: int | None) -> Sampling:
    """more: fields of Sampling that the two routes spell differently."""
    return Sampling(
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        ignore_eos=fields.ignore_eos,
        seed=fields.seed,
        max_tokens=max_tokens,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        allowed_token_ids=None if fields.allowed_token_ids is None else tuple(fields.allowed_token_ids),
        logit_bias={int(key): value for key, value in (fields.logit_bias or {}).items()},
        constraint=constraint_of(fields.constraint_fields()),
        **more,
    )


def chat_request(body: ChatBody) -> ChatRequest:
    """Raises ConfigError for arguments of earlier tool calls that are no JSON."""
    return ChatRequest(
        id=new_id("chatcmpl"),
        model=body.model,
        sampling=_sampling(
            body,
            body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ),
        n=body.n or 1,
        priority=body.priority or 0,
        timeout=body.timeout,
        cache_salt=body.cache_salt or "",
        conversation=Conversation(
            messages=_messages(body.messages),
            tools=[] if body.tool_choice == "none" else _tools(body.tools),
            template_kwargs=body.chat_template_kwargs or {},
            reasoning_effort=body.reasoning_effort,
            reasoning_budget=body.thinking_budget,
            opens_answer=body.add_generation_prompt is not False,
        ),
    )


def tokenized_conversation(body: TokenizeBody) -> Conversation:
    """What /tokenize counts. Errors as `chat_request`."""
    return Conversation(
        messages=_messages(body.messages or ()),
        tools=_tools(body.tools),
        template_kwargs=body.chat_template_kwargs or {},
        opens_answer=body.add_generation_prompt is not False,
    )


def num_prompts(body: CompletionBody) -> int:
    """How many prompts these are. Raises ConfigError for none."""
    if not isinstance(body.prompt, str) and not body.prompt:
        raise ConfigError("prompt is empty: there is nothing to continue")
    return len(_prompts(body))


def _prompts(body: CompletionBody) -> Sequence[str | Sequence[int]]:
    prompt: Any = body.prompt  # one text, several, the token ids of one, or of several
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def text_request(body: CompletionBody) -> TextRequest:
    """max_tokens 0 computes one token all the same: it shows what the model says of the prompt."""
    return TextRequest(
        id=new_id("cmpl"),
        model=body.model,
        sampling=_sampling(
            body,
            None if body.max_tokens is None else max(body.max_tokens, 1),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        ),
        n=body.n or 1,
        priority=body.priority or 0,
        timeout=body.timeout,
        cache_salt=body.cache_salt or "",
        prompts=_prompts(body),
        has_echo=bool(body.echo),
        is_prompt_only=body.max_tokens == 0,
    )
