"""Prompts that are longer than the context: refused in the field's words, or shortened where that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fastapi import Request

from ktransformers.errors import ContextLengthError, FieldError
from ktransformers.media.picture import ReadPicture
from ktransformers.server.answers.prompts import Prompt, chat_prompt, template_kwargs
from ktransformers.server.answers.requests import AnswerRequest, ChatRequest, Conversation, Message, TextRequest
from ktransformers.server.http.fields import note_ignored
from ktransformers.server.service import Service, note_altered, note_unused, service_of
from ktransformers.tokenizer.shortening import prompt_room, shorten

__all__ = [
    "MAX_COUNTED",
    "Fitted",
    "counted_prompt",
    "fitted_chat",
    "fitted_text",
    "in_words_of",
    "most_tokens",
    "served_prompt",
]

logger = logging.getLogger(__name__)

MAX_COUNTED = 1 << 18
"""Most tokens that are counted where the context is shorter: texts that will be cut are counted, too."""


@contextmanager
def in_words_of(service: Service, what: str = "prompt", *, has_answer: bool = True) -> Iterator[None]:
    """Context that turns a text found too long into the error of Limits.too_long, which says whose limit it is."""
    try:
        yield
    except ContextLengthError as error:
        prompt_len = max(error.prompt_len, error.max_len)
        raise service.model.limits.too_long(prompt_len, what, has_answer=has_answer) from error


def most_tokens(service: Service, asked: AnswerRequest) -> int | None:
    """Return the most tokens of an answer to this request; None: to the end of the context."""
    return service.max_tokens(asked.sampling.get("max_tokens"), asked.default_max_tokens)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The prompt of a conversation that fits. num_dropped: how many of its oldest turns, and their pictures, left."""

    prompt: Prompt
    num_dropped: int = 0


def fitted_chat(service: Service, asked: ChatRequest) -> Fitted:
    """Return the prompt of a conversation, and how many of its oldest turns were left out to make it fit.

    Turns are left out where the request, or else the operator (--context_overflow), says so. Raises ContextLengthError
    for one that is too long otherwise, or all the same, FieldError for more than the request itself allows, and what
    chat_prompt raises.
    """
    conversation, max_len = asked.conversation, service.model.max_len
    is_dropping = conversation.drops_oldest
    if is_dropping is None:
        is_dropping = service.config.drops_oldest
    if not is_dropping and conversation.max_prompt_len is None:
        return Fitted(served_prompt(service, conversation, max_len))
    room = prompt_room(max_len, most_tokens(service, asked))
    limits = [room, max_len - 1]  # room for an answer is wanted, not needed
    if conversation.max_prompt_len is not None:
        limits = [min(room, conversation.max_prompt_len)]
    for limit in limits:
        found = _within(service, conversation, limit)
        if found is not None:
            if found.num_dropped:
                logger.info("the oldest %d turns of a conversation were left out: it is too long", found.num_dropped)
            return found
    if conversation.max_prompt_len is None:
        return Fitted(served_prompt(service, conversation, max_len))  # which raises, with the whole length
    raise FieldError(
        f"truncate_prompt_tokens: the instructions and the last question have more than {conversation.max_prompt_len} "
        "tokens, and they are never left out",
        "truncate_prompt_tokens",
    )


def _within(service: Service, conversation: Conversation, limit: int) -> Fitted | None:
    """The whole conversation if it has at most `limit` tokens, else without its oldest turns, if that helps."""
    prompts: dict[int, Prompt] = {}  # by how many turns stayed

    def prompt_of(kept: Sequence[int]) -> list[int] | int:
        part = replace(conversation, messages=[conversation.messages[at] for at in kept])
        try:
            made = prompts[len(kept)] = served_prompt(service, part, limit)
        except ContextLengthError as error:
            return error.prompt_len
        return list(made.ids)

    messages = conversation.messages
    whole = prompt_of(range(len(messages)))
    if not isinstance(whole, int):
        return Fitted(prompts[len(messages)])
    sizes = [_size(message) for message in messages]
    roles = [message.role for message in messages]
    found = shorten(roles, sizes, service.model.max_len, whole, limit, prompt_of)
    return None if found is None else Fitted(prompts[len(messages) - found.num_dropped], found.num_dropped)


_TOKEN_BYTES = 4


def _size(message: Message) -> int:
    """Bytes of a turn's texts, about; of its pictures as many as texts have with so many tokens."""
    texts = [message.text, message.reasoning]
    texts += [text for call in message.tool_calls for text in (call.name, str(call.arguments))]
    pictures = (part.num_positions for part in message.parts if isinstance(part, ReadPicture))
    return sum(len(text.encode(errors="replace")) for text in texts) + _TOKEN_BYTES * sum(pictures)


def served_prompt(service: Service, conversation: Conversation, max_len: int | None = None) -> Prompt:
    """Return the prompt of a conversation as the operator has prompts; see chat_prompt.

    max_len: where it is left out, as many tokens as are counted of conversations that no answer is asked for.
    """
    return chat_prompt(
        service.model.tokenizer,
        conversation,
        max_len=max(service.model.max_len, MAX_COUNTED) if max_len is None else max_len,
        force_think=service.config.force_think,
        reads_special_tokens=service.config.reads_special_tokens,
    )


def counted_prompt(request: Request, asked: Conversation) -> Prompt:
    """Return the prompt of a conversation whose tokens are counted, and note for the response what of it has no effect
    or another form.
    """
    service = service_of(request)
    note_unused(request, template_kwargs(service.model.tokenizer, asked).ignored)
    note_altered(request, asked.altered)
    prompt = served_prompt(service, asked)
    note_ignored(request.scope, prompt.changes)
    return prompt


def fitted_text(service: Service, asked: TextRequest, prompt: str | Sequence[int]) -> Sequence[int]:
    """Return the ids of a prompt that is no conversation: only its last ones where the request limits their number.

    Raises ContextLengthError for a text that is too long.
    """
    tokenizer, max_len, wanted = service.model.tokenizer, service.model.max_len, asked.max_prompt_len
    if wanted is None:
        return tokenizer.encode(prompt, max_len=max_len) if isinstance(prompt, str) else prompt
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if wanted < 0:
        wanted = prompt_room(max_len, most_tokens(service, asked))
    return ids[-wanted:]
