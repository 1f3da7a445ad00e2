"""The fields about how and when an answer is drawn that the bodies of all dialects share, by one name each.

A new one is a line of a class here: tables, bodies and `sampling` follow. It means what SamplingParams says of it.

speculative          auto, ngram, draft, mtp: as the server has it (--speculative); off: this answer has no draft tokens
speculative_tokens   draft tokens of the answer in a step at most, up to the server's --speculative_tokens
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, Field, FiniteFloat, model_validator

from ktransformers.engine.sequence.keywords import SamplingKeywords
from ktransformers.server.api.field_types import Penalty, Seconds, UnicodeText, Whole
from ktransformers.server.http.fields import FieldTable, hint, honour, mapped

__all__ = ["SAMPLING_FIELDS", "SCHEDULING_FIELDS", "DrawFields", "SamplingFields", "SchedulingFields"]


class DrawFields(BaseModel):
    """The fields about which tokens are drawn. What a request does not say is as the operator has it, else as the
    model's authors do.
    """

    temperature: Annotated[FiniteFloat, Field(ge=0, le=100)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=1e-3, le=1e3)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class SamplingFields(DrawFields):
    """Base of bodies that ask for an answer."""

    seed: Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    ignore_eos: bool | None = None
    speculative: Literal["auto", "ngram", "draft", "mtp", "off"] | None = None
    speculative_tokens: Annotated[Whole, Field(ge=0, lt=1 << 31)] | None = None

    @model_validator(mode="after")
    def _say_one_thing(self) -> Self:
        if self.speculative == "off" and self.speculative_tokens:
            count = self.speculative_tokens
            raise ValueError(f"speculative off and speculative_tokens {count} say different things; send one of them")
        return self

    def sampling(self, **more: Any) -> SamplingKeywords:
        """Return what the body says of these fields, and `more`, fields of SamplingParams too. None says nothing.

        top_p 0 leaves the likeliest token alone, which is what temperature 0 does.
        """
        said = {name: getattr(self, name) for name in (*DrawFields.model_fields, "seed", "ignore_eos")}
        if self.top_p == 0:
            said |= {"temperature": 0.0, "top_p": 1.0}
        said["max_drafts"] = 0 if self.speculative == "off" else self.speculative_tokens
        return cast(SamplingKeywords, {name: one for name, one in (said | more).items() if one is not None})


class SchedulingFields(BaseModel):
    """Base of bodies that say when and beside what their answers are computed; see AnswerRequest."""

    priority: Annotated[Whole, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    timeout: Seconds | None = None
    cache_salt: Annotated[UnicodeText, Field(max_length=256)] | None = None

    @property
    def scheduling(self) -> dict[str, Any]:
        """The fields for AnswerRequest."""
        return {"priority": self.priority or 0, "timeout": self.timeout, "cache_salt": self.cache_salt or ""}


SAMPLING_FIELDS: FieldTable = {
    **dict.fromkeys(SamplingFields.model_fields, honour()),
    "repeat_penalty": mapped("repetition_penalty"),
    # llama.cpp's. The server finds out by itself which drafts pay, and says where they come from.
    "speculative.n_max": mapped("speculative_tokens"),
    "speculative.n_min": hint(),
    "speculative.p_min": hint(),
    "speculative.type": hint(),
}
"""What becomes of these fields, in the table of every dialect."""

SCHEDULING_FIELDS: FieldTable = dict.fromkeys(SchedulingFields.model_fields, honour())
"""The same of SchedulingFields, for dialects that have them."""
