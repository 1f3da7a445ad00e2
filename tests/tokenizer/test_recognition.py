"""How a model's answers are written is found by rendering past ones, and what is written is read back.

The templates in templates/turns are whole turns of families, and some of no family, whose marks nothing else tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AddedToken

from ktransformers.core import Constraint, ConstraintKind
from ktransformers.errors import ConfigError, ConversationError
from ktransformers.tokenizer.recognition import probe as probe_module
from ktransformers.tokenizer.recognition.segments import shared_start
from ktransformers.tokenizer.template_limits import TemplateLimitError
from ktransformers.tokenizer.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import (
    TOOL_FORMATS,
    ArgumentsPiece,
    CallStarted,
    ParsedEvent,
    ReasoningPiece,
    TextPiece,
)
from tests.support.engines.fake_runner import byte_tokenizer

TURNS = Path(__file__).parent / "templates" / "turns"
THINK = ("<think>", "</think>")
# A template, the format of its calls, and its marks of reasoning. "template": found by rendering alone.
FAMILIES: dict[str, tuple[str, tuple[str, str] | None]] = {
    "minimax_m3": ("minimax_m3", ("<mm:think>", "</mm:think>")),
    "minimax_m1": ("minimax_m1", THINK),
    "lfm2": ("lfm2", THINK),
    "hy_v3": ("hy_v3", ("<think:opensource>", "</think:opensource>")),
    "cohere2_moe": ("cohere", ("<|START_THINKING|>", "<|END_THINKING|>")),
    "solar_open": ("solar_open", ("<|think|>", "<|end|><|begin|>assistant")),
    "seed_oss": ("seed_oss", ("<seed:think>", "</seed:think>")),
    "kimi_k3": ("kimi_k3", ("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    "nemotron_v2": ("nemotron_v2", THINK),
    "apertus": ("apertus", ("<|inner_prefix|>", "<|inner_suffix|>")),
    "muse_glimmer": ("muse_glimmer", ("to=self<|message|>", "<|eom|><|start|>assistant")),
    "apriel": ("hunyuan", ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")),
    "invented_sections": ("template", ("<%muse%>", "<%/muse%>")),
    "invented_quotes": ("template", ("<musing>", "</musing>")),
    "invented_tags": ("template", ("<pondering>", "</pondering>")),
    "invented_json": ("template", THINK),
    "invented_keywords": ("template", THINK),
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "code": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "is_long": {"type": "boolean"},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}, "names": {"type": "array", "items": {"type": "string"}}},
        },
        "tags": {"type": "array", "items": {"type": "integer"}},
        "units": {"enum": ["metric", "imperial"]},
    },
}
TOOLS: dict[str, Any] = {"get_weather": SCHEMA, "fs.read-file": SCHEMA, "now": None}
Calls = list[tuple[str, dict[str, Any]]]
CALLS: Calls = [
    (
        "get_weather",
        {
            "city": 'São "Paulo"\\ 北京 😀',
            "code": 'if a < b && c:\n\tprint("</x>")',
            "days": 12345678901,
            "share": -1.5,
            "is_long": True,
            "where": {"lat": 1.5, "names": ["a, b", "it's"]},
            "tags": [1, 2],
            "units": "metric",
        },
    ),
    ("now", {}),
    ("fs.read-file", {"city": "/a/b", "days": 3}),
]
SCHEMAS = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": schema or {"type": "object", "properties": {}}},
    }
    for name, schema in TOOLS.items()
]
QUESTION = {"role": "user", "content": "What now?"}
THOUGHTS, CONTENT = "They ask.\n\nI could look.", "Let me look."


def turn(calls: Calls, content: str = "", thoughts: str = "") -> dict[str, Any]:
    more = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thoughts) if thoughts else {}
    if calls:
        more["tool_calls"] = [
            {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    return {"role": "assistant", "content": content, **more}


def tokenizer_of(name: str, tokens: tuple[str, ...] = ()) -> Tokenizer:
    backend = byte_tokenizer((TURNS / f"{name}.jinja").read_text()).backend
    backend.backend_tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return Tokenizer(backend)


def split_turn(tokenizer: Tokenizer, said: dict[str, Any]) -> tuple[str, str]:
    """The prompt and what the model has written then, out of what the template writes of both."""
    opening = tokenizer.render_chat_template([QUESTION], SCHEMAS)
    whole = tokenizer.render_chat_template([QUESTION, said], SCHEMAS, add_generation_prompt=False)
    if not whole.startswith(opening):  # a prompt that begins the reasoning, where the past turn has none
        opening = opening[: shared_start(opening, whole)]
        if opening.rfind("<") > opening.rfind(">"):
            opening = opening[: opening.rfind("<")]
        if "[BEGIN FINAL RESPONSE]" in whole:
            return f"{opening}Here are my reasoning steps:\n", whole[len(opening) :]
    return opening, whole[len(opening) :]


def read(tokenizer: Tokenizer, prompt: str, pieces: list[str]) -> tuple[str, str, Calls]:
    """The reasoning, the text and the calls of an answer."""
    parser = tokenizer.answer_parser(tokenizer.encode(prompt, add_special_tokens=False), TOOLS)
    events: list[ParsedEvent] = [*(event for piece in pieces for event in parser.feed(piece)), *parser.flush()]
    thoughts, text = "", ""
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ReasoningPiece(piece):
                thoughts += piece
            case TextPiece(piece):
                text += piece
            case CallStarted(name):
                calls.append((name, ""))
            case ArgumentsPiece(piece):
                calls[-1] = (calls[-1][0], calls[-1][1] + piece)
    return thoughts.strip(), text.strip(), [(name, json.loads(arguments)) for name, arguments in calls]


def cuts(text: str) -> list[list[str]]:
    """The text in pieces of some sizes, and in two at many places."""
    sized = [[text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 3, 7, len(text))]
    return [*sized, *([text[:at], text[at:]] for at in range(1, len(text), 13))]


def test_every_template_is_known_here() -> None:
    assert {path.stem for path in TURNS.glob("*.jinja")} == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_of_answers_is_found(name: str) -> None:
    tokenizer = tokenizer_of(name)
    if name.startswith("minimax_m1") or name in ("invented_json", "invented_keywords"):  # only tokens tell there
        assert (tokenizer.tool_format, tokenizer.reasoning_tags) == FAMILIES[name]
    assert tokenizer.tool_format == FAMILIES[name][0]
    assert tokenizer.reasoning_tags == FAMILIES[name][1]


@pytest.mark.every(5)
@pytest.mark.parametrize("calls", [CALLS, CALLS[:1], CALLS[1:2]], ids=["three", "one", "none_given"])
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_that_a_template_writes_are_read_back(name: str, calls: Calls) -> None:
    tokenizer = tokenizer_of(name)
    prompt, answer = split_turn(tokenizer, turn(calls))
    for tail in ("<｜hy_eos:opensource｜>", "<|calls|>"):  # end tokens of real tokenizers
        answer = answer.removesuffix(tail)
    for pieces in cuts(answer):
        thoughts, text, found = read(tokenizer, prompt, pieces)
        assert found == calls
        assert not thoughts
        assert not text or text in tokenizer.render_chat_template([QUESTION, turn([], "")], SCHEMAS)


@pytest.mark.parametrize("is_limit", [False, True])
def test_a_pause_beside_a_refusal_is_no_limit(monkeypatch: pytest.MonkeyPatch, is_limit: bool) -> None:
    """The collector of garbage may take a second anywhere; a template that ran into a limit is not rendered again."""
    clock, rendered = [0.0], list[int]()

    def render(messages: Sequence[Mapping[str, Any]], *_: object) -> str:
        rendered.append(len(messages))
        clock[0] += 1.0
        cause = TemplateLimitError("it takes longer") if is_limit else TemplateError("no such turns")
        raise ConversationError("refused") from cause

    monkeypatch.setattr(probe_module.time, "thread_time", lambda: clock[0])
    probe = probe_module.Probe(render, ())
    assert [probe.opening(), probe.opening()] == [None, None]
    assert len(rendered) == (1 if is_limit else 2)


@pytest.mark.parametrize("code", ["</with></do>", "a ]]> b\n", "x[y[0]]>1 && z", "\n<![CDATA[\n", "", "]]>", "&]]>"])
def test_within_quotes_no_tag_ends_a_value(code: str) -> None:
    """The quote does behind which the value's own tag stands."""
    tokenizer = tokenizer_of("invented_quotes")
    calls: Calls = [("fs.read-file", {"code": code, "city": "&"}), ("now", {})]
    prompt, answer = split_turn(tokenizer, turn(calls))
    for pieces in cuts(answer):
        assert read(tokenizer, prompt, pieces)[2] == calls


