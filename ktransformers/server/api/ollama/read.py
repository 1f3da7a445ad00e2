"""Reads Ollama's bodies into the requests of server/answers.

What a field asks that this model or server has no way to do, and that may be left undone, is added to `ignored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ktransformers.server.answers.constraints import constraint_of
from ktransformers.server.answers.history import Alter, left_out, past_arguments, result_text
from ktransformers.server.answers.requests import (
    ChatRequest,
    Content,
    Conversation,
    Message,
    PastCall,
    TextRequest,
    Tool,
    UnreadPicture,
    joined,
    new_id,
)
from ktransformers.server.api.ollama.names import plain_name
from ktransformers.server.api.ollama.schemas import AnswerBody, ChatBody, GenerateBody, PastMessage
from ktransformers.server.service import Service
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.templates.effort import EFFORT_VARIABLES

__all__ = ["chat_request", "generate_request", "is_load", "knows_thinking"]

_TO_THE_END = (1 << 31) - 1
"""Tokens that no context has: the answer ends where it does."""

_PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
_THINK_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates: of Qwen and GLM, of DeepSeek."""


_CHAT_NAMES = {"reasoning_effort": "think", "enable_thinking": "think"}
_GENERATE_NAMES = {**_CHAT_NAMES, "messages.system": "system", "messages.user": "prompt", "messages.empty": "prompt"}
"""See Conversation."""


def knows_thinking(tokenizer: Tokenizer) -> bool:
    """Whether the model reasons before it answers, or can."""
    switches = (*_THINK_SWITCHES, *EFFORT_VARIABLES)
    return tokenizer.reasoning_tags is not None or any(map(tokenizer.template_knows, switches))


def is_load(body: ChatBody | GenerateBody) -> bool:
    """Whether a body asks for no answer, only that the model be loaded or unloaded."""
    return not (body.messages if isinstance(body, ChatBody) else body.prompt or body.images)


def chat_request(service: Service, body: ChatBody, ignored: list[str]) -> ChatRequest:
    """Read a body of /api/chat into the request for the next turn of its conversation."""
    altered: list[str] = []
    messages = _messages(body.messages, altered.append)
    tools = [
        Tool(name=tool.function.name, description=tool.function.description, parameters=tool.function.parameters)
        for tool in body.tools
    ]
    return _chat(service, body, messages, tools, ignored, altered)


def generate_request(service: Service, body: GenerateBody, ignored: list[str]) -> ChatRequest | TextRequest:
    """Read a body of /api/generate into a request, with the prompt as the one turn of a conversation, or raw."""
    if not body.raw:
        messages = [Message(role="system", content=body.system)] if body.system else []
        asked = Message(role="user", content=joined([*_pictures(body.images, "images", "images"), body.prompt]))
        return _chat(service, body, [*messages, asked], [], ignored)
    if body.think is not None:
        ignored.append("think")
    return TextRequest(
        id=new_id("gen"),
        **_answer(service, body, ignored),
        prompts=[body.prompt],
        max_prompt_len=-1 if _drops_oldest(body) else None,
    )


def _chat(
    service: Service,
    body: AnswerBody,
    messages: list[Message],
    tools: list[Tool],
    ignored: list[str],
    altered: Sequence[str] = (),
) -> ChatRequest:
    variables, effort = _thinking(service.model.tokenizer, body.think, ignored)
    return ChatRequest(
        id=new_id("chat"),
        **_answer(service, body, ignored),
        conversation=Conversation(
            messages=messages,
            tools=tools,
            template_kwargs=variables,
            reasoning_effort=effort,
            drops_oldest=_drops_oldest(body),
            altered=altered,
            field_names=_CHAT_NAMES if isinstance(body, ChatBody) else _GENERATE_NAMES,
        ),
    )


def _drops_oldest(body: AnswerBody) -> bool | None:
    asked = [one for one in (body.truncate, body.shift) if one is not None]
    return any(asked) if asked else None


