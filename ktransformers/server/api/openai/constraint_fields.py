"""Fields of OpenAI's bodies that say what an answer must look like. What they mean: server/answers/constraints.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ConstraintFields", "ResponseFormat"]

Schema = dict[str, Any] | str


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NamedSchema(_Fields):
    """A JSON schema that the answer has to fit. It is always followed; strict: whole, or not at all."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Fields):
    """OpenAI's `response_format`; with `schema` beside the type, llama.cpp's. value: TGI's, pattern: Together's,
    grammar: Fireworks'.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar"]
    json_schema: NamedSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    value: Schema | None = None
    pattern: str | None = None
    grammar: str | None = None


class StructuredOutputs(_Fields):
    """vLLM's `structured_outputs`, with one of the first five fields."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None


class TypedGrammar(_Fields):
    """TGI's `grammar`: a schema or a regular expression under the name of a grammar."""

    type: Literal["json", "json_schema", "regex"]
    value: Schema


class ConstraintFields(_Fields):
    """The fields that constrain an answer, at most one of which may be sent."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    grammar: TypedGrammar | str | None = None

    def constraint_fields(self) -> dict[str, Any]:
        """Return the constraint's fields as they were sent."""
        return self.model_dump(by_alias=True, exclude_none=True, include=set(ConstraintFields.model_fields))
