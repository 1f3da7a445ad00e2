"""Why a rule decided nothing: misspelt, hidden behind another rule, or out of the planner's sight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ktransformers.optimize.aliases import legacy_names
from ktransformers.optimize.rules import Rule, Rules

__all__ = ["UnmatchedRule", "explain_unmatched"]


@dataclass(frozen=True, slots=True)
class UnmatchedRule:
    """A rule (1-based number and line) that no module got, and the reason."""

    rule: int
    line: int
    message: str


def explain_unmatched(
    model: nn.Module, model_type: str, rules: Rules, decided: Mapping[str, int | None]
) -> tuple[UnmatchedRule, ...]:
    """The rules that decided for no module. decided: {visited module: number of the rule that decided, or None}."""
    used = set(decided.values())
    idle = [rule for rule in rules.rules if rule.number not in used]
    if not idle:
        return ()
    modules = list(model.named_modules())
    return tuple(UnmatchedRule(rule.number, rule.line, _reason(rule, modules, model_type, decided)) for rule in idle)


def _reason(
    rule: Rule, modules: list[tuple[str, nn.Module]], model_type: str, decided: Mapping[str, int | None]
) -> str:
    hits = [key for key, module in modules if rule.matches(key, module, model_type)]
    if hits:
        first = next((key for key in hits if key in decided), None)
        if first is not None:
            return f"decides nothing: rule {decided[first]} above comes first for all it matches, such as {first!r}"
        return f"decides nothing: {hits[0]!r} belongs to the operator around it"
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
