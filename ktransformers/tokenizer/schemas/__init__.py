"""JSON Schemas as programs write them, made into the few keywords that every grammar can follow.

    any schema ─> references.py ─> expand.py ─> objects.py ─> nodes.py ─> emptiness.py ─> emit.py ─> core schema
                  $ref, $id        allOf,       arrays.py                 what nothing
                                   anyOf, not   scalars.py                can fit

A core schema has one `type`, or `enum`, or `anyOf` and nothing beside it, or a `$ref` to its own `$defs`; and of the
keywords of types `properties`, `required`, `patternProperties`, `additionalProperties`, `minProperties`,
`maxProperties`, `prefixItems`, `items`, `minItems`, `maxItems`, bounds of numbers, lengths, `pattern` (or `allOf` of
several) and a `format` that grammars know. What cannot be said in these is left out: the core schema then takes more
than was asked, and `Core.widened` says where.
"""

from ktransformers.tokenizer.schemas.core_schema import Core, core_schema
from ktransformers.tokenizer.schemas.options import JSON_OPTIONS
from ktransformers.tokenizer.schemas.report import SchemaError, Widened

__all__ = ["JSON_OPTIONS", "Core", "SchemaError", "Widened", "core_schema"]
