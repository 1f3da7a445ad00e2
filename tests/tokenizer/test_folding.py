"""Conversations through templates that drop, move or refuse turns: no text is lost, and what is kept stays as it is."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ktransformers.core import SamplingParams
from ktransformers.engine.sequence.outputs import PromptReader
from ktransformers.errors import ConfigError, ConversationError
from ktransformers.server.answers.prompts import chat_prompt, template_kwargs
from ktransformers.server.answers.requests import Conversation, Message
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.templates import Prober, turns
from ktransformers.tokenizer.templates.effort import nearest_effort
from ktransformers.tokenizer.tools import TOOL_FORMATS
from tests.support.checks.tool_answers import CALLS, TOOLS
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.models.chat_templates import (
    CONVERSATIONS,
    FAMILIES,
    MARKUPS,
    Habits,
    conversation,
    names_of,
    template_of,
    templates,
    texts_of,
)
from tests.tokenizer.test_tool_formats import calls_of, read

TEMPLATES = templates()
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up_00",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "What."}}},
    },
}
Messages = list[dict[str, Any]]
NAMES = [
    pytest.param(name, marks=[] if name.endswith("-chatml") or "-" not in name else pytest.mark.exhaustive)
    for name in TEMPLATES
]


def upstream(template: str, messages: Messages, tools: list[Any] | None = None, *, opens: bool = True) -> str | None:
    """What transformers itself makes of it; None when the template refuses."""
    try:
        texts, _ = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=template, add_generation_prompt=opens
        )
    except (jinja2.TemplateError, TypeError):
        return None
    return str(texts[0])


def is_whole(text: str, messages: Messages) -> bool:
    wanted = texts_of(messages)
    return all(text.count(one) == 1 for one in wanted) and all(name in text for name in names_of(messages))


def is_ordered(text: str, word: str, messages: Messages, *, skip: int = 0) -> bool:
    """skip: turns whose place is the template's own business."""
    wanted = texts_of(messages)[skip:]
    if "B" in word:  # results may stand right behind their calls
        wanted = [one for one in wanted if not one.startswith("value")]
    places = [text.find(one) for one in wanted]
    return places == sorted(places)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
def test_no_text_is_lost(name: str, tools: list[Any] | None) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name])
    for word in CONVERSATIONS:
        messages = conversation(word)
        text = tokenizer.render_chat_template(messages, tools)
        assert is_whole(text, messages), f"{word}: {text}"
        begins_late = "mistral_nemo" in name and word[0] in "SD"
        num_first = len(word) - len(word.lstrip("SD"))
        assert is_ordered(text, word, messages, skip=num_first if begins_late else 0), f"{word}: {text}"


OWN_WAY = ("US", "USU", "UD", "UAUD", "UT", "SUD")  # alternating templates take any role in the assistant's place


@pytest.mark.every(5)
@pytest.mark.parametrize("name", [name for name in NAMES if "kimi_k2_turn" not in name.values])
def test_what_a_template_keeps_is_written_as_it_writes_it(name: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name])
    num_kept = 0
    for word in CONVERSATIONS:
        if "D" in word or word in OWN_WAY:
            continue
        messages = conversation(word)
        theirs = upstream(TEMPLATES[name], messages)
        if theirs is not None and is_whole(theirs, messages) and is_ordered(theirs, word, messages):
            num_kept += 1
            assert tokenizer.render_chat_template(messages) == theirs, word
    assert num_kept >= 2 or "minimax_text" in name  # which wants lists