def _messages(bodies: list[PastMessage], alter: Alter) -> list[Message]:
    """The turns. Calls and their results get ids where clients keep none: some chat templates insist on them."""
    made: list[Message] = []
    waiting: list[PastCall] = []  # for their results
    num_calls = 0
    for index, body in enumerate(bodies):
        message = _message(body, f"messages[{index}]", alter)
        if message.tool_calls:
            waiting = [
                replace(call, id=call.id or f"call{num_calls + i:05}") for i, call in enumerate(message.tool_calls)
            ]
            num_calls += len(waiting)
            message = replace(message, tool_calls=tuple(waiting))
        elif message.role == "tool" and message.tool_call_id is None and waiting:
            call = next((call for call in waiting if call.name == message.name), waiting[0])
            waiting.remove(call)
            message = replace(message, tool_call_id=call.id)
        made.append(message)
    return made


def _message(message: PastMessage, place: str, alter: Alter) -> Message:
    return Message(
        role=message.role,
        content=_content(message, place, alter),
        reasoning=message.thinking or "",
        name=message.tool_name or message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[
            PastCall(
                id=None if call.id in (None, "") else str(call.id),
                name=call.function.name,
                arguments=past_arguments(call.function.arguments, "messages.tool_calls.function.arguments", alter),
            )
            for call in message.tool_calls or ()
        ],
    )


def _content(message: PastMessage, place: str, alter: Alter) -> Content:
    """The pictures, and behind them the text: as Ollama shows them to models. Of a tool's result, those of them that
    are texts.
    """
    content = "" if message.content is None else message.content
    text = content if isinstance(content, str) else result_text(content, "messages.content", alter)
    images = [image for image in message.images or () if isinstance(image, str)]
    wrong = [left_out("picture")] * (len(message.images or ()) - len(images))
    if wrong:
        alter("messages.images")
    return joined([*_pictures(images, f"{place}.images", "messages.images"), *filter(None, (text, *wrong))])


def _pictures(images: Sequence[str], place: str, name: str) -> list[UnreadPicture]:
    return [UnreadPicture(source=image, place=f"{place}[{index}]", name=name) for index, image in enumerate(images)]


def _thinking(tokenizer: Tokenizer, think: bool | str | None, ignored: list[str]) -> tuple[dict[str, Any], str | None]:
    """Variables for the template and its word for the effort. None of both when `think` does not say."""
    if think is None:
        return {}, None
    wanted = think is not False
    variables = {name: wanted for name in _THINK_SWITCHES if tokenizer.template_knows(name)}
    effort = think if isinstance(think, str) and any(map(tokenizer.template_knows, EFFORT_VARIABLES)) else None
    is_always_on = tokenizer.reasoning_tags is not None and not variables
    is_done = effort is not None if isinstance(think, str) else bool(variables) or wanted == is_always_on
    if not is_done:
        ignored.append("think")
    return variables, effort


def _answer(service: Service, body: AnswerBody, ignored: list[str]) -> dict[str, Any]:
    """Fields of AnswerRequest. Penalties look back over everything (repeat_last_n -1) or over nothing (0)."""
    options = body.options
    if options.num_ctx is not None and options.num_ctx > service.model.max_len:
        ignored.append("options.num_ctx")
    more: dict[str, Any] = {} if options.seed != -1 else {"seed": None}
    if options.repeat_last_n == 0:
        more |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    elif options.repeat_last_n not in (None, -1) and _PENALTIES & options.model_fields_set:
        ignored.append("options.repeat_last_n")
    sampling = options.sampling(
        max_tokens=options.num_predict if options.num_predict and options.num_predict > 0 else None,
        stop=options.stop,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **more,
    )
    return {
        "model": plain_name(service, body.model),
        "sampling": sampling,
        "constraint": constraint_of({"format": body.format}),
        "default_max_tokens": _TO_THE_END,
    }
