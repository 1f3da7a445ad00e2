"""The inputs and outputs of callers: prompts and messages in, RequestOutput out. The same for LLM and AsyncLLM."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from ktransformers.core import (
    RECOMMENDED_FIELDS,
    FinishReason,
    GenerationStats,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from ktransformers.engine.sampling.sampler import draw_seed
from ktransformers.engine.sequence.keywords import sampling_with
from ktransformers.engine.sequence.picture_parts import SentPicture, split_pictures
from ktransformers.engine.sequence.prompts import (
    PromptIds,
    check_conversation,
    check_tools,
    ids_of,
    is_one_conversation,
    media_of,
    prompts_of,
    shown,
)
from ktransformers.errors import ConfigError, ContextLengthError, KTransformersError, UnsupportedError
from ktransformers.media.picture import ReadPicture, media_items
from ktransformers.media.records import MediaItem
from ktransformers.tokenizer.tokenizer import Message, Tokenizer

__all__ = [
    "Conversation",
    "IdArray",
    "Prompt",
    "PromptReader",
    "RequestOutput",
    "collect_output",
    "default_sampling_params",
    "join_samples",
    "raise_numbered",
]


class IdArray(Protocol):
    """An array or a tensor of token ids: numpy's, torch's, any that can be made a list."""

    @property
    def shape(self) -> Any:
        """The array's length, or those of its two axes."""

    @property
    def dtype(self) -> Any:
        """The array's type, one of whole numbers."""

    def tolist(self) -> Any:
        """Return the ids as Python's numbers."""


Prompt = str | Sequence[int] | IdArray | Mapping[str, Any]
"""Text, or token ids in a sequence or an array of one axis; also vLLM's {"prompt": text}, {"prompt_token_ids": ids}."""

Conversation = str | Sequence[Message]
"""Messages, oldest first; a plain string is one message of the user."""

_REPR_TEXT = 60


@dataclass(frozen=True, slots=True, repr=False)
class RequestOutput:
    """An answer to a prompt. token_ids include the end token; text does not. params is what was used, its seed filled
    in.

    logprobs has one entry per token when params.logprobs is set, else it is None; prompt_logprobs the same for the
    prompt, None for its first token. `str(output)` is the text. With n answers to a prompt, this is the first of them,
    and `outputs` has all; others: those behind it. index: its place among them, from 0. media: the prompt's pictures.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    stats: GenerationStats
    params: SamplingParams
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    index: int = 0
    others: tuple[RequestOutput, ...] = ()
    media: tuple[MediaItem, ...] = ()

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """All answers to the prompt, this one first: n of them, as SamplingParams asked for."""
        return (self, *self.others)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _REPR_TEXT else self.text[:_REPR_TEXT] + "..."
        return (
            f"RequestOutput(text={text!r}, finish_reason={self.finish_reason.value!r}, "
            f"{len(self.prompt_token_ids)} prompt tokens, {len(self.token_ids)} tokens"
            f"{f', {len(self.others)} others' if self.others else ''})"
        )


def default_sampling_params(generation_defaults: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    """Return the sampling parameters that a model's generation config asks for, as `transformers` reads it: greedy
    unless it says otherwise."""
    given = {
        name: generation_defaults[name] for name in RECOMMENDED_FIELDS if generation_defaults.get(name) is not None
    }
    if not generation_defaults.get("do_sample", "temperature" in given):
        return SamplingParams(
            temperature=0.0, repetition_penalty=given.get("repetition_penalty", 1.0), max_tokens=max_tokens
        )
    return SamplingParams(max_tokens=max_tokens, **given)


def collect_output(prompt_ids: Sequence[int], params: SamplingParams, events: Sequence[TokenEvent]) -> RequestOutput:
    """Collect the whole answer from its events to the last."""
    reason = events[-1].finish_reason
    assert reason is not None
    logprobs = tuple(event.logprobs for event in events if event.logprobs is not None)
    return RequestOutput(
        prompt_token_ids=tuple(prompt_ids),
        token_ids=tuple(event.token_id for event in events if event.token_id is not None),
        text="".join(event.text for event in events),
        finish_reason=reason,
        logprobs=None if params.logprobs is None else logprobs,
        stats=events[-1].stats,
        params=params,
        prompt_logprobs=events[0].prompt_logprobs,
        media=media_of(prompt_ids),
    )


def join_samples(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Join the answers to one prompt to one output: the first of them, which knows the others."""
    first, *others = (replace(output, index=index) for index, output in enumerate(outputs))
    return replace(first, others=tuple(others))


