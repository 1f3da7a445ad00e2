"""The fields that chat and text completions share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, FiniteFloat, WrapValidator, field_validator, model_validator

from ktransformers.server.answers.requests import MAX_ANSWERS
from ktransformers.server.api.field_types import Stop, TokenId, Whole, quick_ids
from ktransformers.server.api.openai.constraint_fields import ConstraintFields
from ktransformers.server.api.openai.schemas.base import Body, History, number_values
from ktransformers.server.api.openai.schemas.prediction import PredictionFields
from ktransformers.server.api.sampling_fields import SamplingFields, SchedulingFields

__all__ = ["GenerationFields", "StreamOptions"]


class StreamOptions(History):
    """The `stream_options` of a body. include_usage: a last chunk without choices carries the usage, all others carry
    `usage: null`.

    continuous_usage_stats: every chunk carries the usage so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(Body, ConstraintFields, PredictionFields, SamplingFields, SchedulingFields):
    """The fields that chat and text completions share. Values that change nothing are gone before (fields.py).

    truncate_prompt_tokens: of longer prompts this much is left; -1: what leaves room for an answer. Conversations lose
    whole turns, their oldest.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stop: Stop | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]], BeforeValidator(number_values)] | None
    ) = None
    max_tokens: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None
    # Extensions.
    min_tokens: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, fail_fast=True), WrapValidator(quick_ids)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_speed: bool | None = None
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, lt=1 << 31)] | None = None

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or {}:
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise ValueError(f"the keys of logit_bias must be token ids, got {key[:20]!r}")
        return bias

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self
