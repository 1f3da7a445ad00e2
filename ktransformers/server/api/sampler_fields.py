"""Fields of all dialects that leave unlikely tokens out of a draw. They mean what SamplingParams says of them.

A new one is a line of each of the three below; dialects that refused it no longer do (fields.py).
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from pydantic import BaseModel, Field, FiniteFloat

from ktransformers.server.api.whole_numbers import Whole
from ktransformers.server.http.fields import FieldTable, honour

__all__ = ["SAMPLER_FIELDS", "Cuts", "SamplerFields"]

SAMPLER_FIELDS: FieldTable = {"top_k": honour(), "min_p": honour()}
"""What becomes of these fields, in the table of every dialect."""


class Cuts(TypedDict):
    """The same fields, for `Sampling`. None: the request does not say."""

    top_k: int | None
    min_p: float | None


class SamplerFields(BaseModel):
    """Base of bodies that have these fields."""

    top_k: Annotated[Whole, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None

    @property
    def cuts(self) -> Cuts:
        """Return the fields for `Sampling`."""
        return Cuts(top_k=self.top_k, min_p=self.min_p)
