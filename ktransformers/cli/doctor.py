"""`ktransformers doctor`: what is right and wrong with this machine and this installation.

One line per finding, and the command that mends it. Exit code 1 when something does not work; warnings are 0.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ktransformers.cli.doctor_gpu import gpu_checks
from ktransformers.cli.doctor_machine import machine_checks
from ktransformers.cli.doctor_software import software_checks
from ktransformers.cli.findings import Check, Finding, Level, examine, shown

__all__ = ["add_parser", "all_checks", "report", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what is right and wrong with this machine and this installation",
        description="Examine the installation, the machine and its GPUs: one line per finding, with the command that "
        "mends it. Exit code 1 when something does not work.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.set_defaults(run=run)


def all_checks() -> Iterator[Check]:
    """In the order of the report. GPUs are looked for when it is their turn."""
    yield from software_checks()
    yield from machine_checks()
    yield from gpu_checks()


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    findings = []
    for check in all_checks():
        for finding in examine(check):
            findings.append(finding)
            if not args.json:
                print(shown(finding), flush=True)
    if args.json:
        print(json.dumps(report(findings), indent=2))
    else:
        print(conclusion(findings))
    return 1 if has_problems(findings) else 0


def has_problems(findings: Sequence[Finding]) -> bool:
    return any(finding.level is Level.PROBLEM for finding in findings)


def conclusion(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = Counter(finding.level for finding in findings)
    parts = [
        f"{counts[level]} {level.value}{'s' if counts[level] > 1 else ''}"
        for level in (Level.PROBLEM, Level.WARNING)
        if counts[level]
    ]
    return ", ".join(parts) or "all is well"


def report(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings in JSON types."""
    rows = [{**asdict(finding), "level": finding.level.value} for finding in findings]
    return {"is_well": not has_problems(findings), "findings": rows}
