"""Reads OpenAI's bodies into the requests of server/answers. Knows no model.

Two forms differ from what chat templates want: content parts (neighbouring texts are one there) and the arguments of
earlier tool calls (JSON as text here, an object there).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ktransformers.errors import ConfigError
from ktransformers.server.answers.constraints import constraint_of
from ktransformers.server.answers.custom_tools import CUSTOM_INPUT, custom_tool
from ktransformers.server.answers.history import Alter, past_arguments, result_text
from ktransformers.server.answers.requests import (
    ChatRequest,
    Conversation,
    Message,
    PastCall,
    TextRequest,
    Tool,
    joined,
    new_id,
)
from ktransformers.server.answers.tool_choices import choose
from ktransformers.server.api.openai.schemas import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    FunctionTool,
    GenerationFields,
    MessageToolCall,
    TokenizeBody,
)
from ktransformers.server.api.openai.schemas.messages import (
    CustomTool,
    FunctionDefinition,
)

__all__ = [
    "chat_request",
    "custom_names",
    "num_prompts",
    "text_request",
    "tokenized_conversation",
    "unenforced",
]

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for completions whose request names no limit."""


def _call(call: MessageToolCall, alter: Alter) -> PastCall:
    id = None if call.id in (None, "") else str(call.id)
    if call.custom is not None:
        text = call.custom.input
        if not isinstance(text, str):
            text = "" if text is None else result_text(text, "messages.tool_calls.custom.input", alter)
        return PastCall(id=id, name=call.custom.name or "", arguments={CUSTOM_INPUT: text})
    if call.function is None:
        alter("messages.tool_calls.function")
        return PastCall(id=id, name="", arguments={})
    arguments = past_arguments(call.function.arguments, "messages.tool_calls.function.arguments", alter)
    return PastCall(id=id, name=call.function.name or "", arguments=arguments)


def _calls(message: ChatMessage, alter: Alter) -> list[PastCall]:
    calls = [_call(call, alter) for call in message.tool_calls or ()]
    if message.function_call is not None and not calls:
        call = message.function_call
        arguments = past_arguments(call.arguments, "messages.function_call.arguments", alter)
        calls = [PastCall(name=call.name or "", arguments=arguments)]
    return calls


def _message(message: ChatMessage, place: str, alter: Alter) -> Message:
    content = message.content
    parts = content if isinstance(content, list) else ()
    thoughts = "\n".join(part.content for part in parts if part.is_reasoning)
    places = ((part, f"{place}.content[{index}]") for index, part in enumerate(parts) if not part.is_reasoning)
    shown = joined(one for part, at in places for one in part.parts(at))
    for part in parts:
        if part.left_out is not None:
            alter(f"messages.content.{part.left_out}")
    if message.has_result_as_json:
        alter("messages.content")
    return Message(
        role="tool" if message.role == "function" else message.role,
        content=(content if isinstance(content, str) else shown) or message.refusal or "",
        reasoning=message.reasoning_content or message.reasoning or thoughts,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=_calls(message, alter),
    )


def _messages(messages: Sequence[ChatMessage], alter: Alter) -> list[Message]:
    return [_message(message, f"messages[{index}]", alter) for index, message in enumerate(messages)]


def _functions(functions: Iterable[FunctionDefinition]) -> list[Tool]:
    return [
        Tool(name=one.name, description=one.description, parameters=one.parameters, strict=one.strict)
        for one in functions
    ]


def _tools(tools: Sequence[FunctionTool | CustomTool] | None) -> list[Tool]:
    return [tool for one in tools or () for tool in _tool(one)]


def _tool(tool: FunctionTool | CustomTool) -> list[Tool]:
    if isinstance(tool, FunctionTool):
        return _functions([tool.function])
    syntax, definition = tool.custom.grammar or (None, None)
    return [custom_tool(tool.custom.name, tool.custom.description, syntax, definition)]


def custom_names(body: ChatBody) -> frozenset[str]:
    """Return the names of the body's tools whose input is a text."""
    return frozenset(tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool))


def unenforced(body: ChatBody) -> list[str]:
    """Return the names of the body's fields that the model is shown and may not follow."""
    has_grammar = any(isinstance(tool, CustomTool) and tool.custom.grammar is not None for tool in body.tools or ())
    return ["tools.custom.format"] if has_grammar else []


