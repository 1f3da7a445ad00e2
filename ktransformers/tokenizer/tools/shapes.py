"""The shapes in which formats spell their calls, for grammars.py, which forces calls, and for shape_parser.py.

Sources: the parsers' modules, and the chat templates of the families.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

__all__ = ["NUMBER", "SHAPES", "CallShape", "Spelling", "shape_of"]

NUMBER = "[0-9]{1,4}"
"""A regular expression for the numbers that some formats give their calls."""
_JSON_HEAD = re.compile(r'\{(?:[^{}]*\{)?[^{}]*"(\w+)"\s*:\s*"NAME"\s*,\s*"(\w+)"\s*:\s*')


class Spelling(Enum):
    """The ways in which a call's arguments are written."""

    JSON = auto()
    TAGS = auto()  # one by one, each between tags of its own
    PYTHON = auto()  # as a function's keywords
    GEMMA = auto()  # nearly JSON: bare keys, strings between tags


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """The shape in which a format spells calls: first open, then calls parted by sep, then close.

    A call is head, its arguments, foot. In head NAME stands for the tool's name, # for a number or an id that `number`
    matches. `parameter`, of arguments between tags: the text before a value, with KEY for its name and KIND for its
    type, and the text after it, which may hold KEY too. kinds: the words for KIND by the names that JSON schema has for
    types; empty: "true" for strings and "false" for others. quotes: what stands around strings of more than one line,
    or with characters of tags in them, which then are no tags; None: they stand as others do. sep None: no more than
    one call. No text here may be the beginning of another that can stand in its place. around: texts that may stand
    around all calls or not.
    has_thoughts: the reasoning may come first, as a message of its own.
    """

    head: str
    foot: str
    open: str = ""
    sep: str | None = "\n"
    close: str = ""
    spelling: Spelling = Spelling.JSON
    parameter: tuple[str, str] = ("", "")
    around: tuple[str, str] | None = None
    has_thoughts: bool = False
    number: str = NUMBER
    kinds: Mapping[str, str] = field(default_factory=dict)
    quotes: tuple[str, str] | None = None

    @property
    def json_keys(self) -> tuple[str, str] | None:
        """The keys of the name and of the arguments where a call is one JSON object, else None."""
        found = _JSON_HEAD.search(self.head)
        return (found[1], found[2]) if found and found.end() == len(self.head) else None

    @property
    def texts(self) -> tuple[str, ...]:
        """All fixed texts of the shape, in which tags stand."""
        return (self.open, self.head, *self.parameter, self.foot, self.sep or "", self.close, *(self.around or ()))


def _dsml(section: str) -> CallShape:
    return CallShape(
        open=f"<｜DSML｜{section}>\n",
        head='<｜DSML｜invoke name="NAME">\n',
        spelling=Spelling.TAGS,
        parameter=('<｜DSML｜parameter name="KEY" string="KIND">', "</｜DSML｜parameter>\n"),
        foot="</｜DSML｜invoke>\n",
        sep="",
        close=f"</｜DSML｜{section}>",
    )


