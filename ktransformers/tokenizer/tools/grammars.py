"""Grammars of tool calls: what a model must write so that nothing but calls of these tools comes out.

In llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md): `%json` is a JSON
schema, `<[id]>` a special token, which no text can match. A grammar is about the answer's text from its first
character on, after the reasoning. Builds text only; does not know the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ktransformers.tokenizer.tools.events import ToolSchemas
from ktransformers.tokenizer.tools.json_text import escaped
from ktransformers.tokenizer.tools.values import kinds_of

__all__ = ["SHAPES", "Shape", "tool_grammar"]

SpecialId = Callable[[str], int | None]
"""The id of a tag that is a special token, None for one that is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a format spells calls: first open, then calls parted by sep, then close.

    A call is head, its arguments, foot. In head NAME stands for the tool's name, # for a number. The arguments are a
    JSON object, or, where `parameter` is given, parameters one by one: the text before a value, with KEY for its name
    and KIND for whether it is a string, and the text after it. sep None: no more than one call.
    No text here may be the beginning of another that can stand in its place. has_thoughts: the reasoning may come
    first, as a message of its own.
    """

    head: str
    foot: str
    open: str = ""
    sep: str | None = "\n"
    close: str = ""
    parameter: tuple[str, str] | None = None
    has_thoughts: bool = False


def _dsml(section: str) -> Shape:
    return Shape(
        open=f"<｜DSML｜{section}>\n",
        head='<｜DSML｜invoke name="NAME">\n',
        parameter=('<｜DSML｜parameter name="KEY" string="KIND">', "</｜DSML｜parameter>\n"),
        foot="</｜DSML｜invoke>\n",
        sep="",
        close=f"</｜DSML｜{section}>",
    )


_HERMES = Shape(head='<tool_call>\n{"name": "NAME", "arguments": ', foot="}\n</tool_call>")
_DEEPSEEK_V3 = Shape(
    open="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    foot="\n```<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
)

SHAPES: dict[str, Shape] = {
    "hermes": _HERMES,
    "ernie": Shape(head=_HERMES.head, foot=_HERMES.foot, sep="\n\n"),
    "hunyuan": Shape(
        open="<tool_calls>[",
        head='{"name": "NAME", "arguments": ',
        foot="}",
        sep=", ",
        close="]</tool_calls>",
    ),
    "llama3_json": Shape(head='{"name": "NAME", "parameters": ', foot="}", sep="; "),
    "mistral": Shape(head="[TOOL_CALLS]NAME[ARGS]", foot="", sep=""),
    "mistral_list": Shape(
        open="[TOOL_CALLS] [",
        head='{"name": "NAME", "arguments": ',
        foot="}",
        sep=", ",
        close="]",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_r1": _DEEPSEEK_V3,
    "deepseek_v31": Shape(
        open="<｜tool▁calls▁begin｜>",
        head="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        foot="<｜tool▁call▁end｜>",
        sep="",
        close="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": Shape(
        open="<|tool_calls_section_begin|>",
        head="<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>",
        foot="<|tool_call_end|>",
        sep="",
        close="<|tool_calls_section_end|>",
    ),
    "harmony": Shape(
        head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        foot="",
        sep=None,
        has_thoughts=True,
    ),
    "qwen3_coder": Shape(
        head="<tool_call>\n<function=NAME>\n",
        parameter=("<parameter=KEY>\n", "\n</parameter>\n"),
        foot="</function>\n</tool_call>",
    ),
    "glm45": Shape(
        head="<tool_call>NAME\n",
        parameter=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
        foot="</tool_call>",
    ),
    "glm47": Shape(
        head="<tool_call>NAME",
        parameter=("<arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
        foot="</tool_call>",
        sep="",
    ),
    "minimax_m2": Shape(
        open="<minimax:tool_call>\n",
        head='<invoke name="NAME">\n',
        parameter=('<parameter name="KEY">', "</parameter>\n"),
        foot="</invoke>\n",
        sep="",
        close="</minimax:tool_call>",
    ),
}
"""By the format's name; mistral_list and glm47 are other forms of the same parsers. Gemma and Python have none."""

_ANY_TEXT = "/(.|\\n)*/"
_SHARED = ("$defs", "definitions")
"""Where a schema keeps what its parts refer to."""


def tool_grammar(
    shape: Shape,
    tags: tuple[str, ...],
    tools: ToolSchemas,
    special: SpecialId,
    *,
    parallel: bool,
    max_thoughts: int | None = None,
) -> str:
    """Lark text for one call of `tools`, or, if parallel, one or more. tags: those of the format.

    For a choice of one tool let it be the only one of `tools`. Schemas go into the grammar as they are: what the
    library cannot enforce it refuses itself.
    """
    return _Writer(shape, tags, tools, special).write(parallel, max_thoughts)


