"""The findings of `ktransformers doctor`, one line each: what is, and the command that repairs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Check", "Finding", "Level", "examine", "ok", "problem", "shown", "warning"]


class Level(Enum):
    """The severity of a finding. problem: something does not work. warning: it works, but slower or not as meant."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of doctor's report. remedy: what to type or do; empty for what is well."""

    level: Level
    name: str
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    """Return a finding about something that is as it should be."""
    return Finding(Level.OK, name, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    """Return a finding about something that costs speed or memory, with its remedy."""
    return Finding(Level.WARNING, name, text, remedy)


def problem(name: str, text: str, remedy: str) -> Finding:
    """Return a finding about something that does not work, with its remedy."""
    return Finding(Level.PROBLEM, name, text, remedy)


@dataclass(frozen=True, slots=True)
class Check:
    """A thing that doctor looks at. name is shown when looking itself fails."""

    name: str
    run: Callable[[], Iterable[Finding]]


def examine(check: Check) -> list[Finding]:
    """Run a check and return its findings.

    That it fails is a finding too: this is for machines on which anything may fail.
    """
    try:
        return list(check.run())
    except Exception as error:  # noqa: BLE001 - see above
        first = (str(error).splitlines() or [""])[0] or type(error).__name__
        return [warning(check.name, f"cannot be examined: {first}", "report this line as a bug if it hides something")]


def shown(finding: Finding) -> str:
    """Return a finding as a line of the report."""
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{finding.level.value:<8} {finding.name:<17} {finding.text}{remedy}"
