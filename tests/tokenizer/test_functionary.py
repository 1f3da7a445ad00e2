"""Functionary's two forms: messages to recipients (v3.2), and a tag with the tool's name (v3.1)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import ArgumentsPiece, CallEnded, CallStarted, TextPiece
from tests.support.checks.forced_calls import check_calls, takes
from tests.support.engines.fake_runner import byte_tokenizer

_HEAD = "'<|start_header_id|>' + ROLE + '<|end_header_id|>\\n\\n'"
_TURN = f"{{{{ {_HEAD.replace('ROLE', 'm.role')} + m.content + '<|eot_id|>' }}}}"
_OPEN = f"{{{{ {_HEAD.replace('ROLE', repr('assistant'))} }}}}"


def _template(calls: str, text: str, opens: str) -> str:
    return (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
        "{% if m.role != 'assistant' %}" + _TURN + "{% else %}" + _OPEN + text + "{% for c in m.tool_calls or [] %}"
        "{{ " + calls + " }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}" + opens + "{% endif %}"
    )  # fmt: skip


_V32 = "'>>>' + c.function.name + '\\n' + c.function.arguments"
_ALL = "{% if m.content %}{{ '>>>all\\n' + m.content }}{% endif %}"
V32 = _template(_V32, _ALL, _OPEN.replace("\\n\\n'", "\\n\\n>>>'"))
V32_UNMARKED = _template(_V32, _ALL, _OPEN)
V31 = _template(
    "'<|python_tag|>' + c.function.arguments if c.function.name == 'python' else "
    "'<function=' + c.function.name + '>' + c.function.arguments + '</function>'",
    "{{ m.content or '' }}",
    _OPEN,
)
FORMATS = {
    "v32": (V32, "functionary_v32"),
    "unmarked": (V32_UNMARKED, "functionary_v32"),
    "v31": (V31, "functionary_v31"),
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: dict[str, Any] = {"look": CITY, "add": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def read(
    tokenizer: Tokenizer, text: str, tools: Any = TOOLS, *, size: int = 1, is_cut: bool = False
) -> tuple[str, list[tuple[str, str, bool]]]:
    """The text and the calls: names, arguments, whether whole."""
    parser = tokenizer.answer_parser(tokenizer.encode("x"), tools)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    shown, calls = "", list[tuple[str, str, bool]]()
    for event in [*(event for piece in pieces for event in parser.feed(piece)), *parser.flush(is_cut)]:
        match event:
            case TextPiece(piece):
                shown += piece
            case CallStarted(name):
                calls.append((name, "", False))
            case ArgumentsPiece(piece):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece, False)
            case CallEnded(is_whole):
                calls[-1] = (*calls[-1][:2], is_whole)
    return shown, calls


@pytest.mark.parametrize(("template", "name"), FORMATS.values(), ids=FORMATS)
def test_what_the_template_writes_is_read(template: str, name: str) -> None:
    tokenizer = byte_tokenizer(template)
    assert tokenizer.tool_format == name
    tools = [{"type": "function", "function": {"name": key, "parameters": value}} for key, value in TOOLS.items()]
    question = {"role": "user", "content": "Hi"}
    calls = [("look", {"city": "Os>>>lo\n"}), ("add", {"a": 1})]
    turn = {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": f"c{index}", "type": "function", "function": {"name": key, "arguments": json.dumps(value)}}
            for index, (key, value) in enumerate(calls)
        ],
    }
    opening = tokenizer.render_chat_template([question], tools)
    whole = tokenizer.render_chat_template([question, turn], tools, add_generation_prompt=False)
    assert whole.startswith(opening)
    answer = whole.removeprefix(opening).removesuffix("<|eot_id|>")
    for size in (1, 3, len(answer)):
        shown, found = read(tokenizer, answer, size=size)
        assert shown == "I look."
        assert [(key, json.loads(arguments), is_whole) for key, arguments, is_whole in found] == [
            (*call, True) for call in calls
        ]


@pytest.mark.parametrize(
    ("text", "shown", "names"),
    [
        ("all\nHello", "Hello", []),
        (">>>all\nHello", "Hello", []),
        ("look\n{}", "", ["look"]),
        (">>>look\n{}\n>>>add\n{}", "", ["look", "add"]),
        ("all\nSo:\n>>>look\n{}", "So:\n", ["look"]),
        ("all\nOne>>>all\nTwo", "OneTwo", []),
        ("all\n>>> print(1)\n1 >>>2", ">>> print(1)\n1 >>>2", []),
        ("other\n{}", "other\n{}", []),
        ("look\nat this", "look\nat this", []),
        ("Hello", "Hello", []),
        ("", "", []),
    ],
)
def test_messages(text: str, shown: str, names: list[str]) -> None:
    tokenizer = byte_tokenizer(V32)
    for size in (1, 4, 100):
        found, calls = read(tokenizer, text, size=size)
        assert (found, [name for name, *_ in calls]) == (shown, names)
    without, none = read(tokenizer, text.replace("look", "others"), None)
    assert none == []
    assert not without.startswith(("all\n", ">>>all"))


@pytest.mark.parametrize("text", ["lo", "look", "look\n", ">>>", ">>>loo", "al", 'all\nSo>>>look\n{"ci'])
def test_what_was_begun_is_no_text(text: str) -> None:
    tokenizer = byte_tokenizer(V32)
    for size in (1, 100):
        shown, calls = read(tokenizer, text, size=size, is_cut=True)
        assert shown == ("So" if "So" in text else "")
        assert calls == ([("look", '{"ci', False)] if "{" in text else [])


@pytest.mark.parametrize(("template", "name"), FORMATS.values(), ids=FORMATS)
def test_calls_can_be_demanded(template: str, name: str) -> None:
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer(template)
    first, last = ("<function=look>", "</function>") if name == "functionary_v31" else ("look\n", "")
    begin = ">>>" if template == V32_UNMARKED else ""
    call = f'{begin}{first}{{"city": "Oslo"}}{last}'
    assert takes(tokenizer, call, TOOLS, parallel=False)
    assert not takes(tokenizer, "all\nHello", TOOLS)
    assert not takes(tokenizer, f"{call}>>>{first}", TOOLS)
    check_calls(tokenizer, call, TOOLS, parallel=False)
    sep = "" if name == "functionary_v31" else ">>>"
    both = f"{call}{sep}{call.removeprefix(begin)}"
    assert takes(tokenizer, both, TOOLS)
    assert not takes(tokenizer, both, TOOLS, parallel=False)
    check_calls(tokenizer, both, TOOLS, parallel=True)