def _answer(body: GenerationFields, max_tokens: int | None, **more: int | None) -> dict[str, Any]:
    """Fields of AnswerRequest. more: of SamplingParams, which the two routes spell differently.

    max_tokens 0 computes one token all the same: it shows what the model says of the prompt.
    """
    sampling = body.sampling(
        max_tokens=None if max_tokens is None else max(max_tokens, 1),
        min_tokens=body.min_tokens,
        stop=body.stop,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        stop_token_ids=body.stop_token_ids,
        allowed_token_ids=body.allowed_token_ids,
        logit_bias={int(key): value for key, value in (body.logit_bias or {}).items()},
        **more,
    )
    return {
        "model": body.model,
        "sampling": sampling,
        "constraint": constraint_of(body.constraint_fields()),
        "prediction": body.predicted_text,
        "is_prompt_only": max_tokens == 0,
        **body.scheduling,
    }


def _overflow(truncate_prompt_tokens: int | None) -> dict[str, Any]:
    """Fields of Conversation."""
    wanted = truncate_prompt_tokens
    return {
        "drops_oldest": None if wanted is None else True,
        "max_prompt_len": None if wanted is None or wanted < 1 else wanted,
    }


def chat_request(body: ChatBody) -> ChatRequest:
    """Read a chat body into a request. Raises FieldError for a choice of tools that there are not."""
    altered: list[str] = []
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = _tools(body.tools) if body.functions is None else _functions(body.functions)
    field = "tool_choice" if body.functions is None else "function_call"
    asked = body.tool_choice if body.functions is None else body.function_call
    is_named = asked is not None and asked.name is not None
    is_single = body.parallel_tool_calls is False or body.functions is not None or is_named
    tools, tool_choice = choose(asked, tools, is_single=is_single, field=field)
    return ChatRequest(
        id=new_id("chatcmpl"),
        **_answer(body, max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        n=body.n or 1,
        conversation=Conversation(
            messages=_messages(body.messages, altered.append),
            altered=altered,
            tools=tools,
            template_kwargs=body.chat_template_kwargs or {},
            reasoning_effort=body.reasoning_effort,
            thinks=body.enable_thinking,
            reasoning_budget=body.thinking_budget,
            opens_answer=body.add_generation_prompt is not False,
            continues=body.continues,
            **_overflow(body.truncate_prompt_tokens),
        ),
        tool_choice=tool_choice,
    )


def tokenized_conversation(body: TokenizeBody) -> Conversation:
    """Return the conversation whose tokens /tokenize counts. Errors as `chat_request`."""
    altered: list[str] = []
    return Conversation(
        messages=_messages(body.messages or (), altered.append),
        altered=altered,
        tools=choose(body.tool_choice, _tools(body.tools))[0],
        template_kwargs=body.chat_template_kwargs or {},
        reasoning_effort=body.reasoning_effort,
        thinks=body.enable_thinking,
        reasoning_budget=body.thinking_budget,
        opens_answer=body.add_generation_prompt is not False,
        continues=body.continues,
    )


def num_prompts(body: CompletionBody) -> int:
    """Return how many prompts the body has. Raises ConfigError for none."""
    if not isinstance(body.prompt, str) and not body.prompt:
        raise ConfigError("prompt is empty: there is nothing to continue")
    return len(_prompts(body))


def _prompts(body: CompletionBody) -> Sequence[str | Sequence[int]]:
    prompt: Any = body.prompt  # one text, several, the token ids of one, or of several
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def text_request(body: CompletionBody) -> TextRequest:
    """Read a completion body into a request. With best_of above n, answers carry what tells the best of them: how
    likely their tokens are.
    """
    is_chosen = body.num_computed > (body.n or 1)
    return TextRequest(
        id=new_id("cmpl"),
        **_answer(
            body,
            body.max_tokens,
            logprobs=body.logprobs or 0 if is_chosen else body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        ),
        default_max_tokens=DEFAULT_MAX_TOKENS,
        n=body.num_computed,
        prompts=_prompts(body),
        has_echo=bool(body.echo),
        max_prompt_len=body.truncate_prompt_tokens,
    )
