"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WrapValidator, model_validator

from ktransformers.server.answers.requests import MAX_ANSWERS
from ktransformers.server.api.field_types import TokenId, Whole
from ktransformers.server.api.openai.schemas.base import quick_prompt
from ktransformers.server.api.openai.schemas.generation import GenerationFields

__all__ = ["CompletionBody"]


class CompletionBody(GenerationFields):
    """The body of POST /v1/completions. prompt: one text, several, the token ids of one, or of several.

    max_tokens 0: nothing but the prompt is looked at. best_of: so many answers are computed, and the n whose tokens are
    likeliest on average come back. return_token_ids: choices carry the answer's token_ids, its end token included.
    """

    prompt: Annotated[
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)],
        WrapValidator(quick_prompt),
    ]
    return_token_ids: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[Whole, Field(ge=1, le=MAX_ANSWERS)] | None = None

    @property
    def num_computed(self) -> int:
        """Number of answers that are computed for each prompt."""
        return max(self.best_of or 1, self.n or 1)

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError("best_of must not be less than n")
        if self.stream and self.num_computed > (self.n or 1):
            raise ValueError("best_of above n cannot be streamed: the best is known when all are complete")
        return self
