"""Fields of all dialects about speculative decoding. No answer depends on them, only how many steps it takes.

speculative          auto, ngram, draft, mtp: as the server has it (--speculative); off: this answer has no draft tokens
speculative_tokens   draft tokens of the answer in a step at most, up to the server's --speculative_tokens
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from ktransformers.server.api.whole_numbers import Whole
from ktransformers.server.http.fields import FieldTable, hint, honour, mapped

__all__ = ["DRAFT_FIELDS", "DraftFields"]

DRAFT_FIELDS: FieldTable = {
    "speculative": honour(),
    "speculative_tokens": honour(),
    # llama.cpp's. The server finds out by itself which drafts pay, and says where they come from.
    "speculative.n_max": mapped("speculative_tokens"),
    "speculative.n_min": hint(),
    "speculative.p_min": hint(),
    "speculative.type": hint(),
}
"""What becomes of these fields, in the table of every dialect."""


class DraftFields(BaseModel):
    """Base of bodies that have these fields."""

    speculative: Literal["auto", "ngram", "draft", "mtp", "off"] | None = None
    speculative_tokens: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None

    @property
    def max_drafts(self) -> int | None:
        """What SamplingParams calls max_drafts."""
        return 0 if self.speculative == "off" else self.speculative_tokens

    @model_validator(mode="after")
    def _say_one_thing(self) -> Self:
        if self.speculative == "off" and self.speculative_tokens:
            count = self.speculative_tokens
            raise ValueError(f"speculative off and speculative_tokens {count} say different things; send one of them")
        return self