class _Writer:
    def __init__(self, shape: Shape, tags: tuple[str, ...], tools: ToolSchemas, special: SpecialId):
        self._shape, self._tools = shape, tools
        self._ids = {tag: found for tag in tags if (found := special(tag)) is not None}
        self._rules: list[str] = []

    def write(self, parallel: bool, max_thoughts: int | None) -> str:
        shape = self._shape
        calls = [self._call(number, name) for number, name in enumerate(self._tools)]
        more = f"({self._spelled(shape.sep)} call)*".replace("( ", "(") if parallel and shape.sep is not None else ""
        start = " ".join(filter(None, (self._prelude(max_thoughts), self._spelled(shape.open), "call", more)))
        close = self._spelled(shape.close)
        return "\n".join([f"start: {start} {close}".rstrip(), f"call: {' | '.join(calls)}", *self._rules]) + "\n"

    def _prelude(self, max_thoughts: int | None) -> str:
        """gpt-oss may think first, and the head of the next message follows when it did."""
        if not self._shape.has_thoughts:
            return ""
        begin, end = self._spelled("<|channel|>analysis<|message|>"), self._spelled("<|end|>")
        limit = "" if max_thoughts is None else f"[max_tokens={max_thoughts}]"
        self._rules.append(f"thoughts: {begin} any {end}")
        self._rules.append(f"any{limit}: {_ANY_TEXT}")
        return f"thoughts? ({self._spelled('<|start|>assistant')})?"

    def _call(self, number: int, name: str) -> str:
        """Adds the rules of one tool; the name of the first."""
        head = self._spelled(self._shape.head.replace("NAME", escaped(name)))
        schema = self._tools[name] or {"type": "object"}
        if self._shape.parameter is None:
            self._rules.append(f"args_{number}: %json {_json(schema)}")
            arguments = f"args_{number}"
        else:
            arguments = " ".join(self._parameters(number, name, schema))
        foot = self._spelled(self._shape.foot)
        self._rules.append(" ".join(filter(None, (f"call_{number}:", head, arguments, foot))))
        return f"call_{number}"

    def _parameters(self, number: int, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        properties, required = schema.get("properties"), schema.get("required")
        shared = {key: schema[key] for key in _SHARED if key in schema}
        for index, (key, value) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
            rule, kinds = f"p_{number}_{index}", kinds_of(self._tools, name, key)
            options = []
            if "string" in kinds or not kinds:
                options.append(f"{self._parameter_head(key, True)} {self._string(rule, value)}")
            if kinds - {"string"} and (not options or self._says_kind):
                self._rules.append(f"{rule}_value: %json {_json({**value, **shared})}")
                options.append(f"{self._parameter_head(key, False)} {rule}_value {self._spelled(self._after)}")
            self._rules.append(f"{rule}: {' | '.join(options)}")
            yield rule if isinstance(required, list) and key in required else f"{rule}?"

    @property
    def _says_kind(self) -> bool:
        return self._shape.parameter is not None and "KIND" in self._shape.parameter[0]

    @property
    def _after(self) -> str:
        assert self._shape.parameter is not None
        return self._shape.parameter[1]

    def _parameter_head(self, key: str, is_string: bool) -> str:
        assert self._shape.parameter is not None
        before = self._shape.parameter[0].replace("KIND", "true" if is_string else "false")
        return self._spelled(before.replace("KEY", key))

    def _string(self, rule: str, schema: object) -> str:
        """A value without quotes and what follows it: one of the enum's, else anything up to the closing tag."""
        values = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return f"({' | '.join(map(_text, values))}) {self._spelled(self._after)}"
        parts = self._parts(self._after)
        first = "" if parts[0] in self._ids else parts.pop(0)
        option = "[lazy]" if first else ""
        # A special token ends any text by itself; text that ends it has to be looked for.
        self._rules.append(f"{rule}_text{option}: /(.|\\n)*{_pattern(first)}/")
        many = "+" if first and parts else ""  # text in front of a special token may be there without it
        return " ".join([f"{rule}_text{many}", *map(self._part, parts)])

    def _spelled(self, text: str) -> str:
        return " ".join(map(self._part, self._parts(text)))

    def _parts(self, text: str) -> list[str]:
        """The special tokens in a text and what stands between them."""
        marks = [re.escape(tag) for tag in sorted(self._ids, key=len, reverse=True)] + ["#"]
        return [part for part in re.split(f"({'|'.join(marks)})", text) if part]

    def _part(self, part: str) -> str:
        if part == "#":
            return "/[0-9]{1,4}/"
        return f"<[{self._ids[part]}]>" if part in self._ids else _text(part)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'


def _pattern(text: str) -> str:
    """`text` inside of a regular expression between slashes."""
    return re.sub(r"[\\/.*+?()\[\]{}|^$#&~-]", lambda found: "\\" + found[0], text).replace("\n", "\\n")