ROLES_AND_PLACES = [
    # habits, conversation, what the whole prompt is
    (Habits(), "SUAS", "S0|U1|A2|S3|"),
    (Habits(system="first"), "SUASU", "S0|U1|A2|U3,4|"),
    (Habits(system="first"), "SUAS", "S0|U1|A2|U3|"),
    (Habits(system="first"), "US", "U0,1|"),
    (Habits(system="first"), "SSU", "S0,1|U2|"),
    (Habits(system="first_raises", developer="raises"), "SDUADU", "S0,1|U2|A3|U4,5|"),
    (Habits(system="raises", alternates=True), "SUAU", "U0,1|A2|U3|"),
    (Habits(system="raises", alternates=True), "S", "U0|"),
    (Habits(system="raises", alternates=True), "SAU", "U0|A1|U2|"),
    (Habits(system="hoists"), "SUASU", "S0|U1|A2|U3,4|"),
    (Habits(developer="knows"), "DU", "D0|U1|"),
    (Habits(developer="echo"), "DU", "S0|U1|"),
    (Habits(alternates=True), "UUAAU", "U0,1|A2,3|U4|"),
    (Habits(alternates=True), "AU", "U|A0|U1|"),
    (Habits(needs_user=True), "S", "S0|U|"),
]


@pytest.mark.parametrize(("habits", "word", "wanted"), ROLES_AND_PLACES)
def test_where_turns_go(habits: Habits, word: str, wanted: str) -> None:
    names = {"S": "system", "D": "instructions", "U": "user", "A": "assistant"}
    shown = "".join(
        f"<|im_start|>{names[turn[0]]}\n{chr(10).join(['']).join(_texts(turn[1:]))}<|im_end|>\n"
        for turn in wanted.split("|")
        if turn
    )
    tokenizer = byte_tokenizer(template_of(habits, "chatml"))
    assert tokenizer.render_chat_template(conversation(word)) == shown + "<|im_start|>assistant\n"


def _texts(numbers: str) -> list[str]:
    return ["\n\n".join(f"text {int(number):02}." for number in numbers.split(",") if number)]


@pytest.mark.every(5)
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_that_goes_on_begins_as_before(name: str) -> None:
    """Else no page of the cache is found again."""
    if "mistral_nemo" in name:
        return  # which moves the system's text with every turn
    tokenizer = byte_tokenizer(TEMPLATES[name])
    for word in ("SUASUASU", "SUASAUSA", "UCTAUXTA", "SUBTTAU"):
        prompts = [
            tokenizer.render_chat_template(conversation(word)[:end], add_generation_prompt=False)
            for end in range(1, len(word) + 1)
            if word[end - 1] == "A"
        ]
        assert len(prompts) > 1 or word == "SUBTTAU"
        for before, after in itertools.pairwise(prompts):
            assert after.startswith(before), word


@pytest.mark.parametrize(
    "ids", ["toolu_01AbCdEfGhIjKlMnOpQrSt{:02}", "call_9f8e7d6c5b4a{:02}", "{:02}-3b1f-4c", "é{:02}"]
)
@pytest.mark.parametrize(
    "name", ["mistral_nemo", "mistral_small-chatml", "kimi_k2", "kimi_k2_turn", "kimi_given-llama"]
)
def test_prompts_do_not_depend_on_the_ids_of_clients(name: str, ids: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name])
    texts = {tokenizer.render_chat_template(conversation("SUCTAUBTTA", one)) for one in (ids, "call_other{:02}")}
    assert len(texts) == 1
    (text,) = texts
    if "kimi" in name:
        numbers = [0, 0, 1] if name == "kimi_k2_turn" else [0, 1, 2]
        for index, number in enumerate(numbers):
            written = f"functions.look_up_{index:02}:{number}"
            assert text.count(written) == (1 if name == "kimi_given-llama" else 2)


def test_ids_that_a_template_takes_stay() -> None:
    tokenizer = byte_tokenizer(TEMPLATES["mistral_nemo"])
    text = tokenizer.render_chat_template(conversation("UCTAU", "AbC4567{:02}"))
    assert text == upstream(TEMPLATES["mistral_nemo"], conversation("UCTAU", "AbC4567{:02}"))
    mixed = conversation("UBTT", "AbC4567{:02}")
    mixed[1]["tool_calls"][0]["id"] = mixed[2]["tool_call_id"] = "call00000"  # ours must be another one
    mixed[1]["tool_calls"][1]["id"] = mixed[3]["tool_call_id"] = "not-nine"
    text = tokenizer.render_chat_template(mixed)
    assert text.count("call00000") == 2
    assert text.count("call00001") == 2


