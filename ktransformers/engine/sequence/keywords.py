"""Keywords of `chat`, `generate` and `stream`: fields of SamplingParams, and variables of the model's chat template."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict

from ktransformers.core import Constraint, Pooling, ReasoningSpec, SamplingParams
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.tokenizer.template_variables import template_variables
from ktransformers.tokenizer.tokenizer import Tokenizer

__all__ = ["SamplingKeywords", "samples_of", "sampling_with", "split_keywords"]


class SamplingKeywords(TypedDict, total=False):
    """The fields of SamplingParams, each in place of the same field of sampling_params or of the model's defaults."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    allowed_token_ids: Sequence[int] | None
    pooling: Pooling | None
    min_tokens: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    constraint: Constraint | Mapping[str, Any] | None
    reasoning: ReasoningSpec | None
    max_drafts: int | None
    n: int
    structured_outputs: Any
    guided_decoding: Any
    guided_json: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any


_SAMPLING = tuple(one.name for one in fields(SamplingParams))

_OURS = ("add_generation_prompt", "continue_final_message", "chat_template")
"""Keywords of `chat` that are about the template, besides its variables."""

_OWN_ARGUMENTS = {
    "chat": ("messages", "sampling_params", "tools", "special_tokens_in_content", "chat_template_kwargs", *_OURS),
    "generate": ("prompts", "sampling_params"),
    "stream": ("prompt", "sampling_params", "should_stop", "on_prefill", "request_id"),
}

_SET_HERE = frozenset({"messages", "tools", "tokenize", "reads_special_tokens", "continue_reasoning", "max_len"})
"""Variables of templates, or arguments on the way to them, that this program sets itself."""

_ELSEWHERE: Mapping[str, tuple[tuple[object, ...], str]] = {
    "use_tqdm": ((False, None), "there is no bar; `stream` gives an answer as it comes"),
    "lora_request": ((None,), "LoRA adapters are not supported here; merge one into the model"),
    "mm_processor_kwargs": ((None,), "images are not supported here"),
    "priority": ((None, 0), "prompts are answered in the order in which they come"),
}
"""vLLM's keywords of which some values ask for nothing: (those values, what is so here)."""


def split_keywords(
    method: str, keywords: Mapping[str, Any], tokenizer: Tokenizer | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into those that are fields of SamplingParams and those that the chat template reads.

    method: the name of the method that was called, for the message. tokenizer: with the template; None for a method
    that renders none. Raises ConfigError for a keyword that is neither, with the nearest that is.
    """
    sampling = {name: value for name, value in keywords.items() if name in _SAMPLING}
    others = {name: value for name, value in keywords.items() if name not in _SAMPLING}
    for name, (harmless, instead) in _ELSEWHERE.items():
        if name in others and not any(others[name] is one for one in harmless):
            raise UnsupportedError(f"{name}={others[name]!r:.40} is not supported: {instead}")
        others.pop(name, None)
    template: dict[str, Any] = {}
    if tokenizer is not None:
        variables = others.pop("chat_template_kwargs", None)
        if variables is not None and not isinstance(variables, Mapping):
            raise ConfigError(f"chat_template_kwargs must be a dict of the template's variables, got {variables!r:.60}")
        template = {**(variables or {}), **others}
        others = {}
    readable = _readable(tokenizer, template.get("chat_template"))
    wrong = [*others, *(name for name in template if not _may_set(name, readable))]
    if wrong:
        raise ConfigError(_unknown(method, wrong[0], readable))
    return sampling, template


def _readable(tokenizer: Tokenizer | None, chosen: object) -> list[frozenset[str]] | None:
    """Variables of each of the chat templates; None where there is no template, which rendering says better."""
    if tokenizer is None:
        return []
    if not tokenizer.has_chat_template and chosen is None:
        return None
    template = tokenizer.backend.chat_template if chosen is None else chosen
    texts: Iterable[object] = template.values() if isinstance(template, Mapping) else (template,)
    return [template_variables(text) for text in texts if isinstance(text, str)]


def _may_set(name: str, readable: list[frozenset[str]] | None) -> bool:
    if name in _SET_HERE:
        return False
    return readable is None or name in _OURS or any(name in variables for variables in readable)


def _unknown(method: str, name: str, readable: list[frozenset[str]] | None) -> str:
    if name in _SET_HERE:
        return f"{name} is no keyword of {method}: it is set here"
    variables = {one for each in readable or () for one in each} - _SET_HERE
    known = [*_SAMPLING, *_OWN_ARGUMENTS[method], *sorted(variables)]
    near = difflib.get_close_matches(name, known, n=1)
    what = "no field of SamplingParams" + (" and no variable of the model's chat template" if method == "chat" else "")
    return f"{method} has no keyword {name}, which is {what}" + (f"; did you mean {near[0]}?" if near else "")


def sampling_with(params: SamplingParams, keywords: Mapping[str, Any]) -> SamplingParams:
    """Return `params` with `keywords` in place of its own fields. Raises ConfigError for values out of range."""
    return replace(params, **keywords) if keywords else params


def samples_of(params: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each of the n answers to one prompt: answer i draws with seed + i, as in the HTTP API.

    params: with its seed filled in.
    """
    if params.n == 1:
        return [params]
    assert params.seed is not None, "seeds are filled in before"
    return [replace(params, n=1, seed=(params.seed + index) % (1 << 64)) for index in range(params.n)]
