"""Chat templates end: those that loop for ever, write without end or nest too deeply are refused, others are not."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from ktransformers.errors import ConversationError
from ktransformers.tokenizer import Tokenizer, template_limits

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CALLS = (
    "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{% set y = f(n - 1) %}{% endif %}{% endmacro %}{% set z = f(40) %}"
)
DOUBLE = "{%% set ns = namespace(x='ab') %%}{%% for a in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}"


SHARED = (
    "{%% set ns = namespace(x=['ab'], y=['ab']) %%}{%% for a in range(60) %%}{%% set ns.x = [ns.x, ns.x] %%}"
    "{%% set ns.y = [ns.y, ns.y] %%}{%% endfor %%}{{ %s }}"
)
"""Sixty small lists, of which the last is 2^60 texts when it is written."""

MANY = (
    "{%% set ns = namespace(big='x' * 300000, kept=[]) %%}{%% for a in range(2000) %%}"
    "{%% set ns.kept = [%s, ns.kept] %%}{%% endfor %%}"
)
"""Each of them is small enough, and all are kept."""


@pytest.fixture
def render(tiny_backend: PreTrainedTokenizerFast):
    def rendered(template: str, **variables: object) -> str:
        tiny_backend.chat_template = template
        return Tokenizer(tiny_backend).render_chat_template([{"role": "user", "content": "hi there"}], **variables)

    return rendered


@pytest.fixture
def tiny_backend() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    return PreTrainedTokenizerFast(tokenizer_object=Backend(WordLevel({"a": 0, "b": 1}, "a")))


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOPS, "longer than"),
        (CALLS, "longer than"),
        (DOUBLE % "ns.x + ns.x", "more than .* characters"),
        (DOUBLE % "ns.x ~ ns.x", "more than .* characters"),
        (DOUBLE % "[ns.x, ns.x] | join", "more than .* characters"),
        (DOUBLE % "''.join([ns.x, ns.x])", "more than .* characters"),
        (DOUBLE % "ns.x.replace('a', ns.x)", "more than .* characters"),
        (DOUBLE % "ns.x * 9", "more than .* characters"),
        (DOUBLE % "ns.x | replace('a', ns.x)", "more than .* characters"),
        ("{% set a = 'x' * 9999 %}{% for i in range(99999) %}{{ a }}{% endfor %}", "more than .* characters"),
        ("{{ 'x' * 10 ** 11 }}", "more than .* characters"),
        ("{{ 9 ** 99999999 }}", "more than .* characters"),
        ("{{ 'x' | center(10 ** 9) }}", "number above"),
        ("{{ 'x'.ljust(1000000000) }}", "number above"),
        ("{{ '%1000000000d' % 3 }}", "width"),
        ("{{ '%1000000000d' | format(3) }}", "width"),
        ("{{ '{:1000000000}'.format(3) }}", "width"),
        ("{% if a %}" * 3000 + "{% endif %}" * 3000, "refuses this conversation"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "refuses this conversation"),
        ("{{ " + "(" * 3000 + "a" + ")" * 3000 + " }}", "refuses this conversation"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses this conversation"),
        ("x" * (template_limits.MAX_TEMPLATE_CHARS + 1), "longer than"),
        ("{{ strftime_now('%Y' * 60000) }}", "formats a date"),
        ("{{ strftime_now(format='%c' * 600) }}", "formats a date"),
        ("{{ ''.join([]) }}{{ ('😀' * 200000) | list | length }}{{ 'x' * (1 << 20) }}", "refuses this conversation"),
        (SHARED % "ns.x", "more than .* characters"),
        (SHARED % "ns.x | tojson", "more than .* characters"),
        (SHARED % "ns.x | string", "more than .* characters"),
        (SHARED % "ns.x | pprint", "more than .* characters"),
        (SHARED % "ns.x | join", "more than .* characters"),
        (SHARED % "ns.x ~ 'a'", "more than .* characters"),
        (SHARED % "'%s' % ns.x", "more than .* characters"),
        (SHARED % "'%s' % (ns.x,)", "more than .* characters"),
        (SHARED % "'{}'.format(ns.x)", "more than .* characters"),
        (SHARED % "'{}' | format(ns.x)", "more than .* characters"),
        (SHARED % "ns.x == ns.y", "more than .* characters"),
        (SHARED % "ns.x is eq ns.y", "more than .* characters"),
        (SHARED % "ns.x in [ns.y]", "more than .* characters"),
        (SHARED % "[ns.x, ns.y] | sort", "more than .* characters"),
        (SHARED % "[ns.x, ns.y] | unique | list", "more than .* characters"),
        (SHARED.replace("[ns.x, ns.x]", "(ns.x, ns.x)") % "{ns.x: 1}", "more than .* characters"),
        (SHARED.replace("[ns.x, ns.x]", "(ns.x, ns.x)") % "{}[ns.x]", "more than .* characters"),
        (SHARED.replace("[ns.x, ns.x]", "{'a': ns.x, 'b': ns.x}") % "ns.x | tojson", "more than .* characters"),
        (MANY % "'x' * 300000", "more than .* MiB"),
        (MANY % "[0] * 99999", "more than .* MiB"),
        (MANY % "'x' ~ ns.big", "more than .* MiB"),
        (MANY % "ns.big.upper()", "more than .* MiB"),
        (MANY % "ns.big | upper", "more than .* MiB"),
        (MANY % "ns.big | replace('x', 'y')", "more than .* MiB"),
        (MANY % "ns.big + 'x'", "more than .* MiB"),
        ("{{ ('x ' * 300000).split() | length }}", "more than .* MiB"),
        ("{{ ('x,' * 300000).split(',') | length }}", "more than .* MiB"),
        ("{{ ('x\n' * 500000).splitlines() | length }}", "more than .* MiB"),
        ("{{ ('\t' * 2000).expandtabs(1000000) }}", "more than .* MiB"),
        ("{{ ('{0}' * 1000).format('x' * 100000) | length }}", "more than .* MiB"),
        ("{{ ('%(a)s' * 1000) % {'a': 'x' * 100000} }}", "more than .* MiB"),
        ("{{ ('<' * 900000) | striptags }}", "more than .* MiB"),
        ("{{ lipsum(n=100000) }}", "refuses this conversation"),
    ],
)
def test_templates_without_end_are_refused(template: str, why: str, render, monkeypatch: pytest.MonkeyPatch) -> None:
    # Short for those that only the clock ends; a slow machine must not let it end the others first.
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.2 if why == "longer than" else 60)
    monkeypatch.setattr(template_limits, "MAX_CHARS", 1 << 20)
    monkeypatch.setattr(template_limits, "MAX_NBYTES", 1 << 24)
    with pytest.raises(ConversationError, match=why):
        render(template)


ORDINARY = """{%- macro turn(m, last=false) -%}<{{ m['role'] }}>{{ m.content | trim }}{{ '\\n' if not last }}
{%- endmacro -%}
{%- for m in messages -%}{{ turn(m, loop.last) }}{{ loop.index0 ~ '/' ~ loop.length }}{{ loop.previtem }}
{%- if loop.first %}{% continue %}{% endif %}{{ loop.cycle('a', 'b') }}{% endfor -%}
{%- for key, value in {'x': 1, 'y': [2, 3]}.items() if value -%}{{ key }}={{ value | tojson(indent=2) }}{% endfor -%}
{% for c in 'abc' | reverse %}{{ c | upper }}{% else %}none{% endfor %}{% for n in [] %}{% else %}none{% endfor %}
{% generation %}said{% endgeneration %}{{ 'a%sb' % 3 }}{{ 'a' * 3 + 'b' }}{{ 7 % 4 }}{{ [1, 2] | join(', ') }}
{% set block %}text {{ messages[0].content }}{% endset %}{{ block | length }}{{ block.split(' ')[-1] }}
{% for a in [[1, [2]], [3]] recursive %}{% if a is iterable %}({{ loop(a) }}){% else %}{{ a }}{% endif %}{% endfor %}
{{ messages | map(attribute='role') | list | tojson }}{{ messages | selectattr('role', 'equalto', 'user') | list }}
{{ namespace(a=1).a }}{{ dict(a=1) }}{{ 'x' | indent(2) }}{{ 1 ~ none ~ true ~ missing }}{{ range(5) | sum }}"""


def test_ordinary_templates_render_as_transformers_renders_them(render) -> None:
    messages = [{"role": "user", "content": "hi there"}]
    (wanted,), _ = render_jinja_template([messages], chat_template=ORDINARY, add_generation_prompt=True)
    assert "text" not in wanted.splitlines()[0]
    assert render(ORDINARY) == wanted


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ("{% set l = [] %}{% set _ = l.append('a') %}{% set _ = l.append('b') %}{{ l.pop(0) }}{{ l | join }}", "ab"),
        (
            "{% set n = namespace(l=['x']) %}{% for i in range(3) %}{% set _ = n.l.append(i) %}{% endfor %}{{ n.l }}",
            None,
        ),
        ("{% set l = messages | list %}{% set _ = l.append('a') %}{{ l | length }}{{ messages | length }}", "21"),
        ("{% set l = [1] + [2] %}{% set _ = l.extend([3]) %}{{ l | length }}", "3"),
    ],
)
def test_templates_change_the_lists_that_they_made(render, template: str, made: str | None) -> None:
    for _ in range(2):  # nothing is left of the rendering before
        assert render(template) == (made or "['x', 0, 1, 2]")


@pytest.mark.parametrize(
    "template",
    [
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].content.append(1) %}",
        "{% set _ = given.append(1) %}",
        "{% set _ = [given] | first | list %}{% set _ = ([given] | first).append(1) %}",
        "{% set _ = messages[0].update({'content': 'x'}) %}",
    ],
)
def test_templates_change_nothing_that_is_given_to_them(render, template: str) -> None:
    given: list[int] = []
    with pytest.raises(ConversationError, match=r"unsafe|no attribute"):
        render(template, given=given)
    assert given == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", ["l.extend(l)", "l.extend(l + l)"])
def test_lists_do_not_grow_without_end(render, change: str) -> None:
    with pytest.raises(ConversationError, match=r"more than|longer than"):
        render(f"{{% set l = [1, 2] %}}{{% for i in range(99) %}}{{% set _ = {change} %}}{{% endfor %}}")
