"""Whole numbers in bodies of all dialects, which clients of several languages write as 30.0."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

__all__ = ["Whole"]


def _whole(value: object) -> object:
    """30.0 is a whole number, as JSON schemas and other languages see it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""An int, or a float that is one."""
