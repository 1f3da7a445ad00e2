"""Chat templates that drop, move or refuse turns as the families' own do, in several markups; and conversations.

A template is a markup (how turns look) and habits (what becomes of turns). The habits are those of real families, which
FAMILIES names; a few templates whose structure matters are files in tests/tokenizer/templates/families.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "CONVERSATIONS",
    "FAMILIES",
    "MARKUPS",
    "Habits",
    "conversation",
    "names_of",
    "template_of",
    "templates",
    "texts_of",
]

FILES = Path(__file__).parents[2] / "tokenizer" / "templates" / "families"

MARKUPS = {
    "chatml": ("<|im_start|>ROLE\n", "<|im_end|>\n"),
    "llama": ("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"),
    "gemma": ("<start_of_turn>ROLE\n", "<end_of_turn>\n"),
    "plain": ("### ROLE:\n", "\n\n"),
}
"""What stands around a turn, ROLE for its name."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a family's template does.

    system: "any" turn is written; "first": the first turn, later ones are dropped; "first_raises": later ones are
    refused; "raises": all are; "hoists": all go to the front; "last_wins": the last one goes there; "last_user": the
    first goes into the last turn if that is the user's. developer: "echo" as any role, "drops", "raises" or "knows".
    alternates: user and assistant have to. calls: "keeps", "one" (two are refused), "first" (others are dropped),
    "drops". text: beside a call, "keeps", "drops" or "plan" (a field of its own). ids: "any", "nine" or "written" for
    the function. arguments: "mapping" or "text". results: "keeps", "drops", "raises" or "needs_call". parts: content is
    a list. needs_user: a conversation has one.
    """

    system: str = "any"
    developer: str = "drops"
    alternates: bool = False
    calls: str = "keeps"
    text: str = "keeps"
    ids: str = "any"
    arguments: str = "mapping"
    results: str = "keeps"
    parts: bool = False
    needs_user: bool = False


FAMILIES = {
    "chatml": Habits(developer="echo"),
    "qwen25": Habits(),
    "qwen35": Habits(system="first_raises", developer="raises", needs_user=True),
    "mistral_small": Habits(system="first_raises", developer="raises", alternates=True, ids="nine"),
    "mistral_v1": Habits(system="raises", developer="raises", alternates=True, calls="drops", results="raises"),
    "mistral_nemo": Habits(system="last_user", developer="raises", ids="nine", text="drops"),
    "gemma2": Habits(system="raises", developer="raises", alternates=True, calls="drops", results="drops"),
    "llama3": Habits(developer="echo", calls="one", text="drops"),
    "minimax_m1": Habits(system="first", text="drops"),
    "minimax_m2": Habits(system="first", developer="knows", results="needs_call"),
    "gpt_oss": Habits(system="first", developer="knows", calls="first", results="needs_call"),
    "r1_distill": Habits(system="last_wins", calls="drops"),
    "deepseek_v3": Habits(system="hoists", arguments="text"),
    "deepseek_v32": Habits(system="hoists", developer="drops"),
    "nemotron_nano": Habits(system="first", needs_user=True),
    "smollm3": Habits(system="first", calls="drops"),
    "command_r7b": Habits(text="plan"),
    "phi35": Habits(calls="drops", results="drops"),
    "kimi_given": Habits(developer="echo", ids="written"),
    "minimax_text": Habits(system="first", parts=True),
}

_HEAD = """
{%- macro turn(role, text) %}{{ OPEN }}{{ text }}{{ CLOSE }}{% endmacro -%}
{%- macro text_of(m) %}{% if PARTS %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}{% endmacro -%}
{%- set ns = namespace(system='', asked=false, count=0, called=false) -%}
{%- for m in messages %}
  {%- if m.role == 'user' %}{% set ns.asked = true %}{% endif %}
  {%- if m.role == 'system' %}
    {%- if SYSTEM == 'last_wins' or (SYSTEM == 'last_user' and loop.first) %}{% set ns.system = text_of(m) %}
    {%- elif SYSTEM == 'hoists' %}
      {%- set ns.system = ns.system ~ ('\\n\\n' if ns.system else '') ~ text_of(m) %}
    {%- endif %}
  {%- endif %}
{%- endfor -%}
{%- if NEEDS_USER and not ns.asked %}{{ raise_exception('No user query found in messages.') }}{% endif -%}
{%- if SYSTEM in ('last_wins', 'hoists') and ns.system %}{{ turn('system', ns.system) }}{% endif -%}
{%- for tool in tools or [] %}{{ turn('tools', tool | tojson) }}{% endfor -%}
{%- set spoken = namespace(count=0) -%}
"""
_BODY = """
{%- for m in messages %}
  {%- if ALTERNATES and m.role != 'tool' and not m.tool_calls and not (loop.first and m.role == 'system') %}
    {%- if (m.role == 'user') != (spoken.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set spoken.count = spoken.count + 1 %}
  {%- endif %}
  {%- if m.role == 'system' %}
    {%- if SYSTEM == 'any' or (SYSTEM in ('first', 'first_raises') and loop.first) %}{{ turn('system', text_of(m)) }}
    {%- elif SYSTEM == 'raises' %}{{ raise_exception('System role not supported') }}
    {%- elif SYSTEM == 'first_raises' %}{{ raise_exception('System message must be at the beginning.') }}
    {%- elif SYSTEM == 'last_user' and not loop.first %}{{ raise_exception('Only the first may be system') }}{% endif %}
  {%- elif m.role == 'developer' and DEVELOPER != 'echo' %}
    {%- if DEVELOPER == 'knows' and loop.first %}{{ turn('instructions', text_of(m)) }}
    {%- elif DEVELOPER == 'raises' %}{{ raise_exception('Unexpected message role.') }}{% endif %}
  {%- elif m.role == 'user' %}
    {%- if loop.last and SYSTEM == 'last_user' and ns.system %}{{ turn('user', ns.system ~ '\\n\\n' ~ text_of(m)) }}
    {%- else %}{{ turn('user', text_of(m)) }}{% endif %}
  {%- elif m.role == 'assistant' and m.tool_calls and CALLS != 'drops' %}
    {%- if CALLS == 'one' and m.tool_calls | length > 1 %}{{ raise_exception('single tool-calls at once!') }}{% endif %}
    {%- set said = m.tool_plan or '' if TEXT == 'plan' else '' if TEXT == 'drops' else text_of(m) %}
    {%- set calls = m.tool_calls[:1] if CALLS == 'first' else m.tool_calls %}
    {%- set written = namespace(text=said) %}
    {%- for call in calls %}
      {%- if IDS == 'nine' and call.id | length != 9 %}
        {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
      {%- endif %}
      {%- set arguments = call.function.arguments if ARGUMENTS == 'text' else call.function.arguments | tojson %}
      {%- set name = call.id if IDS == 'written' else call.function.name %}
      {%- set written.text = written.text + '[CALL]' + name + ' ' + arguments + '[/CALL]' %}
    {%- endfor %}
    {%- set ns.called = true %}
    {{- turn('assistant', written.text) }}
  {%- elif m.role == 'assistant' %}{{ turn('assistant', text_of(m)) }}
  {%- elif m.role == 'tool' and RESULTS != 'drops' %}
    {%- if RESULTS == 'raises' %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
    {%- if RESULTS == 'needs_call' and not ns.called %}{{ raise_exception('no previous tool call') }}{% endif %}
    {%- if IDS == 'nine' and m.tool_call_id | length != 9 %}{{ raise_exception('not nine letters') }}{% endif %}
    {{- turn('tool', text_of(m)) }}
  {%- elif DEVELOPER == 'echo' %}{{ turn(m.role, text_of(m)) }}
  {%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ BEGIN }}{% endif %}
"""


def template_of(habits: Habits, markup: str) -> str:
    """The source of a template."""
    opening, close = MARKUPS[markup]
    before, _, behind = opening.partition("ROLE")
    values = {
        "OPEN": f"{before!r} ~ role ~ {behind!r}",
        "CLOSE": repr(close),
        "BEGIN": repr(opening.replace("ROLE", "assistant")),
        "PARTS": str(habits.parts).lower(),
        "SYSTEM": repr(habits.system),
        "DEVELOPER": repr(habits.developer),
        "ALTERNATES": str(habits.alternates).lower(),
        "CALLS": repr(habits.calls),
        "TEXT": repr(habits.text),
        "IDS": repr(habits.ids),
        "ARGUMENTS": repr(habits.arguments),
        "RESULTS": repr(habits.results),
        "NEEDS_USER": str(habits.needs_user).lower(),
    }
    source = _HEAD + _BODY
    for name, value in values.items():
        source = re.sub(rf"\b{name}\b", lambda _, value=value: value, source)  # type: ignore[misc]
    return source


def templates() -> dict[str, str]:
    """All templates by their names."""
    made = {
        f"{family}-{markup}": template_of(habits, markup)
        for (family, habits), markup in itertools.product(FAMILIES.items(), MARKUPS)
    }
    return made | {path.stem: path.read_text() for path in sorted(FILES.glob("*.jinja"))}


CONVERSATIONS = """
U SU SUAU SSU SSSU S US SUS UAS SUASU USU UAUSA SUAUASUASU UASSU DU DUAU SDU DSU SUD SUADU UAUD UU UUAUU UAAU AU SAU A
UA SUCT SUCTA UCTU UXT SUXTXTA UBTT SUBTTA UBTTUCTA UCT UCTCTCT UCTAUCTAU UCST UCTS SUCTSU UCTSA UCTDA UCU UT SAT T
""".split()  # noqa: SIM905 - columns of quotes say less
"""A letter for each turn: S system, D developer, U user, A assistant, T result; C a call, B two, X text and a call."""

_ROLES = {"S": "system", "D": "developer", "U": "user", "T": "tool"}


def conversation(word: str, ids: str = "call_Zk3v{:02}QwErTyUiOpAsDfGhJk") -> list[dict[str, Any]]:
    """The messages, as OpenAI's dialect has them. ids: of the calls, by their number."""
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    num_calls = 0
    for turn, letter in enumerate(word):
        text = f"text {turn:02}."
        message: dict[str, Any] = {"role": _ROLES.get(letter, "assistant"), "content": text}
        if letter in "CBX":
            message["content"] = text if letter == "X" else ""
            waiting = [ids.format(num_calls + index) for index in range(2 if letter == "B" else 1)]
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": f"look_up_{num_calls + index:02}",
                        "arguments": {"q": f"value {num_calls + index:02}"},
                    },
                }
                for index, call_id in enumerate(waiting)
            ]
            num_calls += len(waiting)
        if letter == "T":
            message["tool_call_id"] = waiting.pop(0) if waiting else ids.format(90 + turn)
        made.append(message)
    return made


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    """Texts of turns and arguments of calls, in their order: what a prompt has to hold once each."""
    made = []
    for message in messages:
        if message["content"]:
            made.append(message["content"])
        made += [call["function"]["arguments"]["q"] for call in message.get("tool_calls", ())]
    return made


def names_of(messages: list[dict[str, Any]]) -> list[str]:
    """Names of the functions that are called: a prompt has to hold each of them."""
    return [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