_HERMES = CallShape(head='<tool_call>\n{"name": "NAME", "arguments": ', foot="}\n</tool_call>")
_DEEPSEEK_V3 = CallShape(
    open="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    foot="\n```<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
)

_MINIMAX = "]<]minimax[>["

SHAPES: dict[str, CallShape] = {
    "hermes": _HERMES,
    "ernie": CallShape(head=_HERMES.head, foot=_HERMES.foot, sep="\n\n"),
    "hunyuan": CallShape(
        open="<tool_calls>[",
        head='{"name": "NAME", "arguments": ',
        foot="}",
        sep=", ",
        close="]</tool_calls>",
    ),
    "llama3_json": CallShape(head='{"name": "NAME", "parameters": ', foot="}", sep="; "),
    "mistral": CallShape(head="[TOOL_CALLS]NAME[ARGS]", foot="", sep=""),
    "mistral_list": CallShape(
        open="[TOOL_CALLS] [",
        head='{"name": "NAME", "arguments": ',
        foot="}",
        sep=", ",
        close="]",
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_r1": _DEEPSEEK_V3,
    "deepseek_v31": CallShape(
        open="<｜tool▁calls▁begin｜>",
        head="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        foot="<｜tool▁call▁end｜>",
        sep="",
        close="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": CallShape(
        open="<|tool_calls_section_begin|>",
        head="<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>",
        foot="<|tool_call_end|>",
        sep="",
        close="<|tool_calls_section_end|>",
    ),
    "harmony": CallShape(
        head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        foot="",
        sep=None,
        has_thoughts=True,
    ),
    "qwen3_coder": CallShape(
        head="<tool_call>\n<function=NAME>\n",
        spelling=Spelling.TAGS,
        parameter=("<parameter=KEY>\n", "\n</parameter>\n"),
        foot="</function>\n</tool_call>",
    ),
    "glm45": CallShape(
        head="<tool_call>NAME\n",
        spelling=Spelling.TAGS,
        parameter=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
        foot="</tool_call>",
    ),
    "glm47": CallShape(
        head="<tool_call>NAME",
        spelling=Spelling.TAGS,
        parameter=("<arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
        foot="</tool_call>",
        sep="",
    ),
    "minimax_m2": CallShape(
        open="<minimax:tool_call>\n",
        head='<invoke name="NAME">\n',
        spelling=Spelling.TAGS,
        parameter=('<parameter name="KEY">', "</parameter>\n"),
        foot="</invoke>\n",
        sep="",
        close="</minimax:tool_call>",
    ),
    "gemma4": CallShape(head="<|tool_call>call:NAME", foot="<tool_call|>", sep="", spelling=Spelling.GEMMA),
    "llama4_pythonic": CallShape(
        open="[",
        head="NAME(",
        foot=")",
        sep=", ",
        close="]",
        spelling=Spelling.PYTHON,
        around=("<|python_start|>", "<|python_end|>"),
    ),
    "lfm2": CallShape(
        open="<|tool_call_start|>[",
        head="NAME(",
        foot=")",
        sep=", ",
        close="]<|tool_call_end|>",
        spelling=Spelling.PYTHON,
    ),
    "seed_oss": CallShape(
        head="<seed:tool_call>\n<function=NAME>\n",
        spelling=Spelling.TAGS,
        parameter=("<parameter=KEY>", "</parameter>\n"),
        foot="</function>\n</seed:tool_call>",
    ),
    "hy_v3": CallShape(
        open="<tool_calls:opensource>\n",
        head="<tool_call:opensource>NAME<tool_sep:opensource>\n",
        spelling=Spelling.TAGS,
        parameter=(
            "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>",
            "</arg_value:opensource>\n",
        ),
        foot="</tool_call:opensource>\n",
        sep="",
        close="</tool_calls:opensource>",
    ),
    "solar_open": CallShape(
        open="<|tool_calls|>",
        head="<|tool_call:begin|>#<|tool_call:name|>NAME<|tool_call:args|>",
        number="[A-Za-z0-9_-]{1,40}",
        foot="<|tool_call:end|>",
        sep="",
        close="<|calls|>",
    ),
    "kimi_k3": CallShape(
        open="<|open|>tools<|sep|>",
        head='<|open|>call tool="NAME" index="#"<|sep|>',
        spelling=Spelling.TAGS,
        parameter=('<|open|>argument key="KEY" type="KIND"<|sep|>', "<|close|>argument<|sep|>"),
        kinds={
            "integer": "number",
            **{kind: kind for kind in ("string", "number", "boolean", "null", "array", "object")},
        },
        foot="<|close|>call<|sep|>",
        sep="",
        close="<|close|>tools<|sep|>",
        around=("<|open|>response<|sep|><|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "cohere": CallShape(
        open="<|START_ACTION|>[\n",
        head='    {"tool_call_id": "#", "tool_name": "NAME", "parameters": ',
        foot="}",
        sep=",\n",
        close="\n]<|END_ACTION|>",
    ),
    "nemotron_v2": CallShape(
        open="<TOOLCALL>[", head='{"name": "NAME", "arguments": ', foot="}", sep=", ", close="]</TOOLCALL>"
    ),
    "apertus": CallShape(open="<|tools_prefix|>[", head='{"NAME": ', foot="}", sep=", ", close="]<|tools_suffix|>"),
    "granite": CallShape(open="<|tool_call|>[", head='{"name": "NAME", "arguments": ', foot="}", sep=", ", close="]"),
    "minimax_m1": CallShape(
        open="<tool_calls>\n", head='{"name": "NAME", "arguments": ', foot="}", sep="\n", close="\n</tool_calls>"
    ),
    "minimax_m3": CallShape(
        open=f"{_MINIMAX}<tool_call>\n",
        head=f'{_MINIMAX}<invoke name="NAME">',
        spelling=Spelling.TAGS,
        parameter=(f"{_MINIMAX}<KEY>", f"{_MINIMAX}</KEY>"),
        foot=f"{_MINIMAX}</invoke>\n",
        sep="",
        close=f"{_MINIMAX}</tool_call>",
    ),
    "functionary_v31": CallShape(head="<function=NAME>", foot="</function>", sep=""),
    "functionary_v32": CallShape(head="NAME\n", foot="", sep=">>>"),
    "functionary_v32_marked": CallShape(open=">>>", head="NAME\n", foot="", sep=">>>"),
    "muse_glimmer": CallShape(
        head=' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n',
        spelling=Spelling.TAGS,
        parameter=('<atem:parameter name="KEY">', "</atem:parameter>\n"),
        foot="</atem:invoke>\n</atem:function_calls>",
        sep="<|eom|><|start|>assistant",
    ),
    "json": CallShape(head='{"name": "NAME", "arguments": ', foot="}", sep="\n"),
}
"""By the format's name; mistral_list, glm47 and functionary_v32_marked are other forms of the same parsers."""

_ENDS_MARKED = re.compile(r"""add_generation_prompt(?:(?!endif).)*>>>['"]""", re.DOTALL)


def shape_of(format_name: str, template: str) -> CallShape:
    """Return the shape of a format's calls, as this chat template writes them where the format has two."""
    if format_name == "mistral" and "[ARGS]" not in template:
        return SHAPES["mistral_list"]
    if format_name == "glm45" and "<arg_key>" in template and "n<arg_key>" not in template:
        return SHAPES["glm47"]
    if format_name == "functionary_v32" and not _ENDS_MARKED.search(template):  # the prompt has no mark
        return SHAPES["functionary_v32_marked"]
    return SHAPES[format_name]
