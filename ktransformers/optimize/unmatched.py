"""Explains why a rule decided nothing: misspelt, hidden behind another rule, or out of the planner's sight; and warns
of it.

A rule that decides nothing is a mistake, but for two kinds: rules of generic files, which are for many models, and
rules of an included file whose modules a rule outside that file takes, which is what including is for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ktransformers.errors import RuleError
from ktransformers.operators.partial_sums import Placeholder
from ktransformers.optimize.aliases import legacy_names
from ktransformers.optimize.rules import Rule, Rules

__all__ = ["UnmatchedRule", "explain_unmatched", "report_unmatched"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnmatchedRule:
    """A rule that no module got, and the reason. rule (1-based number) and line are those in `file`, which holds it.

    is_expected: whether it is no mistake. error: the same as an error, with the includes that lead to the file.
    """

    rule: int
    line: int
    file: str
    message: str
    is_expected: bool
    error: RuleError


def report_unmatched(
    model: nn.Module, model_type: str, rules: Rules, decided: Mapping[str, Rule | None], strict: bool
) -> tuple[UnmatchedRule, ...]:
    """Return the rules that decided nothing by mistake, each with a line in the log. See `explain_unmatched`.

    A part of a model has none: other parts have what its rules are for. Raises RuleError for them with strict.
    """
    found = explain_unmatched(model, model_type, rules, decided)
    is_part = any(isinstance(module, Placeholder) for module in model.modules())
    named = tuple(one for one in found if not is_part and not one.is_expected)
    for one in found:
        if one not in named:
            logger.debug("%s", one.error)
    if named and strict:
        raise RuleError("rules that decide nothing (--strict):\n  " + "\n  ".join(str(one.error) for one in named))
    for one in named:
        logger.warning("%s", one.error)
    return named


def explain_unmatched(
    model: nn.Module, model_type: str, rules: Rules, decided: Mapping[str, Rule | None]
) -> tuple[UnmatchedRule, ...]:
    """Return the rules that decided for no module. decided: {visited module: the rule that decided, or None}."""
    used = {id(rule) for rule in decided.values()}
    idle = [rule for rule in rules.rules if id(rule) not in used]
    if not idle:
        return ()
    modules = list(model.named_modules())
    return tuple(_explained(rule, modules, model_type, decided) for rule in idle)


def _explained(
    rule: Rule, modules: list[tuple[str, nn.Module]], model_type: str, decided: Mapping[str, Rule | None]
) -> UnmatchedRule:
    hits = [key for key, module in modules if rule.matches(key, module, model_type)]
    message = _reason(rule, hits, modules, model_type, decided)
    takers = [decided.get(key) for key in hits]
    is_overridden = any(taker is not None and not rule.source.holds(taker.source) for taker in takers)
    is_expected = rule.source.is_generic or is_overridden
    return UnmatchedRule(rule.number, rule.line, rule.file, message, is_expected, rule.error(message))


def _reason(
    rule: Rule,
    hits: list[str],
    modules: list[tuple[str, nn.Module]],
    model_type: str,
    decided: Mapping[str, Rule | None],
) -> str:
    if hits:
        taker, first = next(((decided[key], key) for key in hits if key in decided), (None, hits[0]))
        if taker is None:
            return f"decides nothing: {first!r} belongs to the operator around it"
        if taker.file == rule.file:
            return f"decides nothing: rule {taker.number} above comes first for all it matches, such as {first!r}"
        return f"decides nothing: {taker.place}, included above, comes first for all it matches, such as {first!r}"
    message = f"matches nothing ({rule.describe()})"
    if rule.name is None or rule.match_class is None:
        return message
    pattern = rule.name
    named = [m for k, m in modules if any(pattern.search(n) for n in legacy_names(model_type, k, pattern.pattern))]
    classed = [key for key, module in modules if isinstance(module, rule.match_class)]
    if classed:
        return f"{message}; modules of that class are called {classed[0]!r} and the like"
    if named:
        return f"{message}; modules of that name are {type(named[0]).__name__} and the like"
    return message
