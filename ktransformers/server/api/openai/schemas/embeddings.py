"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WrapValidator, field_validator

from ktransformers.server.api.field_types import Seconds, TokenId, UnicodeText, Whole
from ktransformers.server.api.openai.schemas.base import Body, quick_prompt

__all__ = ["EmbeddingsBody"]


class EmbeddingsBody(Body):
    """The body of POST /v1/embeddings. input: one text, several, the token ids of one, or of several.

    truncate_prompt_tokens: of longer inputs the last so many tokens count, or with truncation_side "right" the first;
    -1: as many as the model takes.
    """

    model: str | None = None
    input: Annotated[
        UnicodeText
        | Annotated[list[UnicodeText], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)],
        WrapValidator(quick_prompt),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, lt=1 << 31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    dimensions: Annotated[Whole, Field(ge=1, lt=1 << 31)] | None = None
    priority: Annotated[Whole, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    timeout: Seconds | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _something_is_left(cls, num_tokens: int | None) -> int | None:
        if num_tokens == 0:
            raise ValueError("0 leaves nothing to embed; -1 is as much as the model takes")
        return num_tokens