def test_calls_without_ids_get_them_where_they_are_needed() -> None:
    messages = conversation("UBTTA")
    for message in messages:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            del call["id"]
    text = byte_tokenizer(TEMPLATES["mistral_nemo"]).render_chat_template(messages)
    assert [text.count(f"call0000{number}") for number in (0, 1)] == [2, 2]


@pytest.mark.parametrize("arguments", ['{"q": "value 00"}', {"q": "value 00"}])
@pytest.mark.parametrize("name", ["deepseek_v3-chatml", "qwen25-chatml", "kimi_k2"])
def test_arguments_are_text_or_a_mapping_as_the_template_wants(name: str, arguments: Any) -> None:
    messages = conversation("UCTA")
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    assert '{"q": "value 00"}' in byte_tokenizer(TEMPLATES[name]).render_chat_template(messages)


@pytest.mark.parametrize("said", ['{"q": "cut o', "", "null", "[1]"])
def test_arguments_that_are_no_object(said: str) -> None:
    messages = conversation("UCTA")
    messages[1]["tool_calls"][0]["function"]["arguments"] = said
    text = byte_tokenizer(TEMPLATES["qwen25-chatml"]).render_chat_template(messages)
    written = text.partition("look_up_00 ")[2].partition("[/CALL]")[0]
    assert json.loads(written) == (
        {"arguments": said} if said.startswith("{") else {"arguments": json.loads(said)} if said else {}
    )


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_calls_that_are_dropped_are_text_in_the_models_format(form: str) -> None:
    """What the family's parser reads is what was called."""
    tokenizer = byte_tokenizer(template_of(Habits(calls="drops"), "plain"))
    tokenizer.use_tool_format(form)
    messages: Messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": ""}]
    called = [("now", {}), ("add", {"a": 3})] if form in ("glm45", "llama4_pythonic") else CALLS
    messages[1]["tool_calls"] = [
        {"id": str(index), "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(called[:1] if form == "harmony" else called)
    ]
    text = tokenizer.render_chat_template(messages, add_generation_prompt=False)
    events = read(tokenizer.answer_parser([], TOOLS), [text.partition("### assistant:\n")[2].removesuffix("\n\n")])
    found = [(name, json.loads(arguments)) for name, arguments in calls_of(events)]
    assert found == [(call["function"]["name"], call["function"]["arguments"]) for call in messages[1]["tool_calls"]]


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    text = byte_tokenizer(TEMPLATES["qwen25-chatml"]).render_chat_template(messages)
    assert text.startswith("<|im_start|>system\none\ntwo<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n")
    listed = byte_tokenizer(TEMPLATES["minimax_text-chatml"])
    assert listed.render_chat_template([{"role": "user", "content": "x"}]).startswith("<|im_start|>user\nx<|im_end|>")


_TURNS = (
    "{% for m in messages %}BEFORE<{{ m.role }}>TEXT{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_REFUSES = "{% if loop.last and m.role == 'assistant' %}{{ raise_exception('The last is the user') }}{% endif %}"


def _turns(text: str = "{{ m.content }};", before: str = "", opening: str = "") -> str:
    made = _TURNS.replace("TEXT", text).replace("BEFORE", before)
    return made.replace("<assistant>{% endif %}", f"<assistant>{opening}{{% endif %}}")


PREFILLED = [
    (_turns(), ""),
    (_turns("{{ m.content }}"), ""),
    (_turns("{{ m.content if m.role != 'assistant' else m.content | upper }};"), ""),
    (_turns(before=_REFUSES), ""),
    (_turns(before=_REFUSES, opening="<think>\n"), "<think>\n</think>\n\n"),
]


@pytest.mark.parametrize(("template", "opening"), PREFILLED)
def test_an_answer_goes_on_where_the_template_refuses_its_beginning(template: str, opening: str) -> None:
    tokenizer = byte_tokenizer(template)
    messages = [{"role": "user", "content": "17 + 25?"}, {"role": "assistant", "content": "The sum is"}]
    text = tokenizer.render_chat_template(messages, continue_final_message=True)
    assert text.endswith(f"<assistant>{opening}The sum is")
    assert text.count("The sum is") == 1


@pytest.mark.parametrize(
    ("taken", "asked", "given"),
    [
        (("no_think", "low", "high"), "medium", "high"),
        (("no_think", "low", "high"), "minimal", "low"),
        (("no_think", "low", "high"), "none", "no_think"),
        (("no_think", "low", "high"), "max", "high"),
        (("low", "high", "max"), "xhigh", "max"),
        (("low", "medium", "high"), "none", "low"),
        (("low", "medium", "high"), "medium", "medium"),
        (("none", "max"), "low", "max"),
        (("low",), "turbo", "turbo"),
        ((), "low", "low"),
    ],
)
@pytest.mark.parametrize("variable", ["reasoning_effort", "thinking_effort"])
def test_the_nearest_word_for_the_effort(taken: tuple[str, ...], asked: str, given: str, variable: str) -> None:
    assert nearest_effort(asked, taken.__contains__) == given
    template = (
        f"{{% if {variable} is defined and {variable} not in {list(taken)!r} %}}{{{{ raise_exception('unknown') }}}}"
        f"{{% endif %}}{{{{ {variable} }}}};{{% for m in messages %}}{{{{ m.content }}}};{{% endfor %}}"
    )
    tokenizer = byte_tokenizer(template)
    request = Conversation(messages=[Message(role="user", content="x")], reasoning_effort=asked)
    assert template_kwargs(tokenizer, request).given == {variable: asked}
    if given in taken:
        assert tokenizer.decode(chat_prompt(tokenizer, request).ids).startswith(f"{given};x;")
    else:
        with pytest.raises(ConversationError, match="unknown"):
            chat_prompt(tokenizer, request)


def test_changes_are_named_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer(template_of(Habits(system="first", calls="one"), "chatml"))
    changes: list[str] = []
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            tokenizer.apply_chat_template(conversation("SUASUBTT"), note_changes=changes.extend)
    assert changes == ["messages.tool_calls", "messages.system"] * 2
    assert [record.getMessage().count("messages.system") for record in caplog.records].count(1) == 1
    assert "text 0" not in caplog.text
    tokenizer.apply_chat_template(conversation("SUAU"), note_changes=lambda names: pytest.fail(str(names)))


def test_python_and_the_terminal_fold_too() -> None:
    """Whose prompts come from Tokenizer.apply_chat_template, as the server's do."""
    tokenizer = byte_tokenizer(template_of(Habits(system="first_raises"), "chatml"))
    ids = PromptReader(tokenizer, SamplingParams()).conversation_ids(conversation("SUAS"), None, {})
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(
        "<|im_start|>user\ntext 03.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_is_refused_for_good_is_still_an_error() -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception('never') if x }}")
    with pytest.raises(ConfigError, match="never"):
        tokenizer.render_chat_template(conversation("SUAS"), x=True)


def test_a_refusal_that_no_probe_shows_gets_the_plainest_form() -> None:
    """A template that counts turns, for one."""
    limit = "{% if messages | length > 6 %}{{ raise_exception('too many turns') }}{% endif %}"
    tokenizer = byte_tokenizer(limit + template_of(Habits(), "chatml"))
    text = tokenizer.render_chat_template(conversation("SUUUUUUUAU"))
    assert is_whole(text, conversation("SUUUUUUUAU"))


def test_a_template_that_is_not_understood_gets_what_it_got() -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m.role }},{% endfor %}"
    tokenizer = byte_tokenizer(template)
    assert tokenizer.render_chat_template(conversation("SSUUSD")) == "6system,system,user,user,system,developer,"


