"""Grammars of tool calls: the texts that a model may write so that only calls of these tools come out.

A grammar is about the answer's text from its first character on, after the reasoning. Schemas are made into core
schemas (tokenizer/schemas) first. Where arguments are JSON, those go into the grammar as they are; other spellings have
grammars of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ktransformers.errors import ConfigError
from ktransformers.tokenizer.schemas import Widened, core_schema
from ktransformers.tokenizer.tools.base import NAME_LEN
from ktransformers.tokenizer.tools.events import ToolSchemas
from ktransformers.tokenizer.tools.json_text import escaped
from ktransformers.tokenizer.tools.lark import ANY_TEXT, LarkRules, literal
from ktransformers.tokenizer.tools.schema_parts import alternatives, members
from ktransformers.tokenizer.tools.shapes import CallShape, Spelling
from ktransformers.tokenizer.tools.spelled_values import GemmaValues, python_arguments
from ktransformers.tokenizer.tools.tagged_values import TaggedValues

__all__ = ["ToolGrammar", "tool_grammar"]

_NAME = re.compile(r"[\w.\-]+")


class ToolGrammar(NamedTuple):
    """A grammar as Lark text, and by the tool's name where it does not hold calls to its schema."""

    text: str
    widened: Mapping[str, Sequence[Widened]]


def tool_grammar(
    shape: CallShape, ids: Mapping[str, int], tools: ToolSchemas, *, parallel: bool, max_thoughts: int | None = None
) -> ToolGrammar:
    """Return a grammar for one call of `tools`, or, if parallel, one or more. ids: of the format's special tokens.

    For a choice of one tool let it be the only one of `tools`. max_thoughts: tokens of the reasoning, where the shape
    has it. Raises ConfigError, with the tool's name, for what the format cannot spell.
    """
    writer = _Writer(shape, tools, LarkRules(ids))
    return ToolGrammar(writer.write(parallel, max_thoughts), writer.widened)


class _Writer:
    def __init__(self, shape: CallShape, tools: ToolSchemas, rules: LarkRules):
        self._shape, self._tools, self._rules = shape, tools, rules
        self.widened: dict[str, list[Widened]] = {}
        self._now = ""  # the tool whose rules are being written
        is_tagged = shape.spelling is Spelling.TAGS
        self._tagged = TaggedValues(rules, tools, shape, self._widen) if is_tagged else None

    def _widen(self, at: str, keyword: str) -> None:
        found = self.widened.setdefault(self._now, [])
        if Widened(at, keyword) not in found:
            found.append(Widened(at, keyword))

    def write(self, parallel: bool, max_thoughts: int | None) -> str:
        shape, spelled = self._shape, self._rules.spelled
        calls = [self._call(number, name) for number, name in enumerate(self._tools)]
        before, after = (f"({spelled(tag)})?" if tag else "" for tag in shape.around or ("", ""))
        more = f"({spelled(shape.sep)} call)*" if parallel and shape.sep is not None else ""
        parts = (self._prelude(max_thoughts), before, spelled(shape.open), "call", more, spelled(shape.close), after)
        start = " ".join(filter(None, parts))
        return "\n".join([f"start: {start}", f"call: {' | '.join(calls)}", *self._rules.lines]) + "\n"

    def _prelude(self, max_thoughts: int | None) -> str:
        """gpt-oss may think first, and the head of the next message follows when it did. Its tags are tokens."""
        if not self._shape.has_thoughts or max_thoughts == 0:
            return ""
        spelled = self._rules.spelled
        self._rules.add("any", ANY_TEXT, option="" if max_thoughts is None else f"[max_tokens={max_thoughts}]")
        begin, next_head = spelled("<|channel|>analysis<|message|>"), spelled("<|start|>assistant")
        self._rules.add("thoughts", begin, "any", spelled("<|end|>"), next_head)
        return "thoughts?"

    def _call(self, number: int, name: str) -> str:
        """Adds the rules of one tool; the name of the first."""
        rules = self._rules
        try:
            arguments = self._arguments(f"args_{number}", name)
        except ConfigError as error:
            raise ConfigError(f"calls of {name[:64]!r} cannot be forced: {error}") from error
        return rules.add(f"call_{number}", self._head(name), arguments, rules.spelled(self._shape.foot))

    def _head(self, name: str) -> str:
        head = self._shape.head
        is_quoted = '"NAME"' in head and self._tagged is None
        if len(name) > NAME_LEN or not (is_quoted or _NAME.fullmatch(name)):
            raise ConfigError(f"the tool {name[:64]!r} has a name that calls in this model's format cannot hold")
        parts = [self._rules.spelled(part.replace("NAME", escaped(name))) for part in head.split("#")]
        return f" /{self._shape.number}/ ".join(parts).strip()

    def _arguments(self, rule: str, name: str) -> str:
        """The rules of a call's arguments, which are an object whether their schema says so or not."""
        self._now = name
        core = core_schema(self._tools[name] or {}, is_object=True)
        for one in core.widened:
            self._widen(*one)
        root = core.schema
        if self._shape.spelling is Spelling.JSON:
            return self._rules.json(rule, root, root)
        gemma = GemmaValues(self._rules, rule, root, self._widen)
        options = [
            self._listed(f"{rule}_{number}", name, leaf.schema, root, gemma)
            for number, leaf in enumerate(alternatives(root, root))
        ]
        return f"({' | '.join(options)})"

    def _listed(self, rule: str, name: str, schema: Any, root: Any, gemma: GemmaValues) -> str:
        """What stands for arguments that are not JSON, of one of the alternatives that a schema has for them."""
        if self._shape.spelling is Spelling.GEMMA:
            return gemma.arguments(schema)
        for keyword in ("minProperties", "maxProperties"):
            if keyword in schema:
                self._widen("#", keyword)
        if self._shape.spelling is Spelling.PYTHON:
            return python_arguments(self._rules, rule, schema, root, self._widen)
        assert self._tagged is not None
        found = members(schema)
        written = [self._tagged.write(f"{rule}_{at}", name, member, root) for at, member in enumerate(found)]
        parts = (one if member.is_required else f"{one}?" for one, member in zip(written, found, strict=True))
        return " ".join(parts) or literal("")