@pytest.mark.parametrize("name", [name for name, (_, marks) in FAMILIES.items() if marks not in (None, THINK)])
def test_reasoning_that_a_template_writes_is_read_back(name: str) -> None:
    tokenizer = tokenizer_of(name)
    said = turn([], CONTENT, THOUGHTS)
    if name == "apertus":
        said["content"] = {"blocks": [{"type": "thoughts", "text": THOUGHTS}, {"type": "response", "text": CONTENT}]}
    prompt, answer = split_turn(tokenizer, said)
    for pieces in cuts(answer):
        thoughts, text, _ = read(tokenizer, prompt, pieces)
        assert thoughts == THOUGHTS
        assert text.startswith(CONTENT)
        assert text == CONTENT or len(text) < len(CONTENT) + 30  # an end token, in tokenizers that have one


# Tokens of the real tokenizers, which decoded text leaves out where they are no marks.
SPECIAL: dict[str, tuple[str, ...]] = {
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "solar_open": ("<|begin|>", "<|end|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|tool_call:begin|>",
                   "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>"),
    "cohere2_moe": ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_THINKING|>",
                    "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    "minimax_m3": ("]<]minimax[>[", "]~b]", "[e~["),
    "muse_glimmer": ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    "invented_sections": ("<%do%>", "<%/do%>", "<%with%>", "<%/one%>", "<%stop%>", "<%muse%>", "<%/muse%>"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_marks_that_are_special_tokens_are_seen(name: str) -> None:
    tokenizer = tokenizer_of(name, SPECIAL[name])
    assert (tokenizer.tool_format, tokenizer.reasoning_tags) == FAMILIES[name]
    prompt, answer = split_turn(tokenizer, turn(CALLS, "", THOUGHTS))
    shown = tokenizer.decode(tokenizer.encode(answer, add_special_tokens=False))
    thoughts, text, calls = read(tokenizer, prompt, list(shown))
    assert (thoughts, calls) == (THOUGHTS, CALLS)
    assert text in ("", "<|calls|>")
    prompt, answer = split_turn(tokenizer, turn([], CONTENT, THOUGHTS))
    shown = tokenizer.decode(tokenizer.encode(answer, add_special_tokens=False))
    assert read(tokenizer, prompt, list(shown))[:2] == (THOUGHTS, CONTENT)


@pytest.mark.parametrize("name", ["kimi_k3", "solar_open", "muse_glimmer"])
def test_marks_of_turns_cannot_be_written_by_a_message(name: str) -> None:
    tokenizer = tokenizer_of(name, SPECIAL[name])
    _, forged = split_turn(tokenizer, turn([], "Hi"))

    def specials(content: str) -> list[int]:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": content}])
        frame = {tokenizer.token_id(token) for token in tokenizer.render_chat_template([QUESTION]).split(">")}
        return [i for i in ids if i in tokenizer.special_ids and i not in frame]

    whole = tokenizer.render_chat_template([QUESTION], add_generation_prompt=False)
    for token in SPECIAL[name]:
        if token in whole:
            assert specials(f"a{token}b") == specials("ab"), token
    assert forged


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_calls_are_what_the_template_writes(name: str) -> None:
    """The grammar takes a turn as the template writes it, and nothing else."""
    pytest.importorskip("llguidance")
    tokenizer = tokenizer_of(name, SPECIAL.get(name, ()))
    call = ("fs.read-file", {"city": "a", "days": 3})
    _, answer = split_turn(tokenizer, turn([call]))
    form = TOOL_FORMATS.get(FAMILIES[name][0])
    first = {"muse_glimmer": " to=fs", "apriel": "<tool_calls>", "invented_json": "Invoke:",
             "kimi_k3": "<|open|>response"}.get(name)  # fmt: skip
    tags = form.tokens if form else ("<%do%>", "<perform", "<run>", "<do task")
    at = answer.index(first) if first else min(answer.index(tag) for tag in tags if tag in answer)
    text = answer[at:].strip() if name != "muse_glimmer" else answer[at:]
    text = text.replace("'a'", '"a"')  # strings are written as in JSON
    tools = {name: {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
             for name in ("fs.read-file", "now")}  # fmt: skip
    grammar = tokenizer.tool_grammar(tools)
    assert grammar is not None
    grammars = tokenizer.grammars(tokenizer.vocab_size, tokenizer.eos_token_ids)

    def taken(text: str) -> int:
        """How many characters of `text` the grammar takes, one token each or more."""
        matcher, ids = grammars.matcher(Constraint(ConstraintKind.TOOL_CALLS, grammar.text)), tokenizer.encode(text)
        for number, token_id in enumerate(ids):
            if not matcher.allowed()[token_id // 32] >> (token_id % 32) & 1:
                return len(tokenizer.decode(ids[:number], skip_special_tokens=False))
            matcher.consume([token_id])
        return len(text)

    arguments_end = text.index("3", text.index("days")) + 1
    assert taken(text) >= arguments_end, text[: taken(text)]
    assert taken("Hello") == 0


UNRENDERED = "{% for m in messages %}<|r|>{{ m.role }}<|/r|>{{ m.content }}{% endfor %}{{ tools | tojson if tools }}"


@pytest.mark.parametrize(
    ("source", "tokens", "form"),
    [
        ("{# <|tool_call|> in a system prompt #}<|start_of_role|>", (), "granite"),
        ("", ("<|tool_call_start|>", "<|tool_call_end|>"), "lfm2"),
        ("", ("<tool_call>", "</tool_call>"), "hermes"),
        ("", (), "json"),
    ],
)
def test_templates_that_write_no_calls(
    source: str, tokens: tuple[str, ...], form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Tags in the source come next, then tokens; then calls are JSON objects, and the log says so once."""
    backend = byte_tokenizer(UNRENDERED + source).backend
    backend.backend_tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    caplog.clear()
    tokenizer = Tokenizer(backend)
    assert tokenizer.tool_format == form
    warnings = [one for one in caplog.records if "no form that is recognized" in one.message]
    assert len(warnings) == (form == "json")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "now", "arguments": {"a": 1}}',
        '[{"name": "now", "parameters": {"a": 1}}]',
        'Sure.\n```json\n{"name": "now", "arguments": {"a": 1}}\n```',
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {"a": 1}}}</tool_call>',
    ],
)
def test_calls_without_a_form_are_json(text: str) -> None:
    tokenizer = byte_tokenizer(UNRENDERED)
    for pieces in cuts(text):
        _, shown, calls = read(tokenizer, "x", pieces)
        assert calls == [("now", {"a": 1})]
        assert shown == ("Sure." if text.startswith("Sure") else "")
    other = text.replace("now", "bob")
    assert read(tokenizer, "x", [other]) == ("", other, [])


def test_a_template_that_knows_no_tools_has_the_plainest_format() -> None:
    assert byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}").tool_format == "json"
    assert byte_tokenizer(None).tool_format is None


@pytest.mark.parametrize(
    "head",
    [
        " to=functions.now<|channel|>commentary json<|message|>",
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.now<|message|>",
        "<|channel|>commentary to=functions.now code<|message|>",
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        "<|channel|>commentary json to=functions.now<|message|>",
        "<|channel|>analysis to=functions.now code<|message|>",
        "<|channel|>commentary to=now <|constrain|>json<|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|>",
        "to=functions.now json<|message|>",
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": 1}', ""])
def test_harmonys_heads_in_any_order(head: str, arguments: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.use_tool_format("harmony")
    text = f"{head}{arguments}<|call|>"
    for pieces in cuts(text):
        _, shown, calls = read(tokenizer, "<|start|>assistant", pieces)
        assert (shown, calls) == ("", [("now", json.loads(arguments or "{}"))])


@pytest.mark.parametrize("text", [" to=functions.now and so on", "to=you: <b>", "to=", "to be"])
def test_text_is_no_head(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.use_tool_format("harmony")
    for pieces in cuts(text):
        assert read(tokenizer, "<|start|>assistant", pieces)[1:] == (text.strip(), [])


@pytest.mark.parametrize(
    ("continued", "is_inside", "thoughts"),
    [
        ("<think>\n", True, "\nMore"),
        ("<think>\nI was thinking", True, "More"),
        ("<think>a</think>Done. ", False, ""),
        ("<think>a</think>Now again <think>b", True, "More"),
        ("Hello", False, ""),
        ("", False, ""),
    ],
)
def test_continued_text_with_an_open_tag_is_reasoning(continued: str, is_inside: bool, thoughts: str) -> None:
    tokenizer = byte_tokenizer()
    history = [QUESTION, {"role": "assistant", "content": "<think>old"}, QUESTION]
    prompt = tokenizer.render_chat_template(history) + continued + ("x" * 300 if len(continued) > 9 else "")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert tokenizer.opens_reasoning(ids) == is_inside
    parser = tokenizer.answer_parser(ids)
    events = [*parser.feed("\nMore</think>Hi"), *parser.flush()]
    if is_inside:
        assert "".join(one.text for one in events if isinstance(one, ReasoningPiece)).strip() == "More"
        assert events[-1] == TextPiece("Hi")


def test_an_answer_may_begin_with_the_closing_mark() -> None:
    tokenizer = tokenizer_of("minimax_m3")
    for pieces in cuts("</mm:think>Hi"):
        assert read(tokenizer, "]~b]ai\n", pieces) == ("", "Hi", [])


def test_calls_in_the_middle_of_reasoning() -> None:
    """Apertus calls without closing its reasoning; of other formats what looks like a call there is none."""
    tokenizer = tokenizer_of("apertus")
    for pieces in cuts('<|inner_prefix|>Hm.<|tools_prefix|>[{"now": {}}]<|tools_suffix|>'):
        assert read(tokenizer, "<|assistant_start|>", pieces) == ("Hm.", "", [("now", {})])


def test_formats_by_hand() -> None:
    tokenizer = tokenizer_of("minimax_m3")
    tokenizer.use_tool_format("hermes", "none")
    assert (tokenizer.tool_format, tokenizer.reasoning_tags) == ("hermes", None)
    assert read(tokenizer, "x", ["<mm:think>a</mm:think>b"]) == ("", "<mm:think>a</mm:think>b", [])
    tokenizer.use_tool_format("auto")  # the reasoning stays as it was asked for
    assert (tokenizer.tool_format, tokenizer.reasoning_tags) == ("minimax_m3", None)
    tokenizer.use_tool_format("auto", "deepseek")
    assert tokenizer.reasoning_tags == ("<mm:think>", "</mm:think>")
    with pytest.raises(ConfigError, match="--reasoning_format 'nope' is not one of auto, none, think"):
        tokenizer.use_tool_format("auto", "nope")
    tokenizer.use_chat_template((TURNS / "lfm2.jinja").read_text())
    assert tokenizer.tool_format == "lfm2"
    with pytest.raises(ConfigError, match="the template cannot be used"):
        tokenizer.use_chat_template("{% if %}")


@pytest.mark.parametrize(("before", "behind"), [("[", "]"), ("*", "*"), ("(", ")\n"), ("> ", "\n\n"), ("__", "__")])
def test_how_a_template_shows_reasoning_may_be_no_mark(before: str, behind: str) -> None:
    """Answers begin with brackets and stars, too: tags that are known are looked for instead."""
    shown = f"{{% if message.reasoning_content %}}{before}{{{{ message.reasoning_content }}}}{behind}{{% endif %}}"
    tokenizer = byte_tokenizer(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        + shown
        + "{{ message.content }}<|im_end|>\n{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert tokenizer.reasoning_tags == ("<think>", "</think>")
    for text in (f"{before}a note{behind}Hi", "<think>Hm.</think>Hi"):
        thoughts = "Hm." if text.startswith("<think>") else ""
        assert read(tokenizer, "<|im_start|>assistant\n", [text]) == (thoughts, "Hi" if thoughts else text, [])