def test_slow_templates_are_not_probed_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = 0

    def render(messages: Any, tools: Any = None, **options: Any) -> str:
        nonlocal rendered
        rendered += 1
        return "60217401"

    seconds = iter(range(1000))
    monkeypatch.setattr("ktransformers.tokenizer.templates.probe.time.thread_time", lambda: next(seconds))
    made = turns.TemplateTurns(render, lambda calls: "")
    text = made.rendered(turns.Rendering(conversation("SSUUSD")))
    assert rendered <= 3
    assert text.changes == ()


@pytest.mark.exhaustive
def test_probes_are_few_and_none_is_made_twice() -> None:
    for name in (*(f"{family}-chatml" for family in FAMILIES), "mistral_nemo", "kimi_k2", "gemma4"):
        tokenizer = byte_tokenizer(TEMPLATES[name])
        probed: list[str] = []
        prober = tokenizer.turns.prober
        render = prober._render
        prober._render = lambda messages, tools=None, render=render, probed=probed, **options: (
            probed.append(str(messages)) or render(messages, tools, **options)
        )
        tokenizer.render_chat_template(conversation("SUAU"))
        assert len(probed) <= 12, name
        for word in CONVERSATIONS:
            tokenizer.render_chat_template(conversation(word))
        num_probed = len(probed)
        assert num_probed < 160, name
        for word in CONVERSATIONS:
            tokenizer.render_chat_template(conversation(word))
        assert len(probed) <= num_probed + 2, name


