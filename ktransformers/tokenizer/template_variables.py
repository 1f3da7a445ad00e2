"""Which variables a chat template reads. Parses it, never runs it."""

from __future__ import annotations

import functools

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

__all__ = ["template_variables"]


class _Generation(Extension):
    """transformers' `{% generation %}`, which marks what the model itself has said: a block without effect here."""

    tags = {"generation"}  # noqa: RUF012 - declared in the base

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Anything(frozenset[str]):
    """The variables of a template that cannot be parsed: rendering it is what says why."""

    def __contains__(self, name: object) -> bool:
        return True


@functools.lru_cache(maxsize=8)
def template_variables(template: str) -> frozenset[str]:
    """Names that `template` takes from whoever renders it, a few that it always sets itself among them."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
    try:
        return frozenset(find_undeclared_variables(environment.parse(template)))
    except (jinja2.TemplateError, RecursionError):
        return _Anything()