def raise_numbered(error: KTransformersError, index: int, count: int) -> None:
    """Raise `error` with the number of the prompt that it is about, when there are several. Prompts count from 0."""
    if count == 1:
        raise error
    message = f"prompt {index} of {count} (counted from 0): {error}"
    if isinstance(error, ContextLengthError):
        raise ContextLengthError(message, prompt_len=error.prompt_len, max_len=error.max_len) from error
    raise type(error)(message) from error


def _no_pictures(sent: Sequence[SentPicture]) -> list[ReadPicture]:
    raise UnsupportedError("this model was loaded without what reads pictures")


class PromptReader:
    """Turns what a caller gives into ids and parameters. seed: seeds are drawn from it, in the order of the requests.

    default_params: what is used when a call names none. seed None: seeds come from the operating system. read_pictures:
    reads those that conversations hold.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        default_params: SamplingParams,
        seed: int | None = None,
        read_pictures: Callable[[Sequence[SentPicture]], list[ReadPicture]] = _no_pictures,
    ):
        self.tokenizer, self.default_params = tokenizer, default_params
        self._read_pictures = read_pictures
        self._draw_seed: Callable[[], int] = draw_seed
        if seed is not None:
            drawn = random.Random(seed)
            self._draw_seed = lambda: drawn.getrandbits(63)

    def ids(self, prompt: Prompt) -> PromptIds:
        """Token ids of one prompt. Raises ConfigError for what is neither text nor ids."""
        return ids_of(prompt, self.tokenizer.encode)

    def all_ids(self, prompts: Prompt | Sequence[Prompt]) -> list[PromptIds]:
        """Token ids of one prompt, or of each of several. Raises ConfigError for what is neither text nor ids."""
        return [self.ids(prompt) for prompt in prompts_of(prompts)]

    def conversation_ids(
        self,
        messages: Conversation,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        reads_special_tokens: bool = False,
    ) -> PromptIds:
        """Prompt ids of one conversation, its pictures read. reads_special_tokens: see Tokenizer.

        Raises ConfigError or UnsupportedError.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        check_conversation(messages)
        check_tools(tools)
        messages, sent = split_pictures(messages)
        pictures = self._read_pictures(sent) if sent else []
        ids = self.tokenizer.apply_chat_template(
            messages, tools, reads_special_tokens=reads_special_tokens, pictures=pictures, **template_kwargs
        )
        return PromptIds(ids, media_items(ids, pictures))

    def all_conversation_ids(
        self,
        messages: Conversation | Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        reads_special_tokens: bool = False,
    ) -> list[PromptIds]:
        """Prompt ids of one conversation, or of each of several. Raises ConfigError for what is neither."""
        is_one = is_one_conversation(messages)
        each = [cast(Conversation, messages)] if is_one else cast(Sequence[Conversation], messages)
        return [self.conversation_ids(one, tools, template_kwargs, reads_special_tokens) for one in each]

    def params(self, given: SamplingParams | None, keywords: Mapping[str, Any] | None = None) -> SamplingParams:
        """Return `given`, or the defaults, with `keywords` in place of their fields, and a seed.

        Raises ConfigError for anything else, and for values out of range.
        """
        params: object = self.default_params if given is None else given
        if not isinstance(params, SamplingParams):
            hint = "; its fields may be given as keywords too: temperature=0" if isinstance(params, Mapping) else ""
            raise ConfigError(f"sampling_params must be SamplingParams, got {shown(params)}{hint}")
        params = sampling_with(params, keywords or {})
        return params if params.seed is not None else replace(params, seed=self._draw_seed())

    def all_params(
        self,
        given: SamplingParams | Sequence[SamplingParams] | None,
        count: int,
        keywords: Mapping[str, Any] | None = None,
    ) -> list[SamplingParams]:
        """Return the parameters of each prompt, seeds filled in. keywords: as in `params`, for all of them."""
        if given is None or not isinstance(given, Sequence):
            return [self.params(given, keywords) for _ in range(count)]
        if len(given) != count:
            raise ConfigError(f"{len(given)} sampling parameters for {count} prompts; give one, or one per prompt")
        return [self.params(one, keywords) for one in given]
