"""Finds the variables that a chat template reads. Parses it, never runs it."""

from __future__ import annotations

import functools

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

__all__ = ["template_variables"]


class _Generation(Extension):
    """transformers' `{% generation %}`, which marks what the model itself has said: a block without effect here."""

    tags = {"generation"}  # noqa: RUF012 - declared in the base

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _not_yet(context: Context, value: object, *args: object, **kwargs: object) -> object:
    """In place of any filter: what takes the context is not computed while a template is parsed."""
    return value


class _Unfolded(SandboxedEnvironment):
    """Computes nothing while it parses: `'a' * 10 ** 10` is a constant, too."""

    intercepted_binops = frozenset(SandboxedEnvironment.default_binop_table)
    intercepted_unops = frozenset(SandboxedEnvironment.default_unop_table)


class _Anything(frozenset[str]):
    """The variables of a template that cannot be parsed: rendering it is what says why."""

    def __contains__(self, name: object) -> bool:
        return True


@functools.lru_cache(maxsize=8)
def template_variables(template: str) -> frozenset[str]:
    """Return the names that `template` takes from whoever renders it, a few that it always sets itself among them."""
    environment = _Unfolded(extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters = dict.fromkeys(environment.filters, _not_yet)
    try:
        return frozenset(find_undeclared_variables(environment.parse(template)))
    except (jinja2.TemplateError, RecursionError):
        return _Anything()
