"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WrapValidator

from ktransformers.server.api.openai.schemas.base import Body, Seconds, TokenId, UnicodeText, Whole, quick_prompt

__all__ = ["EmbeddingsBody"]


class EmbeddingsBody(Body):
    """POST /v1/embeddings. input: one text, several, the token ids of one, or of several."""

    model: str | None = None
    input: Annotated[
        UnicodeText
        | Annotated[list[UnicodeText], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)],
        WrapValidator(quick_prompt),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Whole, Field(ge=1, lt=1 << 31)] | None = None
    priority: Annotated[Whole, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    timeout: Seconds | None = None