def test_a_probe_says_what_a_template_writes() -> None:
    tokenizer: Tokenizer = byte_tokenizer(TEMPLATES["qwen35-chatml"])
    prober = tokenizer.turns.prober
    assert isinstance(prober, Prober)
    assert "hello" in str(prober.render([{"role": "user", "content": "hello"}]))
    assert prober.render([{"role": "system", "content": "hello"}]) is None


def test_there_are_many_templates() -> None:
    assert len(TEMPLATES) >= 70
    assert len(FAMILIES) * len(MARKUPS) >= 70
    assert len(CONVERSATIONS) >= 33


def test_many_results_of_a_turn_find_their_calls() -> None:
    """In any order, with the same id, or with none: in as many steps as there are."""
    tokenizer = byte_tokenizer(template_of(Habits(calls="one", ids="nine"), "chatml"))
    calls = [
        {"id": f"x{index}", "type": "function", "function": {"name": f"f{index}", "arguments": {}}}
        for index in range(3)
    ]
    answered = {"role": "assistant", "content": "", "tool_calls": calls}
    question = {"role": "user", "content": "Hi."}

    def prompt(ids: Sequence[str | None]) -> str:
        results = [
            {"role": "tool", "content": f"result {index}"} | ({} if one is None else {"tool_call_id": one})
            for index, one in enumerate(ids)
        ]
        return tokenizer.render_chat_template([question, answered, *results], add_generation_prompt=False)

    def order(text: str) -> list[str]:
        return re.findall(r"f\d|result \d", text)

    assert order(prompt(["x2", "x0", "x1"])) == ["f0", "result 1", "f1", "result 2", "f2", "result 0"]
    assert order(prompt([None] * 3)) == ["f0", "result 0", "f1", "result 1", "f2", "result 2"]
    for call in calls:
        call["id"] = "same"
    assert order(prompt(["same"] * 3)) == ["f0", "result 0", "f1", "result 1", "f2", "result 2"]


def test_text_between_the_results_of_two_calls() -> None:
    for habits in (Habits(system="first_raises"), Habits(ids="nine", alternates=True, system="first"), Habits()):
        text = byte_tokenizer(template_of(habits, "chatml")).render_chat_template(conversation("UBTSTUA"))
        assert is_whole(text, conversation("UBTSTUA"))
        assert is_ordered(text, "UBTSTUA", conversation("UBTSTUA"))
