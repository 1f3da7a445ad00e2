"""What `ktransformers doctor` found, one line each: what is, and the command that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Check", "Finding", "Level", "examine", "ok", "problem", "shown", "warning"]


class Level(Enum):
    """problem: something does not work. warning: it works, but slower or not as meant."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. remedy: what to type or do; empty for what is well."""

    level: Level
    name: str
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    """Something that is as it should be."""
    return Finding(Level.OK, name, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    """Something that costs speed or memory, and what mends it."""
    return Finding(Level.WARNING, name, text, remedy)


def problem(name: str, text: str, remedy: str) -> Finding:
    """Something that does not work, and what mends it."""
    return Finding(Level.PROBLEM, name, text, remedy)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at. name is shown when looking itself fails."""

    name: str
    run: Callable[[], Iterable[Finding]]


def examine(check: Check) -> list[Finding]:
    """What a check finds. That it fails is a finding too: this is for machines on which anything may fail."""
    try:
        return list(check.run())
    except Exception as error:  # noqa: BLE001 - see above
        first = (str(error).splitlines() or [""])[0] or type(error).__name__
        return [warning(check.name, f"cannot be examined: {first}", "report this line as a bug if it hides something")]


def shown(finding: Finding) -> str:
    """As a line of the report."""
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{finding.level.value:<8} {finding.name:<17} {finding.text}{remedy}"
